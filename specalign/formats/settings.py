"""config.json of another engine's block drafter as the values of `BlockConfig`.

Published definitions: DFlash, arXiv 2602.06036 and its package; DSpark, arXiv 2607.05147; the
speculators package. What the network here does not compute is refused by its key, and so is a
drafter for a target of another shape.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.formats.rotary import read_rotary
from specalign.lm.inspection.parts import embedding_scale
from specalign.lm.model import Target

ARCHITECTURES = {
    "dflash": ("DFlashDraftModel",),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel"),
}
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "output_multiplier": (1.0,), "logit_scale": (1.0,), "attention_value_scale": (1.0,), "attention_sink_bias": (False,),
    "use_swa": (False,), "rope_is_neox_style": (True,), "is_neox_style": (True,), "use_aux_hidden_state": (True,),
    "final_logit_softcapping": (0,), "is_causal": (False,), "causal": (False,), "attention_mode": ("gqa", "mha"),
    "projector_type": ("dflash", "dspark"), "conv_kernel_size": (0,), "selector_rank": (0,),
    "markov_head_type": ("vanilla", "gated", "rnn"), "speculators_model_type": ("dflash", "dspark"),
}  # fmt: skip
"""Keys that change what is computed, and the values that the network here computes."""
NESTED = {
    *SUPPORTED, "mask_token_id", "mask_token", "target_layer_ids", "num_target_layers", "block_size", "sample_from_anchor",
    "shift_label", "markov_rank", "enable_confidence_head", "confidence_head_with_markov", "input_embedding_scale",
    "conv_group_size", "selector_top_k", "swa_window_size", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim",
    "num_anchors", "loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha",
}  # fmt: skip
"""Keys of `dflash_config` and `dspark_config` that are read, refused by name, or for training
only."""


class ConfigReader:
    """A config.json whose keys may be in several places. where: the file, for messages. inner: the
    part about the layers."""

    def __init__(self, values: JsonObject, layout: str, where: str) -> None:
        self.values, self.layout, self.where = values, layout, where
        self.inner: JsonObject = values.get("transformer_layer_config", values)
        if not isinstance(self.inner, dict):
            raise self.error("transformer_layer_config must be an object")
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
            raise self.error(f"missing key {name!r}")
        if type(value) is not int or value < low:
            raise self.error(f"{name} must be a whole number of at least {low}, not {value!r:.60}")
        return value

    def error(self, what: str) -> UserError:
        return UserError(f"{self.where}: {what}")


def read_settings(values: JsonObject, layout: str, where: str, target: Target) -> JsonObject:
    """The input of `BlockConfig.from_dict`, without the target's name and what only the tensors
    tell (`draft_vocab_size`). Raises UserError for a key that is missing, not computed by the
    network here, or does not fit the target."""
    s = ConfigReader(values, layout, where)
    _check_network(s)
    _check_windows(s, target)
    _check_embedding(s, target)
    heads, width = s.get_int("num_attention_heads"), s.get_int("hidden_size")
    head_dim = s.get_int("head_dim", width // heads)
    rotary, rope = read_rotary(s.inner, head_dim, target, where)
    return {
        "context": "taps",
        "block_size": s.get_int("block_size"),  # rows, as in this project's files
        "sample_from_anchor": _samples_from_anchor(s),
        "target_layer_ids": _tapped_layers(s, target),
        "init_layer_ids": [-1] * s.get_int("num_hidden_layers"),
        "hidden_size": width,
        "intermediate_size": s.get_int("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": s.get_int("num_key_value_heads", heads),
        "head_dim": head_dim,
        "rms_norm_eps": s.get("rms_norm_eps", 1e-6),
        "hidden_act": s.get("hidden_act", "silu"),
        "vocab_size": s.get_int("vocab_size", target.vocab_size),
        "mask_token_id": s.get_int("mask_token_id", low=0),
        "num_target_layers": s.get_int("num_target_layers", target.num_layers),
        "rope_theta": float(rope.get("rope_theta") or target.rope_theta),
        "qk_norm": True,
        "attention_bias": bool(s.get("attention_bias", False)),
        "rotary": rotary,
        "extra": {"rope_parameters": rope} if rotary else {},
        **_head_settings(s),
    }


def _check_network(s: ConfigReader) -> None:
    """Raises UserError for a network that is not decoded here."""
    known = ARCHITECTURES.get(s.layout)
    if known:
        names = s.values.get("architectures", [known[0]])
        if not isinstance(names, list) or not names or names[0] not in known:
            raise s.error(f"architectures={names!r:.60}: of this layout [{known[0]!r}] is decoded")
        kind = s.values.get("model_type", "qwen3")
        if kind != "qwen3":
            raise s.error(f"model_type={kind!r}: the layers of a block drafter are qwen3's")
    for name, choices in SUPPORTED.items():
        value = s.get(name)
        if value is not None and value not in choices:
            listed = " or ".join(map(str, choices))
            raise s.error(f"{name}={value!r:.60} is not decoded here; must be {listed}")
    for name, value in s.nested.items():
        if name not in NESTED and value not in (None, False):
            raise s.error(f"{name}={value!r:.60} is not known here (remove it if unused)")


def _check_windows(s: ConfigReader, target: Target) -> None:
    """Raises UserError unless every row sees the whole context and its whole block."""
    kinds = s.get("layer_types")
    if kinds is None:  # Qwen3's default
        full_layers = s.get_int("max_window_layers", 28, low=0)
        slides = s.get("use_sliding_window") and full_layers < s.get_int("num_hidden_layers")
        kinds = ["sliding_attention"] if slides else []
    both_ways = s.get("sliding_window_non_causal")
    both_ways = both_ways or s.get("is_causal") is not None or s.get("causal") is not None
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        # a window that holds every text is none
        whole = kind == "sliding_attention" and both_ways
        whole = whole and s.get_int("sliding_window") >= target.context_limit
        if kind != "full_attention" and not whole:
            raise s.error(f"layer_types has {kind!r:.60}: layers see the whole context here")


def _check_embedding(s: ConfigReader, target: Target) -> None:
    """Raises UserError unless rows go in as the target embeds them."""
    own = embedding_scale(target)
    scale = s.get("input_embedding_scale", own)
    if not isinstance(scale, int | float) or abs(scale / own - 1) > 1e-3:
        raise s.error(f"input_embedding_scale={scale}: target {target.spec!r} has {own:g}")
    width = s.get("target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        has = f"target {target.spec!r} has {target.hidden_size}"
        raise s.error(f"target_hidden_size={width}: {has}")


def _samples_from_anchor(s: ConfigReader) -> bool:
    """Whether the anchor's row drafts too: DSpark's layout; DFlash's is fill-in."""
    default = s.layout == "dspark"
    if s.layout == "speculators":  # old folders don't say it, and keep the first row for the anchor
        with suppress(KeyError, IndexError, TypeError):
            method = s.values["speculators_config"]["proposal_methods"][0]
            default = method["speculative_tokens"] == s.get("block_size")
    value = s.get("sample_from_anchor", default)
    if not isinstance(value, bool):
        raise s.error(f"sample_from_anchor must be true or false, not {value!r:.60}")
    if s.get("shift_label") and not value:
        raise s.error("shift_label=true needs sample_from_anchor=true")
    return value


