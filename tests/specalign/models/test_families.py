"""Each family is told by its config or its hub id, and has its published mask."""

from __future__ import annotations

import pytest

from specalign.common.errors import UserError
from specalign.models.families import FAMILIES, family_of
from tests.masked_lms import DREAM


def test_a_family_is_told_by_its_config_or_its_hub_id() -> None:
    assert family_of(DREAM, "some/finetune").name == "dream"
    plain = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert family_of(plain, "diffusionfamily/diffullama").name == "diffullama"
    with pytest.raises(UserError, match="not a supported masked-diffusion family"):
        family_of(plain, "meta-llama/Llama-2-7b-hf")
    for named in (5, {"a": 1}, [None], [{}]):
        with pytest.raises(UserError, match="not a supported masked-diffusion family"):
            family_of({"model_type": "llama", "architectures": named}, "x")
    for family in FAMILIES.values():
        for name in ("lm_head.weight", "model.layers.11.mlp.up_proj.weight"):
            assert family.ours(family.theirs(name)) == name
