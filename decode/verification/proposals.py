"""Check 2: the random draws of a proposal, enumerated. In place of each draw every token that it
may give is tried, so that the probability of every proposal is known exactly and can be compared
with the q that is reported. And the draws of recorded rounds, whatever their options."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.captured import acceptance, block, causal, denoising
from decode.captured import rows as captured_rows
from decode.captured.graph import EagerGraph
from decode.proposers import overlapped
from decode.speculation import rounds, verifiers
from decode.speculation import sampling as sampling_module
from decode.speculation.proposal import Proposal
from decode.verification.cases import drafts_so
from decode.verification.recording import InThisThread, Recorder
from decode.verification.reference import NEAR, interval, is_inside
from decode.verification.sources import DraftSource
from decode.verification.verdict import Tally

Result = TypeVar("Result")
Row = dict[int, float]  # token → probability
EXACT = 1e-5
SAME = 1e-4  # probabilities of one row differ by less: a context read in parts rounds differently
MOST_OUTCOMES = 128
NEGLIGIBLE = 1e-12  # shares of an interval that are left to rounding
FEW, SIBLINGS = 2, 3  # top-k of enumerated proposals, and of those of one level, all siblings
DRAWING: tuple[Any, ...] = (
    sampling_module, rounds, verifiers, acceptance, block, causal, denoising,
)  # fmt: skip
"""Modules whose `draw_at` is replaced."""
LEVELS = 4  # draft tokens along a path of an enumerated proposal


class TooMany(Exception):
    """More outcomes than are enumerated, or other ones at every run."""


class Choices:
    """Replaces `draw_at`. Of each random number the interval is known in which it lies, at first all
    of [0, 1). A draw tries the tokens that the number may give, as a script says, beyond it the
    first one; then the number lies within that token's part. So numbers that serve several draws
    are followed exactly."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.place = script, 0
        self.weight = 1.0
        self.widths: list[int] = []
        self.intervals: dict[float, tuple[float, float]] = {}

    def draw_at(self, weights: Tensor, u: Tensor) -> Tensor:
        numbers = u.flatten().tolist()
        tokens = torch.zeros(len(numbers), dtype=torch.int64, device=weights.device)
        rows = weights.reshape(-1, weights.shape[-1]).double()
        for i, number in enumerate(numbers):
            if number >= 0:  # in captured rounds others do not count
                tokens[i] = self._choose(rows[i], number)
        return tokens.reshape(weights.shape[:-1])

    def _choose(self, row_V: Tensor, number: float) -> int:
        low, high = self.intervals.get(number, (0.0, 1.0))
        ends_V = row_V.cumsum(0) / row_V.sum()
        starts_V = F.pad(ends_V, (1, 0))[:-1].clamp(min=low)
        shares_V = (ends_V.clamp(max=high) - starts_V).clamp(min=0) / (high - low)
        support = (shares_V > NEGLIGIBLE).nonzero()[:, 0]
        if self.place == len(self.script):
            self.script.append(0)
        if self.script[self.place] >= len(support):
            raise TooMany  # another run than the last one: it cannot be enumerated
        token = int(support[self.script[self.place]])
        self.widths.append(len(support))
        self.place += 1
        self.weight *= float(shares_V[token])
        self.intervals[number] = float(starts_V[token]), min(high, float(ends_V[token]))
        return token


def every_outcome(
    run: Callable[[], Result], most: int, even: bool = False
) -> list[tuple[float, Result]]:
    """(probability, result) of a function for everything that its draws may give. `even`: every run
    draws equally often, so the first one shows how many outcomes there are.

    Raises:
        TooMany.
    """
    found: list[tuple[float, Result]] = []
    script: list[int] = []
    while True:
        choices = Choices(script)
        with ExitStack() as stack:
            for module in DRAWING:
                stack.enter_context(mock.patch.object(module, "draw_at", choices.draw_at))
            stack.enter_context(mock.patch.object(verifiers, "_chains_in_c", lambda *_: None))
            here = mock.patch.object(overlapped, "ThreadPoolExecutor", InThisThread)
            stack.enter_context(here)
            # a graph would not call `draw_at`
            direct = mock.patch.object(captured_rows, "capture", lambda run, *_: EagerGraph(run))
            stack.enter_context(direct)
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


def check_proposal(source: DraftSource, tally: Tally, name: str) -> None:
    """Enumerate what a request would draft now, at a small top-k. The request is left as it was."""
    tally.place = {"method": name}
    room, sampling = source.room, source.settings.sampling
    if room < 1:
        return
    try:
        if source.chosen:
            first, second = source.propose(room), source.propose(room)
            alike = first is None or second is None or _are_alike(first, second)
            what = f"{name}: two proposals for the same text differ, although nothing is drawn"
            tally.expect("chosen proposals, drafted twice", alike, what)
            return
        for top_k, most in ((FEW, min(LEVELS, room)), (SIBLINGS, 1)):
            source.settings.sampling = replace(sampling, top_k=top_k)
            outcomes = _enumerate(source.propose, most)
            if outcomes is None:
                tally.counts["proposals with too many outcomes"] += top_k == FEW
                return
            judge(outcomes, tally, name)
            if not any(proposal is not None and proposal.siblings for _, proposal in outcomes):
                return
    finally:
        source.restore()


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


def _are_alike(one: Proposal, other: Proposal) -> bool:
    """The same drafts, as far as both go: their number may depend on the clock."""
    count = min(len(one), len(other))
    same = torch.equal(one.tokens_K[:count], other.tokens_K[:count])
    return same and one.tree[:count] == other.tree[:count]


