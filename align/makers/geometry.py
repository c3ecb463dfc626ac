"""What a drafter takes from its target: layers, sizes, a mask token; and notes on options that
`drafter.init` overrides."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers.activations import ACT2FN

from align.config.drafter import DrafterConfig
from specalign.common.errors import UserError
from specalign.common.text import say
from specalign.lm.inspection.keys import RotaryTable, key_rotaries
from specalign.lm.model import Target
from specalign.lm.slabs import LayerShape

_INNER = (
    "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "block_ff_dim", "ffn_hidden_dim",
)  # fmt: skip
_EPS = (
    "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps",
    "layernorm_epsilon",
)  # fmt: skip
_SPARE = re.compile(
    r"\[MASK\]|<\|?_?mask_?\|?>|<\|?mdm_mask\|?>|[<\[]\|?_?((reserved|unused|extra|dummy|"
    r"place_?holder)[\w -]*|(special|control)_?\d+)\|?[>\]]",
    re.IGNORECASE,
)
"""Reserved tokens: `[MASK]`, `<|mask|>`, `<|reserved_special_token_0|>`, `<unused7>`,
`[control_8]`."""
_IN_USE = re.compile(
    r"fim|prefix|middle|suffix|hole|vision|image|img|audio|video|<\|?_?(pre|mid|suf)\W|"
    r"think|tool|call|channel|message|"
    r"^<\|?(user|assistant|system|developer|observation|human|bot)\|?>$|"
    r"(end|start|begin).?of|^</?s>$|im_(start|end)|(bo|eo)[stm](_id)?\W|<\|?(end|start)\|?>|"
    r"header_id",
    re.IGNORECASE,
)
"""Tokens for infilling, images and sound, and those that begin or end texts, turns, thoughts and
calls in some model."""


def tap_layers(num_layers: int, taps: int) -> list[int]:
    """DFlash's spread of tapped layers (arXiv 2602.06036): round(1 + i·(L−4)/(F−1)), i = 0..F−1."""
    if taps == 1:
        return [num_layers - 3]
    return [round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps)]


