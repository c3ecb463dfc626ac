"""Bugs of `decode.verify --self-test`: every option of `decode.losslessness.options`, dropped by the engine, dropped by the verifiers
that draw by themselves, and dropped by the reference alone; and what shows only from the sixth draft on, in long texts, in what is
streamed, after an interruption, or where a value is rounded or capped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from align.target.cache import KVCache
from decode.engine import decoder, engine
from decode.engine.detokenizer import TextStream
from decode.engine.engine import Engine
from decode.losslessness import options
from decode.losslessness.law import Setting
from decode.losslessness.planted import BY_RATIO, Bug, Verify, sampled_otherwise, take_all, verified
from decode.losslessness.searched import COUNTED, NEW
from decode.speculation.processors import History
from decode.speculation.sampling import Sampling
from decode.speculation.tree import depths
from decode.speculation.verification import Outcome, Round

Plant = tuple[Any, str, Callable[[Any], Any]]

_OFF: dict[str, tuple[str, dict[str, Any]]] = {
    "temperature": ("temperature, seed", {"temperature": 1.0}),
    "seed": ("temperature, seed", {"seed": 0}),
    "top-k": ("top-k", {"top_k": 0}),
    "top-p": ("top-p", {"top_p": 1.0}),
    "min-p": ("min-p", {"min_p": 0.0}),
    "repetition penalty": ("repetition penalty", {"repetition_penalty": 1.0}),
    "presence penalty": ("presence penalty", {"presence_penalty": 0.0}),
    "banned tokens": ("banned tokens", {"banned": ()}),
    "minimum length": ("minimum length", {"min_new_tokens": 0}),
}
"""Each option of `Sampling` → the setting that has it, and its value when it is off."""
_REQUEST: dict[str, dict[str, Any]] = {
    "stop string": {"stop": ()},
    "length": {"new": NEW},
    "context": {"context": None},
    "end of text": {"ends": ()},
}
"""Each option of a request → what a `Setting` without it has."""


def engine_asked(change: Callable[[Sampling], Sampling]) -> Plant:
    """An engine that changes the `Sampling` that it was asked for."""

    def broken(right: Callable[..., None]) -> Callable[..., None]:
        def begin(self: Engine, target: Any, prompt: Any, new: int, sampling: Any, *rest: Any) -> None:
            right(self, target, prompt, new, change(sampling), *rest)

        return begin

    return Engine, "__init__", broken


def engine_with(**off: Any) -> Plant:
    """An engine that is given other values of `Sampling`, at temperature 0 those alone that greedy decoding has."""
    return engine_asked(lambda sampling: replace(sampling, **off))


def engine_after(change: Callable[[Engine], object]) -> Plant:
    """An engine that is changed once it is made."""

    def broken(right: Callable[..., None]) -> Callable[..., None]:
        def begin(self: Engine, *given: Any) -> None:
            right(self, *given)
            change(self)

        return begin

    return Engine, "__init__", broken


def _reference_with(change: Callable[[Setting], Setting]) -> Plant:
    return options, "write", lambda right: lambda target, prompt, s: right(target, prompt, change(s))


def _without_sampling(off: dict[str, Any]) -> Callable[[Setting], Setting]:
    return lambda s: replace(s, sampling=replace(s.sampling, **off))


def _without_request(off: dict[str, Any]) -> Callable[[Setting], Setting]:
    return lambda s: replace(s, **off)


_ENGINE: dict[str, Plant] = {
    "stop string": engine_after(lambda e: setattr(e.text, "stops", ())),
    "length": engine_after(lambda e: setattr(e, "limit", e.limit + 1)),
    "context": engine_after(lambda e: setattr(e, "limit", NEW)),
    "end of text": engine_after(lambda e: setattr(e, "eos", frozenset())),
}


def _bug(name: str, by: str, plant: Plant, setting: str) -> Bug:
    return Bug(f"{name}: dropped by the {by}", "options", plant, setting=setting)


DROPPED = (
    *(_bug(name, "engine", engine_with(**off), setting) for name, (setting, off) in _OFF.items()),
    *(_bug(name, "engine", plant, name) for name, plant in _ENGINE.items()),
    Bug(
        "raw prompt: dropped by the engine",
        "options",
        (decoder, "prompt_tokens", lambda right: lambda target, prompt, raw: right(target, prompt)),
        setting="raw prompt",
        chat=True,
    ),
    *(
        _bug(name, "reference", _reference_with(_without_sampling(off)), setting)
        for name, (setting, off) in _OFF.items()
    ),
    *(_bug(name, "reference", _reference_with(_without_request(off)), name) for name, off in _REQUEST.items()),
    *(
        Bug(f"{name}: not in the p that drafts are compared with", "options drawn", plant, BY_RATIO)
        for name, plant in {
            "top-k": verified(sampled_otherwise(top_k=0)),
            "top-p": verified(sampled_otherwise(top_p=1.0)),
            "min-p": verified(sampled_otherwise(min_p=0.0)),
        }.items()
    ),
    Bug(
        "banned tokens, minimum length: not in the p that drafts are compared with",
        "rounds",
        verified(lambda one: one._replace(before=one.before._replace(barred=None))),
        BY_RATIO,
    ),
    Bug("seed: not in what is drawn", "options drawn", engine_with(seed=0)),
)  # fmt: skip

LATE = 5
"""Drafts of a round behind which a bug begins."""
MOST = 64
"""The largest minimum length, and twice the tokens that a penalty remembers, under a bug."""
LONGEST = 8
"""Characters of a stop string that are looked for."""


def _unseen(right: Verify) -> Verify:
    """After so many drafts of a chain the others are accepted without a look."""
    every = take_all(right)

    def verify(one: Round) -> Outcome:
        outcome = right([one])[0]
        return every([one])[0] if not one.proposal.branches and len(outcome.accepted) >= LATE else outcome

    return lambda rounds: [verify(one) for one in rounds]


def _late_row(one: Round) -> Round:
    """The logits after a late draft are those after the one before it."""
    if not one.proposal.branches:
        one.logits_MV[LATE + 1 :] = one.logits_MV[LATE:-1].clone()
    return one


def _late_siblings(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def ancestors(parents: tuple[int, ...]) -> Tensor:
        see_MM = right(parents).clone()
        late = [i + 1 for i, depth in enumerate(depths(parents)) if depth > LATE]
        see_MM[late] = torch.ones_like(see_MM).tril()[late]
        return see_MM

    return ancestors


def _late_kept(right: Callable[..., None]) -> Callable[..., None]:
    """Of many accepted drafts the last is lost to the one that stands before it."""

    def keep(self: KVCache, start: int, offsets: Sequence[int]) -> None:
        right(self, start, [*offsets[:-1], offsets[-1] - 1] if len(offsets) > LATE + 1 else offsets)

    return keep


def _uncounted(right: Callable[[History, Sequence[int]], None]) -> Callable[[History, Sequence[int]], None]:
    def extend(self: History, tokens: Sequence[int]) -> None:
        if self.count < COUNTED:
            right(self, tokens)
        else:
            self.count += len(tokens)

    return extend


def _forgotten(right: Callable[[Engine, Outcome], int]) -> Callable[[Engine, Outcome], int]:
    """Penalties count the latest tokens alone."""

    def commit(self: Engine, outcome: Outcome) -> int:
        accepted = right(self, outcome)
        if (held_V := self.request.history.written_V) is not None:
            held_V.zero_()[self.out.tokens[-MOST // 2 :]] = True
        return accepted

    return commit


def _lost(right: Callable[[TextStream, int], None]) -> Callable[[TextStream, int], None]:
    """What the last piece of a text holds is not streamed."""

    def send(self: TextStream, end: int) -> None:
        if self.settled < len(self.tokens) or end < len(self.text) or self.sent == 0:
            right(self, end)

    return send


def _swallowing(right: Callable[[TextStream, int], None]) -> Callable[[TextStream, int], None]:
    def send(self: TextStream, end: int) -> None:
        try:
            right(self, end)
        except Exception:
            self.emit = None

    return send


def _left_over(right: Callable[[Engine], Round]) -> Callable[[Engine], Round]:
    """A request after one that did not end goes on with that one's counts of tokens."""
    begun: list[Engine] = []

    def prefill(self: Engine) -> Round:
        first = right(self)
        if begun and not begun[-1].out.finish:
            self.request.history = begun[-1].request.history
        begun.append(self)
        return first

    return prefill


