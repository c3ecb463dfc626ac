"""Every law × verifier that the types allow gives EXACTLY the target's joint law: enumerated, not sampled.

A toy is a table of target rows p(·|prefix) over V tokens. For every possible draft the two pure functions of
a verifier give the law of (accepted, next token); tokens after that come from the target itself. Summed over
all drafts this is the joint law of the first K + 1 output tokens, compared with the target's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from decode import verify
from decode.proposal import DenseQ, Proposal, SparseQ
from decode.sampling import Sampling, probs
from decode.verify import VERIFIERS, Verifier

EXACT = 1e-9
WRONG = 1e-3
Drafts = Iterable[tuple[float, Proposal]]
SIZES = [(V, K) for V in (2, 3, 4) for K in (1, 2, 3)]


def rows(count: int, V: int, generator: torch.Generator, zeros: float = 0.3) -> Tensor:
    """Random distributions, (count, V) fp64, sharp and flat, some entries exactly zero."""
    weights = torch.rand(count, V, dtype=torch.float64, generator=generator) ** 3 + 1e-3
    weights[torch.rand(count, V, generator=generator) < zeros] = 0
    weights[weights.sum(1) == 0, 0] = 1
    return weights / weights.sum(1, keepdim=True)


class Toy:
    """Tables of p and q for every prefix of up to K tokens: `p[d][prefix]` is the row after d tokens."""

    def __init__(self, V: int, K: int, seed: int, greedy: bool = False) -> None:
        self.V, self.K = V, K
        generator = torch.Generator().manual_seed(seed)
        self.generator = generator
        self.p = [rows(V**d, V, generator).reshape((V,) * (d + 1)) for d in range(K + 1)]
        self.q = [rows(V**d, V, generator).reshape((V,) * (d + 1)) for d in range(K)]
        if seed % 5 == 0:  # p = q
            self.q = [p.clone() for p in self.p[:K]]
        if greedy:
            self.p = [probs(p, Sampling()) for p in self.p]
        self.q_KV = torch.stack([q.reshape(-1, V)[0] for q in self.q])  # the q of an independent draft
        self.joint = self.rest(())

    def p_NV(self, tokens: tuple[int, ...]) -> Tensor:
        return torch.stack([self.p[d][tokens[:d]] for d in range(len(tokens) + 1)])

    def rest(self, prefix: tuple[int, ...]) -> Tensor:
        """The target's joint law of what follows the prefix, up to K + 1 tokens in all."""
        shape = (self.V,) * (self.K + 1 - len(prefix))
        law = torch.ones((), dtype=torch.float64)
        for d in range(len(prefix), self.K + 1):
            law = law[..., None] * self.p[d][prefix]
        return law.reshape(shape)

    def drafts(self) -> list[tuple[int, ...]]:
        return list(itertools.product(range(self.V), repeat=self.K))


def output_law(toy: Toy, drafts: Drafts, verifier: Verifier) -> Tensor:
    out = torch.zeros_like(toy.joint)
    for weight, proposal in drafts:
        if weight == 0:
            continue
        tokens = tuple(proposal.tokens_K.tolist())
        p_NV = toy.p_NV(tokens)
        survival = [1.0, *verifier.survival(p_NV, proposal).tolist(), 0.0]
        for n in range(len(tokens) + 1):
            reached = weight * (survival[n] - survival[n + 1])
            if reached == 0:
                continue
            emission = verifier.emission(p_NV, proposal, torch.tensor(n))
            for y, mass in enumerate((emission / emission.sum()).tolist()):
                if mass:
                    prefix = (*tokens[:n], y)
                    out[prefix] += reached * mass * toy.rest(prefix)
    return out


def distance(toy: Toy, drafts: Drafts, verifier: Verifier | str) -> float:
    """Total variation between the output's joint law and the target's."""
    found = output_law(toy, drafts, VERIFIERS[verifier] if isinstance(verifier, str) else verifier)
    return float((found - toy.joint).abs().sum() / 2)


def tokens(draft: tuple[int, ...]) -> Tensor:
    return torch.tensor(draft, dtype=torch.int64)


# ---- draft laws: every possible proposal with its probability ----


