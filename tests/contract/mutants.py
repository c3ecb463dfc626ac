"""Ways to lose the target's law, each built as somebody would build it: enumeration has to see every one.

python -m tests.contract.mutants            # the table of tests/contract/README.md
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.speculation import drafts as drafts_module
from decode.speculation import rules, tree
from decode.speculation.rules import Drafts, Outcomes
from decode.speculation.sampling import probs
from decode.speculation.settings import Sampling
from decode.speculation.tree import chain
from decode.speculation.verifiers import Verifier
from decode.verification.enumeration import (
    Parents,
    RuleCase,
    Toy,
    case,
    chosen,
    distance,
    drawn,
    every,
    rows,
    unmasked,
)
from specalign.common.text import say

TWO, CHAIN = (-1, -1), (-1, 0)
APART = "without_replacement"
Make = Callable[[Toy], RuleCase]


# ---- drafters that say of their drafts what is not so ----


def of_independent(toy: Toy, tokens_BN: Tensor) -> Tensor:
    return toy.q_KV[:2].expand(len(tokens_BN), 2, toy.V)


def argmax(toy: Toy) -> RuleCase:
    tokens = toy.q_KV.argmax(1)[None]
    return case(toy, CHAIN, torch.ones(1, dtype=torch.float64), tokens, of_independent(toy, tokens))


def drawn_from(toy: Toy, drawn_KV: Tensor) -> RuleCase:
    """Drawn from other rows than the q that is tested."""
    tokens = every(toy.V, 2)
    weight = drawn_KV[0][tokens[:, 0]] * drawn_KV[1][tokens[:, 1]]
    return case(toy, CHAIN, weight, tokens, of_independent(toy, tokens))


def sharpened(toy: Toy) -> RuleCase:
    return drawn_from(
        toy, probs(toy.q_KV.clamp(min=1e-9).log(), Sampling(temperature=1.0, top_k=2))
    )


def cut_at_a_poor_draw(toy: Toy) -> RuleCase:
    """The second token is left out where it was a poor one: its q is no longer the law of those that stay."""
    full = drawn(toy, CHAIN, True)
    q_BNV = full.drafts.q_BNV
    assert q_BNV is not None
    drew_B = q_BNV[:, 1].gather(1, full.drafts.tokens_BN[:, 1:])[:, 0]
    poor = (drew_B < q_BNV[:, 1].amax(1)).tolist()
    each = [chain(1) if x else CHAIN for x in poor]
    return case(toy, each, full.weight_B, full.drafts.tokens_BN, q_BNV)


def best_of_two(toy: Toy) -> RuleCase:
    """Two chains drawn, the one that the target likes better is handed over."""
    pairs = every(toy.V, 4)
    score = toy.joint.sum(2)
    first = score[pairs[:, 0], pairs[:, 1]] >= score[pairs[:, 2], pairs[:, 3]]
    weight = torch.stack([toy.q_KV[i % 2][pairs[:, i]] for i in range(4)]).prod(0)
    tokens = torch.where(first[:, None], pairs[:, :2], pairs[:, 2:])
    return case(toy, CHAIN, weight, tokens, of_independent(toy, tokens))


def surest_first(toy: Toy) -> RuleCase:
    """Both positions are drawn, the token of the higher q stays, the other is drawn again given it: the order looks at
    values drawn."""
    again = [rows(toy.V, toy.V, toy.generator) for _ in range(2)]
    draws = every(toy.V, 3)  # both, and the second draw
    q0, q1 = toy.q_KV[:2]
    weights, tokens, qs, steps = [], [], [], []
    for x0, x1, y in draws.tolist():
        first = q0[x0] >= q1[x1]
        second_q = again[1][x0] if first else again[0][x1]
        weights.append(float(q0[x0] * q1[x1] * second_q[y]))
        tokens.append((x0, y) if first else (y, x1))
        qs.append(torch.stack([q0, second_q] if first else [second_q, q1]))
        steps.append((0, 1) if first else (1, 0))
    weight_B = torch.tensor(weights, dtype=torch.float64)
    drafted = (torch.tensor(tokens), torch.stack(qs))
    return case(toy, CHAIN, weight_B, *drafted, steps_BN=torch.tensor(steps))


def sorted_by_id(siblings: str) -> Make:
    """Two siblings in another order than they were drawn in."""

    def make(toy: Toy) -> RuleCase:
        out = drawn(toy, TWO, False, siblings)
        tokens = out.drafts.tokens_BN.sort(dim=1).values
        q_BNV = toy.q_KV[:1].expand(len(tokens), 2, toy.V)
        return case(toy, TWO, out.weight_B, tokens, q_BNV, siblings == APART)

    return make


def said_to_be(without_replacement: bool, siblings: str, toy: Toy) -> RuleCase:
    out = drawn(toy, TWO, False, siblings)
    tokens = out.drafts.tokens_BN
    q_BNV = toy.q_KV[:1].expand(len(tokens), 2, toy.V)
    return case(toy, TWO, out.weight_B, tokens, q_BNV, without_replacement)


iid_of_apart = partial(said_to_be, False, APART)
apart_of_iid = partial(said_to_be, True, "iid")


def causal_as_independent(toy: Toy) -> RuleCase:
    out = drawn(toy, CHAIN, causal=True)
    tokens = out.drafts.tokens_BN
    return case(toy, CHAIN, out.weight_B, tokens, of_independent(toy, tokens))


# ---- rules with a slip ----


def keep_rejected(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Point mass that draws from p itself after a rejection."""
    return Outcomes(rules.point(p_BMV, drafts).stop_BM, p_BMV)


