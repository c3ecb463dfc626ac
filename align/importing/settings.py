"""config.json of another engine's block drafter as the values of this project's own (`align.models.block_config`).

Published definitions: DFlash, arXiv 2602.06036 and its package; DSpark, arXiv 2607.05147; the speculators package. What the network
here does not compute is refused by its key, and so is what was made for a target of another shape.
"""

from __future__ import annotations

from typing import Any

from align.common.errors import UserError
from align.importing.rotary import rotary_entries
from align.target.inspection.parts import embedding_scale
from align.target.model import Target

ARCHITECTURES = {
    "dflash": ("DFlashDraftModel",),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel"),
}
HEADS = ("vanilla", "gated", "rnn")
NEUTRAL: dict[str, Any] = {
    "output_multiplier": 1.0, "logit_scale": 1.0, "attention_value_scale": 1.0, "attention_sink_bias": False, "use_swa": False,
    "rope_is_neox_style": True, "is_neox_style": True, "use_aux_hidden_state": True,
}  # fmt: skip
"""Keys that change what is computed, and the value that they have where they change nothing."""
NESTED = {
    *NEUTRAL, "mask_token_id", "mask_token", "target_layer_ids", "num_target_layers", "block_size", "causal", "sample_from_anchor",
    "shift_label", "projector_type", "attention_mode", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "final_logit_softcapping", "input_embedding_scale", "conv_kernel_size", "conv_group_size",
    "selector_rank", "selector_top_k", "swa_window_size", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim", "num_anchors",
    "loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha",
}  # fmt: skip
"""All keys of `dflash_config` and `dspark_config` that are read, refused by name, or of training alone."""


