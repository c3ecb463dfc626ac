"""config.json of another engine's block drafter as the values of this project's own
(`specalign.models.block_config`).

Published definitions: DFlash, arXiv 2602.06036 and its package; DSpark, arXiv 2607.05147; the
speculators package. What the network here does not compute is refused by its key, and so is a
drafter for a target of another shape.
"""

from __future__ import annotations

from typing import Any

from specalign.common.errors import UserError
from specalign.formats.rotary import rotary_entries
from specalign.lm.inspection.parts import embedding_scale
from specalign.lm.model import Target

ARCHITECTURES = {
    "dflash": ("DFlashDraftModel",),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel"),
}
HEADS = ("vanilla", "gated", "rnn")
NEUTRAL: dict[str, Any] = {
    "output_multiplier": 1.0, "logit_scale": 1.0, "attention_value_scale": 1.0, "attention_sink_bias": False, "use_swa": False,
    "rope_is_neox_style": True, "is_neox_style": True, "use_aux_hidden_state": True,
}  # fmt: skip
"""Keys that change what is computed, and the value with which they change nothing."""
NESTED = {
    *NEUTRAL, "mask_token_id", "mask_token", "target_layer_ids", "num_target_layers", "block_size", "causal", "sample_from_anchor",
    "shift_label", "projector_type", "attention_mode", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "final_logit_softcapping", "input_embedding_scale", "conv_kernel_size", "conv_group_size",
    "selector_rank", "selector_top_k", "swa_window_size", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim", "num_anchors",
    "loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha",
}  # fmt: skip
"""Keys of `dflash_config` and `dspark_config` that are read, refused by name, or for training
only."""


class Settings:
    """A config.json whose keys may be in several places.

    where: the file, for messages. inner: the part about the layers.
    """

    def __init__(self, values: dict[str, Any], layout: str, where: str) -> None:
        self.values, self.layout, self.where = values, layout, where
        self.inner: dict[str, Any] = values.get("transformer_layer_config", values)
        if not isinstance(self.inner, dict):
            raise self.error("transformer_layer_config must be an object")
        self.nested: dict[str, Any] = {}
        for section in ("dspark_config", "dflash_config"):
            found = values.get(section)
            self.nested |= found if isinstance(found, dict) else {}

    def get(self, name: str, default: Any = None) -> Any:
        """A value from `dflash_config` or `dspark_config`, the file, or its part about the layers;
        null counts as missing."""
        for place in (self.nested, self.values, self.inner):
            if place.get(name) is not None:
                return place[name]
        return default

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


