"""Bugs of `decode.verify --self-test` that show only where a request has several values of one option, records gaps or is cold, in
batches, or in long contexts. With those of the engine and the dropped options: all bugs of the self-test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from align.target.cache import KVCache
from decode.engine import decoder, engine
from decode.engine.detokenizer import TextStream
from decode.engine.engine import Engine
from decode.losslessness.dropped import DEEPENED, DROPPED, Plant, engine_after, engine_asked
from decode.losslessness.planted import ENGINE_BUGS, Bug, verified
from decode.speculation import sampling as distribution
from decode.speculation import verification
from decode.speculation.processors import History
from decode.speculation.sampling import Sampling, seeded
from decode.speculation.verification import Outcome, Round

FLOOR = 0.3
"""Colder temperatures are raised to it by a bug."""
CEILING = 2.0
"""Hotter temperatures are lowered to it by a bug."""
BEYOND = 200
"""Positions of a cache behind which a bug begins."""
RECENT = 64
"""Prompt tokens that a forgetful penalty counts."""


def _cooled(sampling: Sampling) -> Sampling:
    return replace(sampling, temperature=min(CEILING, sampling.temperature))


def _warm(sampling: Sampling) -> Sampling:
    return sampling if sampling.greedy else replace(sampling, temperature=max(FLOOR, sampling.temperature))


def _stops(keep: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Plant:
    def change(one: Engine) -> None:
        if one.text is not None:
            one.text.stops = keep(one.text.stops)

    return engine_after(change)


def _batch(change: Callable[[Engine, Engine], object]) -> Plant:
    """A batch in which every request takes something of the first one's. change: (the first, each)."""

    def broken(right: Callable[..., None]) -> Callable[..., None]:
        def run(engines: Sequence[Engine], most: int = 1) -> None:
            for one in engines:
                change(engines[0], one)
            right(engines, most)

        return run

    return decoder, "run_together", broken


def _seed(first: Engine, one: Engine) -> None:
    one.sampling = replace(one.sampling, seed=first.sampling.seed)


def _kept(right: Callable[..., None]) -> Callable[..., None]:
    """Behind so many positions one rejected draft stays, as long as there is room."""

    def keep(self: KVCache, start: int, offsets: Sequence[int]) -> None:
        more = self.length > BEYOND and self.length - start > len(offsets) and self.capacity - self.length > 1
        right(self, start, [*offsets, offsets[-1] + 1] if more else offsets)

    return keep


def _coarse(one: Round) -> Any:
    """Requests that draw alike share the settings of the first."""
    return "greedy" if one.sampling.greedy and not one.by_rule else (one.noise is None, one.by_rule)


def _shortened(right: Callable[..., Any]) -> Callable[..., Any]:
    """Of each full piece of a prompt the last token is lost."""

    def forward(self: Engine, tokens_1L: Tensor, logits: bool = True, *tree: Tensor | None) -> Any:
        lost = not logits and tokens_1L.shape[1] == engine.PREFILL_CHUNK
        return right(self, tokens_1L[:, :-1] if lost else tokens_1L, logits, *tree)

    return forward


def _recent(right: Callable[..., None]) -> Callable[..., None]:
    def begin(self: History, sampling: Sampling, prompt: Sequence[int], *rest: Any) -> None:
        right(self, sampling, prompt[-RECENT:], *rest)

    return begin