class Settings:
    """A config.json in the hands of somebody who looks for keys in all the places where they are written.

    where: the file, for messages. inner: what says the layers.
    """

    def __init__(self, values: dict[str, Any], layout: str, where: str) -> None:
        self.values, self.layout, self.where = values, layout, where
        inner = values.get("transformer_layer_config", values)
        if not isinstance(inner, dict):
            raise self.refused("transformer_layer_config must be an object")
        self.inner: dict[str, Any] = inner
        both = (values.get("dspark_config"), values.get("dflash_config"))
        self.nested: dict[str, Any] = {
            k: v for found in both if isinstance(found, dict) for k, v in found.items()
        }

    def get(self, name: str, default: Any = None) -> Any:
        """A value from `dflash_config` or `dspark_config`, from the file or from the layers' part of it; `default` where none has it, or null."""
        for place in (self.nested, self.values, self.inner):
            if place.get(name) is not None:
                return place[name]
        return default

    def whole(self, name: str, default: int | None = None, low: int = 0) -> int:
        """A whole number. Raises UserError."""
        value = self.get(name, default)
        if value is None:
            raise self.refused(f"missing key {name!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.refused(f"{name} must be a whole number of at least {low}, not {value!r:.60}")
        return value

    def refused(self, what: str) -> UserError:
        return UserError(f"{self.where}: {what}")


def read_settings(values: dict[str, Any], layout: str, where: str, target: Target) -> dict[str, Any]:
    """What `BlockConfig.from_dict` takes, without what the tensors alone say (`draft_vocab_size`) and the target's name.

    Raises:
        UserError: a key that is missing, that this project's network does not compute, or that does not fit the target.
    """
    s = Settings(values, layout, where)
    _check_kind(s)
    _check_attention(s, target)
    _check_input_and_output(s, target)
    heads = s.whole("num_attention_heads", low=1)
    width = s.whole("hidden_size", low=1)
    head_dim = s.whole("head_dim", width // heads, low=1)
    rotary, rope = rotary_entries(s.inner, head_dim, target, where)
    return {
        "context": "taps",
        "block_size": s.whole("block_size", low=1),  # rows, in this project's files too
        "sample_from_anchor": _from_anchor(s),
        "target_layer_ids": _tapped(s, target),
        "init_layer_ids": [-1] * s.whole("num_hidden_layers", low=1),
        "hidden_size": width,
        "intermediate_size": s.whole("intermediate_size", low=1),
        "num_attention_heads": heads,
        "num_key_value_heads": s.whole("num_key_value_heads", heads, low=1),
        "head_dim": head_dim,
        "rms_norm_eps": s.get("rms_norm_eps", 1e-6),
        "hidden_act": s.get("hidden_act", "silu"),
        "vocab_size": s.whole("vocab_size", target.vocab_size, low=1),
        "mask_token_id": s.whole("mask_token_id"),
        "num_target_layers": s.whole("num_target_layers", target.num_layers, low=1),
        "rope_theta": _theta(rope, target),
        "qk_norm": True,
        "attention_bias": bool(s.get("attention_bias", False)),
        "rotary": rotary,
        "extra": {"rope_parameters": rope} if rotary else {},
        **_heads(s),
    }


def _theta(rope: dict[str, Any], target: Target) -> float:
    return float(rope.get("rope_theta") or target.rope_theta)


def _check_kind(s: Settings) -> None:
    """Whether it is one of the networks that are decoded here."""
    if s.layout == "speculators":
        kind = s.values["speculators_model_type"]
        if kind not in ("dflash", "dspark"):
            raise s.refused(
                f"speculators_model_type={kind!r} is not decoded here; dflash and dspark are block drafters"
            )
    elif s.layout != "transformers":
        names, known = s.values.get("architectures"), ARCHITECTURES[s.layout]
        if names is not None and not isinstance(names, list):
            raise s.refused(f"architectures={names!r:.60}: must be a list, as [{known[0]!r}]")
        if names is not None and names[:1] not in [[n] for n in known]:
            raise s.refused(f"architectures={names}: of this layout {known[0]} alone is decoded here")
        if (kind := s.values.get("model_type", "qwen3")) != "qwen3":
            raise s.refused(f"model_type={kind!r}: the layers of a block drafter are qwen3's")
    projector = s.get("projector_type", s.layout)
    if projector not in (s.layout, "dflash", "dspark"):
        raise s.refused(f"projector_type={projector!r} is not decoded here; dflash and dspark are")
    for name in ("conv_kernel_size", "selector_rank"):
        if s.get(name):
            raise s.refused(f"{name}={s.get(name)}: DFlash 2 is not decoded here; DFlash and DSpark are")
    for name in s.nested:  # whatever stands there is of the drafter itself
        if name not in NESTED and s.nested[name] not in (None, False):
            raise s.refused(
                f"{name}={s.nested[name]!r:.60} is not known here; if it is of training alone, take it out"
            )
    if (mode := s.get("attention_mode", "gqa")) not in ("gqa", "mha"):
        raise s.refused(f"attention_mode={mode!r} is not decoded here; gqa and mha are")


def _check_attention(s: Settings, target: Target) -> None:
    """Every row sees the whole context and its whole block."""
    causal = {name: value for name in ("is_causal", "causal") if (value := s.get(name)) is not None}
    for name, value in causal.items():
        if value:
            raise s.refused(f"{name}={str(value).lower():.60}: a block's rows see one another both ways here")
    kinds = s.get("layer_types")
    if kinds is None:  # Qwen3's own choice
        slides = s.get("use_sliding_window", False) and s.whole("max_window_layers", 28) < s.whole(
            "num_hidden_layers"
        )
        kinds = ["sliding_attention"] if slides else []
    if not isinstance(kinds, list) or not all(isinstance(k, str) for k in kinds):
        raise s.refused("layer_types must be a list of names")
    for kind in kinds:
        if kind == "sliding_attention":
            window = s.whole("sliding_window", low=1)
            both_ways = bool(causal) or s.get("sliding_window_non_causal", False)
            if not both_ways or window < target.context_limit:
                raise s.refused(
                    f"layer_types has sliding_attention (sliding_window={window}): layers see the whole context here"
                )
        elif kind != "full_attention":
            raise s.refused(f"layer_types has {kind!r}: layers see the whole context here (full_attention)")


def _check_input_and_output(s: Settings, target: Target) -> None:
    """Rows go in as the target embeds them, and their hidden states through its head alone."""
    for name, neutral in NEUTRAL.items():
        if (value := s.get(name, neutral)) != neutral:
            raise s.refused(f"{name}={value!r:.60} is not decoded here; {neutral} is")
    if s.get("final_logit_softcapping"):
        raise s.refused(
            f"final_logit_softcapping={s.get('final_logit_softcapping')}: draft logits are the head's own here"
        )
    own = embedding_scale(target)
    scale = s.get("input_embedding_scale", own)
    if not isinstance(scale, int | float) or abs(scale / own - 1) > 1e-3:
        raise s.refused(
            f"input_embedding_scale={scale}: target {target.spec!r} scales its embeddings by {own:g}"
        )
    width = s.get("target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        raise s.refused(f"target_hidden_size={width}: target {target.spec!r} has {target.hidden_size}")


def _from_anchor(s: Settings) -> bool:
    """Whether the anchor's row drafts too: DSpark's layout; fill-in is DFlash's."""
    value = s.get(
        "sample_from_anchor", _as_many_rows(s) if s.layout == "speculators" else s.layout == "dspark"
    )
    if not isinstance(value, bool):
        raise s.refused(f"sample_from_anchor must be true or false, not {value!r:.60}")
    if s.get("shift_label") and not value:
        raise s.refused(
            "shift_label=true: each row drafts the token behind its own; say so by sample_from_anchor: true if the anchor's does too"
        )
    return value


def _as_many_rows(s: Settings) -> bool:
    """Whether a speculators folder that does not say so proposes as many tokens as it has rows. Folders from before there was
    `sample_from_anchor` keep the first row for the anchor, DSpark's too, and engines read them so."""
    said: Any = s.values.get("speculators_config")
    said = said.get("proposal_methods") if isinstance(said, dict) else None
    first = said[0] if isinstance(said, list) and said and isinstance(said[0], dict) else {}
    return first.get("speculative_tokens") == s.get("block_size")


def _tapped(s: Settings, target: Target) -> list[int]:
    """Tapped layers, the target's from 0: id i is what layer i writes. In the speculators package ids begin at the embedding."""
    name = "aux_hidden_state_layer_ids" if s.layout == "speculators" else "target_layer_ids"
    ids = s.get(name)
    if ids is None and s.layout == "dflash":  # its package's own choice
        ids = _chosen(s.whole("num_target_layers"), s.whole("num_hidden_layers", low=1))
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise s.refused(f"{name} must be a list of layers, not {ids!r:.60}")
    shift = 1 if s.layout == "speculators" else 0
    for i in ids:
        if not 0 <= i - shift < target.num_layers:
            raise s.refused(
                f"{name} has {i}: target {target.spec!r} has the layers {shift} to {target.num_layers - 1 + shift}"
            )
        if i - shift == target.num_layers - 1:
            raise s.refused(
                f"{name} has {i}, the target's last layer, which some engines give with its last norm and others without"
            )
    return [i - shift for i in ids]


def _chosen(layers: int, drafter_layers: int) -> list[int]:
    """DFlash's taps where its config names none: evenly spread from layer 1 to the third from the end."""
    if drafter_layers == 1:
        return [layers // 2]
    step = (layers - 4) / (drafter_layers - 1)
    return [round(1 + i * step) for i in range(drafter_layers)]


def _heads(s: Settings) -> dict[str, Any]:
    """Markov and confidence head as the config says them; which kind of ours it is, the tensors decide."""
    dspark = s.layout == "dspark" or s.values.get("speculators_model_type") == "dspark"
    if not dspark:
        if s.get("markov_rank", 0):
            raise s.refused(f"markov_rank={s.get('markov_rank')} in a layout without Markov heads")
        return {}
    rank, kind = s.whole("markov_rank", 0), s.get("markov_head_type", "vanilla")
    if rank and kind not in HEADS:
        raise s.refused(f"markov_head_type={kind!r} is not decoded here; {', '.join(HEADS)} are")
    found: dict[str, Any] = {"markov_rank": rank, "markov": kind if rank else ""}
    if s.get("enable_confidence_head", False):
        reads = s.get("confidence_head_with_markov", rank > 0)
        if reads and not rank:
            raise s.refused("confidence_head_with_markov=true needs markov_rank above 0")
        found |= {"confidence_head": True, "confidence_input": "markov" if reads else "hidden"}
    return found