def read_settings(
    values: dict[str, Any], layout: str, where: str, target: Target
) -> dict[str, Any]:
    """The input of `BlockConfig.from_dict`, without the target's name and what only the tensors
    tell (`draft_vocab_size`).

    Raises:
        UserError: a key that is missing, not computed by the network here, or does not fit the
            target.
    """
    s = Settings(values, layout, where)
    _check_kind(s)
    _check_attention(s, target)
    _check_input_and_output(s, target)
    heads, width = s.get_int("num_attention_heads"), s.get_int("hidden_size")
    head_dim = s.get_int("head_dim", width // heads)
    rotary, rope = rotary_entries(s.inner, head_dim, target, where)
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


def _check_kind(s: Settings) -> None:
    """Raises UserError for a network that is not decoded here."""
    if s.layout == "speculators":
        kind = s.values["speculators_model_type"]
        if kind not in ARCHITECTURES:
            raise s.error(
                f"speculators_model_type={kind!r} is not decoded here; dflash and dspark are"
            )
    elif s.layout != "transformers":
        names, known = s.values.get("architectures"), ARCHITECTURES[s.layout]
        if names is not None and not isinstance(names, list):
            raise s.error(f"architectures={names!r:.60}: must be a list, as [{known[0]!r}]")
        if names is not None and (not names or names[0] not in known):
            raise s.error(f"architectures={names}: of this layout {known[0]} alone is decoded here")
        kind = s.values.get("model_type", "qwen3")
        if kind != "qwen3":
            raise s.error(f"model_type={kind!r}: the layers of a block drafter are qwen3's")
    projector = s.get("projector_type", s.layout)
    if projector not in (s.layout, "dflash", "dspark"):
        raise s.error(f"projector_type={projector!r} is not decoded here; dflash and dspark are")
    for name in ("conv_kernel_size", "selector_rank"):
        if s.get(name):
            raise s.error(
                f"{name}={s.get(name)}: DFlash 2 is not decoded here; DFlash and DSpark are"
            )
    for name, value in s.nested.items():
        if name not in NESTED and value not in (None, False):
            raise s.error(
                f"{name}={value!r:.60} is not known here; if it is for training only, remove it"
            )
    mode = s.get("attention_mode", "gqa")
    if mode not in ("gqa", "mha"):
        raise s.error(f"attention_mode={mode!r} is not decoded here; gqa and mha are")


def _check_attention(s: Settings, target: Target) -> None:
    """Raises UserError unless every row sees the whole context and its whole block."""
    causal = {name: s.get(name) for name in ("is_causal", "causal")}
    for name, value in causal.items():
        if value:
            raise s.error(
                f"{name}={str(value).lower():.60}: a block's rows see one another both ways here"
            )
    kinds = s.get("layer_types")
    if kinds is None:  # Qwen3's default
        slides = s.get("use_sliding_window", False)
        slides = slides and s.get_int("max_window_layers", 28, low=0) < s.get_int(
            "num_hidden_layers"
        )
        kinds = ["sliding_attention"] if slides else []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise s.error("layer_types must be a list of names")
    for kind in kinds:
        if kind == "full_attention":
            continue
        if kind != "sliding_attention":
            raise s.error(
                f"layer_types has {kind!r}: layers see the whole context here (full_attention)"
            )
        window = s.get_int("sliding_window")
        both_ways = s.get("sliding_window_non_causal", False) or any(
            v is not None for v in causal.values()
        )
        if not both_ways or window < target.context_limit:
            why = f"layer_types has sliding_attention (sliding_window={window})"
            raise s.error(f"{why}: layers see the whole context here")


def _check_input_and_output(s: Settings, target: Target) -> None:
    """Raises UserError unless rows go in as the target embeds them and out through its head
    alone."""
    for name, neutral in NEUTRAL.items():
        value = s.get(name, neutral)
        if value != neutral:
            raise s.error(f"{name}={value!r:.60} is not decoded here; {neutral} is")
    cap = s.get("final_logit_softcapping")
    if cap:
        raise s.error(f"final_logit_softcapping={cap}: draft logits are the head's own here")
    own = embedding_scale(target)
    scale = s.get("input_embedding_scale", own)
    if not isinstance(scale, int | float) or abs(scale / own - 1) > 1e-3:
        raise s.error(
            f"input_embedding_scale={scale}: target {target.spec!r} scales its embeddings by "
            f"{own:g}"
        )
    width = s.get("target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        raise s.error(
            f"target_hidden_size={width}: target {target.spec!r} has {target.hidden_size}"
        )


def _samples_from_anchor(s: Settings) -> bool:
    """Whether the anchor's row drafts too: DSpark's layout; DFlash's is fill-in."""
    default = s.layout == "dspark"
    if s.layout == "speculators":  # old folders don't say it, and keep the first row for the anchor
        default = _proposed_tokens(s.values) == s.get("block_size")
    value = s.get("sample_from_anchor", default)
    if not isinstance(value, bool):
        raise s.error(f"sample_from_anchor must be true or false, not {value!r:.60}")
    if s.get("shift_label") and not value:
        raise s.error(
            "shift_label=true: each row drafts the token behind its own; if the anchor's does too, "
            "set "
            "sample_from_anchor: true"
        )
    return value


def _proposed_tokens(values: dict[str, Any]) -> Any:
    """The number of drafts of a speculators folder's first proposal method."""
    section = values.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    return first.get("speculative_tokens") if isinstance(first, dict) else None


def _tapped_layers(s: Settings, target: Target) -> list[int]:
    """Tapped layers, the target's from 0: id i is the output of layer i. In the speculators package
    0 is the embedding."""
    shift = 1 if s.layout == "speculators" else 0
    name = "aux_hidden_state_layer_ids" if shift else "target_layer_ids"
    ids = s.get(name)
    if ids is None and s.layout == "dflash":
        ids = _default_taps(s.get_int("num_target_layers", low=0), s.get_int("num_hidden_layers"))
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise s.error(f"{name} must be a list of layers, not {ids!r:.60}")
    last = target.num_layers - 1 + shift
    for i in ids:
        if not shift <= i <= last:
            raise s.error(
                f"{name} has {i}: target {target.spec!r} has the layers {shift} to {last}"
            )
        if i == last:
            raise s.error(
                f"{name} has {i}, the target's last layer, which some engines give with its last "
                "norm and others "
                "without"
            )
    return [i - shift for i in ids]


def _default_taps(layers: int, drafter_layers: int) -> list[int]:
    """The dflash package's choice: evenly spread from layer 1 to the third from the end."""
    if drafter_layers == 1:
        return [layers // 2]
    step = (layers - 4) / (drafter_layers - 1)
    return [round(1 + i * step) for i in range(drafter_layers)]


def _head_settings(s: Settings) -> dict[str, Any]:
    """Markov and confidence head by the config; the tensors decide which kind of ours it is."""
    if s.layout != "dspark" and s.values.get("speculators_model_type") != "dspark":
        if s.get("markov_rank", 0):
            raise s.error(f"markov_rank={s.get('markov_rank')} in a layout without Markov heads")
        return {}
    rank, kind = s.get_int("markov_rank", 0, low=0), s.get("markov_head_type", "vanilla")
    if rank and kind not in HEADS:
        raise s.error(f"markov_head_type={kind!r} is not decoded here; {', '.join(HEADS)} are")
    found: dict[str, Any] = {"markov_rank": rank, "markov": kind if rank else ""}
    if s.get("enable_confidence_head", False):
        reads = s.get("confidence_head_with_markov", rank > 0)
        if reads and not rank:
            raise s.error("confidence_head_with_markov=true needs markov_rank above 0")
        found |= {"confidence_head": True, "confidence_input": "markov" if reads else "hidden"}
    return found
