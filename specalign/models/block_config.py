"""A block drafter's config.json: read, checked and written under its published names.

`block_layout` says which rows the network reads and which of them draft:

| `block_layout` | input | drafts | stored `block_size` | stored `sample_from_anchor` |
|---|---|---|---|---|
| `anchor_first` (DSpark) | [anchor, MASK × (K−1)] | row k drafts token k+1, k = 0..K−1 | K | true |
| `fill_in` (DFlash) | [anchor, MASK × K] | row k drafts token k, k = 1..K; row 0 nothing | K + 1 | false |

In a file `block_size` is the number of input rows, as in published drafters; in `BlockConfig` and
in recipes it is K, the number of drafts. A file without `block_layout` has the layout that
`sample_from_anchor` says, without either `anchor_first`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from transformers.activations import ACT2FN

from specalign.common.errors import UserError, in_one_line, nearest
from specalign.common.schema import JsonObject, convert, finite
from specalign.common.text import short
from specalign.lm.inspection.keys import RotaryTable


@dataclass
class BlockConfig:
    """The architecture, as stored in config.json. Sizes are the target's unless noted otherwise.

    target_layer_ids: `shared_kv`: whose keys and values; `taps`: whose outputs (id i =
    hidden_states[i + 1]). init_layer_ids: target layers that this drafter's layers started from; -1
    = unknown. draft_vocab_size: 0 = the target's whole vocabulary. markov_rank: 0 = positions are
    independent given the context. markov: the kind of that head, "" = silu. markov_bias: of gated
    and rnn. convolution: two-tap convolutions around attention and feed-forward. confidence_head:
    predicts each position's acceptance; it reads the hidden state and `confidence_input`: the
    previous token's embedding (""), its row of the Markov table, or nothing ("hidden"). value_dim:
    width of a value where it is not head_dim. rotary: `specalign.lm.inspection.keys.Rotary` of all
    layers or of each one; empty = the target's own module. places: a learned vector for each row of
    a block, for keys without positions. own_head: the head's rows for the draft vocabulary are
    stored here.
    """

    context: Literal["shared_kv", "taps"]
    block_size: int  # K, drafted tokens, in either layout
    target_layer_ids: list[int]
    init_layer_ids: list[int]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    vocab_size: int
    mask_token_id: int
    num_target_layers: int
    rope_theta: float
    target: str
    target_sha256: str
    qk_norm: bool = False
    attention_bias: bool = False
    draft_vocab_size: int = 0
    markov_rank: int = 0
    markov: Literal["", "silu", "tanh", "linear", "vanilla", "gated", "rnn"] = ""
    convolution: bool = False
    confidence_head: bool = False
    block_layout: Literal["anchor_first", "fill_in"] = "anchor_first"
    value_dim: int = 0
    rotary: list[JsonObject] = field(default_factory=list)
    places: bool = False
    markov_bias: bool = False
    confidence_input: Literal["", "markov", "hidden"] = ""
    own_head: bool = False
    extra: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.markov = "" if self.markov == "silu" else self.markov
        for f in fields(self):
            value, least = getattr(self, f.name), _LEAST.get(f.name, 1)
            if f.type in ("int", "float") and not (finite(value) and value >= least):
                raise _error(f"{f.name}={value} must be at least {least:g}")
        layers, last = len(self.init_layer_ids), self.num_target_layers - 1
        read, size = self.target_layer_ids, self.vocab_size
        per_layer = self.context == "taps" or len(read) == layers
        known = self.hidden_act in ACT2FN
        for holds, message in (
            (known, f"hidden_act={self.hidden_act!r} is unknown{nearest(self.hidden_act, ACT2FN)}"),
            (
                self.mask_token_id < size,
                f"mask_token_id={self.mask_token_id} is not within 0..{size - 1}",
            ),
            (
                all(0 <= i <= last for i in read),
                f"target_layer_ids={read} are not within 0..{last}",
            ),
            (per_layer, "shared_kv needs one target layer for each drafter layer"),
            (len(self.rotary) in (0, 1, layers), "rotary needs one entry, or one for each layer"),
        ):
            if not holds:
                raise _error(message)
        self.rotaries = [_read_rotary(entry) for entry in self.rotary]

    @property
    def markov_kind(self) -> str:
        """One of the Markov heads' `KINDS`; "" = no such head."""
        return (self.markov or "silu") if self.markov_rank else ""

    @property
    def fill_in(self) -> bool:
        return self.block_layout == "fill_in"

    @property
    def rows(self) -> int:
        """R: rows of a block's input, K or K + 1."""
        return self.block_size + self.fill_in

    def rotary_of(self, layer: int) -> RotaryTable | None:
        """How positions are written in a layer; None = by the target's module."""
        return self.rotaries[min(layer, len(self.rotaries) - 1)] if self.rotaries else None

    def to_dict(self) -> JsonObject:
        """As stored: fields that later versions added only where they differ from the default."""
        values = {k: v for k, v in asdict(self).items() if v != _OMITTED.get(k)}
        return {**values, "block_size": self.rows, "sample_from_anchor": not self.fill_in}

    @classmethod
    def from_dict(cls, values: JsonObject, where: str = "config.json") -> BlockConfig:
        """The config in a file's values; other keys are ignored. Raises UserError for a missing
        key, or a value that does not fit."""
        rows = convert(values.get("block_size", 0), int, "block_size", where)
        sampled = convert(values.get("sample_from_anchor", True), bool, "sample_from_anchor", where)
        layout = values.get("block_layout", "anchor_first" if sampled else "fill_in")
        if "sample_from_anchor" in values and sampled == (layout == "fill_in"):
            flag = f"sample_from_anchor={str(sampled).lower()}"
            raise UserError(f"{where}: {flag} contradicts block_layout={layout!r:.40}")
        stored = {"block_layout": layout, "block_size": rows - (layout == "fill_in")}
        try:
            return convert({**values, **stored}, cls, "", where)
        except UserError as error:
            raise UserError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None


_OMITTED: JsonObject = {
    **dict.fromkeys(("value_dim", "places", "markov_bias", "own_head"), 0),
    **{"rotary": [], "block_layout": "anchor_first", "confidence_input": ""},
}
"""Defaults that are not stored."""
_LEAST = {
    **dict.fromkeys(("mask_token_id", "draft_vocab_size", "markov_rank", "value_dim"), 0),
    "rope_theta": 1e-6,
    "rms_norm_eps": 0,
}
"""The smallest valid value of a number, 1 for those that are not named."""


def _error(message: str) -> UserError:
    return UserError(f"drafter config: {message}")


def _read_rotary(entry: JsonObject) -> RotaryTable:
    with in_one_line(f"drafter config: rotary={short(entry)}"):
        table = tuple(map(float, entry["inv_freq"]))
        scale = float(entry.get("scale", 1.0))
        return RotaryTable(entry.get("layout", "half"), int(entry["start"]), table, scale)