def independent(toy: Toy) -> Drafts:
    for draft in toy.drafts():
        weight = float(torch.stack([toy.q_KV[k, x] for k, x in enumerate(draft)]).prod())
        yield weight, Proposal(tokens(draft), "independent", DenseQ(toy.q_KV))


def pruned(toy: Toy) -> Drafts:
    """q on all tokens but token 0, its ids out of order: p has mass outside."""
    ids = torch.arange(toy.V - 1, 0, -1)
    q_KS = toy.q_KV[:, ids] + 0.01
    q_KS = q_KS / q_KS.sum(1, keepdim=True)
    for columns in itertools.product(range(len(ids)), repeat=toy.K):
        weight = float(torch.stack([q_KS[k, c] for k, c in enumerate(columns)]).prod())
        yield weight, Proposal(ids[list(columns)], "independent", SparseQ(ids, q_KS))


def causal(toy: Toy) -> Drafts:
    for draft in toy.drafts():
        q_KV = torch.stack([toy.q[k][draft[:k]] for k in range(toy.K)])
        weight = float(torch.stack([q_KV[k, x] for k, x in enumerate(draft)]).prod())
        yield weight, Proposal(tokens(draft), "causal", DenseQ(q_KV))


def unmasked(toy: Toy) -> Drafts:
    """Right to left: each position's q depends on the tokens to its right."""
    steps = torch.arange(toy.K, 0, -1)
    for draft in toy.drafts():
        q_KV = torch.stack([toy.q[toy.K - 1 - k][draft[:k:-1]] for k in range(toy.K)])
        weight = float(torch.stack([q_KV[k, x] for k, x in enumerate(draft)]).prod())
        yield weight, Proposal(tokens(draft), "unmasked", DenseQ(q_KV), steps_K=steps)


def broken(toy: Toy) -> Drafts:
    """A drafter whose q is no number, or infinite, at some positions, its tokens whatever comes out then."""
    for draft in toy.drafts():
        q_KV = toy.q_KV.clone()
        for k in range(toy.K):
            if (toy.V + k) % 2:
                q_KV[k] = float("nan")
        weight = 1.0
        for k, x in enumerate(draft):
            weight *= float(x == toy.V - 1) if bool(q_KV[k].isnan().any()) else float(q_KV[k, x])
        yield weight, Proposal(tokens(draft), "independent", DenseQ(q_KV))


def argmax(toy: Toy) -> Drafts:
    yield 1.0, Proposal(toy.q_KV.argmax(1), "point")


def mixture(toy: Toy) -> Drafts:
    """Any joint law at all."""
    weights = rows(1, toy.V**toy.K, toy.generator)[0].tolist()
    for weight, draft in zip(weights, toy.drafts(), strict=True):
        yield weight, Proposal(tokens(draft), "point")


def best_of_two(toy: Toy) -> Drafts:
    """Two independent draws, the one the target likes better is proposed."""
    score = {draft: float(toy.joint[draft].sum()) for draft in toy.drafts()}
    singles = [(w, tuple(x.tokens_K.tolist())) for w, x in independent(toy)]
    for (w1, x1), (w2, x2) in itertools.product(singles, repeat=2):
        yield w1 * w2, Proposal(tokens(x1 if score[x1] >= score[x2] else x2), "point")


def dropped(toy: Toy) -> Drafts:
    """Cut before the first token whose own q is small."""
    for weight, proposal in independent(toy):
        small = (proposal.q.at(proposal.tokens_K) < 0.2).tolist()
        yield weight, Proposal(proposal.tokens_K[: small.index(True) if True in small else toy.K], "point")


def as_independent(drafts: Callable[[Toy], Drafts], length: bool = False) -> Callable[[Toy], Drafts]:
    """The lie: the same drafts, declared as drawn from the full independent q."""

    def lie(toy: Toy) -> Drafts:
        for weight, x in drafts(toy):
            yield weight, Proposal(x.tokens_K, "independent", DenseQ(toy.q_KV[: len(x)]))

    return lie


