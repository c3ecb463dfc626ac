"""How positions are in keys: told from what the layers give, and written the same way again."""

from __future__ import annotations

import pytest
import torch

from specalign.lm.inspection.keys import RotaryTable, key_rotaries, plain_rotary
from tests.target_models import tiny_target

KINDS = {
    "llama": ["half 0 8"] * 4,
    "cohere": ["pairs 0 8"] * 4,
    "gpt_neox": ["half 0 2"] * 4,
    "gpt2": ["none"] * 4,  # learned positions are in the hidden states
    "bloom": ["none"] * 4,  # ALiBi is in the scores
    "deepseek_v3": ["what it keeps as values changes with the position, as compressed ones do"] * 4,
    "lfm2": ["it keeps none of its own", "half 0 8"] * 2,  # convolutions
    "hunyuan_v1_dense": ["its keys at two positions differ by no rotation that is known"] * 4,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_layers_do_is_told_from_their_keys(kind: str) -> None:
    def said(rotary: RotaryTable | str) -> str:
        if isinstance(rotary, str) or not rotary.inv_freq:
            return rotary if isinstance(rotary, str) else "none"
        return f"{rotary.layout} {rotary.start} {len(rotary.inv_freq)}"

    assert [said(r) for r in key_rotaries(tiny_target(kind))] == KINDS[kind]


def test_layers_have_bases_of_their_own() -> None:
    """Gemma's local and global layers."""
    found = key_rotaries(tiny_target("gemma3n_text"))[:2]
    assert [round(r.inv_freq[1], 3) for r in found if isinstance(r, RotaryTable)] == [0.316, 0.178]


@pytest.mark.parametrize(
    "rotary",
    [
        RotaryTable("half", 2, (1.0, 0.3)),
        RotaryTable("pairs", 0, (1.0, 0.3, 0.1)),
        plain_rotary(8, 1e4),
    ],
)
def test_scores_depend_on_the_distance_alone(rotary: RotaryTable) -> None:
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    score = rotary.rotate_at(q, 9) @ rotary.rotate_at(k, 4)
    torch.testing.assert_close(score, rotary.rotate_at(q, 25) @ rotary.rotate_at(k, 20))
    assert abs(float(score - rotary.rotate_at(q, 9) @ rotary.rotate_at(k, 6))) > 1e-3
    assert torch.equal(rotary.rotate_at(q, 0), q)
