"""Check 2: the random draws of a proposal, enumerated. In place of each draw every token that it
may give is tried, so that the probability of every proposal is known exactly and can be compared
with the q that is reported."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from decode.engine.engine import Engine
from decode.proposers.base import DraftSession
from decode.proposers.suffix_automaton import TextAutomaton
from decode.speculation import sampling as sampling_module
from decode.speculation import verification, verifiers
from decode.speculation.proposal import Proposal
from decode.verification.verdict import Tally
from specalign.common.schema import JsonObject

Result = TypeVar("Result")
EXACT = 1e-5
SAME = 1e-4
"""Probabilities of one row differ by less: a context read at once or in parts rounds differently."""
MOST_OUTCOMES = 128
FEW = 2
"""top-k of the enumerated proposals."""
SIBLINGS = 3
"""top-k of proposals of one level, whose drafts are siblings."""
LEVELS = 3
"""Draft tokens along a path of an enumerated proposal."""


class TooMany(Exception):
    """More outcomes than are enumerated, or other ones at every run."""


class ReusedNumber(Exception):
    """One random number serves two draws."""


class Choices:
    """Replaces `draw_at` by the next choice of a script; beyond the script, by the first token of
    each row."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.place = script, 0
        self.weight = 1.0
        self.widths: list[int] = []
        self.numbers: set[float] = set()

    def draw_at(self, weights: Tensor, u: Tensor) -> Tensor:
        numbers = u.flatten().tolist()
        if self.numbers & {*numbers} or len({*numbers}) < len(numbers):
            raise ReusedNumber
        self.numbers.update(numbers)
        rows = weights.reshape(-1, weights.shape[-1]).double()
        found = [self._choose(row_V) for row_V in rows / rows.sum(-1, keepdim=True)]
        return torch.stack(found).reshape(weights.shape[:-1])

    def _choose(self, row_V: Tensor) -> Tensor:
        support = row_V.nonzero()[:, 0]
        if self.place == len(self.script):
            self.script.append(0)
        if self.script[self.place] >= len(support):
            raise TooMany  # another run than the last one: it cannot be enumerated
        token = support[self.script[self.place]]
        self.widths.append(len(support))
        self.place += 1
        self.weight *= float(row_V[token])
        return token


def every_outcome(
    run: Callable[[], Result], most: int, even: bool = False
) -> list[tuple[float, Result]]:
    """(probability, result) of a function for everything that its draws may give.

    Args:
        even: every run draws equally often, so the first one shows how many outcomes there are.

    Raises:
        TooMany, ReusedNumber.
    """
    found: list[tuple[float, Result]] = []
    script: list[int] = []
    while True:
        choices = Choices(script)
        with ExitStack() as stack:
            for module in (sampling_module, verification, verifiers):
                stack.enter_context(mock.patch.object(module, "draw_at", choices.draw_at))
            stack.enter_context(mock.patch.object(verifiers, "_chains_in_c", lambda *_: None))
            result = run()
        found.append((choices.weight, result))
        if len(found) > most or (even and math.prod(choices.widths) > most):
            raise TooMany
        del script[choices.place :]
        while script and script[-1] + 1 == choices.widths[len(script) - 1]:
            script.pop()
        if not script:
            return found
        script[-1] += 1


def check_proposal_of(engine: Engine, tally: Tally, name: str) -> None:
    """Enumerate what a request would draft now, at a small top-k. The request is left as it was."""
    tally.place = {"method": name}
    room = min(LEVELS, engine.limit - len(engine.out.tokens) - 1)
    if engine.session is None or room < 1:
        return
    with _restored(engine) as propose:
        if engine.request.sampling.greedy or engine.request.noise is not None:
            first, second = propose(room), propose(room)
            alike = first is None or second is None or _alike(first, second)
            what = f"{name}: two proposals for one text differ, though nothing is drawn"
            tally.expect("chosen proposals, drafted twice", alike, what)
            return
        sampling = engine.request.sampling
        for top_k, most in ((FEW, room), (SIBLINGS, 1)):
            engine.request.sampling = replace(sampling, top_k=top_k)
            try:
                outcomes = _enumerate(propose, most)
            except ReusedNumber:
                tally.find(f"{name}: two drafts of a proposal were drawn at one random number")
                return
            if outcomes is None:
                tally.counts["proposals with too many outcomes"] += top_k == FEW
                return
            judge(outcomes, tally, name)
            if not any(proposal is not None and proposal.siblings for _, proposal in outcomes):
                return


