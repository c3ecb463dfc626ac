"""Records decoding: every round as the verifier received it, and every random number.
Recording changes no result.

The recorder replaces functions of the engine, and torch's random operators, for as long as it is
entered. Production code does not depend on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from decode.engine import engine as engine_module
from decode.engine.decoder import Decoder
from decode.engine.engine import RequestRunner
from decode.speculation import sampling as sampling_module
from decode.speculation import verification, verifiers
from decode.speculation.tree import path_to
from decode.speculation.verification import Outcome, Round
from decode.verification.requests import Asked

Original = Callable[..., Any]  # the watched function, as it was
RANDOM = (
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal",
    "multinomial", "bernoulli", "poisson", "uniform_", "normal_", "bernoulli_", "exponential_",
    "random_", "geometric_", "cauchy_", "log_normal_",
)  # fmt: skip


@dataclass
class RandomCall:
    """One random operator. `drafting`: the request whose proposal asked for it, if one did."""

    name: str
    again: Callable[..., Tensor]
    generator: torch.Generator | None
    values: Tensor
    drafting: RecordedRequest | None


@dataclass(eq=False)
class RecordedRequest:
    """One request. pieces: those of its text where it is streamed. drawn: the random numbers of its
    present draft."""

    number: int
    asked: Asked
    runner: RequestRunner
    pieces: list[str] | None
    rounds: list[RecordedRound] = field(default_factory=list)
    generator: torch.Generator | None = None
    drawn: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class RecordedRound:
    """One round of one request, after `text`. received: node (0 = the root) → the distribution (V,)
    that the rule, or the draw at that node, received; at temperature 0 the token that was chosen
    there. drafting, verifying: the random numbers of the round."""

    request: RecordedRequest
    text: list[int]
    round: InitVar[Round]
    drafting: list[Tensor]
    received: dict[int, Tensor] = field(default_factory=dict)
    verifying: list[Tensor] = field(default_factory=list)
    end: Outcome = Outcome([], 0, [])

    def __post_init__(self, round: Round) -> None:
        self.proposal, self.verifier = round.proposal, round.verifier
        self.sampling, self.by_rule = round.sampling, round.by_rule
        self.logits_MV = round.logits_MV.clone()  # verification overwrites them

    @property
    def place(self) -> dict[str, int]:
        return {"request": self.request.number, "round": self.request.rounds.index(self)}

    def path(self, node: int) -> list[int]:
        """The drafts on the path to a node."""
        return path_to(self.proposal.tree, node)

    def text_at(self, node: int) -> list[int]:
        """The text up to a node, with the drafts on its path."""
        return [*self.text, *(int(self.proposal.tokens_K[i]) for i in self.path(node))]


class Recorder:
    """Context manager that records everything a decoder runs.

    Args:
        asked: the requests, in their order. Every second one is streamed.
    """

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.asked = asked
        self.requests: list[RecordedRequest] = []
        self.rounds: list[RecordedRound] = []
        self.calls: list[RandomCall] = []
        self.used: list[Tensor] = []  # the numbers at which tokens were drawn
        self.foreign: list[str] = []  # rounds with another request's random numbers
        self._waiting: list[RecordedRequest] = []  # those of the next rounds, in their order
        self._open: dict[int, RecordedRound] = {}
        self._rows: list[tuple[RecordedRound | None, int]] = []  # round and node of the next rows
        self._drafting: RecordedRequest | None = None
        self._stack = ExitStack()
        self._thread = threading.get_ident()

    def __enter__(self) -> Recorder:
        for owner, name, watch in (
            (Decoder, "_make_runner", self._make_runner),
            (RequestRunner, "draft", self._draft),
            (RequestRunner, "make_round", self._make_round),
            (RequestRunner, "prefill", self._make_round),
            (engine_module, "verify_rounds", self._verify),
            (verification, "_apply_rule", self._process),
            (verification, "_choose_greedily", self._process),
            (verification, "_sampler", self._make_sampler),
            (verification, "probs", self._note_rows),
            (verification, "best", self._note_rows),
            (verification, "draw_at", self._note_numbers),
            (verifiers, "draw_at", self._note_numbers),
            (sampling_module, "draw_at", self._note_numbers),
        ):
            self._replace(owner, name, watch)
        for name in RANDOM:
            for module in (torch, Tensor):
                if hasattr(module, name):
                    self._replace(module, name, partial(self._note_random, name))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _replace(self, owner: Any, name: str, watch: Original) -> None:
        """Call `watch(original, *arguments)` in place of a function."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:  # a drafter in the background verifies too
                return original(*args, **kwargs)
            return watch(original, *args, **kwargs)

        self._stack.enter_context(mock.patch.object(owner, name, call))

    # ---- rounds ----

    def _make_runner(self, original: Original, *args: Any) -> RequestRunner:
        number = len(self.requests)
        pieces: list[str] | None = [] if number % 2 == 0 else None
        *given, stream = args
        made: RequestRunner = original(*given, stream if pieces is None else pieces.append)
        self.requests.append(RecordedRequest(number, self.asked[number], made, pieces))
        return made

    def _of(self, runner: RequestRunner) -> RecordedRequest:
        return next(one for one in self.requests if one.runner is runner)

    def _draft(self, original: Original, runner: RequestRunner) -> Any:
        self._drafting = self._of(runner)
        self._drafting.drawn = []
        try:
            return original(runner)
        finally:
            self._drafting = None

    def _make_round(self, original: Original, runner: RequestRunner, *args: Any) -> Round:
        self._waiting.append(self._of(runner))
        made: Round = original(runner, *args)
        return made

    def _verify(self, original: Original, rounds: Sequence[Round]) -> list[Outcome]:
        for one, request in zip(rounds, self._waiting, strict=True):
            state = request.runner.request
            request.generator = request.generator or state.generator
            if one.generator is not request.generator:
                what = "a round was verified with another generator than its own"
                self.foreign.append(f"request {request.number}: {what}")
            self._open[id(one)] = RecordedRound(request, list(state.tokens), one, request.drawn)
        outcomes: list[Outcome] = original(rounds)
        for made, outcome in zip(self._open.values(), outcomes, strict=True):
            made.end = outcome
            made.request.rounds.append(made)
            self.rounds.append(made)
        self._open.clear()
        self._waiting.clear()
        return outcomes

    # ---- what a rule, or the draw at a node, receives; a drafter's own rounds are not open ----

    def _process(self, original: Original, group: Sequence[Round]) -> Any:
        rounds = [(self._open.get(id(one)), len(one.logits_MV)) for one in group]
        self._rows = [(one, node) for one, count in rounds for node in range(count)]
        return original(group)

    def _make_sampler(self, original: Original, group: Sequence[Round]) -> Any:
        sample = original(group)

        def sample_and_note(asked: list[tuple[int, int]]) -> Tensor:
            self._rows = [(self._open.get(id(group[b])), node) for b, node in asked]
            return sample(asked)  # type: ignore[no-any-return]

        return sample_and_note

    def _note_rows(self, original: Original, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = original(*args, **kwargs)
        for (one, node), row in zip(self._rows, found, strict=False):
            if one is not None:
                one.received[node] = row.clone()
        del self._rows[: len(found)]
        return found

    # ---- random numbers ----

    def _note_numbers(self, original: Original, weights: Tensor, u: Tensor) -> Any:
        self.used.append(u.detach().clone())
        return original(weights, u)

    def _note_random(self, name: str, original: Original, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        values, generator = result.detach().clone(), kwargs.get("generator")
        again = partial(original, *args, **kwargs)
        self.calls.append(RandomCall(name, again, generator, values, self._drafting))
        if self._drafting is not None:
            self._drafting.drawn.append(values)
        for one in self._open.values():
            if generator is not None and one.request.generator is generator:
                one.verifying.append(values)
        return result
