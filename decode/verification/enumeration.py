"""The exact joint law of what a drafter and a verifier write on small tables, over everything that
the drafter may draw.

For every draft the two tensors of a verifier (`stop`, `rest`: decode/speculation/rules.py) give the
law of the accepted path and of the token after it. The tokens after that come from the target
itself. All drafts of a case go through the rule in one batch.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from decode.speculation import verifiers
from decode.speculation.drafts import Drafts, normalise
from decode.speculation.rules import Outcomes, fall_back_to_p
from decode.speculation.sampling import probs
from decode.speculation.settings import Sampling
from decode.speculation.tree import ancestors, chain
from decode.speculation.verifiers import VERIFIERS, Verifier

EXACT = 1e-9
"""The largest total variation from p that fp64 leaves."""
Parents = tuple[int, ...]


def rows(count: int, V: int, generator: torch.Generator, zeros: float = 0.3) -> Tensor:
    """Random distributions, (count, V) fp64, sharp and flat, some entries exactly zero."""
    weights = torch.rand(count, V, dtype=torch.float64, generator=generator) ** 3 + 1e-3
    weights[torch.rand(count, V, generator=generator) < zeros] = 0
    weights[weights.sum(1) == 0, 0] = 1
    return normalise(weights)


class Toy:
    """Tables of p and q for every prefix of up to K tokens: `p[d][prefix]` is the row after d
    tokens.

    Args:
        pool: rows (R, V) of p, then of q, to take in place of random ones.
    """

    def __init__(
        self,
        V: int,
        K: int,
        seed: int,
        greedy: bool = False,
        pool: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.V, self.K = V, K
        generator = torch.Generator().manual_seed(seed)
        self.generator = generator
        self.p, self.q = self.random_tables(K + 1), self.random_tables(K)
        if pool is not None:
            for tables, own_RV in ((self.p, pool[0]), (self.q, pool[1])):
                for d, table in enumerate(tables):
                    at = torch.randint(len(own_RV), (V**d,), generator=generator)
                    tables[d] = own_RV[at].reshape(table.shape)
        elif seed % 5 == 0:  # p = q
            self.q = [p.clone() for p in self.p[:K]]
        if greedy:
            self.p = [probs(p, Sampling()) for p in self.p]
        # the q of an independent draft
        self.q_KV = torch.stack([q.reshape(-1, V)[0] for q in self.q])

    def random_tables(self, count: int) -> list[Tensor]:
        """Random rows after every prefix of fewer than `count` tokens."""
        V = self.V
        return [rows(V**d, V, self.generator).reshape((V,) * (d + 1)) for d in range(count)]

    @property
    def joint(self) -> Tensor:
        """The target's joint law of K + 1 tokens."""
        return self.continued(torch.ones((), dtype=torch.float64))

    def continued(self, mass: Tensor) -> Tensor:
        """The joint law of K + 1 tokens whose first ones have the law `mass`, (V,) * d."""
        for d in range(mass.dim(), self.K + 1):
            mass = mass[..., None] * self.p[d]
        return mass

    def p_BMV(self, tokens_BN: Tensor, parents: Parents) -> Tensor:
        """The target's rows at the root and at every node."""
        each = [self.p[len(path)][tuple(tokens_BN[:, path].T)] for path in nodes(parents)]
        return torch.stack([p.expand(len(tokens_BN), self.V) for p in each], dim=1)


@dataclass(frozen=True)
class RuleCase:
    """All possible proposals of a drafter, with their probabilities."""

    weight_B: Tensor
    drafts: Drafts
    p_BMV: Tensor
    toy: Toy


@lru_cache(None)
def nodes(parents: Parents) -> list[list[int]]:
    """The drafted tokens on the path to the root, and to every node."""
    return [row.nonzero()[:, 0].tolist() for row in ancestors(parents)[:, 1:]]


@lru_cache(None)
def every(V: int, N: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(V), repeat=N))).reshape(-1, N)