def _over_all(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """top-p over the mass of all tokens, those included that top-k leaves out."""

    def best(logits_RV: Tensor, top_k: int, top_p: float) -> Tensor:
        if not top_k or top_p >= 1:
            return right(logits_RV, top_k, top_p)
        kept_RV = right(logits_RV, top_k, 1.0) * (right(logits_RV, 0, top_p) > 0)
        return kept_RV / kept_RV.sum(-1, keepdim=True)

    return best


def _unnamed(right: Callable[..., Sampling]) -> Callable[..., Sampling]:
    def named(sampling: Sampling | None, options: Mapping[str, Any], *rest: Any) -> Sampling:
        return right(sampling, {key: value for key, value in options.items() if key != "seed"}, *rest)

    return named


def _few_seeds(right: Callable[[Engine], Round]) -> Callable[[Engine], Round]:
    def prefill(self: Engine) -> Round:
        first = right(self)
        self.request.generator.manual_seed(self.sampling.seed % 4)
        return first

    return prefill


def _lent(right: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """A request without a mask is lent another's."""

    def joined(masks: Sequence[Tensor | None], heights: Sequence[int]) -> Tensor | None:
        own = next((t for t in masks if t is not None), None)
        lent = own[0] if own is not None and own.dim() == 2 else own
        return right([lent if t is None else t for t in masks], heights)

    return joined


def _one_generator(right: Callable[[Engine], Round]) -> Callable[[Engine], Round]:
    """All requests that begin while the bug is planted draw from the first one's generator."""
    first: list[torch.Generator] = []

    def prefill(self: Engine) -> Round:
        found = right(self)
        first.append(self.request.generator)
        self.request.generator = first[0]
        return found._replace(generator=first[0])

    return prefill


def _begun_anew(right: Callable[[Engine, Outcome], None]) -> Callable[[Engine, Outcome], None]:
    """After the prompt the random numbers begin anew, so those of the first token come again."""

    def commit_first(self: Engine, outcome: Outcome) -> None:
        right(self, outcome)
        self.request.generator.set_state(seeded(self.sampling.seed, self.target.device).get_state())

    return commit_first


def _allowed(right: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Where only some rows are below the minimum length, the others ban nothing."""

    def barred(self: History, depth: Sequence[int]) -> Tensor | None:
        barred = right(self, depth)
        if barred is not None and barred.dim() == 2:
            past = [self.count + d >= self.min_new_tokens for d in depth]
            barred[past] = False
        return barred

    return barred


def _first_listed(right: Callable[[TextStream, str], bool]) -> Callable[[TextStream, str], bool]:
    def cut(self: TextStream, text: str) -> bool:
        found = right(self, text)
        if found:
            self.text = text[: next(text.find(stop) for stop in self.stops if stop in text)]
        return found

    return cut


def _reversed(right: Callable[..., None]) -> Callable[..., None]:
    def run(engines: Sequence[Engine], most: int = 1) -> None:
        right(engines, most)
        if most > 6:
            for one, out in zip(engines, [one.out for one in reversed(engines)], strict=True):
                one.out = out

    return run


WIDENED = (
    Bug("only the first stop string counts", "options", _stops(lambda stops: stops[:1]), setting="stop strings"),
    Bug("only the last stop string counts", "options", _stops(lambda stops: stops[-1:]), setting="stop strings"),
    Bug(
        "only the first banned token counts",
        "options",
        engine_asked(lambda s: replace(s, banned=s.banned[:1])),
        setting="banned tokens",
    ),
    Bug(
        "only the first end of text counts",
        "options",
        engine_after(lambda one: setattr(one, "eos", frozenset(one.target.eos_ids[:1]))),
        setting="end of text",
    ),
    Bug(
        "recording gaps overwrites logits",
        "options",
        (engine, "penalised", lambda right: lambda z, sampling, before: right(z, sampling, before, True)),
        setting="gaps",
    ),
    Bug(
        "gaps are those of other rows",
        "options",
        (
            engine,
            "penalised",
            lambda right: lambda z, sampling, before: right(z, sampling, before).roll(1, 0),
        ),
        setting="gaps",
    ),
    Bug("cold temperatures are raised", "options", engine_asked(_warm), setting="temperature, below 0.14"),
    Bug(
        "a top-p of 0.9 or more is ignored",
        "options",
        engine_asked(lambda s: replace(s, top_p=1.0 if s.top_p >= 0.9 else s.top_p)),
        setting="top-p, usual",
    ),
    Bug(
        "a min-p below 0.3 is ignored",
        "options",
        engine_asked(lambda s: replace(s, min_p=0.0 if s.min_p < 0.3 else s.min_p)),
        setting="min-p, usual",
    ),
    *(
        Bug(f"{name} is ignored", "options", engine_asked(change), setting=setting)
        for name, setting, change in (
            ("a top-p above 0.95", "top-p, wide", lambda s: replace(s, top_p=1.0 if s.top_p > 0.95 else s.top_p)),
            ("a min-p of 0.1 to 0.45", "min-p, strong", lambda s: replace(s, min_p=0.0 if 0.1 <= s.min_p <= 0.45 else s.min_p)),
            ("a top-k above 64", "top-k, wide", lambda s: replace(s, top_k=0 if s.top_k > 64 else s.top_k)),
            (
                "a repetition penalty near 1",
                "repetition penalty, usual",
                lambda s: replace(s, repetition_penalty=1.0 if abs(s.repetition_penalty - 1) < 0.19 else s.repetition_penalty),
            ),
            (
                "a temperature of 0.55 to 0.95",
                "usual temperature",
                lambda s: replace(s, temperature=1.0 if 0.55 <= s.temperature <= 0.95 else s.temperature),
            ),
        )
    ),
    Bug("hot temperatures are lowered", "options", engine_asked(_cooled), setting="hot, seed"),
    Bug("cold temperatures are raised where drafts are verified", "rounds", verified(lambda one: one._replace(sampling=_warm(one.sampling)))),
    Bug("one seed for all requests of a batch", "batch", _batch(_seed)),
    Bug(
        "one noise for all requests of a batch",
        "batch",
        _batch(lambda first, one: setattr(one, "_noise", first._noise)),
    ),
    Bug("one seed for all requests of a batch, drawn", "options drawn", _batch(_seed)),
    Bug(
        "one length for all requests of a batch",
        "batch",
        _batch(lambda first, one: setattr(one, "limit", first.limit)),
    ),
    Bug("a request that bans nothing takes its neighbour's banned tokens", "batch", (distribution, "_joined", _lent)),
    Bug("requests of a batch draw by the settings of the first", "batch", (verification, "_kind", lambda right: _coarse)),
    Bug("rejected drafts stay in a long cache", "long", (KVCache, "keep", _kept)),
    Bug(
        "the noise of a long text begins anew",
        "long",
        verified(lambda one: one._replace(position=one.position % BEYOND)),
    ),
    Bug("a prompt token is lost at the end of each piece", "long", (Engine, "_forward", _shortened), setting="long prompt"),
    Bug("the repetition penalty forgets old prompt tokens", "long", (History, "__init__", _recent), setting="long prompt"),
    Bug(
        "top_k=1 is ignored",
        "options",
        engine_asked(lambda s: replace(s, top_k=0 if s.top_k == 1 else s.top_k)),
        setting="top-k, one",
    ),
    Bug(
        "top-p counts what top-k left out",
        "options",
        (distribution, "_best_only", _over_all),
        setting="top-k, top-p",
    ),
    Bug("a seed given by name is dropped", "options", (decoder, "named", _unnamed), setting="all together, by name"),
    Bug("a seed given by name is dropped in a batch", "batch", (decoder, "named", _unnamed)),
    Bug("four seeds in all", "options drawn", (Engine, "prefill", _few_seeds)),
    Bug("requests of a batch draw from one generator", "options drawn", (Engine, "prefill", _one_generator)),
    Bug("the random numbers begin anew after the prompt", "sampled", (Engine, "commit_first", _begun_anew)),
    Bug(
        "banned tokens are allowed in the round that reaches the minimum length",
        "options scripted",
        (History, "_barred", _allowed),
        setting="banned tokens, minimum length",
    ),
    Bug(
        "the first stop string listed wins, not the first in the text",
        "options",
        (TextStream, "_cut", _first_listed),
        setting="stop strings, one in another",
    ),
    Bug("outputs of a large batch are reversed", "batch", (decoder, "run_together", _reversed)),
)  # fmt: skip
BUGS = (*ENGINE_BUGS, *DROPPED, *WIDENED, *DEEPENED)
