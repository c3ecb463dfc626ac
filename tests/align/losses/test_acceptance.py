"""The expected τ against token and greedy verification worked out by enumeration over toy vocabularies."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from align.losses.distillation import expected_accepted_token, kept_greedy, kept_token
from specalign.diffusion.noise import LOG_ZERO

V, K = 3, 3
Path = tuple[int, ...]


class Toy:
    """p(·|x_<k) for every path, and q: one law a position (independent) or one for every path (causal)."""

    def __init__(self, seed: int, causal: bool, outside: int | None = None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        paths = [path for k in range(K) for path in itertools.product(range(V), repeat=k)]
        self.p = {path: self._law() for path in paths}
        by_position = [self._law() for _ in range(K)]
        self.q = {path: self._law() if causal else by_position[len(path)] for path in self.p}
        if outside is not None:
            self.q = {path: self._without(law, outside) for path, law in self.q.items()}

    def _law(self) -> Tensor:
        return (torch.randn(V, generator=self.generator, dtype=torch.float64) * 1.5).softmax(-1)

    @staticmethod
    def _without(law: Tensor, token: int) -> Tensor:
        law = law.clone()
        law[token] = 0
        return law / law.sum()

    def paths(self) -> Iterator[tuple[Path, float]]:
        """Every text of K tokens with its probability under p."""
        for path in itertools.product(range(V), repeat=K):
            yield path, math.prod(float(self.p[path[:k]][path[k]]) for k in range(K))

    def statistics(self, path: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log_q_label, p_label, acceptance, valid along one text, (1, 1, K)."""
        q = torch.tensor([[[self.q[path[:k]][path[k]] for k in range(K)]]])
        p = torch.tensor([[[self.p[path[:k]][path[k]] for k in range(K)]]])
        least = [torch.minimum(self.p[path[:k]], self.q[path[:k]]).sum() for k in range(K)]
        beta = torch.tensor([[least]])
        log_q = torch.where(q > 0, q.log(), LOG_ZERO)
        return log_q.float(), p.float(), beta.float(), torch.ones(1, 1, K, dtype=torch.bool)

    def accepted_at_least(self, m: int) -> float:
        """Chance that token verification keeps drafts 1..m: drafts come from q, each is kept with min(1, p/q)."""
        total = 0.0
        for path in itertools.product(range(V), repeat=m):
            chance = 1.0
            for k in range(m):
                p, q = float(self.p[path[:k]][path[k]]), float(self.q[path[:k]][path[k]])
                chance *= q * min(1.0, p / q) if q else 0.0
            total += chance
        return total


TOYS = [Toy(*case) for case in itertools.product((0, 1), (False, True), (None, 2))]


@pytest.mark.parametrize("toy", TOYS)
def test_expected_accepted_is_unbiased(toy: Toy) -> None:
    """Its mean over p-drawn text is how far token verification keeps drafts, for both laws of q."""
    kept = sum(w * kept_token(*toy.statistics(path))[0, 0] for path, w in toy.paths())
    exact = [toy.accepted_at_least(m) for m in range(1, K + 1)]
    torch.testing.assert_close(kept, torch.tensor(exact), rtol=1e-5, atol=1e-6)


def test_positions_past_the_end_are_cut() -> None:
    log_q, p, beta, _ = TOYS[0].statistics((0, 1, 2))
    valid = torch.tensor([[[True, True, False]]])
    cut = expected_accepted_token(log_q, p, beta, valid)
    shorter = expected_accepted_token(*(x[..., :2] for x in (log_q, p, beta, valid)))
    torch.testing.assert_close(cut, shorter)
    assert float(expected_accepted_token(log_q, p, beta, torch.zeros(1, 1, 3).bool())) == 0.0
    assert float(kept_token(log_q, p, beta, valid)[0, 0, 2]) == 0.0


def test_a_label_of_vanishing_probability() -> None:
    """p underflows to 0 in fp32 where q does not: the draft would be kept, and nothing becomes NaN."""
    log_q, p = torch.tensor([[-2.0, -1.0]]), torch.tensor([[0.0, 0.5]])
    got = expected_accepted_token(log_q, p, torch.tensor([[0.4, 0.3]]), torch.ones(1, 2).bool())
    torch.testing.assert_close(got, torch.tensor([0.7]))


def greedy_by_decoding(toy: Toy, path: Path) -> int:
    """Greedy verification of the drafter's argmax chain, independent q."""
    accepted: Path = ()
    for k in range(K):
        draft = int(toy.q[(0,) * k].argmax())
        if draft != int(toy.p[accepted].argmax()):
            break
        accepted += (draft,)
    return len(accepted)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_is_exact_on_greedy_text_and_a_lower_bound_elsewhere(seed: int) -> None:
    toy = Toy(seed, causal=False)
    greedy: Path = ()
    for _ in range(K):
        greedy += (int(toy.p[greedy].argmax()),)
    exact = greedy_by_decoding(toy, greedy)
    for path, _ in toy.paths():
        best = torch.tensor([[[int(toy.p[path[:k]].argmax()) for k in range(K)]]])
        match = torch.tensor([[[int(toy.q[path[:k]].argmax()) for k in range(K)]]]) == best
        on_path = (best == torch.tensor([[path]])).float()
        got = kept_greedy(match.float(), on_path, torch.ones(1, 1, K).bool())
        assert float(got.sum()) == exact if path == greedy else float(got.sum()) <= exact
