"""What a model computes by itself over a few tokens: as transformers runs it, with its own attention and its own cache."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from align.target.inspection.anatomy import cache_name, decoder, eos_ids
from align.target.inspection.own_cache import cache_of_its_own
from align.target.inspection.reads import reads_past
from align.target.logits import over_the_head

TEXT = "One model, run in two ways, says the same: first whole, then piece by piece through a cache."
LENGTH, CUT = 14, 9
"""Tokens of the proof; those in front of the drafts."""


@dataclass
class Own:
    """What the model computes by itself: logits of the tokens, and the decoder's last states (where there is none, what its head saw)."""

    tokens_1L: Tensor
    logits_LV: Tensor
    head_input_LD: Tensor
    placed: dict[int, tuple[Tensor, Tensor]]
    """By placeholder (of an image, of sound), a text that holds it, and its logits, (LENGTH, V)."""
    read_past: frozenset[nn.Module]
    """Layers whose weights other modules read; but the head, which is called by itself here."""
    never_V: Tensor | None = None
    """Tokens that it never writes."""
    layers_write: int | None = None
    """The width of the decoder's last states."""
    before_head: Any = None
    """The module that turns the last states into what the head sees, where there is one (ModernBERT)."""

    @property
    def written_LV(self) -> Tensor:
        """The logits of the tokens that it writes."""
        return self.logits_LV if self.never_V is None else self.logits_LV[:, ~self.never_V]


@torch.no_grad()
def own_output(model: Any, tokenizer: Any) -> Own:
    """A call over the first tokens, and the others through the cache that `generate` gives it, or that it makes itself; recurrent
    states one by one, as they are made."""
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), Tensor):  # MusicGen has several, over codes of sound
        raise NotImplementedError(
            f"it has {'no' if head is None else 'more than one'} head over a vocabulary"
        )
    tokens_1L = _tokens(model, tokenizer)
    config = model.config.get_text_config(decoder=True)
    seen: list[Tensor] = []
    last: list[Tensor] = []
    hooks = [model.get_output_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0]))]
    between: list[tuple[Any, Any, Any]] = []
    cache: Any = DynamicCache(config=config)
    recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
    with suppress(NotImplementedError):  # no decoder apart from its head
        body = decoder(model)
        if cache_of_its_own(body, cache_name(body), model.device) is not None:
            cache, recurrent = None, True
        hooks.append(body.register_forward_hook(lambda *call: _keep_last(call[-1], last)))
        for module in _between(model, body):
            hooks.append(module.register_forward_hook(lambda *call: between.append(call)))
    try:
        logits: list[Tensor] = []
        rest = tokens_1L[:, CUT:]
        with reads_past(model) as read_past:
            for part in (tokens_1L[:, :CUT], *(rest.split(1, dim=1) if recurrent else [rest])):
                given = {cache_name(model): cache, **positions(model, part, sum(len(x) for x in logits))}
                output = model(input_ids=part, use_cache=True, **given)
                logits.append(output.logits[0])
                cache = output.get(cache_name(model)) if cache is None else cache
    finally:
        for hook in hooks:
            hook.remove()
    before_head = _turning(between, last, seen)
    alike = [x.shape for x in last] == [x.shape for x in seen]
    if before_head is None and alike:  # MiniCPM3 scales them in front of its head
        seen = [x.to(y.dtype) for x, y in zip(last, seen, strict=True)]
    hidden = [x[0] if x.dim() == 3 else x for x in seen]
    placed = {token: _with_placeholder(model, tokens_1L, token) for token in _placeholders(model)}
    known = {token: found for token, found in placed.items() if found is not None}
    found_LV, never_V = over_the_head(torch.cat(logits), len(model.get_output_embeddings().weight))
    width = last[0].shape[-1] if last else None
    return Own(
        tokens_1L,
        found_LV,
        torch.cat(hidden),
        known,
        frozenset(read_past - {head}),
        never_V,
        width,
        before_head,
    )


def _between(model: Any, body: Any) -> list[Any]:
    """The modules that hold neither the decoder nor the head, and lie in neither."""
    ends = (body, model.get_output_embeddings())
    inside = {m for end in ends for m in end.modules()}
    return [m for m in model.modules() if inside.isdisjoint(m.modules())]


def _turning(calls: list[tuple[Any, Any, Any]], last: list[Tensor], seen: list[Tensor]) -> Any:
    """Of modules' calls (module, given, gave) the module that made what the head saw first out of the last states, as wide; else None."""

    def same(one: Any, other: Tensor) -> bool:
        return isinstance(one, Tensor) and one.shape == other.shape and torch.equal(one, other)

    if not last or last[0].shape != seen[0].shape or same(last[0], seen[0]):
        return None
    made = (m for m, given, gave in calls if given and same(given[0], last[0]) and same(gave, seen[0]))
    return next(made, None)


def _keep_last(output: Any, found: list[Tensor]) -> None:
    if isinstance(state := getattr(output, "last_hidden_state", None), Tensor):
        found.append(state)


def _placeholders(model: Any) -> list[int]:
    """The tokens that stand for images and sound in the texts of a model that takes some."""
    size = model.get_output_embeddings().weight.shape[0]
    names = (f"{what}_token_{key}" for what in ("image", "video", "audio") for key in ("id", "index"))
    found = {getattr(model.config, name, None) for name in names}
    return sorted(token for token in found if isinstance(token, int) and 0 <= token < size)


def _with_placeholder(model: Any, tokens_1L: Tensor, token: int) -> tuple[Tensor, Tensor] | None:
    """A text that holds it, and its logits; None where the model asks for what it stands for."""
    text_1L = tokens_1L.clone()
    text_1L[:, LENGTH // 2] = token
    try:
        logits_LV = model(input_ids=text_1L, use_cache=False).logits[0]
        return text_1L, over_the_head(logits_LV, len(model.get_output_embeddings().weight))[0]
    except Exception:  # it has a form of its own in each model
        return None


def positions(model: Any, tokens_1L: Tensor, past: int) -> dict[str, Tensor]:
    """The tokens' positions, where `generate` gives them; a wrapper counts on its own, some in three parts. Without them Bamba begins
    each call at 0."""
    wraps = model.config.get_text_config(decoder=True) is not model.config
    if wraps or "position_ids" not in signature(model.forward).parameters:
        return {}
    return {"position_ids": past + torch.arange(tokens_1L.shape[1], device=model.device)[None]}


def _tokens(model: Any, tokenizer: Any) -> Tensor:
    """The proof's text, without tokens that end one or stand for an image, (1, LENGTH). No tokenizer: the first tokens."""
    size, no_text = (
        model.get_output_embeddings().weight.shape[0],
        {*eos_ids(model, tokenizer), *_placeholders(model)},
    )
    ids = [i for i in tokenizer(TEXT, add_special_tokens=False)["input_ids"] if i < size and i not in no_text]
    ids = ids or [i for i in range(size) if i not in no_text]
    return torch.tensor([(ids * LENGTH)[:LENGTH]], device=model.device)
