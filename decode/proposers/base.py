"""The interface between the engine and drafters. A drafter is shared by all requests; a session is
its state for one request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from decode.speculation.history import History
from decode.speculation.proposal import Law, Proposal
from decode.speculation.sampling import ProcessorState, best, couple, draw, probs
from decode.speculation.settings import Sampling
from specalign.lm.cache import KVCache
from specalign.lm.model import Target, TargetOutput


def common_prefix_length(one: list[int], other: list[int]) -> int:
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return next(i for i in range(count) if one[i] != other[i])


@dataclass
class Request:
    """One request's state, owned by the engine and read by a drafter's session.

    tokens: prompt and committed output. cache: the target's; it holds all tokens but the last.
    history: the processors' state after `tokens`; q goes through the same processors as p.
    numbers_T: what decides the target's own tokens, by the position in the output. noise: under the verifier `gumbel`, the noise (V,) that the target adds at a position; a drafter that
    adds it too drafts the target's own token wherever q is near p.
    """

    target: Target
    tokens: list[int]
    cache: KVCache
    sampling: Sampling
    generator: torch.Generator
    history: History
    numbers_T: Tensor | None = None
    noise: Callable[[int], Tensor] | None = None

    def law(self, drafter: Proposer) -> Law:
        """How this drafter draws here: with `noise` its drafts have no q."""
        return drafter.law(self.sampling) if self.noise is None else "point"

    def choose(
        self,
        law: Law,
        logits_RV: Tensor,
        before: ProcessorState,
        ahead: Iterable[int],
        ids_V: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Choose or draw a column per row of logits, which are overwritten; returns columns and,
        where they were drawn, q. ahead: how many drafts lie between the text and each row. ids_V:
        the tokens of the columns; None = all."""
        noise = self.noise
        if noise is None and law == "point":
            return best(logits_RV, self.sampling, before, overwrite=True), None
        q_RV = probs(logits_RV, self.sampling, before, overwrite=True)
        if noise is None:
            return draw(q_RV, self.generator), q_RV
        columns = slice(None) if ids_V is None else ids_V
        positions = [len(self.tokens) + i for i in ahead]
        return couple(q_RV, lambda position: noise(position)[columns], positions), None


class Proposer:
    """Base class of proposers; by default, tokens are chosen, not sampled.

    For `decode.verify`, a class sets `in_background` if it drafts in another thread, `by_clock` if
    measured times change its drafts, `in_rounds` if it uses more random numbers than drafts.
    """

    name: str
    draft_tokens: int
    """K: the most tokens that it drafts per round; of a tree, its levels."""
    session: type[DraftSession]

    @cached_property
    def draft_nodes(self) -> int:
        """The largest number of tokens in one proposal: `draft_tokens` unless it drafts trees."""
        return self.draft_tokens

    def law(self, sampling: Sampling) -> Law:
        """How the tokens of every proposal are drawn."""
        return "point"

    def start(self, request: Request) -> DraftSession:
        """Begin a request, before the target reads its prompt."""
        return self.session(self, request)


class DraftSession(ABC):
    """A drafter's state for one request; by default it needs only the text."""

    taps: tuple[int, ...] = ()
    """Target layers whose outputs `observe` needs."""
    proposer: Proposer

    def __init__(self, proposer: Proposer, request: Request) -> None:
        self.proposer, self.request = proposer, request

    def observe(self, output: TargetOutput, kept: int) -> None:  # noqa: B027
        """A target forward whose first `kept` ≥ 1 positions are committed and in the cache."""

    @abstractmethod
    def propose(self, k: int) -> Proposal | None:
        """Draft at most k ≥ 1 tokens (of a tree: levels) after `request.tokens`; None = no drafts.

        Unless the law is `point`, whether a position is drafted may depend on the values drawn
        before it, never on its own.
        """

    def close(self) -> None:  # noqa: B027
        """The request has ended or failed: wait for background work. May be called repeatedly."""


class WrappingProposer(Proposer):
    """A drafter around another one, whose law it keeps."""

    def __init__(self, inner: Proposer, addition: str) -> None:
        self.inner, self.name = inner, f"{inner.name}+{addition}"
        self.draft_tokens, self.draft_nodes = inner.draft_tokens, inner.draft_nodes

    def law(self, sampling: Sampling) -> Law:
        return self.inner.law(sampling)


class WrappingSession(DraftSession):
    """A session around the inner drafter's, which sees the request `seen`."""

    def __init__(
        self, proposer: WrappingProposer, request: Request, seen: Request | None = None
    ) -> None:
        super().__init__(proposer, request)
        self.inner = proposer.inner.start(seen or request)
        self.taps = self.inner.taps

    def observe(self, output: TargetOutput, kept: int) -> None:
        self.inner.observe(output, kept)

    def close(self) -> None:
        self.inner.close()
