"""What other engines' layouts share: config.json of a block drafter of Qwen3 layers that read taps
of the target, read and written. What the network here does not compute is refused by its key.

Published definitions: DFlash, arXiv 2602.06036 and its package; DSpark, arXiv 2607.05147; the
speculators package. No such layout has Markov heads unless its reader adds them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.formats.kinds import architectures_of
from specalign.formats.rotary import read_rotary, write_rotary
from specalign.lm.inspection.parts import embedding_scale, embeds_rows
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "output_multiplier": (1.0,), "logit_scale": (1.0,), "attention_value_scale": (1.0,),
    "attention_sink_bias": (False,), "use_swa": (False,), "rope_is_neox_style": (True,),
    "is_neox_style": (True,), "use_aux_hidden_state": (True,), "final_logit_softcapping": (0,),
    "is_causal": (False,), "causal": (False,), "attention_mode": ("gqa", "mha"),
    "projector_type": ("dflash", "dspark"), "conv_kernel_size": (0,), "selector_rank": (0,),
    "markov_head_type": ("vanilla", "gated", "rnn"), "speculators_model_type": ("dflash", "dspark"),
}  # fmt: skip
"""Keys that change what is computed, and the values that the network here computes."""
LAYERS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "attention_bias", "vocab_size",
)  # fmt: skip
"""Keys of Qwen3's config that `BlockConfig` names alike."""
TAPS = "target_layer_ids"


@dataclass
class Exported:
    """What a folder holds. files: further text files, path → content."""

    config: JsonObject
    tensors: dict[str, Tensor]
    files: dict[str, str] = field(default_factory=dict)


# ---- read ----


