"""Records what decoding runs: every round as the verifier received it, and every random number.
Recording changes no result.

The recorder replaces module attributes of the engine for as long as it is entered, and watches
random operators by a `TorchFunctionMode`. Production code knows nothing of it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from decode.engine import engine as engine_module
from decode.engine.decoder import Decoder
from decode.engine.engine import Engine
from decode.speculation import sampling as sampling_module
from decode.speculation import verification, verifiers
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import Sampling
from decode.speculation.tree import path_to
from decode.speculation.verification import Outcome, Round

Original = Callable[..., Any]
"""The watched function, as it was."""

RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "multinomial", "bernoulli", "normal", "poisson",
    "uniform_", "normal_", "bernoulli_", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_",
}  # fmt: skip
"""torch's random operators, by name."""


@dataclass
class RandomCall:
    """One random operator. `drafting`: the request whose proposal asked for it, None outside of
    drafting."""

    name: str
    again: Callable[[torch.Generator], Tensor]
    generator: torch.Generator | None
    values: Tensor
    drafting: int | None


@dataclass
class RecordedRound:
    """One round of one request.

    Args:
        request: index into `Recorder.engines`.
        text: prompt and committed tokens before the round.
        logits_MV: as the target returned them.
        received: node (0 = the root) → the distribution (V,) that the rule, or the draw at that
            node, received.
        chosen: node → the target's own token there, of rounds without a rule.
        drafting, verifying: the random numbers of the round.
    """

    request: int
    text: list[int]
    proposal: Proposal
    verifier: str
    sampling: Sampling
    logits_MV: Tensor
    by_rule: bool
    received: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, int] = field(default_factory=dict)
    drafting: list[Tensor] = field(default_factory=list)
    verifying: list[Tensor] = field(default_factory=list)
    outcome: Outcome | None = None

    @property
    def end(self) -> Outcome:
        assert self.outcome is not None
        return self.outcome

    def text_at(self, node: int) -> list[int]:
        """The text up to a node, with the drafts on its path."""
        return [*self.text, *(int(self.proposal.tokens_K[i]) for i in self.path(node))]

    def path(self, node: int) -> list[int]:
        """The drafts on the path to a node."""
        return path_to(self.proposal.tree, node)


