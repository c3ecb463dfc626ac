"""Bugs that `decode.verify --self-test` plants in the running engine, one at a time. Each is a mistake that somebody might make,
and changes the output's distribution. They show what the checks can see with the given number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from align.target.cache import KVCache
from decode.engine import engine
from decode.speculation import rules, verifiers
from decode.speculation.processors import History
from decode.speculation.proposal import DraftProbs
from decode.speculation.sampling import draw, probs
from decode.speculation.tree import path_to
from decode.speculation.verification import Outcome, Round

Verify = Callable[[Sequence[Round]], list[Outcome]]

BY_RATIO = frozenset({"token", "block", "recursive", "traversal", "k_seq", "hybrid"})
"""The verifiers that look at q."""
CHAINS = frozenset({"token", "block", "hybrid"})
"""Those of them that take chains alone."""
CHANCE = 0.8
"""One bug multiplies the probability of acceptance by this."""


@dataclass(frozen=True)
class Bug:
    """A bug, and the check that has to catch it.

    Args:
        check: greedy, coupled, sampled, rounds, options (greedy and coupled) or options drawn; with scripted drafts options scripted, batch or
            long.
        plant: (object, attribute, function from the right attribute to the broken one).
        verifiers: those that it affects; empty: all.
        trees: it shows only where drafts branch.
        by: the figure of the sampled check that is largest in the case in which the bug shows most.
        setting: of the check `options`: the name of the setting in which the bug shows.
        chat: it shows only where the target has a chat template.
    """

    name: str
    check: str
    plant: tuple[Any, str, Callable[[Any], Any]]
    verifiers: frozenset[str] = frozenset()
    trees: bool = False
    by: str = "accepted"
    setting: str | None = None
    chat: bool = False

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Inside this context the engine has the bug."""
        home, name, broken = self.plant
        right = getattr(home, name)
        setattr(home, name, broken(right))
        try:
            yield
        finally:
            setattr(home, name, right)


def verified(change: Callable[[Round], Round]) -> tuple[Any, str, Callable[[Any], Any]]:
    """A bug in what `verify_rounds` is given, of rounds with drafts."""

    def broken(right: Verify) -> Verify:
        return lambda rounds: right([change(one) if len(one.proposal) else one for one in rounds])

    return engine, "verify_rounds", broken


def _row_before(one: Round) -> Round:
    parents = one.proposal.tree
    for node in set(range(len(parents))) - set(parents):
        one.logits_MV[node + 1] = one.logits_MV[parents[node] + 1]
    return one


def sampled_otherwise(**options: Any) -> Callable[[Round], Round]:
    def change(one: Round) -> Round:
        return one if one.sampling.greedy else one._replace(sampling=replace(one.sampling, **options))

    return change


def _q(change: Callable[[Tensor, Sequence[int]], Tensor]) -> Callable[[Round], Round]:
    """A bug in q. `change`: (q (K, V), parents) → what replaces it."""

    def edit(one: Round) -> Round:
        proposal = one.proposal
        if proposal.q is None:
            return one
        q_KV = change(proposal.q.dense(one.logits_MV.shape[-1]), proposal.tree)
        return one._replace(proposal=replace(proposal, q=DraftProbs(q_KV / q_KV.sum(1, keepdim=True))))

    return edit


def _of_the_next_position(q_KV: Tensor, parents: Sequence[int]) -> Tensor:
    """Each group of siblings gets the q of the next group."""
    first = {parent: i for i, parent in reversed(list(enumerate(parents)))}
    order = sorted(first)
    after = dict(zip(order, [*order[1:], order[0]], strict=True))
    return q_KV[[first[after[parent]] for parent in parents]]


def take_all(right: Verify) -> Verify:
    """Of every draft the first path is accepted."""

    def taken(one: Round) -> Outcome:
        proposal, end = one.proposal, 1
        while end - 1 in proposal.tree:  # the first child of the first child …
            end = proposal.tree.index(end - 1) + 1
        path, tokens = path_to(proposal.tree, end), proposal.tokens_K.tolist()
        row = slice(end, end + 1)
        p_1V = probs(one.logits_MV[row], one.sampling, one.before.rows(row))
        return Outcome([tokens[i] for i in path], int(draw(p_1V, one.generator)), path)

    return lambda rounds: [taken(one) if len(one.proposal) else right([one])[0] for one in rounds]


def _rows_without_drafts(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tokens_K, parents: self.ahead(0, len(parents) + 1)


def _keep_next(right: Callable[..., None]) -> Callable[..., None]:
    def keep(self: KVCache, start: int, offsets: Sequence[int]) -> None:
        written = self.length - start
        right(self, start, [*offsets[:-1], min(offsets[-1] + 1, written - 1)])

    return keep


ENGINE_BUGS = (
    Bug("a draft is accepted without a look", "greedy", (engine, "verify_rounds", take_all)),
    Bug("the cache keeps a rejected draft in place of an accepted one", "greedy", (KVCache, "keep", _keep_next)),
    Bug(
        "siblings attend to one another",
        "greedy",
        (engine, "ancestors", lambda right: lambda parents: torch.ones_like(right(parents)).tril()),
        trees=True,
    ),
    Bug(
        "the noise belongs to the place in the draft",
        "coupled",
        verified(lambda one: one._replace(position=0)),
    ),
    Bug("every draft is accepted", "sampled", (engine, "verify_rounds", take_all)),
    Bug("the token after a whole draft comes from the row before", "sampled", verified(_row_before), by="whole"),
    Bug("p is taken at temperature 1", "sampled", verified(sampled_otherwise(temperature=1.0))),
    Bug("p is taken without top-p", "sampled", verified(sampled_otherwise(top_p=1.0))),
    Bug(
        "penalties do not count the drafts",
        "options scripted",
        (History, "rows", _rows_without_drafts),
        setting="presence penalty in a round",
    ),
    Bug("q is said at half its temperature", "sampled", verified(_q(lambda q_KV, _: q_KV.square())), BY_RATIO),
    Bug("q is said at twice its temperature", "rounds", verified(_q(lambda q_KV, _: q_KV.sqrt())), BY_RATIO),
    Bug("q is that of the next position", "sampled", verified(_q(_of_the_next_position)), BY_RATIO),
    Bug(
        "one draft in five is rejected for nothing",
        "rounds",
        (rules, "accept_probability", lambda right: lambda p, q: right(p, q) * CHANCE),
        BY_RATIO,
    ),
    Bug("p/q is turned round", "sampled", (rules, "accept_probability", lambda right: lambda p, q: right(q, p)), BY_RATIO),
    Bug(
        "a rejected draft is not taken out of p",
        "rounds",
        (
            verifiers,
            "resolve",
            lambda right: lambda found, p_BMV, u_B2: right(found._replace(rest_BMV=p_BMV), p_BMV, u_B2),
        ),
        BY_RATIO,
    ),
    Bug(
        "a rejected draft is not taken out of p from the fourth on",
        "rounds",
        (
            verifiers,
            "resolve",
            lambda right: lambda found, p_BMV, u_B2: right(
                found._replace(rest_BMV=torch.cat((found.rest_BMV[:, :3], p_BMV[:, 3:]), 1)), p_BMV, u_B2
            ),
        ),
        CHAINS,
    ),
    Bug(
        "one random number serves two draws",
        "rounds",
        (verifiers, "resolve", lambda right: lambda found, p_BMV, u_B2: right(found, p_BMV, u_B2[:, [0, 0]])),
        BY_RATIO,
    ),
)  # fmt: skip
