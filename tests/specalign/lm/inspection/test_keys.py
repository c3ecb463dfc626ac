"""How positions are in keys: told from what the layers give, and written the same way again."""

import pytest

from specalign.lm.inspection.keys import RotaryTable, key_rotaries
from tests.target_models import tiny_target

KINDS = {
    "llama": ["half 0 8"] * 4,
    "cohere": ["pairs 0 8"] * 4,
    "gpt_neox": ["half 0 2"] * 4,
    "gpt2": ["none"] * 4,  # learned positions are in the hidden states
    "bloom": ["none"] * 4,  # ALiBi is in the scores
    "deepseek_v3": ["its cached values depend on the position, as compressed ones do"] * 4,
    "lfm2": ["it does not cache keys", "half 0 8"] * 2,  # convolutions
    "hunyuan_v1_dense": ["its keys at two positions do not differ by a known rotation"] * 4,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_layers_do_is_told_from_their_keys(kind: str) -> None:
    def said(rotary: RotaryTable | str) -> str:
        if isinstance(rotary, str) or not rotary.inv_freq:
            return rotary if isinstance(rotary, str) else "none"
        return f"{rotary.layout} {rotary.start} {len(rotary.inv_freq)}"

    assert [said(r) for r in key_rotaries(tiny_target(kind))] == KINDS[kind]
