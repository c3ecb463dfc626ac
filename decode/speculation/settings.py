"""The settings by which tokens are chosen. No torch here, so that a command refuses a number at
once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from specalign.common.errors import UserError
from specalign.common.schema import finite
from specalign.common.text import say_once, short

MIN_TEMPERATURE = 1e-3
MOST_NODES = 512
"""The largest tree of one target forward."""
MOST_PENALTY = 100.0
"""Larger penalties leave fp32 no digits in which to tell the other tokens apart."""


@dataclass(frozen=True)
class Sampling:
    """The settings by which tokens are chosen.

    Applied in this order: repetition penalty, presence penalty, banned tokens and minimum length,
    temperature, top-k, top-p, min-p (the order of transformers' `generate`).

    Raises:
        UserError: a value outside its range.
    """

    temperature: float = 0.0
    """0 = always the most probable token, else at least 0.001."""
    top_p: float = 1.0
    """Keep the most probable tokens until their mass reaches this; 1 = all."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 = all."""
    repetition_penalty: float = 1.0
    """Logits of tokens already in the text (prompt included) are divided by this if positive, else
    multiplied; 1 = off."""
    seed: int | None = None
    """Seeds the random generator of a request, 0 to 2**63 - 1. The same seed and settings give the
    same output, unless the drafter looks at the clock (decode/proposers/controllers.py). None:
    `decode.Decoder` draws a new seed for each request and records it in `Generation.seed`."""
    min_p: float = 0.0
    """Keep the tokens at least this many times as probable as the most probable one; 0 = all."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output (without the prompt) already holds; 0 =
    off."""
    banned: tuple[int, ...] = ()
    """Token ids that are never chosen."""
    min_new_tokens: int = 0
    """No end of sequence before the output holds this many tokens."""

    def __post_init__(self) -> None:
        if isinstance(self.banned, list | tuple):
            plain = set(map(type, self.banned)) <= {int}  # quick: there may be thousands
            banned = self.banned if plain else map(_as_int, self.banned)
            object.__setattr__(self, "banned", tuple(banned))
        for name in ("top_k", "seed", "min_new_tokens"):
            object.__setattr__(self, name, _as_int(getattr(self, name)))

        def need(ok: bool, name: str, range_: str) -> None:
            if not ok:
                raise UserError(f"{name}={getattr(self, name)!r}: must be {range_}")

        for name in ("temperature", "top_p", "repetition_penalty", "min_p", "presence_penalty"):
            need(finite(getattr(self, name)), name, "a finite number")
        for name in ("top_k", "min_new_tokens"):
            need(_whole(getattr(self, name)), name, "a whole number")
        need(self.seed is None or _whole(self.seed), "seed", "a whole number")
        need(
            isinstance(self.banned, tuple)
            and (set(map(type, self.banned)) <= {int} or all(map(_whole, self.banned)))
            and min(self.banned, default=0) >= 0,
            "banned",
            "token ids, from 0 up",
        )
        need(
            self.temperature == 0 or self.temperature >= MIN_TEMPERATURE,
            "temperature",
            f"0 (greedy) or at least {MIN_TEMPERATURE}",
        )
        need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        need(self.top_k >= 0, "top_k", "0 (off) or more")
        need(
            1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY,
            "repetition_penalty",
            f"{1 / MOST_PENALTY:g} to {MOST_PENALTY:g} (1 = off)",
        )
        need(
            abs(self.presence_penalty) <= MOST_PENALTY,
            "presence_penalty",
            f"{-MOST_PENALTY:g} to {MOST_PENALTY:g} (0 = off)",
        )
        need(self.seed is None or 0 <= self.seed < 2**63, "seed", "from 0 to 2**63 - 1")
        need(0 <= self.min_p <= 1, "min_p", "from 0 (off) to 1")
        need(self.min_new_tokens >= 0, "min_new_tokens", "0 (off) or more")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def fixed_seed(self) -> int:
        """The seed, 0 where none is given: for measurements, which have to repeat."""
        return 0 if self.seed is None else self.seed

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p leave tokens out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments of a call."""

    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    seed: int | None
    min_p: float
    presence_penalty: float
    banned: tuple[int, ...] | list[int]
    min_new_tokens: int


def check_sampling(value: Any) -> Sampling:
    """The value. Raises UserError where it is no `Sampling`."""
    if not isinstance(value, Sampling):
        raise UserError(
            f"sampling={short(value, 60)}: not a decode.Sampling; its fields can also be given by "
            "name, temperature=0.7"
        )
    return value


def named(sampling: Sampling | None, options: Mapping[str, Any]) -> Sampling:
    """`sampling`, greedy where it is None; or the one whose fields `options` name
    (`temperature=0.7`).

    Raises:
        UserError: both `sampling` and options, or a value out of its range.
    """
    if options and sampling is not None:
        raise UserError(
            f"sampling and {next(iter(options))} are two places for one setting: give one"
        )
    if sampling is not None:
        return check_sampling(sampling)
    chosen = Sampling(**options)
    unused = [
        name
        for name in ("top_p", "top_k", "min_p", "seed")
        if getattr(chosen, name) != getattr(Sampling, name)
    ]
    if chosen.greedy and unused:
        say_once(
            f"note: {', '.join(unused)} without effect: temperature=0 is greedy (temperature=1 "
            "samples)"
        )
    return chosen


def _as_int(value: Any) -> Any:
    """A whole number of another type, as numpy's, as int."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
