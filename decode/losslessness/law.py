"""What a setting asks for, written a second time: p after every processor, and a text written from it token by token. No code of
the engine, its processors or its sampling is used here, so a processor that the engine drops, or puts in another order, shows.

Temperature, top-k, top-p and min-p are transformers' own; the penalties and what is barred follow `Sampling`'s words.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from align.target.model import Target
from decode.speculation.sampling import Sampling


@dataclass(frozen=True)
class Setting:
    """What a user may ask of `Decoder.generate`.

    Args:
        new: max_new_tokens.
        stop: strings that end the text.
        ends: the tokens that count as the end of a text; None = the target's own.
        context: of the target, in tokens; None = its own.
        raw: the prompt as text that is continued without a chat template; empty = the prompt is given in tokens.
    """

    name: str
    sampling: Sampling
    new: int
    stop: tuple[str, ...] = ()
    ends: tuple[int, ...] | None = None
    context: int | None = None
    raw: str = ""


class Written(NamedTuple):
    """A text as it has to be. `finish` as in `Generation`."""

    tokens: list[int]
    text: str
    finish: str


@contextmanager
def as_asked(target: Target, setting: Setting) -> Iterator[None]:
    """Inside this context the target has the setting's ends and context."""
    own = target.eos_ids, target.context_limit
    target.eos_ids = own[0] if setting.ends is None else setting.ends
    target.context_limit = own[1] if setting.context is None else setting.context
    try:
        yield
    finally:
        target.eos_ids, target.context_limit = own


def scores(
    logits_LV: Tensor, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling, ends: Sequence[int]
) -> Tensor:
    """Logits (L, V) in fp64 after the processors that look at the text; row i chooses token i, after `tokens[:i]`.

    Args:
        prompt: counts for the repetition penalty alone.
        ends: the tokens that the minimum length bars.
    """
    return torch.stack([_score(z_V, prompt, tokens[:i], sampling, ends) for i, z_V in enumerate(logits_LV)])


def _score(
    logits_V: Tensor, prompt: Sequence[int], text: Sequence[int], sampling: Sampling, ends: Sequence[int]
) -> Tensor:
    """A row of `scores`, after this text."""
    z_V, written = logits_V.double().clone(), sorted(set(text))
    if sampling.repetition_penalty != 1:
        seen = sorted({*prompt, *written})
        held, by = z_V[seen], sampling.repetition_penalty
        z_V[seen] = torch.where(held > 0, held / by, held * by)
    z_V[written] -= sampling.presence_penalty
    z_V[list(sampling.banned)] = -math.inf
    if len(text) < sampling.min_new_tokens:
        z_V[list(ends)] = -math.inf
    return z_V


def law(z_LV: Tensor, sampling: Sampling) -> Tensor:
    """p (L, V) of `scores`, at a temperature above 0."""
    none: Any = torch.empty(len(z_LV), 0, dtype=torch.int64)  # these look at no text
    z_LV = TemperatureLogitsWarper(float(sampling.temperature))(none, z_LV)
    if sampling.top_k:
        z_LV = TopKLogitsWarper(sampling.top_k)(none, z_LV)
    if sampling.top_p < 1:
        z_LV = TopPLogitsWarper(sampling.top_p)(none, z_LV)
    if sampling.min_p:
        z_LV = MinPLogitsWarper(sampling.min_p)(none, z_LV)
    return z_LV.softmax(-1)


def noise(seed: int, position: int, size: int, device: torch.device) -> Tensor:
    """The Gumbel noise (V,) of a position under a seed: the definition of `position_noise`, written again."""
    key = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    drawn = torch.Generator(device).manual_seed(int.from_bytes(key, "little") // 2)
    return -torch.rand(size, dtype=torch.float64, generator=drawn, device=device).log().neg().log()


def choice(
    logits_V: Tensor, prompt: Sequence[int], tokens: Sequence[int], setting: Setting, ends: Sequence[int]
) -> Tensor:
    """The values (V,) whose argmax is the next token: greedy, or coupled to its position."""
    z_1V = _score(logits_V, prompt, tokens, setting.sampling, ends)[None]
    if setting.sampling.temperature == 0:
        return z_1V[0]
    p_V = law(z_1V, setting.sampling)[0]
    return p_V.log() + noise(setting.sampling.seed, len(prompt) + len(tokens), len(p_V), p_V.device)


@torch.no_grad()
def write(target: Target, prompt: list[int], setting: Setting) -> Written:
    """The text that the setting asks for, greedy or coupled, one token at a time."""
    with as_asked(target, setting):
        limit = min(setting.new, target.context_limit - len(prompt))
        cache = target.new_cache(1, len(prompt) + limit)
        tokens: list[int] = []
        fed = prompt
        while True:
            logits_BLV = target.forward(torch.tensor([fed], device=target.device), cache=cache).logits_BLV
            assert logits_BLV is not None
            token = int(choice(logits_BLV[0, -1], prompt, tokens, setting, target.eos_ids).argmax())
            tokens.append(token)
            fed = [token]
            text = target.decode(tokens)
            at = [text.find(stop) for stop in setting.stop if stop in text]
            if at:
                return Written(tokens, text[: min(at)], "stop")
            if token in target.eos_ids:
                return Written(tokens, text, "eos")
            if len(tokens) == limit:
                return Written(tokens, text, "length" if limit == setting.new else "context")
