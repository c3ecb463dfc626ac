"""Every tree of up to six nodes under every verifier, and the tables of tests/contract/README.md.

python -m tests.contract.enumeration        # the first two tables
"""

from collections.abc import Iterator
from functools import lru_cache

import torch

from decode.speculation.tree import chain, depths
from decode.speculation.verifiers import VERIFIERS, Verifier
from decode.verification.enumeration import (
    DRAFTERS,
    EXACT,
    Parents,
    RuleCase,
    Toy,
    chains_only,
    distance,
    outcomes,
    pairs,
)
from specalign.common.text import say

WRONG = 1e-3
MOST_DRAFTS = 800
"""Drafts enumerated in one case: V is chosen so."""


def mean_accepted(case_: RuleCase, verifier: Verifier | str) -> float:
    """Drafted tokens committed per call."""
    depth_M = torch.tensor([0, *depths(max(case_.drafts.parents, key=len))], dtype=torch.float64)
    return float(case_.weight_B @ (outcomes(case_, verifier).stop_BM @ depth_M))


@lru_cache(None)
def shapes(most: int = 6, deepest: int = 3) -> list[Parents]:
    """Every ordered tree of 1 to `most` nodes and at most `deepest` levels, depth first."""

    def grow(parents: Parents) -> Iterator[Parents]:
        yield parents
        if len(parents) == most:
            return
        # depth first: the next node hangs below the last one, or below something on the way to it
        at = len(parents) - 1
        while True:
            if (depths(parents)[at] if at >= 0 else 0) < deepest:
                yield from grow((*parents, at))
            if at < 0:
                return
            at = parents[at]

    return sorted((x for x in grow(()) if x), key=lambda x: (len(x), x))


def breadth_first(parents: Parents) -> Parents:
    """The same tree, its nodes level by level."""
    order = sorted(range(len(parents)), key=lambda i: (depths(parents)[i], i))
    place = {old: new for new, old in enumerate(order)}
    return tuple(place.get(parents[i], -1) for i in order)


def vocabulary(N: int, seed: int) -> int:
    """2 to 4, as large as the number of drafts allows."""
    largest = max(V for V in (2, 3, 4) if V**N <= MOST_DRAFTS)
    return 2 + seed % (largest - 1)


def trees_for(verifier: str, drafter: str) -> list[Parents]:
    return _trees(chains_only(verifier, drafter))


def _trees(chains: bool) -> list[Parents]:
    if chains:
        return [chain(K) for K in (1, 2, 3)]
    return list(dict.fromkeys([*shapes(), *map(breadth_first, shapes())]))


def cases(verifier: str, drafter: str, least: int = 300) -> list[RuleCase]:
    """At least `least` random tables over all trees. Verifiers of the same drafts share them."""
    chains = len(trees_for(verifier, drafter)) == 3
    return _cases(drafter, chains, VERIFIERS[verifier].greedy_only, least)


@lru_cache(1)
def _cases(drafter: str, chains: bool, greedy: bool, least: int) -> list[RuleCase]:
    found: list[RuleCase] = []
    while len(found) < least:
        for parents in _trees(chains):
            seed = len(found)
            toy = Toy(vocabulary(len(parents), seed), max(depths(parents)), seed, greedy)
            found.append(DRAFTERS[drafter](toy, parents))
    return found


def table() -> str:
    """The proof as Markdown."""
    lines = ["| verifier | drafts | trees | cases | worst TV |", "|---|---|---|---|---|"]
    for verifier, drafter in pairs():
        found = [distance(x, verifier) for x in cases(verifier, drafter)]
        trees = len(trees_for(verifier, drafter))
        lines.append(f"| {verifier} | {drafter} | {trees} | {len(found)} | {max(found):.1e} |")
    return "\n".join(lines)


def gains() -> str:
    """Drafted tokens accepted a call, rule against rule over the same cases, as Markdown."""
    lines = ["| rules | drafts | cases | mean accepted | never fewer |", "|---|---|---|---|---|"]
    for better, other, drafter in DOMINATES:
        rules, tables = (other, better), cases(better, drafter)
        found = torch.tensor([[mean_accepted(x, rule) for rule in rules] for x in tables])
        never = int((found[:, 1] >= found[:, 0] - EXACT).sum())
        mean = found.mean(0).tolist()
        lines.append(
            f"| {better} ≥ {other} | {drafter} | {len(found)} | {mean[1]:.3f} / {mean[0]:.3f} | {never} of {len(found)} |"
        )
    return "\n".join(lines)


DOMINATES = [
    ("block", "token", "independent, i.i.d. siblings"),
    ("block", "token", "causal, i.i.d. siblings"),
    *(("traversal", "recursive", drafter) for drafter in list(DRAFTERS)[1:5]),
]


if __name__ == "__main__":
    say(table())
    say()
    say(gains())
