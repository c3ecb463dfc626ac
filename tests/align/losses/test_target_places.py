"""p at every place of a text equals a float64 softmax, whatever the chunk; logits are overwritten, hidden states are not."""

from __future__ import annotations

import pytest
import torch

from align.diffusion.parameterization import LOG_ZERO
from align.losses.target_places import target_places
from tests.logits import make


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("chunk", [3, 256])
def test_places_hold_p(temperature: float, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(7, 5, generator=generator), torch.randn(11, 5, generator=generator)
    following = torch.randint(0, 11, (7,), generator=generator)
    before = hidden.clone()
    places = target_places(hidden, following, lambda h: h @ head.T, temperature, chunk)
    scaled = hidden.double() @ head.double().T / temperature
    torch.testing.assert_close(places.log_z_P.double(), scaled.logsumexp(-1), rtol=1e-5, atol=1e-5)
    chosen = scaled.log_softmax(-1).gather(-1, following[:, None])[:, 0]
    torch.testing.assert_close(places.log_p_next_P.double(), chosen, rtol=1e-5, atol=1e-5)
    assert torch.equal(places.best_P, scaled.argmax(-1)) and torch.equal(places.next_P, following)
    assert places.temperature == temperature and torch.equal(places.hidden_PD, before)


TERMS = ("log_q_label", "forward_kl", "jensen_shannon", "total_variation")


@pytest.mark.parametrize("kept", [None, 9])
@pytest.mark.parametrize("top_k", [17, 4])
def test_the_most_probable_tokens_stand_for_p(kept: int | None, top_k: int) -> None:
    """Against float64 with p = 0 elsewhere; with every token known, against p itself. Values and gradients."""
    case = make(kept=kept, rank=2, temperature=0.7)
    head = case.head_VD
    case.places = target_places(case.places.hidden_PD, case.places.next_P, lambda x: x @ head.t(), 0.7, 4, top_k=top_k)  # fmt: skip
    assert case.places.top is not None and case.places.top.ids_Pk.shape == (11, top_k)
    case.places.hidden_PD = case.places.hidden_PD[:, :0]
    found = case.statistics(frozenset(TERMS[1:]))
    sum((i + 1) * getattr(found, name).sum() for i, name in enumerate(TERMS)).backward()  # type: ignore[union-attr]

    whole = make(kept=kept, rank=2, temperature=0.7)
    p = (whole.places.hidden_PD.double() @ head.double().t() / 0.7).softmax(-1)
    p = torch.where(p >= p.topk(top_k).values[:, -1:], p, 0.0)[whole.rows.place_R]
    ids = torch.arange(17) if whole.draft_vocab is None else whole.draft_vocab
    hidden, z, basis = (x.detach().double().requires_grad_() for x in whole.leaves)
    q = (hidden @ whole.head_VdD.double().t() + z @ basis).softmax(-1)
    p_in, label = p[:, ids], whole.places.next_P[whole.rows.place_R]
    column = (ids == label[:, None]).double()
    log_q = torch.where(column.any(-1), (q * column).sum(-1).clamp_min(1e-300).log(), LOG_ZERO)
    m, log = (p_in + q) / 2, lambda x: x.clamp_min(1e-300).log()
    own = {
        "log_q_label": log_q,
        "forward_kl": (p_in * (log(p_in) - log(q))).sum(-1),
        "jensen_shannon": ((p_in * (log(p_in) - log(m)) + q * (log(q) - log(m))).sum(-1) + (1 - p_in.sum(-1)) * log(torch.tensor(2.0))) / 2,
        "total_variation": 1 - torch.minimum(p_in, q).sum(-1),
    }  # fmt: skip
    for name, value in own.items():
        torch.testing.assert_close(getattr(found, name).flatten().double(), value, atol=1e-5, rtol=1e-4)
    sum((i + 1) * own[name].sum() for i, name in enumerate(TERMS)).backward()  # type: ignore[union-attr]
    for mine, its in zip(case.leaves, (hidden, z, basis), strict=True):
        torch.testing.assert_close(mine.grad.double(), its.grad, atol=1e-4, rtol=1e-3)
    if top_k == 17:
        of_p = whole.statistics(frozenset(TERMS[1:]))
        for name in (*TERMS, "acceptance", "p_label", "match", "greedy_label"):
            torch.testing.assert_close(getattr(found, name), getattr(of_p, name), atol=1e-5, rtol=1e-4)
