"""The joint law of sampled tokens: exactly, and how far from it counts may be by chance."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from decode.speculation.sampling import probs

if TYPE_CHECKING:
    from decode.speculation.settings import Sampling
    from specalign.lm.model import Target

Law = dict[tuple[int, ...], float]


def exact_law(target: Target, prompt: list[int], length: int, sampling: Sampling) -> Law:
    """The joint law of the next tokens by forwards over every prefix that has any mass; top-k keeps them few."""
    law: Law = {(): 1.0}
    for _ in range(length):
        ended = {x: m for x, m in law.items() if x and x[-1] in target.eos_ids}
        open_ = [x for x in law if x not in ended]
        rows = torch.tensor([[*prompt, *x] for x in open_], device=target.device)
        p_BV = []
        for row in rows.split(32):
            output = target.forward(row, logits=False)
            p_BV.append(probs(target.head(output.hidden_BLD[:, -1:])[:, 0].double(), sampling))
        fresh = dict(ended)
        for x, p_V in zip(open_, torch.cat(p_BV), strict=True):
            for token in p_V.nonzero()[:, 0].tolist():
                fresh[(*x, token)] = law[x] * float(p_V[token])
        law = fresh
    return law


def chi_square(found: Counter[tuple[int, ...]], law: Law, runs: int) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom. Outcomes expected fewer than five times are one cell; what that holds
    is added to the next larger one where it is itself expected so seldom: the statistic is no χ² there."""
    cells = sorted((mass * runs, found[outcome]) for outcome, mass in law.items() if mass > 0)
    while len(cells) > 1 and cells[0][0] < 5:
        (e, n), (f, m), *rest = cells
        cells = [(e + f, n + m), *rest]
    return sum((n - e) ** 2 / e for e, n in cells), max(1, len(cells) - 1)


def chi_square_tail(statistic: float, freedom: float) -> float:
    """P(χ² ≥ statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
