"""Records decoding: every round as the verifier received it, and every random number.
Recording changes no result.

The recorder replaces attributes of the engine's modules, and torch's random operators, for as long
as it is entered. Production code does not depend on it.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from decode.engine import loop as engine_module
from decode.engine import request as request_module
from decode.engine.decoder import Decoder
from decode.engine.pace import Trials
from decode.engine.request import Prefill, RequestRunner
from decode.proposers import overlapped
from decode.speculation import rounds, verifiers
from decode.speculation import sampling as sampling_module
from decode.speculation.rounds import Round
from decode.speculation.verifiers import Outcome
from decode.verification.batches import Asked
from decode.verification.recorded import RandomCall, RecordedRequest, RecordedRound
from decode.verification.sources import DraftSource, SessionDrafts

Original = Callable[..., Any]  # the watched function, as it was
Watch = tuple[Any, str, Original]  # module or class, name, and what runs in its place
RANDOM = (
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like",
    "multinomial", "bernoulli", "normal", "poisson", "uniform_", "normal_", "bernoulli_",
    "exponential_", "random_", "geometric_", "cauchy_", "log_normal_",
)  # fmt: skip
"""torch's random operators, by name."""


class InThisThread:
    """Replaces the thread pools of drafters: what is submitted runs at once, so that it can be
    recorded and enumerated."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, function: Original, *args: Any) -> Future[Any]:
        ended: Future[Any] = Future()
        ended.set_result(function(*args))
        return ended

    def shutdown(self, **_: object) -> None: ...


BeforeDraft = Callable[[RecordedRequest, DraftSource], object]


class Recorder:
    """Context manager that records everything a decoder runs.

    Args:
        asked: the requests, in their order. Every second one is streamed.
        before_draft: called with each request before it drafts, and with what it would draft.
    """

    def __init__(self, asked: Sequence[Asked], before_draft: BeforeDraft) -> None:
        self.asked, self.before_draft = asked, before_draft
        self.requests: list[RecordedRequest] = []
        self.rounds: list[RecordedRound] = []
        self.calls: list[RandomCall] = []
        self.used: list[Tensor] = []  # the numbers at which tokens were drawn
        self.foreign: list[str] = []  # what used random numbers that belong to no request
        self._open: dict[int, RecordedRound] = {}  # made and not yet verified, by the round's id
        self._drawing: list[tuple[RecordedRound, int]] = []
        self._drafting: RecordedRequest | None = None
        self._verified = self._sizes = 0
        self._seeds = random.Random(0)  # of requests without a seed, the same at every run
        self._paused = False
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        for owner, name, watch in self._watches():
            self._replace(owner, name, watch)
        for name in RANDOM:
            for module in (torch, Tensor):
                if hasattr(module, name):
                    self._replace(module, name, partial(self._note_random, name))
        here = mock.patch.object(overlapped, "ThreadPoolExecutor", InThisThread)
        self._stack.enter_context(here)
        self._shared = _shared_states()
        return self

    def _watches(self) -> list[Watch]:
        return [
            (Decoder, "_make_runner", self._make_runner),
            (secrets, "randbits", lambda _, bits: self._seeds.getrandbits(bits)),
            (request_module, "token_numbers", self._make_numbers),
            (Trials, "choose", self._choose_size),
            (RequestRunner, "draft", self._draft),
            (RequestRunner, "make_round", self._make_round),
            (RequestRunner, "prefill", self._prefill),
            (engine_module, "verify_rounds", self._verify),
            (rounds, "run_verifier", self._run_verifier),
            (rounds, "_sampler", self._make_sampler),
            (rounds, "probs", self._probs),
            (verifiers, "draw_at", self._note_numbers),
            (sampling_module, "draw_at", self._note_numbers),
            (rounds, "_choose_greedily", self._choose),
        ]

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        after = _shared_states()
        self.foreign += [f"{name} was used" for name in after if after[name] != self._shared[name]]

    def _replace(self, owner: Any, name: str, watch: Original) -> None:
        """Call `watch(original, *arguments)` in place of a function."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._paused:
                return original(*args, **kwargs)
            return watch(original, *args, **kwargs)

        self._stack.enter_context(mock.patch.object(owner, name, call))

    def _make_runner(self, original: Original, *args: Any) -> RequestRunner:
        number = len(self.requests)
        pieces: list[str] | None = [] if number % 2 == 0 else None
        *given, stream = args
        made: RequestRunner = original(*given, stream if pieces is None else pieces.append)
        asked = replace(self.asked[number], sampling=made.sampling)  # with its seed
        self.requests.append(RecordedRequest(number, asked, made, pieces))
        return made

    def _choose_size(self, original: Original, trials: Trials, _: bool) -> int | None:
        """Every size of drafts in turn, every other round all of them: no clock decides."""
        self._sizes += 1
        turn, odd = divmod(self._sizes, 2)
        return trials.sizes[turn % len(trials.sizes)] if odd else None

    def _of(self, runner: RequestRunner) -> RecordedRequest:
        return next(one for one in self.requests if one.runner is runner)

    def _make_numbers(self, original: Original, *args: Any) -> Tensor:
        count = len(self.calls)
        numbers_T: Tensor = original(*args)
        del self.calls[count:]  # they come from another generator
        return numbers_T

    def _draft(self, original: Original, runner: RequestRunner, *size: int | None) -> Any:
        request = self._of(runner)
        self._prepare(request, SessionDrafts(runner))
        self._drafting = request
        try:
            return original(runner, *size)
        finally:
            self._drafting = None

    def _prepare(self, request: RecordedRequest, source: DraftSource) -> None:
        calls, used = len(self.calls), len(self.used)
        self.before_draft(request, source)
        del self.calls[calls:], self.used[used:]  # its draws are not the request's

    def _prefill(self, original: Original, runner: RequestRunner, *args: Any) -> Prefill[Round]:
        made = yield from original(runner, *args)
        return self._make_round(lambda _: made, runner)

    def _make_round(self, original: Original, runner: RequestRunner, *args: Any) -> Round:
        made: Round = original(runner, *args)
        request = self._of(runner)
        request.generator = request.generator or runner.request.generator
        drafted = self.calls[self._verified :]
        numbers = [call.values for call in drafted if call.drafting is request]
        self._open[id(made)] = RecordedRound(request, list(runner.request.tokens), made, numbers)
        return made

    def _verify(self, original: Original, rounds: Sequence[Round]) -> list[Outcome]:
        opened = [self._open[id(one)] for one in rounds]
        for one, made in zip(rounds, opened, strict=True):
            if one.generator is not made.request.generator:
                what = "a round was verified with another generator than its own"
                self.foreign.append(f"request {made.request.number}: {what}")
        first = len(self.calls)
        outcomes: list[Outcome] = original(rounds)
        calls = self.calls[first:]
        for made, outcome in zip(opened, outcomes, strict=True):
            own = made.request.generator
            made.verifying = [call.values for call in calls if call.generator is own]
            made.end = outcome
            made.request.rounds.append(made)
        self._open.clear()
        self._verified = len(self.calls)
        self.rounds += opened
        return outcomes

    # ---- what a rule, or the draw at a node, receives ----

    def _run_verifier(
        self, original: Original, name: str, proposals: Any, p_BMV: Tensor, *more: Any
    ) -> Any:
        p_of = {id(proposal): p_MV for proposal, p_MV in zip(proposals, p_BMV, strict=True)}
        for one in self._open.values():
            if id(one.proposal) in p_of:
                rows_MV = p_of[id(one.proposal)][: len(one.proposal) + 1]
                one.received = dict(enumerate(rows_MV.clone()))
        return original(name, proposals, p_BMV, *more)

    def _make_sampler(self, original: Original, group: Sequence[Round]) -> Any:
        sample = original(group)

        def sample_and_note(asked: list[tuple[int, int]]) -> Tensor:
            opened = [(self._open.get(id(group[b])), node) for b, node in asked]
            self._drawing = [(one, node) for one, node in opened if one is not None]
            tokens: Tensor = sample(asked)
            return tokens

        return sample_and_note

    def _probs(self, original: Original, *args: Any, **options: Any) -> Tensor:
        p_RV: Tensor = original(*args, **options)
        for (one, node), p_V in zip(self._drawing, p_RV, strict=False):
            one.received[node] = p_V.clone()
        self._drawing = []
        return p_RV

    def _note_numbers(self, original: Original, weights: Tensor, u: Tensor) -> Any:
        self.used.append(u.detach()[u >= 0])  # captured rounds: others do not count
        return original(weights, u)

    def _choose(self, original: Original, group: Sequence[Round]) -> Any:
        pending = original(group)
        for one, (values, _) in zip(group, pending, strict=True):  # the target's tokens, the drafts
            if id(one) in self._open:
                chosen = values[: len(one.proposal) + 1].tolist()
                self._open[id(one)].chosen = dict(enumerate(chosen))
        return pending

    def _note_random(self, name: str, original: Original, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)

        def again(generator: torch.Generator) -> Tensor:
            fresh = [x.clone() if isinstance(x, Tensor) else x for x in args]
            values: Tensor = original(*fresh, **{**kwargs, "generator": generator})
            return values

        values, generator = result.detach().clone(), kwargs.get("generator")
        self.calls.append(RandomCall(name, again, generator, values, self._drafting))
        return result


def _shared_states() -> dict[str, object]:
    """The states of the generators that everybody shares."""
    numpy_state: Any = np.random.get_state()
    return {
        "torch's shared generator": torch.get_rng_state().numpy().tobytes(),
        "Python's random": random.getstate(),
        "numpy's random": (numpy_state[1].tobytes(), numpy_state[2]),
    }