def judge(outcomes: Sequence[tuple[float, Proposal | None]], tally: Tally, name: str) -> None:
    """Compare the distribution of each drafted token, given what was drawn before it, with its
    q."""
    mass: dict[Any, Row] = defaultdict(lambda: defaultdict(float))
    wanted: dict[Any, Row] = {}
    known: list[Row] = []
    total = sum(weight for weight, _ in outcomes)
    what = f"{name}: the probabilities of its proposals do not sum to 1"
    tally.measure(
        "total probability of all proposals, distance from 1", abs(total - 1), EXACT, what
    )
    for weight, proposal in outcomes:
        if proposal is None or proposal.q is None or weight == 0:
            tally.counts["chosen proposals"] += 1
            continue
        tokens, tree = proposal.tokens_K.tolist(), proposal.tree
        steps = [0] * len(tokens) if proposal.steps_K is None else proposal.steps_K.tolist()
        rows = [_support(proposal, i) for i in range(len(tokens))]
        # a token that was unmasked before an earlier one is tested as a point mass, without its q
        tested = [i for i in range(len(tokens)) if steps[i] >= max(steps[: i + 1])]
        for i in tested:
            seen = tuple(_number(rows[j], known) for j in tested if j <= i)
            key = (tree[: i + 1], tuple(tokens[:i]), seen, tuple(steps[: i + 1]))
            mass[key][tokens[i]] += weight
            without = proposal.siblings == "without_replacement"
            gone = {tokens[j] for j in range(i) if without and tree[j] == tree[i]}
            wanted[key] = {token: q for token, q in rows[i].items() if token not in gone}
    for key, counts in mass.items():
        away = _distance(counts, wanted[key])
        what = f"{name}: draft {len(key[1]) + 1} after {list(key[1])} does not follow its q"
        if not tally.measure("drafted token against its q, total variation", away, EXACT, what):
            return


def _distance(a: Row, b: Row) -> float:
    """Total variation between two distributions, normalised; 0 where nothing is left of one."""
    whole, share = sum(a.values()), sum(b.values())
    if share <= 0:
        return 0.0
    return sum(abs(a.get(t, 0.0) / whole - b.get(t, 0.0) / share) for t in {*a, *b}) / 2


def _support(proposal: Proposal, i: int) -> Row:
    assert proposal.q is not None
    row = proposal.q.probs[i]
    columns = row.nonzero()[:, 0]
    ids = columns if proposal.q.ids is None else proposal.q.ids[columns]
    return dict(zip(ids.tolist(), row[columns].tolist(), strict=True))


def _number(row: Row, known: list[Row]) -> int:
    """The place of a distribution among those seen, up to rounding; a new one is appended."""
    for number, other in enumerate(known):
        if all(abs(row.get(t, 0.0) - other.get(t, 0.0)) < SAME for t in {*row, *other}):
            return number
    known.append(row)
    return len(known) - 1


def check_drafts(recorder: Recorder, tally: Tally) -> None:
    """Every drafted token is the one that its reported q and a random number used for nothing else
    determine, whatever the options."""
    for one in recorder.rounds:
        tally.place = one.place
        if one.proposal.q is not None and not drafts_so(one.request.runner.drafter, "in_rounds"):
            _check_drawn(one.proposal, one.drafting, tally)


def _check_drawn(proposal: Proposal, numbers: Sequence[Tensor], tally: Tally) -> None:
    assert proposal.q is not None
    u_K = [u for x in numbers if x.is_floating_point() for u in x.flatten().tolist()]
    columns_K, ids = proposal.tokens_K, proposal.q.ids
    if ids is not None:
        columns_K = (ids == columns_K[:, None]).long().argmax(1)
    if not u_K and bool((proposal.q.probs.gather(1, columns_K[:, None]) == 1).all()):  # copies
        return
    if len(u_K) != len(proposal):
        what = "each proposed draft needs exactly one"
        tally.find(f"{len(proposal)} drafts used {len(u_K)} random numbers: {what}")
        return
    bounds = []
    for k, parent in enumerate(proposal.tree):
        left_S = proposal.q.probs[k].clone()
        if proposal.siblings == "without_replacement":
            left_S[columns_K[[j for j in range(k) if proposal.tree[j] == parent]]] = 0
        # where nothing is left any number draws any token
        some = float(left_S.sum()) > 0
        bounds.append(interval(left_S, int(columns_K[k])) if some else (0.0, 1.0))
    if proposal.parents is not None or proposal.law == "unmasked":
        u_K = _match(bounds, u_K)  # drawn in another order than they stand
    for k, u in enumerate(u_K):
        what = f"draft {k + 1} does not follow from its q and random number"
        tally.expect(
            "drafted tokens recomputed from q and random number", is_inside(bounds[k], u), what
        )


def _match(bounds: Sequence[tuple[float, float]], numbers: Sequence[float]) -> list[float]:
    """The numbers in the order of the intervals that they lie in, each in one; -1 where none is
    left for an interval."""
    free, found = sorted(numbers), [-1.0] * len(bounds)
    for k in sorted(range(len(bounds)), key=lambda k: bounds[k][1]):
        at = next((u for u in free if bounds[k][0] - NEAR <= u <= bounds[k][1] + NEAR), None)
        if at is not None:
            free.remove(at)
            found[k] = at
    return found
