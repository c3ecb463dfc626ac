"""What a block drafter's config.json says: read, checked and written under its published names.

A block's layout says which rows the network reads and which of them draft:

| `block_layout` | input | drafts | stored `block_size` | stored `sample_from_anchor` |
|---|---|---|---|---|
| `anchor_first` (DSpark) | [anchor, MASK × (K−1)] | row k drafts token k+1, k = 0..K−1 | K | true |
| `fill_in` (DFlash) | [anchor, MASK × K] | row k drafts token k, k = 1..K; row 0 nothing | K + 1 | false |

In a file `block_size` is the number of input rows, as published drafters of both kinds have it; in `BlockConfig` and in recipes it
is K, the number of drafts. `block_layout` is written where it is not `anchor_first`, `sample_from_anchor` always; a file without
`block_layout` is of the layout that `sample_from_anchor` says, and without either of `anchor_first`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from transformers.activations import ACT2FN

from align.common.errors import UserError, nearest
from align.common.schema import finite
from align.models.markov import KINDS as MARKOV_KINDS
from align.models.markov import OLD_NAMES, TABLES
from align.target.inspection.keys import LAYOUTS, Rotary

CONTEXTS = ("shared_kv", "taps")
LAYOUTS_OF_BLOCKS = ("anchor_first", "fill_in")
CONFIDENCE_INPUTS = ("", "markov", "hidden")
"""The embedding of the token before, its row of the Markov head's table, or nothing beside the hidden state."""


@dataclass
class BlockConfig:
    """The architecture, as stored in config.json. Sizes are the target's unless said otherwise."""

    context: str
    block_size: int  # K, drafted tokens, in either layout
    target_layer_ids: list[
        int
    ]  # shared_kv: whose keys and values; taps: whose outputs (id i = hidden_states[i + 1])
    init_layer_ids: list[
        int
    ]  # the target layers that this drafter's layers started from; -1 = not known (another engine's)
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
    draft_vocab_size: int = 0  # 0 = the target's whole vocabulary
    markov_rank: int = 0  # 0 = positions are independent given the context
    markov: str = ""  # the Markov head's kind (align/models/markov.py); "" = silu, the only one of old
    markov_width: int = 0  # of the first layer of an mlp; 0 = twice the rank
    convolution: bool = False  # two-tap convolutions around attention and feed-forward
    self_conditioning: bool = False  # a second pass that sees the first one's estimates
    confidence_head: bool = False  # predicts each position's acceptance
    block_layout: str = "anchor_first"  # which rows draft: one of `LAYOUTS_OF_BLOCKS`
    value_dim: int = 0  # width of a value where it is not a key's; 0 = head_dim
    rotary: list[dict[str, Any]] = field(default_factory=list)
    """How positions are written into queries and keys (`align.target.inspection.keys.Rotary`), of all layers or of each one; empty = by the
    target's own module."""
    places: bool = False  # a learned vector for each row of a block, where keys know no position
    markov_bias: bool = False  # gated, rnn: the layer over the hidden state has a bias
    confidence_input: str = (
        ""  # what the confidence head reads beside the hidden state; "" = the embedding of the token before
    )
    own_head: bool = False  # the head's rows for the draft vocabulary are kept here, not the target's
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.context not in CONTEXTS:
            raise UserError(
                f"drafter config: context={self.context!r} is unknown{nearest(self.context, CONTEXTS)}"
            )
        if self.block_layout not in LAYOUTS_OF_BLOCKS:
            raise UserError(
                f"drafter config: block_layout={self.block_layout!r} is unknown{nearest(self.block_layout, LAYOUTS_OF_BLOCKS)}"
            )
        if not 1 <= self.block_size <= _MOST_BLOCK:
            raise UserError(f"drafter config: block_size={self.block_size} must be 1 to {_MOST_BLOCK}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"drafter config: mask_token_id={self.mask_token_id} is not within 0..{self.vocab_size - 1}"
            )
        if self.hidden_act not in ACT2FN:
            raise UserError(
                f"drafter config: hidden_act={self.hidden_act!r} is unknown{nearest(self.hidden_act, ACT2FN)}"
            )
        bad = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if bad:
            raise UserError(
                f"drafter config: target layer {bad[0]} is not within 0..{self.num_target_layers - 1}"
            )
        self.markov = OLD_NAMES.get(self.markov, self.markov)
        if self.markov == "silu":
            self.markov = ""
        if self.markov not in ("", *MARKOV_KINDS):
            raise UserError(
                f"drafter config: markov={self.markov!r} is unknown{nearest(self.markov, MARKOV_KINDS)}"
            )
        if self.confidence_input not in CONFIDENCE_INPUTS:
            raise UserError(
                f"drafter config: confidence_input={self.confidence_input!r} is unknown"
                f"{nearest(self.confidence_input, CONFIDENCE_INPUTS)}"
            )
        if self.confidence_input == "markov" and self.markov_kind not in TABLES:
            raise UserError(
                f"drafter config: confidence_input=markov needs markov one of {', '.join(TABLES)}"
            )
        if self.own_head and not self.draft_vocab_size:
            raise UserError("drafter config: own_head needs a draft vocabulary (draft_vocab_size)")
        if len(self.init_layer_ids) > _MOST_LAYERS:
            raise UserError(
                f"drafter config: {len(self.init_layer_ids)} layers, more than {_MOST_LAYERS}: no drafter has so many"
            )
        if self.context == "shared_kv" and len(self.target_layer_ids) != len(self.init_layer_ids):
            raise UserError("drafter config: shared_kv needs one target layer for each drafter layer")
        if len(self.rotary) not in (0, 1, len(self.init_layer_ids)):
            raise UserError("drafter config: rotary needs one entry, or one for each drafter layer")
        self.rotaries = [_rotary(entry, self.head_dim) for entry in self.rotary]

    @property
    def markov_kind(self) -> str:
        """One of the Markov heads' `KINDS`; "" = no such head."""
        return (self.markov or "silu") if self.markov_rank else ""

    @property
    def fill_in(self) -> bool:
        """Whether row k drafts the token in its own place, so that the anchor's row drafts nothing."""
        return self.block_layout == "fill_in"

    @property
    def sample_from_anchor(self) -> bool:
        """The layout under its published name."""
        return not self.fill_in

    @property
    def rows(self) -> int:
        """R: rows of a block's input, K or K + 1."""
        return self.block_size + self.fill_in

    def rotary_of(self, layer: int) -> Rotary | None:
        """How positions are written in a layer; None = by the target's module."""
        return self.rotaries[min(layer, len(self.rotaries) - 1)] if self.rotaries else None

    def to_dict(self) -> dict[str, Any]:
        """As stored; what says how drafters differ from the first ones stands there where it says something."""
        values = {k: v for k, v in asdict(self).items() if v != _LATER.get(k)}
        return {**values, "block_size": self.rows, "sample_from_anchor": self.sample_from_anchor}

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config.json") -> BlockConfig:
        """Raises UserError for a missing key; keys that belong to other readers of the file are left alone."""
        names = {f.name for f in fields(cls)}
        for f in fields(cls):
            if f.name in values:
                _check_type(f.name, str(f.type), values[f.name], where)
        required = [f.name for f in fields(cls) if f.name not in values and f.name not in _DEFAULTED]
        if required:
            raise UserError(f"{where}: missing key {required[0]!r}, so this is not a block drafter")
        values = _in_drafts(values, where)
        try:
            return cls(**{k: v for k, v in values.items() if k in names})
        except TypeError as error:
            raise UserError(f"{where}: {error}") from None