@contextmanager
def _restored(engine: Engine) -> Iterator[Callable[[int], Proposal | None]]:
    """A function that drafts a number of levels from the request's current state. Afterwards the
    request is as it was."""
    session, request, drafter = engine.session, engine.request, engine.drafter
    assert session is not None and drafter is not None
    states, sampling = _states(session), request.sampling
    numbers = request.generator.get_state()

    def restore() -> None:
        request.generator.set_state(numbers)
        for part, values in states:
            vars(part).clear()
            vars(part).update({name: _copy(value) for name, value in values.items()})

    def propose(levels: int) -> Proposal | None:
        restore()
        return session.propose(min(levels, drafter.draft_tokens))

    try:
        yield propose
    finally:
        request.sampling = sampling
        restore()


def _states(session: DraftSession) -> list[tuple[Any, JsonObject]]:
    """The fields of a session and of those that it wraps."""
    found, at = [], session
    while at is not None and hasattr(at, "__dict__"):
        found.append((at, {name: _copy(value) for name, value in vars(at).items()}))
        at = getattr(at, "inner", None)  # type: ignore[assignment]
    return found


def _copy(value: object) -> object:
    """A copy of what drafting changes in place; anything else as it is."""
    return deepcopy(value) if isinstance(value, TextAutomaton) else value


def _enumerate(
    propose: Callable[[int], Proposal | None], most: int
) -> list[tuple[float, Proposal | None]] | None:
    """All proposals of as many levels as can be enumerated; None if there are none."""
    for levels in range(most, 0, -1):
        try:
            return every_outcome(partial(propose, levels), MOST_OUTCOMES, even=True)
        except TooMany:
            continue
    return None


def _alike(one: Proposal, other: Proposal) -> bool:
    """The same drafts, as far as both go: their number may depend on the clock."""
    count = min(len(one), len(other))
    same = torch.equal(one.tokens_K[:count], other.tokens_K[:count])
    return same and one.tree[:count] == other.tree[:count]


def judge(outcomes: list[tuple[float, Proposal | None]], tally: Tally, name: str) -> None:
    """Compare the distribution of each drafted token, given what was drawn before it, with its
    q."""
    mass: dict[Any, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    wanted: dict[Any, dict[int, float]] = {}
    known: list[dict[int, float]] = []
    total = sum(weight for weight, _ in outcomes)
    what = f"{name}: the probabilities of its proposals do not sum to 1"
    tally.measure("probability of all proposals, from 1", abs(total - 1), EXACT, what)
    for weight, proposal in outcomes:
        if proposal is None or proposal.q is None or weight == 0:
            tally.counts["chosen proposals"] += 1
            continue
        tokens = proposal.tokens_K.tolist()
        steps = [0] * len(tokens) if proposal.steps_K is None else proposal.steps_K.tolist()
        rows = [_support(proposal, i) for i in range(len(tokens))]
        ratio = [steps[i] >= max(steps[: i + 1]) for i in range(len(tokens))]
        for i, token in enumerate(tokens):
            if not ratio[i]:
                continue  # tested as a point mass, which needs no q
            seen = tuple(_number(rows[j], known) for j in range(i + 1) if ratio[j])
            key = (proposal.tree[: i + 1], tuple(tokens[:i]), seen, tuple(steps[: i + 1]))
            mass[key][token] += weight
            wanted[key] = _left(proposal, rows[i], tokens, i)
    for key, counts in mass.items():
        away = _distance(counts, wanted[key])
        what = f"{name}: draft {len(key[1]) + 1} after {list(key[1])} is not from its q"
        if not tally.measure("drafted token against its q, total variation", away, EXACT, what):
            return


def _left(proposal: Proposal, row: dict[int, float], tokens: list[int], i: int) -> dict[int, float]:
    """What draft i is drawn from: its q without the siblings before it."""
    if proposal.siblings != "without_replacement":
        return row
    gone = {tokens[j] for j in range(i) if proposal.tree[j] == proposal.tree[i]}
    return {token: q for token, q in row.items() if token not in gone}


def _distance(a: dict[int, float], b: dict[int, float]) -> float:
    """Total variation between two distributions, normalised; 0 where nothing is left of one."""
    whole, share = sum(a.values()), sum(b.values())
    if share <= 0:
        return 0.0
    return sum(abs(a.get(t, 0.0) / whole - b.get(t, 0.0) / share) for t in {*a, *b}) / 2


def _support(proposal: Proposal, i: int) -> dict[int, float]:
    assert proposal.q is not None
    row = proposal.q.probs[i]
    columns = row.nonzero()[:, 0]
    ids = columns if proposal.q.ids is None else proposal.q.ids[columns]
    return dict(zip(ids.tolist(), row[columns].tolist(), strict=True))


def _number(row: dict[int, float], known: list[dict[int, float]]) -> int:
    """The place of a distribution among those seen, up to rounding; a new one is appended."""
    for number, other in enumerate(known):
        if all(abs(row.get(t, 0.0) - other.get(t, 0.0)) < SAME for t in {*row, *other}):
            return number
    known.append(row)
    return len(known) - 1
