"""Check 2: the random draws of a proposal, enumerated. In place of each draw every token that it
may give is tried, so that the probability of every proposal is known exactly and can be compared
with the q that is reported."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from decode.engine.engine import Engine
from decode.proposers.base import DraftSession
from decode.speculation import sampling as sampling_module
from decode.speculation import verification, verifiers
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import make_generator
from decode.verification.tally import Tally

EXACT = 1e-5
MOST_OUTCOMES = 300
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
        found = []
        for row_V in rows / rows.sum(-1, keepdim=True):
            support = row_V.nonzero()[:, 0]
            if self.place == len(self.script):
                self.script.append(0)
            if self.script[self.place] >= len(support):
                raise TooMany  # another run than the last one: it cannot be enumerated
            at = support[self.script[self.place]]
            self.widths.append(len(support))
            self.place += 1
            self.weight *= float(row_V[at])
            found.append(at)
        return torch.stack(found).reshape(weights.shape[:-1])


def every_outcome(run: Any, most: int = MOST_OUTCOMES) -> list[tuple[float, Any]]:
    """(probability, result) of a function for everything that its draws may give. Raises TooMany,
    ReusedNumber."""
    found: list[tuple[float, Any]] = []
    script: list[int] = []
    while True:
        choices = Choices(script)
        with ExitStack() as stack:
            for module in (sampling_module, verification, verifiers):
                stack.enter_context(mock.patch.object(module, "draw_at", choices.draw_at))
            stack.enter_context(mock.patch.object(verifiers, "_chains_in_c", lambda *_: None))
            result = run()
        found.append((choices.weight, result))
        if len(found) > most:
            raise TooMany
        del script[choices.place :]
        while script and script[-1] + 1 == choices.widths[len(script) - 1]:
            script.pop()
        if not script:
            return found
        script[-1] += 1


def check_proposal_of(engine: Engine, tally: Tally, name: str) -> None:
    """Enumerate what a request would draft now, at a small top-k. The request is left as it was."""
    session, request = engine.session, engine.request
    room = min(LEVELS, engine.limit - len(engine.out.tokens) - 1)
    if session is None or engine.drafter is None or room < 1:
        return
    kept, sampling = _states(session), request.sampling
    state = request.generator.get_state()

    def propose(levels: int = room) -> Proposal | None:
        request.generator.set_state(state)
        for part, values in kept:
            vars(part).clear()
            vars(part).update(values)
        return session.propose(min(levels, engine.drafter.draft_tokens))  # type: ignore[union-attr]

    try:
        if sampling.greedy or request.noise is not None:
            first = propose()
            request.generator.set_state(
                make_generator(1).get_state() if state.device.type == "cpu" else state
            )
            second = propose()
            tally.counts["chosen proposals, drafted twice"] += 1
            if first is not None and second is not None and not _alike(first, second):
                tally.find(
                    f"{name}: two proposals for one text differ, though nothing is drawn",
                    method=name,
                )
            return
        for top_k, most in ((FEW, room), (SIBLINGS, 1)):
            request.sampling = replace(sampling, top_k=top_k)
            outcomes = None
            for levels in range(most, 0, -1):
                try:
                    outcomes = every_outcome(partial(propose, levels))
                    break
                except ReusedNumber:
                    tally.find(
                        f"{name}: two drafts of a proposal were drawn at one random number",
                        method=name,
                    )
                    return
                except TooMany:
                    continue
            if outcomes is None:
                tally.counts["proposals with too many outcomes"] += 1
                return
            judge(outcomes, tally, name)
            if not any(proposal is not None and proposal.siblings for _, proposal in outcomes):
                return
    finally:
        request.sampling = sampling
        request.generator.set_state(state)
        for part, values in kept:
            vars(part).clear()
            vars(part).update(values)


def _states(session: DraftSession) -> list[tuple[Any, dict[str, Any]]]:
    """The fields of a session and of those that it wraps."""
    found, at = [], session
    while at is not None and hasattr(at, "__dict__"):
        found.append((at, dict(vars(at))))
        at = getattr(at, "inner", None)  # type: ignore[assignment]
    return found


def _alike(one: Proposal, other: Proposal) -> bool:
    """The same drafts, as far as both go: their number may depend on the clock."""
    count = min(len(one), len(other))
    return one.tree[:count] == other.tree[:count] and torch.equal(
        one.tokens_K[:count], other.tokens_K[:count]
    )


def judge(outcomes: list[tuple[float, Proposal | None]], tally: Tally, name: str) -> None:
    """Compare the distribution of each drafted token, given what was drawn before it, with its
    q."""
    mass: dict[Any, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    wanted: dict[Any, dict[int, float]] = {}
    total = sum(weight for weight, _ in outcomes)
    if not tally.measure("probability of all proposals, from 1", abs(total - 1), EXACT):
        tally.find(f"{name}: the probabilities of its proposals sum to {total:.6f}", method=name)
    for weight, proposal in outcomes:
        if proposal is None or proposal.q is None or weight == 0:
            tally.counts["chosen proposals"] += 1
            continue
        tokens, steps = (
            proposal.tokens_K.tolist(),
            None if proposal.steps_K is None else proposal.steps_K.tolist(),
        )
        rows = [_support(proposal, i) for i in range(len(tokens))]
        ratio = [steps is None or steps[i] >= max(steps[: i + 1]) for i in range(len(tokens))]
        for i, token in enumerate(tokens):
            if not ratio[i]:
                continue  # tested as a point mass, which needs no q
            seen = tuple(_key(rows[j]) for j in range(i + 1) if ratio[j])
            key = (
                proposal.tree[: i + 1],
                tuple(tokens[:i]),
                seen,
                None if steps is None else tuple(steps[: i + 1]),
            )
            mass[key][token] += weight
            left = dict(rows[i])
            if proposal.siblings == "without_replacement":
                for j in range(i):
                    if proposal.tree[j] == proposal.tree[i]:
                        left.pop(tokens[j], None)
            wanted[key] = left
    for key, counts in mass.items():
        whole, share = sum(counts.values()), sum(wanted[key].values())
        if share <= 0:
            continue
        away = (
            sum(
                abs(counts.get(t, 0.0) / whole - wanted[key].get(t, 0.0) / share)
                for t in {*counts, *wanted[key]}
            )
            / 2
        )
        if not tally.measure("drafted token against its q, total variation", away, EXACT):
            where = f"draft {len(key[1]) + 1} after {list(key[1])}"
            tally.find(
                f"{name}: {where} is {away:.3g} from the q reported with it (total variation)",
                method=name,
            )
            return


def _support(proposal: Proposal, i: int) -> dict[int, float]:
    assert proposal.q is not None
    row = proposal.q.probs[i]
    columns = row.nonzero()[:, 0]
    ids = columns if proposal.q.ids is None else proposal.q.ids[columns]
    return dict(zip(ids.tolist(), row[columns].tolist(), strict=True))


def _key(row: dict[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((t, round(p, 5)) for t, p in row.items()))