LAWS: dict[str, tuple[Callable[[Toy], Drafts], ...]] = {
    "point": (argmax, mixture, best_of_two, dropped),
    "independent": (independent, pruned, broken),
    "causal": (causal,),
    "unmasked": (unmasked,),
}
PAIRS = [
    pytest.param(verifier, drafts, id=f"{verifier}-{drafts.__name__}")
    for verifier, law in itertools.product(VERIFIERS, LAWS)
    if law in VERIFIERS[verifier].laws
    for drafts in LAWS[law]
]


@pytest.mark.parametrize(("verifier", "drafts"), PAIRS)
def test_the_output_law_is_the_targets(verifier: str, drafts: Callable[[Toy], Drafts]) -> None:
    greedy = VERIFIERS[verifier].greedy_only
    for (V, K), seed in itertools.product(SIZES, range(12)):
        if drafts is best_of_two and V**K > 27:
            continue
        toy = Toy(V, K, 100 * V + 10 * K + seed, greedy)
        assert distance(toy, drafts(toy), verifier) < EXACT, (V, K, seed)


def test_toys_hold_the_awkward_cases() -> None:
    toys = [Toy(V, K, 100 * V + 10 * K + seed) for (V, K), seed in itertools.product(SIZES, range(12))]
    assert any((t.p[0] == 0).any() for t in toys)
    assert any(torch.equal(t.p[0], t.q[0]) for t in toys)
    assert any(((t.p[0] == 0) & (t.q[0] > 0)).any() for t in toys)
    assert any(((t.p[0] > 0) & (t.q[0] == 0)).any() for t in toys)


def test_cutting_a_draft_keeps_its_law() -> None:
    for V, K in ((3, 2), (4, 3)):
        toy = Toy(V, K, 7)
        for drafts in (independent, causal):
            cut = [(w, x.cut(K - 1)) for w, x in drafts(toy)]
            assert distance(toy, cut, "token") < EXACT
        assert distance(toy, [(w, x.cut(1)) for w, x in pruned(toy)], "token") < EXACT


# ---- mutants: each must be seen ----


def worst(make: Callable[[Toy], Drafts], verifier: Verifier | str, K: int = 2, V: int = 3) -> float:
    toys = [Toy(V, K, seed) for seed in range(1, 9)]
    return max(distance(toy, make(toy), verifier) for toy in toys)


def sharpened(toy: Toy) -> Drafts:
    """Drawn from the two best of each row, tested against the whole row."""
    drawn = probs(toy.q_KV.clamp(min=1e-9).log(), Sampling(temperature=1.0, top_k=2))
    for draft in toy.drafts():
        weight = float(torch.stack([drawn[k, x] for k, x in enumerate(draft)]).prod())
        yield weight, Proposal(tokens(draft), "independent", DenseQ(toy.q_KV))


def no_subtraction(p_NV: Tensor, proposal: Proposal, n: Tensor) -> Tensor:
    return p_NV[int(n)]


def bonus_from_q(p_NV: Tensor, proposal: Proposal, n: Tensor) -> Tensor:
    if int(n) == len(proposal):
        return proposal.q.row(n - 1, p_NV.shape[1])
    return VERIFIERS["token"].emission(p_NV, proposal, n)


def next_row(p_NV: Tensor, proposal: Proposal, n: Tensor) -> Tensor:
    """Off by one: the residual of the position after the rejected one."""
    return VERIFIERS["token"].emission(p_NV, proposal, (n + 1).clamp(max=len(proposal)))


def inverted(p_NV: Tensor, proposal: Proposal) -> Tensor:
    p, q = p_NV[:-1].gather(1, proposal.tokens_K[:, None])[:, 0], proposal.q.at(proposal.tokens_K)
    return verify.accept_probability(q, p).cumprod(0)


def token_with(**changed: Callable) -> Verifier:
    token = VERIFIERS["token"]
    return Verifier(
        "mutant", token.laws, **{"survival": token.survival, "emission": token.emission, **changed}
    )