class Recorder(TorchFunctionMode):
    """Within it, everything that a decoder runs is recorded.

    Args:
        before_draft: called with each request before it drafts.

    Attributes:
        engines: the requests, in the order given. generators: of each, its own.
        streamed: of every second request the pieces of its text, of the others None.
        used: the numbers at which tokens were drawn.
        foreign: what used random numbers that belong to no request.
    """

    def __init__(self, before_draft: Callable[[Engine], object] | None = None) -> None:
        super().__init__()
        self.before_draft = before_draft
        self.engines: list[Engine] = []
        self.streamed: list[list[str] | None] = []
        self.generators: dict[int, torch.Generator] = {}
        self.rounds: list[RecordedRound] = []
        self.calls: list[RandomCall] = []
        self.used: list[Tensor] = []
        self.foreign: list[str] = []
        self._owners: dict[int, tuple[Round, int]] = {}
        self._open: dict[int, RecordedRound] = {}
        self._asked: list[tuple[RecordedRound, int]] = []
        self._choosing: list[RecordedRound] = []
        self._drafting: int | None = None
        self._drafted: dict[int, list[Tensor]] = {}
        self._stack = ExitStack()
        self._thread = threading.get_ident()

    def __enter__(self) -> Recorder:
        for owner, name, watch in (
            (Decoder, "_engine", self._make_engine),
            (Engine, "draft", self._begin_round),
            (Engine, "make_round", self._make_round),
            (Engine, "prefill", self._make_round),
            (engine_module, "verify_rounds", self._verify),
            (verification, "run_verifier", self._run_verifier),
            (verification, "_sampler", self._make_sampler),
            (verification, "draw_at", self._draw_at),
            (verifiers, "draw_at", self._note_numbers),
            (sampling_module, "draw_at", self._note_numbers),
            (verification, "_couple_token", self._couple),
            (verification, "_choose_greedily", self._choose),
            (verification, "best", self._best),
        ):
            self._replace(owner, name, watch)
        self._shared = _shared_states()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._stack.close()
        after = _shared_states()
        self.foreign += [f"{name} was used" for name in after if after[name] != self._shared[name]]

    def _replace(self, owner: Any, name: str, watch: Callable[..., Any]) -> None:
        """Call `watch(original, *arguments)` in place of a function."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:  # a drafter in the background verifies too
                return original(*args, **kwargs)
            return watch(original, *args, **kwargs)

        self._stack.enter_context(mock.patch.object(owner, name, call))

    def rounds_of(self, number: int) -> list[RecordedRound]:
        """The rounds of one request."""
        return [one for one in self.rounds if one.request == number]

    def number(self, engine: Engine) -> int:
        """The index of a request."""
        return next(i for i, one in enumerate(self.engines) if one is engine)

    def _make_engine(self, original: Original, *args: Any, **kwargs: Any) -> Engine:
        pieces: list[str] | None = [] if len(self.engines) % 2 == 0 else None
        if pieces is not None:
            args = (*args[:5], pieces.append, *args[6:])
        made: Engine = original(*args, **kwargs)
        self.engines.append(made)
        self.streamed.append(pieces)
        return made

    def _begin_round(self, original: Original, engine: Engine) -> Any:
        if self.before_draft is not None:
            used = len(self.used)
            self.before_draft(engine)
            del self.used[used:]  # its draws are not the request's
        self._drafting = self.number(engine)
        try:
            return original(engine)
        finally:
            self._drafting = None

    def _make_round(self, original: Original, engine: Engine, *args: Any) -> Round:
        made: Round = original(engine, *args)
        number = self.number(engine)
        self._owners[id(made)] = made, number
        self.generators.setdefault(number, engine.request.generator)
        return made

    def _verify(self, original: Original, rounds: Sequence[Round]) -> list[Outcome]:
        fresh: list[RecordedRound] = []
        for one in rounds:
            _, number = self._owners.pop(id(one))
            if one.generator is not self.generators[number]:
                what = "a round was verified with another generator than its own"
                self.foreign.append(f"request {number}: {what}")
            made = RecordedRound(
                number, list(self.engines[number].request.tokens), one.proposal, one.verifier, one.sampling, one.logits_MV.clone(),
                one.by_rule, drafting=self._drafted.pop(number, []),
            )  # fmt: skip
            fresh.append(made)
            self._open[id(one)] = made
        first = len(self.calls)
        outcomes: list[Outcome] = original(rounds)
        for made, outcome in zip(fresh, outcomes, strict=True):
            own = self.generators[made.request]
            made.verifying = [call.values for call in self.calls[first:] if call.generator is own]
            made.outcome = outcome
        self._open.clear()
        self.rounds += fresh
        return outcomes

    # ---- what a rule, or the draw at a node, receives ----

    def _run_verifier(
        self,
        original: Original,
        name: str,
        proposals: Sequence[Proposal],
        p_BMV: Tensor,
        *more: Any,
    ) -> Any:
        for proposal, p_MV in zip(proposals, p_BMV, strict=True):
            for one in self._open.values():
                if one.proposal is proposal:
                    one.received = dict(enumerate(p_MV[: len(proposal) + 1].clone()))
        return original(name, proposals, p_BMV, *more)

    def _make_sampler(self, original: Original, group: Sequence[Round]) -> Any:
        sample = original(group)

        def watched(asked: list[tuple[int, int]]) -> Tensor:
            opened = [(self._open.get(id(group[b])), node) for b, node in asked]
            self._asked = [(one, node) for one, node in opened if one is not None]
            tokens: Tensor = sample(asked)
            for (one, node), token in zip(self._asked, tokens.tolist(), strict=False):
                one.chosen[node] = token
            self._asked = []
            return tokens

        return watched

    def _draw_at(self, original: Original, p_RV: Tensor, u_R: Tensor) -> Any:
        for (one, node), p_V in zip(self._asked, p_RV, strict=False):
            one.received[node] = p_V.clone()
        return self._note_numbers(original, p_RV, u_R)

    def _note_numbers(self, original: Original, weights: Tensor, u: Tensor) -> Any:
        self.used.append(u.detach().clone())
        return original(weights, u)

    def _couple(self, original: Original, p_1V: Tensor, one: Round, node: int) -> Any:
        if id(one) in self._open:
            self._open[id(one)].received[node] = p_1V[0].clone()
        return original(p_1V, one, node)

    def _choose(self, original: Original, group: Sequence[Round]) -> Any:
        self._choosing = [self._open[id(one)] for one in group if id(one) in self._open]
        return original(group)

    def _best(self, original: Original, *args: Any, **kwargs: Any) -> Tensor:
        tokens: Tensor = original(*args, **kwargs)
        if self._choosing:
            self._choosing.pop(0).chosen = dict(enumerate(tokens.tolist()))
        return tokens

    # ---- random numbers ----

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        name = getattr(func, "__name__", "")
        if name not in RANDOM or not isinstance(result, Tensor):
            return result

        def again(generator: torch.Generator) -> Tensor:
            fresh = [x.clone() if isinstance(x, Tensor) else x for x in args]
            return func(*fresh, **{**given, "generator": generator})

        values = result.detach().clone()
        self.calls.append(RandomCall(name, again, given.get("generator"), values, self._drafting))
        if self._drafting is not None:
            self._drafted.setdefault(self._drafting, []).append(values)
        return result


def _shared_states() -> dict[str, object]:
    """The states of the generators that everybody shares."""
    numpy_state: Any = np.random.get_state()
    return {
        "torch's shared generator": torch.get_rng_state().numpy().tobytes(),
        "Python's random": random.getstate(),
        "numpy's random": (numpy_state[1].tobytes(), numpy_state[2]),
    }