def shared_layers(num_layers: int, layers: int) -> list[int]:
    """Target layers that a drafter starts from: first, last and evenly spaced ones between them."""
    if layers == 1:
        return [num_layers - 1]
    return [-(-i * (num_layers - 1) // (layers - 1)) for i in range(layers)]


class SizedTarget(Protocol):
    """Sizes of a loaded target, or from its config.json (align/planning/target_sizes.py)."""

    @property
    def spec(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def named_layers(target: SizedTarget, named: Sequence[int] | None) -> list[int]:
    """The target layers that a recipe names, -1 the last one; empty for None. Raises UserError for
    a layer that the target lacks."""
    count = target.num_layers
    if named is not None and not all(-count <= i < count for i in named):
        has = f"target {target.spec!r} has the layers 0 to {count - 1} (-1 = the last one)"
        raise UserError(f"drafter.target_layers={list(named)}: {has}")
    return [i % count for i in named or ()]


def start_layers(target: Target, layers: int) -> list[int]:
    """Target layers to start from: `shared_layers` of those that attend, of all if none does."""
    shapes = () if target.anatomy.repeats else target.anatomy.shapes
    attending = [i for i, shape in enumerate(shapes) if shape is not None]
    return _spread(attending, layers) if attending else shared_layers(target.num_layers, layers)


def _spread(layers: Sequence[int], count: int) -> list[int]:
    """`shared_layers` of a list of layers, the last one repeated if they are too few."""
    if count > len(layers):
        return [*layers, *[layers[-1]] * (count - len(layers))]
    return [layers[i] for i in shared_layers(len(layers), count)]


def first_layers(target: SizedTarget, options: DrafterConfig) -> list[int]:
    """The target layers that a drafter starts from: those that the recipe names, else
    `shared_layers`. Raises UserError for layers that the target lacks."""
    if named := named_layers(target, options.target_layers):
        return named
    check_count(target, options.layers)
    return shared_layers(target.num_layers, options.layers)


def check_count(target: SizedTarget, layers: int) -> None:
    """Raises UserError for more layers than the target has."""
    if layers > target.num_layers:
        has = f"target {target.spec!r} has {target.num_layers} layers"
        raise UserError(f"drafter.layers={layers}: {has}")


def shared_keys(target: Target, options: DrafterConfig) -> tuple[list[int], list[RotaryTable]]:
    """The layers whose keys and values a drafter reads, by default spread evenly, and their
    rotaries. Raises UserError for layers without keys that can be shared, or of several shapes."""
    named = named_layers(target, options.target_layers)
    plain = [None if s is None else s._replace(indexer=0) for s in target.anatomy.shapes]
    rotaries = key_rotaries(target)
    serving = [i for i, found in enumerate(rotaries) if isinstance(found, RotaryTable)]
    last = next((plain[i] for i in reversed(named or serving)), None)
    same = [i for i in serving if plain[i] == last]
    chosen = named or shared_layers(target.num_layers, options.layers)
    if same and not named and not set(chosen) <= set(same):
        chosen = _spread(same, options.layers)
    found = [r for i in chosen if isinstance(r := rotaries[i], RotaryTable) and i in same]
    if len(found) == len(chosen):
        return chosen, found
    bad = next(i for i in chosen if i not in same)
    why = rotaries[bad]
    why = why if isinstance(why, str) else "their shape differs from that of other layers"
    raise UserError(
        f"drafter.context=shared_kv: layer {bad} of target {target.spec!r} has no keys and values "
        f"that a drafter can share: {why}; use drafter.context=taps"
    )


@torch.no_grad()
def check_taps(target: Target, layers: Sequence[int]) -> None:
    """Raises UserError if these layers do not output one hidden state per token."""
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=target.device)
    found = target.forward(tokens, taps=layers, logits=False).taps_BLFD
    if found is not None and tuple(found.shape) == (1, 2, len(layers), target.hidden_size):
        return
    shares = any(isinstance(rotary, RotaryTable) for rotary in key_rotaries(target))
    advice = "use drafter.context=shared_kv" if shares else "--methods lookup needs no drafter"
    raise UserError(
        f"drafter.context=taps: the layers of target {target.spec!r} do not output one hidden "
        f"state per token; {advice}"
    )


def own_shape(target: Target) -> LayerShape:
    """Heads of a drafter that makes its own keys: the target's, else of the usual width."""
    heads, width = target.num_kv_heads, target.head_dim
    if not (target.anatomy.attends and width % 2 == 0 and target.num_heads % heads == 0):
        width = min(64, target.hidden_size // 2 * 2)
        heads = max(1, target.hidden_size // width)
    return LayerShape(heads, width, width)


def inner_size(target: Target) -> int:
    """Width of the feed-forward layers, the last one's where each has its own."""
    given = [getattr(target.config, name, None) for name in _INNER]
    sizes = [v[-1] if isinstance(v, list) and v else v for v in given]
    return next((v for v in sizes if isinstance(v, int) and v > 0), 4 * target.hidden_size)


def norm_eps(target: Target) -> float:
    given = [getattr(target.config, name, None) for name in _EPS]
    return next((float(v) for v in given if isinstance(v, float | int) and v >= 0), 1e-6)


def activation(target: Target) -> str:
    """The target's activation if transformers knows it and it has no weights, else silu."""
    c = target.config
    named = getattr(c, "hidden_act", None) or getattr(c, "hidden_activation", None)
    if not isinstance(named, str) or named not in ACT2FN:
        return "silu"
    made: Any = ACT2FN[named]
    return "silu" if isinstance(made, nn.Module) and list(made.parameters()) else named


def has_attention_bias(target: Target) -> bool:
    """Whether the layers' queries have a bias."""
    layers: Any = target.layers
    return any("self_attn.q_proj.bias" in dict(layer.named_parameters()) for layer in layers)


@torch.no_grad()
def matches_target_tables(target: Target, width: int, rotaries: Sequence[RotaryTable]) -> bool:
    """Whether the target's rotary module, in the plain layout, computes these rotaries."""
    module = getattr(target.body, "rotary_emb", None)
    if module is None:
        return False
    x = torch.zeros(1, 3, target.hidden_size, dtype=target.dtype, device=target.device)
    positions = torch.arange(3, device=target.device)[None]
    try:
        cos, sin = module(x, positions)
        halves = [torch.equal(t[..., : width // 2], t[..., width // 2 :]) for t in (cos, sin)]
    except Exception:  # modules of this name have many signatures
        return False
    if not all(halves) or not cos.shape == sin.shape == (1, 3, width):
        return False
    tolerance = 0.02 if x.dtype != torch.float32 else 1e-4
    # a table may be scaled as a whole: keys have the scale, queries learn it
    tables = [rotary.tables(positions, width) for rotary in rotaries]
    crossed = [(s * cos.float(), c * sin.float()) for c, s in tables]
    return all(torch.allclose(a, b, atol=tolerance) for a, b in crossed)


def mask_token(target: Target) -> int:
    """The id whose row of the frozen embedding serves as the mask: the last row without a token
    (padding), else the first reserved token, else the first unused special token. It depends on the
    target's files only. Raises UserError if there is none."""
    tokenizer = target.tokenizer
    names = {index: _to_ascii(token) for token, index in tokenizer.get_vocab().items()}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    rows = min(target.vocab_size, len(target.embedding_VD))
    roles = _role_ids(target)
    used = roles | _config_ids(target)
    free = [i for i in range(rows) if i not in names and i not in added and i not in used]
    if free:
        return free[-1]
    template = _to_ascii(str(tokenizer.chat_template or ""))
    unused = [i for i in sorted(names) if i < rows and i not in roles and names[i] not in template]
    unused = [i for i in unused if not _IN_USE.search(names[i])]
    spare = [i for i in unused if _SPARE.fullmatch(names[i])]
    found = spare or [i for i in unused if i in added and added[i].special and i not in used]
    if not found:
        raise UserError(
            f"target {target.spec!r} has no unused special token for the mask; choose one that "
            "never occurs in its texts: drafter.mask_token_id=ID"
        )
    return found[0]


def _to_ascii(name: str) -> str:
    """A token's text with DeepSeek's characters replaced: `<｜place▁holder▁no▁0｜>`."""
    return name.replace("▁", "_").replace("｜", "|")


def _role_ids(target: Target) -> set[int]:
    """Tokens that end a text, that the tokenizer names, or that stand for images and sound."""
    roles = ("bos", "eos", "pad", "unk", "sep", "cls")
    named = [getattr(target.tokenizer, f"{role}_token_id", None) for role in roles]
    return {*target.eos_ids, *target.placeholder_ids, *(i for i in named if i is not None)}


def _config_ids(target: Target) -> set[int]:
    """Tokens that the target's configs name (`bos_token_id`, `image_token_id`)."""
    configs = (target.model.config, target.config, getattr(target.model, "generation_config", None))
    found: list[Any] = []
    for config in configs:
        for key, value in ({} if config is None else config.to_dict()).items():
            if key.endswith(("token_id", "token_index")) and key != "mask_token_id":
                found += value if isinstance(value, list) else [value]
    return {i for i in found if isinstance(i, int)}


def note_ignored(options: DrafterConfig, has: Mapping[str, Any]) -> None:
    """Print the recipe's options that `drafter.init` overrules by its own, `has`."""
    default = DrafterConfig()
    for name, own in has.items():
        asked = getattr(options, name)
        if asked not in (getattr(default, name), own):
            note = f"note: drafter.init={options.init} has {name}={own}; ignoring {name}={asked}"
            say(note, error=True)