def _tapped_layers(s: ConfigReader, target: Target) -> list[int]:
    """Tapped layers, the target's from 0: id i is the output of layer i. In the speculators package
    0 is the embedding."""
    shift = 1 if s.layout == "speculators" else 0
    name = "aux_hidden_state_layer_ids" if shift else "target_layer_ids"
    ids = s.get(name)
    if ids is None and s.layout == "dflash":  # evenly spread from layer 1 to the third from the end
        layers, count = s.get_int("num_target_layers", low=0), s.get_int("num_hidden_layers")
        step = (layers - 4) / max(count - 1, 1)
        ids = [layers // 2] if count == 1 else [round(1 + i * step) for i in range(count)]
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise s.error(f"{name} must be a list of layers, not {ids!r:.60}")
    last = target.num_layers - 1 + shift
    for i in ids:
        if not shift <= i < last:  # of the last, engines differ in whether its norm is applied
            fit = f"the layers {shift} to {last - 1} can be used, not the last"
            raise s.error(f"{name} has {i}: of target {target.spec!r} {fit}")
    return [i - shift for i in ids]


def _head_settings(s: ConfigReader) -> JsonObject:
    """Markov and confidence head by the config; the tensors decide which kind of ours it is."""
    rank = s.get_int("markov_rank", 0, low=0)
    if s.layout != "dspark" and s.values.get("speculators_model_type") != "dspark":
        if rank:
            raise s.error(f"markov_rank={rank} in a layout without Markov heads")
        return {}
    kind = s.get("markov_head_type", "vanilla")
    found: JsonObject = {"markov_rank": rank, "markov": kind if rank else ""}
    if s.get("enable_confidence_head", False):
        reads = s.get("confidence_head_with_markov", rank > 0)
        if reads and not rank:
            raise s.error("confidence_head_with_markov=true needs markov_rank above 0")
        found |= {"confidence_head": True, "confidence_input": "markov" if reads else "hidden"}
    return found