def _rounded(sampling: Sampling) -> Sampling:
    warm = sampling.temperature > 0.5
    return replace(sampling, temperature=round(sampling.temperature, 1)) if warm else sampling


def _short(one: Engine) -> None:
    if one.text is not None:
        one.text.stops = tuple(stop for stop in one.text.stops if len(stop) <= LONGEST)


LONG, DRAWN = "at length", "at length, seed"
_Change = Callable[[Sampling], Sampling]
_ASKED: dict[str, tuple[str, _Change]] = {
    "a temperature above 0.5 is rounded to a tenth": ("fine temperature", _rounded),
    "a top-k above 64 is one too small": ("top-k, wide", lambda s: replace(s, top_k=s.top_k - (s.top_k > 64))),
    "a top-k above 64 is one too large": ("top-k, no wider", lambda s: replace(s, top_k=s.top_k + (s.top_k > 64))),
    "top-p is rounded to 0.05": ("top-p, usual", lambda s: replace(s, top_p=max(0.05, round(20 * s.top_p) / 20))),
    "min-p is rounded to a tenth": ("min-p, usual", lambda s: replace(s, min_p=round(s.min_p, 1))),
    "the presence penalty is at most 1": (DRAWN, lambda s: replace(s, presence_penalty=min(1.0, s.presence_penalty))),
    "the minimum length is at most 64": (DRAWN, lambda s: replace(s, min_new_tokens=min(MOST, s.min_new_tokens))),
    "seeds count by their lower 32 bits": ("hot, seed", lambda s: replace(s, seed=s.seed % 2**32)),
}  # fmt: skip
DEEPENED = (
    Bug("the sixth draft of a chain and those after it are accepted without a look", "options scripted", (engine, "verify_rounds", _unseen), setting=LONG),
    Bug("the logits from the sixth draft of a chain on are those of the row before", "options scripted", verified(_late_row), setting=DRAWN),
    Bug("siblings attend to one another from the sixth level on", "options scripted", (engine, "ancestors", _late_siblings), setting=LONG),
    Bug("the cache keeps the draft before the last accepted one twice, where six are accepted", "options scripted", (KVCache, "keep", _late_kept), setting=LONG),
    Bug("penalties do not count what is written after 40 tokens", "options scripted", (History, "extend", _uncounted), setting=DRAWN),
    Bug("penalties forget what was written 32 tokens ago", "options scripted", (Engine, "_commit", _forgotten), setting=DRAWN),
    Bug("the last piece of a text is not streamed", "options scripted", (TextStream, "_send", _lost), setting=LONG),
    Bug("an exception of stream is swallowed", "options", (TextStream, "_send", _swallowing), setting="after an interruption"),
    Bug("a request goes on with what an interrupted one wrote", "options", (Engine, "prefill", _left_over), setting="after an interruption"),
    Bug("stop strings of more than 8 characters are not found", "options", engine_after(_short), setting="stop strings, one in another"),
    Bug("raw prompts: not raw in a batch", "batch", (decoder, "prompt_tokens", lambda right: lambda target, prompt, raw: right(target, prompt)), chat=True),
    Bug("seeds that agree modulo 2³² draw alike", "options drawn", (engine, "seeded", lambda right: lambda seed, *device: right(seed % 2**32, *device))),
    *(Bug(name, "options scripted", engine_asked(change), setting=setting) for name, (setting, change) in _ASKED.items()),
)  # fmt: skip
