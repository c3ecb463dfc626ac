"""What the engine asks of a drafter. The drafter is the model, shared; a session is its state for one
request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from align.common.errors import UserError
from align.target.cache import KVCache
from align.target.model import Target, TargetOutput
from decode.speculation.processors import History
from decode.speculation.proposal import Law, Proposal
from decode.speculation.sampling import Sampling
from decode.speculation.tree import MOST_NODES


def common_prefix_length(one: list[int], other: list[int]) -> int:
    """How many tokens both texts begin with."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return next(i for i in range(count) if one[i] != other[i])


def check_range(name: str, value: int | None, least: int, most: int | None = MOST_NODES) -> None:
    """Raises UserError for an option, where it is given, that is out of its range; `most` None = without end."""
    if value is not None and (value < least or (most is not None and value > most)):
        raise UserError(
            f"{name}={value!r}: must be {f'at least {least}' if most is None else f'{least} to {most}'}"
        )


@dataclass
class Request:
    """One request's state, owned by the engine; a drafter's session reads it.

    tokens: prompt and everything committed so far. cache: the target's, it holds all of them but the last.
    history: what `tokens` mean for the processors: q passes the same ones as p.
    noise: under the verifier `gumbel`, the noise (V,) that the target will add at an absolute position: a drafter that adds
        the same drafts what the target will say wherever q is near p.
    """

    target: Target
    tokens: list[int]
    cache: KVCache
    sampling: Sampling
    generator: torch.Generator
    history: History
    noise: Callable[[int], Tensor] | None = None


class DraftSession(ABC):
    """A drafter at work on one request. As it stands here it reads the text alone (`request.tokens`)."""

    taps: tuple[int, ...] = ()
    """Target layers whose outputs `observe` needs."""
    rewinds = False
    """Whether the text may be another one, or shorter, than at the last call."""

    def observe(self, output: TargetOutput, kept: int) -> None:  # noqa: B027
        """A target forward whose first `kept` ≥ 1 positions are committed and in the cache."""

    @abstractmethod
    def propose(self, k: int) -> Proposal | None:
        """At most k ≥ 1 tokens, or levels of a tree, to follow `request.tokens`, drawn as the drafter's law says; None = none worth
        a test. Whether a position is drafted at all may depend on the values drawn before it, never on its own, unless the law is
        `point`."""

    def close(self) -> None:  # noqa: B027
        """The request has ended or failed: wait for whatever still runs for it. May be called more than once."""


class Drafter(Protocol):
    """Where proposals come from."""

    name: str
    draft_tokens: int
    """K: the most tokens that it can draft ahead for one target call; of a tree, its levels."""
    draft_nodes: int
    """The most tokens in one proposal: `draft_tokens` unless it drafts trees."""

    def law(self, sampling: Sampling) -> Law:
        """The law of every proposal under these settings."""

    def start(self, request: Request) -> DraftSession:
        """Begin a request, before its prompt goes through the target."""
