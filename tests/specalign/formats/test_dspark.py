"""DSpark's tensors of a head compute what the head computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from specalign.common.errors import UserError
from specalign.formats.dspark import dspark_tensors
from specalign.models.markov import MarkovHead, markov_head


def random_head(kind: str) -> tuple[MarkovHead, nn.Linear, Tensor, Tensor, Tensor]:
    """A head of rank 4 over 9 of 12 tokens and a confidence head's layer, both random; embedding, hidden states, tokens before."""
    generator = torch.Generator().manual_seed(0)
    head, confidence = markov_head(kind, 16, 4, 9, 12), nn.Linear(32, 1)
    with torch.no_grad():
        for parameter in (*head.parameters(), *confidence.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    embedding = torch.randn(12, 16, generator=generator)
    return (
        head,
        confidence,
        embedding,
        torch.randn(5, 16, generator=generator),
        torch.tensor([0, 3, 11, 3, 7]),
    )


@pytest.mark.parametrize("kind", ["tanh", "linear", "vanilla", "gated", "none"])
def test_dspark_tensors_compute_the_same(kind: str) -> None:
    """DSpark's heads written out from their definition: bias and confidence are ours up to rounding, over a block that carries
    the rnn's state along."""
    head, layer, embedding, hidden, before = random_head("silu" if kind == "none" else kind)
    for confidence in (None, layer):
        made = dspark_tensors(None if kind == "none" else head, embedding, 9, confidence)
        t = {name.removeprefix("markov_head."): tensor for name, tensor in made.tensors.items()}
        w1, w2, rank = t["markov_w1.weight"], t["markov_w2.weight"], made.rank
        assert w1.shape == (12, rank) and w2.shape == (9, rank)
        assert made.kind == {"tanh": "rnn", "gated": "gated"}.get(kind, "vanilla")
        state, found = torch.randn(rank), []
        for h, x in zip(hidden, before, strict=True):
            latent = w1[x]
            if made.kind == "gated":
                gate = t["gate_proj.weight"] @ torch.cat((h, latent)) + t["gate_proj.bias"]
                latent = gate.sigmoid() * latent
            if made.kind == "rnn":
                joint = (
                    t["joint_proj.weight"] @ torch.cat((state, latent, h)) + t["joint_proj.bias"]
                )
                gate, candidate, output = joint.chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                latent = output.tanh()
            found.append(w2 @ latent)
        ours = torch.zeros(5, 9)
        if kind != "none":
            ours = head(hidden, before, lambda tokens: embedding[tokens]) @ head.basis
        torch.testing.assert_close(torch.stack(found), ours, atol=1e-5, rtol=1e-5)
        if confidence is not None:
            weight, bias = t["confidence_head.proj.weight"][0], t["confidence_head.proj.bias"]
            got = torch.cat((hidden, w1[before]), dim=1) @ weight + bias
            wanted = confidence(torch.cat((hidden, embedding[before]), dim=1))[:, 0]
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["silu"])
def test_what_dspark_can_not_hold_is_refused(kind: str) -> None:
    head, _, embedding, *_ = random_head(kind)
    with pytest.raises(
        UserError, match=f"drafter.markov={kind}: .* no such head, but tanh, linear"
    ):
        dspark_tensors(head, embedding, 9)
