"""The logits that a model computes by itself over a few tokens: run by transformers, with its own
attention and cache."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from specalign.lm.inspection.anatomy import cache_name, decoder, eos_ids
from specalign.lm.inspection.reads import watch_reads
from specalign.lm.logits import over_the_head

TEXT = (
    "One model, run in two ways, says the same: first whole, then piece by piece through a cache."
)
LENGTH, CUT = 14, 9
"""Tokens of the proof; those before the drafts."""


@dataclass(frozen=True)
class OwnOutput:
    """What the model computes by itself.

    logits_LV: of the tokens. head_input_LD: the decoder's last states. never_V: tokens that the
    model never writes. read_past: layers whose weights are read without calling them, but for the
    head, which is called here.
    """

    tokens_1L: Tensor
    logits_LV: Tensor
    head_input_LD: Tensor
    never_V: Tensor | None
    read_past: frozenset[nn.Module]

    @property
    def written_LV(self) -> Tensor:
        """The logits of the tokens that it writes."""
        return self.logits_LV if self.never_V is None else self.logits_LV[:, ~self.never_V]


@torch.no_grad()
def own_output(model: Any, tokenizer: Any) -> OwnOutput:
    """The first tokens in one call, the others through the cache; with recurrent states one by one,
    as they are made."""
    head = model.get_output_embeddings()
    if not isinstance(
        getattr(head, "weight", None), Tensor
    ):  # MusicGen has several, over audio codes
        raise NotImplementedError(
            f"it has {'no' if head is None else 'more than one'} head over a vocabulary"
        )
    tokens_1L = _proof_tokens(model, tokenizer)
    body = decoder(model)
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
    rest = tokens_1L[:, CUT:]
    parts = [tokens_1L[:, :CUT], *(rest.split(1, dim=1) if recurrent else [rest])]
    head_inputs: list[Tensor] = []
    last_states: list[Tensor] = []
    hooks = [
        head.register_forward_pre_hook(lambda _, args: head_inputs.append(args[0])),
        body.register_forward_hook(lambda *call: last_states.append(call[-1].last_hidden_state)),
    ]
    logits: list[Tensor] = []
    name, past = cache_name(model), 0
    try:
        with watch_reads(model) as read_past:
            for part in parts:
                given = {name: cache, **positions(model, part, past)}
                logits.append(model(input_ids=part, use_cache=True, **given).logits[0])
                past += part.shape[1]
    finally:
        for hook in hooks:
            hook.remove()
    logits_LV, never_V = over_the_head(torch.cat(logits), len(head.weight))
    hidden_LD = _head_input(head_inputs, last_states)
    return OwnOutput(tokens_1L, logits_LV, hidden_LD, never_V, frozenset(read_past - {head}))


def _head_input(head_inputs: list[Tensor], last_states: list[Tensor]) -> Tensor:
    """The decoder's last states, which the head reads as they are or scaled (MiniCPM3).

    Raises:
        NotImplementedError: the head reads states of another width.
    """
    read, written = (states[0].shape[-1] for states in (head_inputs, last_states))
    if read != written:
        raise NotImplementedError(
            f"its head reads states of width {read}, its layers write {written}"
        )
    if [x.shape for x in last_states] == [x.shape for x in head_inputs]:
        head_inputs = [x.to(y.dtype) for x, y in zip(last_states, head_inputs, strict=True)]
    return torch.cat([x[0] if x.dim() == 3 else x for x in head_inputs])


def placeholder_ids(model: Any) -> list[int]:
    """The tokens that stand for images and audio in a model's texts."""
    size = model.get_output_embeddings().weight.shape[0]
    names = (
        f"{what}_token_{key}" for what in ("image", "video", "audio") for key in ("id", "index")
    )
    found = {getattr(model.config, name, None) for name in names}
    return sorted(token for token in found if isinstance(token, int) and 0 <= token < size)


def positions(model: Any, tokens_1L: Tensor, past: int) -> dict[str, Tensor]:
    """The positions that `generate` passes; wrappers count for themselves. Without them Bamba
    begins each call at 0."""
    wraps = model.config.get_text_config(decoder=True) is not model.config
    if wraps or "position_ids" not in signature(model.forward).parameters:
        return {}
    return {"position_ids": past + torch.arange(tokens_1L.shape[1], device=model.device)[None]}


def _proof_tokens(model: Any, tokenizer: Any) -> Tensor:
    """The proof's text, without tokens that end one or stand for an image, (1, LENGTH). Without a
    tokenizer: the first tokens."""
    size = model.get_output_embeddings().weight.shape[0]
    no_text = {*eos_ids(model, tokenizer), *placeholder_ids(model)}
    ids = [
        i
        for i in tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        if i < size and i not in no_text
    ]
    ids = ids or [i for i in range(size) if i not in no_text]
    return torch.tensor([(ids * LENGTH)[:LENGTH]], device=model.device)