MUTANTS = {
    "argmax draft against the full q": (as_independent(argmax), "token"),
    "raw q, drawn from the top-k-processed one": (sharpened, "token"),
    "best of two with the ratio test": (as_independent(best_of_two), "token"),
    "dropped by its own q": (as_independent(dropped), "token"),
    "residual without subtracting q": (independent, token_with(emission=no_subtraction)),
    "bonus from q": (independent, token_with(emission=bonus_from_q)),
    "residual of the next row": (causal, token_with(emission=next_row)),
    "q/p in place of p/q": (independent, token_with(survival=inverted)),
    "point mass without zeroing the rejected token": (
        mixture,
        Verifier("mutant", frozenset(), VERIFIERS["point_mass"].survival, no_subtraction),
    ),
    "causal drafts with independent q": (as_independent(causal), "token"),
    "greedy rule on a sampled target": (independent, "greedy"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_seen(name: str) -> None:
    make, verifier = MUTANTS[name]
    assert worst(make, verifier) > WRONG


def test_a_zero_uniform_never_accepts_a_token_of_probability_zero() -> None:
    p_NV = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    proposal = Proposal(tokens((1,)), "independent", DenseQ(torch.tensor([[0.5, 0.5]])))
    zero = torch.zeros(1, dtype=torch.float64)
    for name in ("token", "point_mass", "greedy"):
        survival = VERIFIERS[name].survival(p_NV, proposal)
        assert verify.count_survivals(survival, zero) == 0, name
        assert (zero <= survival).sum() == 1  # the mutant: r ≤ p/q


def test_out_of_order_unmasking_needs_point_mass() -> None:
    """The worked example of the field guide: two binary tokens, a drafter whose joint equals the target's."""
    toy = Toy(2, 2, 1)
    stay = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    toy.p = [
        torch.full((2,), 0.5, dtype=torch.float64),
        stay,
        torch.full((2, 2, 2), 0.5, dtype=torch.float64),
    ]
    toy.joint = toy.rest(())
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)

    def drafts(law: str, q_first: Callable[[int], Tensor]) -> Drafts:
        for x1, x2 in toy.drafts():
            weight = float(0.5 * stay[x2, x1])  # x2 first, from (.5, .5); then x1 given x2
            if law == "point":
                yield weight, Proposal(tokens((x1, x2)), "point")
            else:
                yield (
                    weight,
                    Proposal(tokens((x1, x2)), "independent", DenseQ(torch.stack([q_first(x2), half]))),
                )

    assert distance(toy, drafts("independent", lambda x2: stay[x2]), "token") == pytest.approx(
        0.040, abs=5e-4
    )
    assert distance(toy, drafts("independent", lambda x2: half), "token") == pytest.approx(0.080, abs=5e-4)
    assert distance(toy, drafts("point", lambda x2: half), "point_mass") < EXACT


# ---- the sampled version follows the two pure functions ----


@pytest.mark.parametrize("verifier", ["token", "point_mass"])
def test_draws_follow_survival_and_emission(verifier: str) -> None:
    toy = Toy(3, 2, 3)
    proposal = Proposal(tokens((1, 2)), "independent", DenseQ(toy.q_KV + 0.1))
    p_NV = toy.p_NV((1, 2)) * 0.9 + 0.1 / 3
    rule = VERIFIERS[verifier]
    survival = [1.0, *rule.survival(p_NV, proposal).tolist(), 0.0]
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for n in range(3):
        emission = rule.emission(p_NV, proposal, torch.tensor(n))
        expected[n] = (survival[n] - survival[n + 1]) * emission / emission.sum()
    generator = torch.Generator().manual_seed(0)
    draws, found = 6000, torch.zeros(3, 3, dtype=torch.float64)
    for _ in range(draws):
        n, y = verify.verify(verifier, proposal, p_NV, generator)
        found[n, y] += 1
    sigma = (expected * (1 - expected) * draws).sqrt()
    assert ((found - expected * draws).abs() <= 4.5 * sigma + 1e-9).all()


def test_greedy_match_is_the_greedy_verifier() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(30):
        toy = Toy(3, 3, seed, greedy=True)
        draft = tokens(tuple(torch.randint(3, (3,), generator=generator).tolist()))
        p_NV = toy.p_NV(tuple(draft.tolist()))
        one_hot = verify.verify("greedy", Proposal(draft, "point"), p_NV, generator)
        assert [int(t) for t in one_hot] == [int(t) for t in verify.match(draft, p_NV.argmax(1))]