def case(
    toy: Toy,
    parents: Parents | list[Parents],
    weight_B: Tensor,
    tokens_BN: Tensor,
    q_BNV: Tensor | None = None,
    without_replacement: bool = False,
    steps_BN: Tensor | None = None,
) -> RuleCase:
    """Drafts of weight 0 left out. Parents of each, or of all; shorter trees are beginnings of the
    longest one."""
    some_B = weight_B > 0
    each = parents if isinstance(parents, list) else [parents] * len(weight_B)
    each = [x for x, some in zip(each, some_B.tolist(), strict=True) if some]
    most = max(each, key=len)

    def cut(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows[some_B][:, : len(most)]

    tokens_BN = tokens_BN[some_B][:, : len(most)]
    drafts = Drafts(tokens_BN, tuple(each), cut(q_BNV), cut(steps_BN), without_replacement)
    return RuleCase(weight_B[some_B], drafts, toy.p_BMV(tokens_BN, most), toy)


def chosen(toy: Toy, parents: Parents) -> RuleCase:
    """Any joint law over the whole tree at all: point drafts."""
    tokens_BN = every(toy.V, len(parents))
    return case(toy, parents, rows(1, len(tokens_BN), toy.generator)[0], tokens_BN)


def drawn(toy: Toy, parents: Parents, causal: bool, siblings: str = "iid") -> RuleCase:
    """Every token from its q: of its depth, or of its path (`causal`); `independent`: of two
    siblings, each has another."""
    tokens_BN, paths = every(toy.V, len(parents)), nodes(parents)
    others = toy.random_tables(toy.K) if siblings == "independent" else toy.q
    without = siblings == "without_replacement"
    q, weight_B = [], torch.ones(len(tokens_BN), dtype=torch.float64)
    first_V = one_hot(torch.tensor(0), toy.V).double()
    for i, parent in enumerate(parents):
        path = paths[parent + 1]
        row = toy.q_KV[len(path)]
        if causal:
            tables = others if parents[:i].count(parent) % 2 else toy.q
            row = tables[len(path)][tuple(tokens_BN[:, path].T)]
        q.append(row.expand(len(tokens_BN), toy.V))
        earlier = [j for j in range(i) if without and parents[j] == parent]
        left_BV = q[-1].scatter(1, tokens_BN[:, earlier], 0.0)
        total_B1 = left_BV.sum(1, keepdim=True)
        # where nothing is left a drafter hands over whatever it likes: token 0
        left_BV = torch.where(total_B1 > 0, left_BV / total_B1, first_V)
        weight_B = weight_B * left_BV.gather(1, tokens_BN[:, i, None])[:, 0]
    return case(toy, parents, weight_B, tokens_BN, torch.stack(q, 1), without)


def stopped(toy: Toy, parents: Parents) -> RuleCase:
    """A causal chain whose length depends on the tokens drawn so far, as with a confidence head:
    a coin for every prefix, tossed before the next token is drawn."""
    full = drawn(toy, parents, True)
    tokens_BN = full.drafts.tokens_BN
    length_B = torch.ones(len(tokens_BN), dtype=torch.int64)
    for d in range(1, len(parents)):
        goes_on = torch.rand((toy.V,) * d, generator=toy.generator) < 0.6
        length_B += (length_B == d) & goes_on[tuple(tokens_BN[:, :d].T)]
    each = [chain(n) for n in length_B.tolist()]
    # a token that is not drawn says nothing: what follows a draft's end sums to 1
    return case(toy, each, full.weight_B, tokens_BN, full.drafts.q_BNV)


def unmask(toy: Toy, parents: Parents, choose: Callable[[int, Tensor], Tensor]) -> RuleCase:
    """A chain that is unmasked step by step, every q looking at the tokens of EARLIER steps on both
    sides. `choose`: the step and the tokens so far (B, K), V where masked → the positions (B, K)
    that the step unmasks, decided before anything is drawn (state-only)."""
    K, V = len(parents), toy.V
    tokens_BN = every(V, K)
    tables = [rows((V + 1) ** K, V, toy.generator).reshape(*(V + 1,) * K, V) for _ in range(K)]
    state_BN, steps_BN = torch.full_like(tokens_BN, V), torch.zeros_like(tokens_BN)
    q_BNV = torch.zeros(*tokens_BN.shape, V, dtype=torch.float64)
    for step in range(K):
        now_BN = choose(step, state_BN)
        q_BNV[now_BN] = torch.stack([table[tuple(state_BN.T)] for table in tables], 1)[now_BN]
        steps_BN[now_BN] = step
        state_BN = torch.where(now_BN, tokens_BN, state_BN)
    weight_B = q_BNV.gather(2, tokens_BN[..., None])[..., 0].prod(1)
    return case(toy, parents, weight_B, tokens_BN, q_BNV, steps_BN=steps_BN)


def unmasked(toy: Toy, parents: Parents) -> RuleCase:
    """In a random order, some positions together."""
    steps_K = torch.randint(0, len(parents), (len(parents),), generator=toy.generator)
    return unmask(toy, parents, lambda step, state_BN: (steps_K == step).expand_as(state_BN))


def surest(toy: Toy, parents: Parents) -> RuleCase:
    """Each step's position is decided by what EARLIER steps drew: the order `confidence`."""
    K, V = len(parents), toy.V
    urge = torch.rand((V + 1,) * K + (K,), generator=toy.generator)

    def choose(_: int, state_BN: Tensor) -> Tensor:
        next_B = urge[tuple(state_BN.T)].masked_fill(state_BN < V, -1).argmax(1)
        return one_hot(next_B, K).bool()

    return unmask(toy, parents, choose)


WITHOUT = "without_replacement"
DRAFTERS: dict[str, Callable[[Toy, Parents], RuleCase]] = {
    "point": chosen,
    "independent, i.i.d. siblings": partial(drawn, causal=False),
    "independent, without replacement": partial(drawn, causal=False, siblings=WITHOUT),
    "causal, i.i.d. siblings": partial(drawn, causal=True),
    "causal, without replacement": partial(drawn, causal=True, siblings=WITHOUT),
    "causal, siblings of several q": partial(drawn, causal=True, siblings="independent"),
    "causal, stopped by earlier draws": stopped,
    "unmasked, state-only": unmasked,
    "unmasked, order by earlier draws": surest,
}
KINDS = {"without replacement": WITHOUT, "siblings of several q": "independent"}


def chains_only(verifier: str, drafter: str) -> bool:
    """Whether such drafts do not branch under this verifier."""
    branching = VERIFIERS[verifier].siblings
    return not branching or drafter.startswith("unmasked") or "stopped" in drafter


def outcomes(case_: RuleCase, verifier: Verifier | str) -> Outcomes:
    rule = (verifiers.VERIFIERS[verifier] if isinstance(verifier, str) else verifier).rule
    assert rule is not None
    return rule(case_.p_BMV, case_.drafts)


def output_law(case_: RuleCase, out: Outcomes) -> Tensor:
    """The joint law of the first K + 1 tokens that come out."""
    toy, parents = case_.toy, max(case_.drafts.parents, key=len)
    next_BMV = normalise(fall_back_to_p(out.rest_BMV, case_.p_BMV))
    mass_BMV = case_.weight_B[:, None, None] * out.stop_BM[..., None] * next_BMV
    laws = [torch.zeros((toy.V,) * (d + 1), dtype=torch.float64) for d in range(toy.K + 1)]
    for m, path in enumerate(nodes(parents)):
        column = [case_.drafts.tokens_BN[:, j, None].expand(-1, toy.V) for j in path]
        column.append(torch.arange(toy.V).expand(len(mass_BMV), -1))
        laws[len(path)].index_put_(tuple(column), mass_BMV[:, m], accumulate=True)
    return sum((toy.continued(law) for law in laws), torch.zeros_like(toy.joint))


def distance(case_: RuleCase, verifier: Verifier | str) -> float:
    """Total variation between the output's joint law and the target's."""
    return float((output_law(case_, outcomes(case_, verifier)) - case_.toy.joint).abs().sum() / 2)


def pairs() -> list[tuple[str, str]]:
    """(verifier, drafter) of everything that the types allow and that claims to be exact."""
    found = []
    for verifier in VERIFIERS.values():
        for drafter in DRAFTERS:
            law, _, siblings = drafter.partition(", ")
            kind = KINDS.get(siblings, "iid")
            fits = law in verifier.laws and (kind == "iid" or kind in verifier.siblings)
            if fits and verifier.rule is not None and not verifier.lossy:
                found.append((verifier.name, drafter))
    # neighbours share their cases
    return sorted(found, key=lambda pair: (pair[1], VERIFIERS[pair[0]].greedy_only))