class ConfigReader:
    """A config.json whose keys may be in several places. inner: the part about the layers."""

    def __init__(self, values: JsonObject) -> None:
        self.values = values
        self.inner: JsonObject = values.get("transformer_layer_config", values)
        if not isinstance(self.inner, dict):
            raise UserError("transformer_layer_config must be an object")
        sections = [values.get(name) for name in ("dspark_config", "dflash_config")]
        one, other = (section if isinstance(section, dict) else {} for section in sections)
        self.nested: JsonObject = one | other

    def get(self, name: str, default: Any = None) -> Any:
        """A value from `dflash_config` or `dspark_config`, the file, or its part about the layers;
        null counts as missing."""
        found = (place.get(name) for place in (self.nested, self.values, self.inner))
        return next((value for value in found if value is not None), default)

    def get_int(self, name: str, default: int | None = None, low: int = 1) -> int:
        """A whole number. Raises UserError."""
        value = self.get(name, default)
        if value is None:
            raise UserError(f"missing key {name!r}")
        if type(value) is not int or value < low:
            raise UserError(f"{name} must be an integer >= {low}, not {value!r:.60}")
        return value

    def check_architecture(self, *known: str) -> None:
        """Raises UserError for a network that is not decoded here."""
        names = architectures_of({"architectures": [known[0]], **self.values})
        kind = self.values.get("model_type", "qwen3")
        if not names or names[0] not in known:
            raise UserError(f"architectures={names!r:.60}: this layout supports only {known[0]!r}")
        if kind != "qwen3":
            raise UserError(f"model_type={kind!r}: only qwen3 layers are supported")

    def read_layers(
        self, target: Target, from_anchor: bool = False, taps: str = TAPS, shift: int = 0
    ) -> JsonObject:
        """The input of `BlockConfig.from_dict`, without the target's name and what only the tensors
        tell. from_anchor: whether the anchor's row drafts too, if the file does not say. taps: the
        key of the tapped layers, of which id i − shift is the output of the target's layer, from 0.
        Raises UserError for a key that is missing, not computed here, or does not fit the
        target."""
        for name, choices in SUPPORTED.items():
            value = self.get(name)
            if value is not None and value not in choices:
                listed = " or ".join(map(str, choices))
                raise UserError(f"{name}={value!r:.60} is not supported; must be {listed}")
        self._check_windows(target)
        own = embedding_scale(target)
        scale = self.get("input_embedding_scale", own)
        if not isinstance(scale, int | float) or abs(scale / own - 1) > 1e-3:
            raise UserError(f"input_embedding_scale={scale}: target {target.spec!r} has {own:g}")
        from_anchor = self.get("sample_from_anchor", from_anchor)
        if self.get("shift_label") and from_anchor is not True:
            raise UserError("shift_label=true needs sample_from_anchor=true")
        heads, width = self.get_int("num_attention_heads"), self.get_int("hidden_size")
        head_dim = self.get_int("head_dim", width // heads)
        rotary, rope = read_rotary(self.inner, head_dim, target)
        defaults: JsonObject = {
            "num_key_value_heads": heads, "head_dim": head_dim, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "attention_bias": False, "vocab_size": target.vocab_size,
        }  # fmt: skip
        return {
            "context": "taps",
            "block_size": self.get_int("block_size"),  # rows, as in this project's files
            "sample_from_anchor": from_anchor,
            "init_layer_ids": [-1] * self.get_int("num_hidden_layers"),
            **{name: self.get(name, defaults.get(name)) for name in LAYERS},
            "mask_token_id": self.get_int("mask_token_id", low=0),
            "num_target_layers": self.get_int("num_target_layers", target.num_layers),
            "rope_theta": float(rope.get("rope_theta") or target.rope_theta),
            "qk_norm": True,
            "rotary": rotary,
            "extra": {"rope_parameters": rope} if rotary else {},
            TAPS: self._read_taps(target, taps, shift),
        }

    def _check_windows(self, target: Target) -> None:
        """Raises UserError unless every row sees the whole context and its whole block."""
        kinds = self.get("layer_types")
        if kinds is None:  # Qwen3's default
            some = self.get_int("max_window_layers", 28, low=0) < self.get_int("num_hidden_layers")
            slides = self.get("use_sliding_window") and some
            kinds = ["sliding_attention"] if slides else []
        both_ways = self.get("sliding_window_non_causal")
        both_ways = both_ways or self.get("is_causal") is not None or self.get("causal") is not None
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            # a window that holds every text is none
            whole = kind == "sliding_attention" and both_ways
            whole = whole and self.get_int("sliding_window") >= target.context_limit
            if kind != "full_attention" and not whole:
                raise UserError(f"layer_types has {kind!r:.60}: only full attention is supported")

    def _read_taps(self, target: Target, name: str, shift: int) -> list[int]:
        ids = self.get(name)
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise UserError(f"{name} must be a list of layers, not {ids!r:.60}")
        last = target.num_layers - 1 + shift
        for i in ids:
            if not shift <= i < last:  # of the last, engines differ in whether its norm is applied
                fit = f"only layers {shift} to {last - 1} of target {target.spec!r} can be tapped"
                raise UserError(f"{name} has {i}: {fit}")
        return [i - shift for i in ids]


# ---- written ----


def check_fit(
    drafter: BlockDrafter,
    name: str,
    layout: str,
    markov: Sequence[str] = (),
    biases: bool = True,
    adds_bias: bool = False,
) -> None:
    """Raises UserError naming the training options that the format `name` needs, or what no option
    changes.

    Args:
        layout: of blocks. markov: the kinds of Markov heads. biases: whether attention may have
            them. adds_bias: whether the engine adds the output head's bias to drafts, which
            training does not.
    """
    c, target = drafter.config, drafter.target
    needed = {"context": "taps", "block_layout": layout, "convolution": False}
    needed |= {} if biases else {"attention_bias": False}
    wrong = [f"{key}={str(v).lower()}" for key, v in needed.items() if getattr(c, key) != v]
    if c.markov_kind and c.markov_kind not in markov:
        wrong.append(f"markov={' or '.join(markov)}" if markov else "markov_rank=0")
    if wrong:
        options = " and ".join(f"drafter.{option}" for option in wrong)
        raise UserError(f"--format {name}: can't represent this drafter; train with {options}")
    check_last_layer(drafter, name)
    bias = target.head_bias_V
    why = ""
    if c.value_dim or not c.qk_norm or c.places:
        why = "it needs Qwen3 layers (QK-norm, RoPE)"
    elif not embeds_rows(target):
        why = f"its target {c.target!r} normalizes embeddings, which engines do not"
    elif adds_bias and bias is not None and bool(bias.any()):
        why = f"the output head of {c.target!r} has a bias, which the engine would add to drafts"
    if why:
        raise UserError(f"--format {name}: {why}")
    write_rotary(drafter, name)


def check_last_layer(drafter: BlockDrafter, name: str) -> None:
    """Raises UserError if the target's last layer is tapped: transformers gives it after the final
    norm, engines before."""
    last = drafter.target.num_layers - 1
    if drafter.config.context == "taps" and last in drafter.config.target_layer_ids:
        why = f"layer {last} is the target's last, which engines tap before the final norm"
        raise UserError(f"--format {name}: {why}; train with drafter.target_layers below it")


def qwen3_config(drafter: BlockDrafter) -> JsonObject:
    """The layers as a Qwen3 config."""
    c, layers = drafter.config, len(drafter.config.init_layer_ids)
    rope = write_rotary(drafter)
    return {
        "model_type": "qwen3",
        **{name: getattr(c, name) for name in LAYERS},
        "num_hidden_layers": layers,
        "attention_dropout": 0.0,
        "max_position_embeddings": drafter.target.context_limit,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "layer_types": ["full_attention"] * layers,
        "is_causal": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def taps_config(drafter: BlockDrafter) -> JsonObject:
    """Blocks, taps and draft vocabulary: layer i's output is transformers' hidden_states[i + 1]."""
    c = drafter.config
    return {
        "block_size": c.rows,
        "mask_token_id": c.mask_token_id,
        TAPS: list(c.target_layer_ids),
        "num_target_layers": c.num_target_layers,
        **({} if drafter.draft_vocab is None else {"draft_vocab_size": drafter.draft_size}),
    }
