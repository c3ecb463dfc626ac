"""The tokens a call that enumeration expects are those that the decoder counts: the same tables behind the real engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Decoder, Sampling
from decode.drafters.base import Request
from decode.grow import draw_tree
from decode.proposal import DenseQ, Proposal, Siblings
from decode.tree import depths
from tests.contract.enumeration import Parents, Toy, drawn, mean_accepted
from tests.decode.fakes import ScriptedDrafter, TableTarget

RUNS = 800
PROMPT = [0]
"""The prompt and the token that it is answered with stand before the tables' own first token."""


class ToyTarget(TableTarget):
    """p of a `Toy` behind two tokens; what follows its last table is uniform."""

    def __init__(self, toy: Toy) -> None:
        super().__init__(toy.V)
        self.toy = toy
        self.paths: list[list[int]] = []

    def hidden(self, paths: list[list[int]]) -> Tensor:
        """The places of the latest forward."""
        self.paths = paths
        return torch.arange(len(paths))[:, None]

    def head(self, hidden: Tensor) -> Tensor:
        return torch.stack([self._row(self.paths[int(i)][2:]) for i in hidden[0, :, 0]])[None].float()

    def _row(self, done: list[int]) -> Tensor:
        if len(done) > self.toy.K:
            return torch.zeros(self.toy.V, dtype=torch.float64)
        return self.toy.p[len(done)][tuple(done)].clamp_min(1e-30).log()


def drafts_of(toy: Toy, parents: Parents, causal: bool, siblings: Siblings) -> Any:
    """The drafter that enumeration calls `drawn`."""

    def propose(request: Request, k: int) -> Proposal | None:
        if len(request.tokens) != 2:
            return None

        def q_of(level: int, above_P: Tensor) -> Tensor:
            if not causal:
                return toy.q_KV[level].expand(len(above_P), -1)
            return torch.stack([toy.q[level][(a,) * level] for a in above_P.tolist()])

        tokens, q_NV = draw_tree(parents, q_of, siblings, request.generator, request.target.device)
        kind = siblings if len(set(parents)) < len(parents) else None
        law = "causal" if causal else "independent"
        return Proposal(tokens, law, DenseQ(q_NV.float()), parents=parents, siblings=kind)  # type: ignore[arg-type]

    return propose


@pytest.mark.parametrize(
    ("verifier", "parents", "causal", "siblings"),
    [
        ("token", (-1, 0), True, "iid"),
        ("block", (-1, 0), True, "iid"),
        ("point_mass", (-1, 0), False, "iid"),
        ("self_selection", (-1, -1, 0, 1), False, "iid"),
        ("k_seq", (-1, -1), False, "iid"),
        ("recursive", (-1, -1, 0, 1), True, "iid"),
        ("recursive", (-1, -1, 0), False, "without_replacement"),
        ("traversal", (-1, -1, 0, 1), True, "iid"),
        ("traversal", (-1, -1, 0, 0), True, "without_replacement"),
    ],
)
def test_tokens_a_call(verifier: str, parents: Parents, causal: bool, siblings: Siblings) -> None:
    for seed in (1, 2):
        toy = Toy(4, max(depths(parents)), seed)
        expected = mean_accepted(drawn(toy, parents, causal, siblings), verifier)
        drafter = ScriptedDrafter(
            "causal" if causal else "independent", drafts_of(toy, parents, causal, siblings), toy.K
        )
        drafter.draft_nodes = len(parents)
        decoder = Decoder(ToyTarget(toy), drafter, verifier)  # type: ignore[arg-type]
        counts = torch.tensor(
            [
                decoder.generate(PROMPT, max_new_tokens=toy.K + 2, sampling=Sampling(1.0, seed=s)).accepted[0]
                for s in range(RUNS)
            ],
            dtype=torch.float64,
        )
        error = float(counts.std()) / RUNS**0.5
        assert abs(float(counts.mean()) - expected) < 4.5 * error + 1e-3, (seed, expected, counts.mean())