def all_taken_out(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Self-selection that takes the tokens of the paths which it left aside out of p, too."""
    return Outcomes(rules.select_path(p_BMV, drafts).stop_BM, rules.point(p_BMV, drafts).rest_BMV)


def shifted(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Off by one: the token after a path from the residual of the node after it."""
    out = rules.recursive(p_BMV, drafts)
    return Outcomes(out.stop_BM, out.rest_BMV.roll(-1, 1))


def always_in_order(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Hybrid that compares a step with the one before it, not with the latest."""
    steps = drafts.steps_BN
    assert steps is not None
    own = torch.cat((steps[:, :1], steps[:, 1:] >= steps[:, :-1]), 1)
    fooled = Drafts(drafts.tokens_BN, drafts.parents, drafts.q_BNV, own.long().cummax(1).values)
    return rules.hybrid(p_BMV, fooled)


def one_hot_p(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    return rules.point(F.one_hot(p_BMV.argmax(-1), p_BMV.shape[-1]).double(), drafts)


def inverse_ratio(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(q < p, q / p, 1.0)


def not_inflated(p: Tensor, q: Tensor, siblings: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(siblings), torch.minimum(p, q).sum(-1)


def visit_backwards(*args: Any) -> Any:
    """`visit_together` of walks that visit siblings in reverse."""
    visits = tree.visits

    def backwards(parents: Parents) -> tuple[tuple[int, bool], ...]:
        return tuple((len(parents) - 1 - i, leaving) for i, leaving in visits(parents))

    with mock.patch.object(tree, "visits", backwards):
        return tree.visit_together.__wrapped__(*args)


def slip(rule: Callable[[Tensor, Drafts], Outcomes]) -> Verifier:
    return Verifier("mutant", rule, frozenset())


def patched(
    name: str, instead: object, module: ModuleType = rules
) -> Callable[[], AbstractContextManager[object]]:
    return lambda: mock.patch.object(module, name, instead)


@dataclass(frozen=True)
class Mutant:
    make: Make
    verifier: str | Verifier
    slip: Callable[[], AbstractContextManager[object]] = nullcontext
    V: int = 3
    K: int = 2
    toys: int = 24

    def distances(self) -> Iterator[float]:
        for seed in range(1, self.toys + 1):
            with self.slip():
                yield distance(self.make(Toy(self.V, self.K, seed)), self.verifier)


def tree_of(parents: Parents, siblings: str = "iid", causal: bool = False) -> Make:
    return lambda toy: drawn(toy, parents, causal, siblings)


def by_choice(parents: Parents) -> Make:
    return lambda toy: chosen(toy, parents)


def in_steps(parents: Parents) -> Make:
    return lambda toy: unmasked(toy, parents)


MUTANTS: dict[str, Mutant] = {
    "argmax draft against the full q": Mutant(argmax, "token"),
    "raw q, drawn from the top-k-processed one": Mutant(sharpened, "token"),
    "best of two chosen by p, then the ratio test": Mutant(best_of_two, "token"),
    "unmasked out of order, ratio with the q of its step": Mutant(
        in_steps(CHAIN), "token", toys=60
    ),
    "order by the confidence of sampled tokens, hybrid": Mutant(surest_first, "hybrid"),
    "a draft cut before a token that turned out poor": Mutant(cut_at_a_poor_draw, "token"),
    "causal drafts with independent q": Mutant(causal_as_independent, "token"),
    "siblings sorted by id": Mutant(sorted_by_id("iid"), "recursive"),
    "siblings without replacement sorted by id": Mutant(sorted_by_id(APART), "recursive"),
    "siblings without replacement under the i.i.d. rule": Mutant(iid_of_apart, "recursive"),
    "siblings of several q under K-SEQ": Mutant(tree_of(TWO, "independent", causal=True), "k_seq"),
    "i.i.d. siblings under the rule without replacement": Mutant(apart_of_iid, "recursive"),
    "greedy rule on a sampled target": Mutant(by_choice(CHAIN), slip(one_hot_p)),
    "typical acceptance": Mutant(tree_of(CHAIN), "lossy_typical"),
    "point mass, the rejected token not taken out": Mutant(by_choice(CHAIN), slip(keep_rejected)),
    "self-selection, tokens of the paths left aside taken out": Mutant(
        by_choice((-1, -1, 0, 1)), slip(all_taken_out)
    ),
    "residual without subtracting q": Mutant(
        tree_of(CHAIN), slip(rules.recursive), patched("residual", lambda p, q: p)
    ),
    "q/p for p/q": Mutant(tree_of(CHAIN), "token", patched("accept_probability", inverse_ratio)),
    "residual of the next node": Mutant(tree_of(CHAIN, causal=True), slip(shifted)),
    "siblings' residual not normalised": Mutant(
        tree_of((-1, 0, 0, -1)), "recursive", patched("normalise", lambda w: w)
    ),
    "q not normalised without replacement": Mutant(
        tree_of(TWO, APART), "recursive", patched("normalise", lambda w: w, drafts_module), V=4
    ),
    "K-SEQ that takes rho for 1": Mutant(
        tree_of(TWO), "k_seq", patched("_inflation", not_inflated)
    ),
    "traversal, last leaf first, without replacement": Mutant(
        tree_of(TWO, APART), "traversal", patched("visit_together", visit_backwards), V=4
    ),
    "hybrid that forgets the latest step": Mutant(in_steps(chain(3)), slip(always_in_order), K=3),
}


def table() -> str:
    lines = ["| mistake | mean TV | max TV |", "|---|---|---|"]
    for name, mutant in MUTANTS.items():
        found = list(mutant.distances())
        lines.append(f"| {name} | {sum(found) / len(found):.4f} | {max(found):.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    say(table())
