"""What a setting asks for, written a second time: p after every processor, and a text written from it token by token. No code of
the engine, its processors or its sampling is used here, so a processor that the engine drops, or puts in another order, shows.

Temperature, top-k, top-p and min-p are transformers' own; the penalties and what is barred follow `Sampling`'s words.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from align.target.cache import KVCache
from align.target.model import Target
from decode.speculation.sampling import Sampling

TOGETHER = 32
"""Texts in one forward."""
DRAFTED = 4
"""The usual length of scripted drafts (`decode.losslessness.scripted`)."""


@dataclass(frozen=True)
class Setting:
    """What a user may ask of `Decoder.generate`.

    Args:
        new: max_new_tokens.
        stop: strings that end the text.
        ends: the tokens that count as the end of a text; None = the target's own.
        context: of the target, in tokens; None = its own.
        raw: the prompt as text that is continued without a chat template; messages: as a conversation, (role, content) of each;
            prompt: in tokens. At most one of them; none: whoever asks has the prompt.
        gaps: whether the gaps between the two largest logits are recorded.
        named: whether the fields of `sampling` are given one by one, by their names.
        piece: tokens of a piece in which the engine reads the prompt; None = its own.
        drafts: the length of scripted drafts.
        interrupted: whether the same was asked for before, by somebody whose `stream` raised an exception in the middle.
    """

    name: str
    sampling: Sampling
    new: int
    stop: tuple[str, ...] = ()
    ends: tuple[int, ...] | None = None
    context: int | None = None
    raw: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    prompt: tuple[int, ...] = ()
    gaps: bool = False
    named: bool = False
    piece: int | None = None
    drafts: int = DRAFTED
    interrupted: bool = False


class Written(NamedTuple):
    """A text as it has to be. `finish` and `gaps` as in `Generation`."""

    tokens: list[int]
    text: str
    finish: str
    gaps: list[float]


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
    logits_V: Tensor,
    prompt: Sequence[int],
    tokens: Sequence[int],
    setting: Setting,
    ends: Sequence[int],
    at: int | None = None,
) -> Tensor:
    """The values (V,) whose argmax is the next token: greedy, or coupled to its position (`at`; default: behind the tokens)."""
    z_1V = _score(logits_V, prompt, tokens, setting.sampling, ends)[None]
    if setting.sampling.temperature == 0:
        return z_1V[0]
    p_V = law(z_1V, setting.sampling)[0]
    at = len(prompt) + len(tokens) if at is None else at
    return p_V.log() + noise(setting.sampling.seed, at, len(p_V), p_V.device)


class _Text:
    """A text that grows by a token at a time."""

    def __init__(self, target: Target, prompt: list[int], setting: Setting) -> None:
        self.target, self.prompt, self.setting = target, prompt, setting
        self.ends = target.eos_ids if setting.ends is None else setting.ends
        context = target.context_limit if setting.context is None else setting.context
        self.limit = min(setting.new, context - len(prompt))
        self.cache = target.new_cache(1, len(prompt) + self.limit)
        self.tokens: list[int] = []
        self.gaps: list[float] = []

    def add(self, logits_V: Tensor) -> Written | None:
        """Choose the next token; the whole text where that ends it."""
        setting, tokens = self.setting, self.tokens
        best_2 = _score(logits_V, self.prompt, tokens, setting.sampling, self.ends).topk(2).values
        self.gaps.append(float(best_2[0] - best_2[1]))
        token = int(choice(logits_V, self.prompt, tokens, setting, self.ends).argmax())
        tokens.append(token)
        text = self.target.decode(tokens)
        at = [text.find(stop) for stop in setting.stop if stop in text]
        if at:
            return Written(tokens, text[: min(at)], "stop", self.gaps)
        if token in self.ends:
            return Written(tokens, text, "eos", self.gaps)
        if len(tokens) == self.limit:
            return Written(tokens, text, "length" if self.limit == setting.new else "context", self.gaps)
        return None


def write(target: Target, prompt: list[int], setting: Setting) -> Written:
    """The text that the setting asks for, greedy or coupled."""
    return write_all(target, [(prompt, setting)])[0]


@torch.no_grad()
def write_all(
    target: Target,
    asked: Sequence[tuple[list[int], Setting]],
    see: Callable[[int, Tensor], object] = lambda _index, _logits_V: None,
) -> list[Written]:
    """The texts that several settings ask for, each after its prompt: a token of each in one forward, where the target takes that.
    `see` gets the number of a text and the logits of each of its tokens.
    """
    texts = [_Text(target, prompt, setting) for prompt, setting in asked]
    found: dict[int, Written] = {}
    read: dict[tuple[int, ...], tuple[KVCache, Tensor]] = {}
    for i, text in enumerate(texts):
        if (key := tuple(text.prompt)) not in read:
            cache = target.new_cache(1, len(key))
            tokens_1L = torch.tensor([text.prompt], device=target.device)
            hidden_BLD = target.forward(tokens_1L, cache=cache, logits=False).hidden_BLD
            read[key] = cache, target.head(hidden_BLD[:, -1:])[0, 0]
        source, logits_V = read[key]
        text.cache.fill(source)
        text.cache.advance(source.length)
        see(i, logits_V)
        if (done := text.add(logits_V)) is not None:
            found[i] = done
    while running := [i for i in range(len(texts)) if i not in found]:
        for start in range(0, len(running), TOGETHER):
            part = running[start : start + TOGETHER]
            last = [torch.tensor([texts[i].tokens[-1:]], device=target.device) for i in part]
            outputs = target.forward_together(last, [texts[i].cache for i in part], [None] * len(part))
            for i, output in zip(part, outputs, strict=True):
                assert output.logits_BLV is not None
                see(i, output.logits_BLV[0, -1])
                if (done := texts[i].add(output.logits_BLV[0, -1])) is not None:
                    found[i] = done
    return [found[i] for i in range(len(texts))]