_LATER: dict[str, Any] = {
    "value_dim": 0,
    "rotary": [],
    "places": False,
    "block_layout": "anchor_first",
    "markov_bias": False,
    "confidence_input": "",
    "own_head": False,
}


def _in_drafts(values: dict[str, Any], where: str) -> dict[str, Any]:
    """A file's values with the layout under our name and `block_size` as K. Raises UserError where they contradict each other."""
    sampled = values.get("sample_from_anchor", True)
    _check_type("sample_from_anchor", "bool", sampled, where)
    layout = values.get("block_layout", "anchor_first" if sampled else "fill_in")
    if layout not in LAYOUTS_OF_BLOCKS:  # the config says so
        return {**values, "block_layout": layout}
    if "sample_from_anchor" in values and sampled != (layout == "anchor_first"):
        raise UserError(
            f"{where}: sample_from_anchor={str(sampled).lower()} contradicts block_layout={layout!r}"
        )
    drafts = values["block_size"] - (layout == "fill_in")
    if drafts < 1:
        raise UserError(
            f"{where}: block_size=1 must be at least 2 in the layout fill_in: row 0 drafts nothing"
        )
    return {**values, "block_layout": layout, "block_size": drafts}


def _rotary(entry: dict[str, Any], width: int) -> Rotary:
    layout, start, table = entry.get("layout", "half"), entry.get("start", 0), entry.get("inv_freq", [])
    scale = entry.get("scale", 1.0)
    if layout not in LAYOUTS:
        raise UserError(f"drafter config: rotary layout={layout!r} is unknown{nearest(str(layout), LAYOUTS)}")
    numbers = isinstance(table, list) and all(finite(f) for f in table)
    if not numbers or type(start) is not int or start < 0 or start + 2 * len(table) > width:
        raise UserError(f"drafter config: rotary: start and inv_freq must lie within head_dim={width}")
    if not finite(scale) or scale <= 0:
        raise UserError(f"drafter config: rotary: scale must be a number above 0, not {scale!r:.60}")
    return Rotary(layout, start, tuple(float(f) for f in table), float(scale))


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda v: isinstance(v, str)),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "int": ("a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    "float": ("a finite number", finite),
    "list[int]": (
        "a list of whole numbers",
        lambda v: isinstance(v, list) and all(type(i) is int for i in v),
    ),
    "list[dict[str, Any]]": (
        "a list of objects",
        lambda v: isinstance(v, list) and all(isinstance(entry, dict) for entry in v),
    ),
    "dict[str, Any]": ("an object", lambda v: isinstance(v, dict)),
}
_LEAST = {
    "mask_token_id": 0,
    "draft_vocab_size": 0,
    "markov_rank": 0,
    "markov_width": 0,
    "value_dim": 0,
    "rope_theta": 1e-6,
    "rms_norm_eps": 0,
}
"""The smallest value that makes sense; 1 for every other number."""
_MOST_BLOCK, _MOST_LAYERS = 512, 1024


def _check_type(name: str, kind: str, value: Any, where: str) -> None:
    what, fits = _TYPES[kind]
    if not fits(value):
        raise UserError(f"{where}: {name} must be {what}, not {value!r:.60}")
    if kind in ("int", "float") and value < _LEAST.get(name, 1):
        raise UserError(f"{where}: {name}={value} must be at least {_LEAST.get(name, 1):g}")


_DEFAULTED = {
    f.name for f in fields(BlockConfig) if f.default is not MISSING or f.default_factory is not MISSING
}
