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
from decode.speculation.sampling import make_generator
from decode.speculation.tree import path_to
from decode.speculation.verification import Outcome, Round
from decode.verification.requests import Asked

Original = Callable[..., Any]  # the watched function, as it was
RANDOM = (
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal",
    "multinomial", "bernoulli", "poisson", "uniform_", "normal_", "bernoulli_", "exponential_",
    "random_", "geometric_", "cauchy_", "log_normal_",
)  # fmt: skip


@dataclass(eq=False)
class RecordedRequest:
    """One request. pieces: those of its text where it is streamed. generator, seeded: its own, and
    one of its seed that gives every number again. drawn: the random numbers of its present
    draft."""

    number: int
    asked: Asked
    runner: RequestRunner
    pieces: list[str] | None
    rounds: list[RecordedRound] = field(default_factory=list)
    generator: torch.Generator | None = None
    seeded: torch.Generator = field(default_factory=torch.Generator)
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


class Recorder(ExitStack):
    """Context manager that records everything a decoder runs.

    Args:
        asked: the requests, in their order. Every second one is streamed.
    """

    def __init__(self, asked: Sequence[Asked]) -> None:
        super().__init__()
        self.asked = asked
        self.requests: list[RecordedRequest] = []
        self.rounds: list[RecordedRound] = []
        self.given: list[float] = []  # random numbers of requests' own generators
        self.used: list[float] = []  # those at which tokens were drawn
        self.strange: list[str] = []  # random numbers that are not those of a request's seed
        self._waiting: list[RecordedRequest] = []  # those of the next rounds, in their order
        self._open: dict[int, RecordedRound] = {}
        self._rows: list[tuple[RecordedRound | None, int]] = []  # round and node of coming rows
        self._drafting: RecordedRequest | None = None
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

    def _replace(self, owner: Any, name: str, watch: Original) -> None:
        """Call `watch(original, *arguments)` in place of a function."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:  # a drafter in the background verifies too
                return original(*args, **kwargs)
            return watch(original, *args, **kwargs)

        self.enter_context(mock.patch.object(owner, name, call))

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
        made: Round = original(runner, *args)
        request, own = self._of(runner), runner.request.generator
        if request.generator is None:
            request.generator = own
            request.seeded = make_generator(request.asked.sampling.fixed_seed, own.device)
        if made.generator is not own:
            what = "a round was verified with another generator than its own"
            self.strange.append(f"request {request.number}: {what}")
        self._waiting.append(request)
        return made

    def _verify(self, original: Original, rounds: Sequence[Round]) -> list[Outcome]:
        for one, request in zip(rounds, self._waiting, strict=True):
            text = list(request.runner.request.tokens)
            self._open[id(one)] = RecordedRound(request, text, one, request.drawn)
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

        def sample_and_note(asked: list[tuple[int, int]]) -> Any:
            self._rows = [(self._open.get(id(group[b])), node) for b, node in asked]
            return sample(asked)

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
        self.used += u.flatten().tolist()
        return original(weights, u)

    def _note_random(self, name: str, original: Original, *args: Any, **kwargs: Any) -> Any:
        result, generator = original(*args, **kwargs), kwargs.get("generator")
        values = result.detach().clone()
        owner = next((x for x in self.requests if x.generator is generator is not None), None)
        if owner is None:
            if not any(request.runner.verifier == "gumbel" for request in self.requests):
                self.strange.append(f"{name} used a generator that belongs to no request")
            return result
        again = original(*args, **{**kwargs, "generator": owner.seeded})
        if not torch.equal(again, values):
            self.strange.append(f"request {owner.number}: {name} gave other numbers than its seed")
        if self._drafting not in (None, owner):
            self.strange.append(f"a request drafted with the numbers of request {owner.number}")
        self.given += values.flatten().tolist()
        if self._drafting is not None:
            self._drafting.drawn.append(values)
        for one in self._open.values():
            if one.request is owner:
                one.verifying.append(values)
        return result
