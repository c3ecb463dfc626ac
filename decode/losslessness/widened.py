"""Bugs of `decode.verify --self-test` that show only where a request has several values of one option, records gaps or is cold, in
batches, or in long contexts. With those of the engine and the dropped options: all bugs of the self-test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from align.target.cache import KVCache
from decode.engine import decoder, engine
from decode.engine.engine import Engine
from decode.losslessness.dropped import DROPPED, Plant, engine_after, engine_asked
from decode.losslessness.planted import ENGINE_BUGS, Bug, verified
from decode.speculation import verification
from decode.speculation.sampling import Sampling
from decode.speculation.verification import Round

FLOOR = 0.3
"""Colder temperatures are raised to it by a bug."""
BEYOND = 200
"""Positions of a cache behind which a bug begins."""


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
    Bug("cold temperatures are raised where drafts are verified", "sampled", verified(lambda one: one._replace(sampling=_warm(one.sampling)))),
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
    Bug("requests of a batch draw by the settings of the first", "batch", (verification, "_kind", lambda right: _coarse)),
    Bug("rejected drafts stay in a long cache", "long", (KVCache, "keep", _kept)),
    Bug(
        "the noise of a long text begins anew",
        "long",
        verified(lambda one: one._replace(position=one.position % BEYOND)),
    ),
)  # fmt: skip
BUGS = (*ENGINE_BUGS, *DROPPED, *WIDENED)
