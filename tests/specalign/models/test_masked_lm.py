"""Masked-diffusion language models: each family's own layout, its mask, its shift; adaptation, caches, folders, LoRA."""

import copy
from pathlib import Path

import pytest
import torch
import transformers

from align.makers.standalone import adapt
from specalign.common.errors import UserError
from specalign.formats.masked_lm import load_masked_lm, save_masked_lm
from specalign.lm.debug import debug_model
from specalign.lm.model import Target
from specalign.lm.names import ModelSource
from specalign.lm.proof import prove_target
from specalign.models.families import FAMILIES, family_of
from specalign.models.masked_lm import annealed_see, merge_lora, with_lora
from tests.masked_lms import CONFIGS, DREAM, small_masked_lm
from tests.masked_lms import masked_block_logits as block_session
from tests.masked_lms import partly_masked as tokens
from tests.target_models import tiny_model


@pytest.mark.parametrize("grad", [True, False])
def test_a_head_that_is_kept_in_bf16_multiplies_in_fp32(grad: bool) -> None:
    """The target's, of a bf16 checkpoint."""
    tokenizer = debug_model("Llama")[1]
    model = tiny_model("llama", len(tokenizer)).bfloat16().float()
    stock, fast = (
        prove_target(copy.deepcopy(model), tokenizer, ModelSource("llama"), fast=fast)
        for fast in (False, True)
    )
    hidden = torch.randn(2, 5, fast.hidden_size)
    with torch.set_grad_enabled(grad):
        found, wanted = (adapt(t, [0], 36).head(hidden) for t in (fast, stock))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_mask_and_shift_equal_transformers_own_eager_attention(name: str) -> None:
    """Row i predicts position i: the raw row before it."""
    network, family = small_masked_lm(name), FAMILIES[name]
    plain = getattr(transformers, family.base)(copy.deepcopy(network.model.config))
    plain.load_state_dict(network.model.state_dict())
    plain.eval().set_attn_implementation("eager")
    length = tokens().shape[1]
    unseen = torch.zeros(1, 1, length, length)
    with torch.no_grad():
        raw = plain(tokens(), attention_mask=unseen, use_cache=False).logits
        got = network(tokens())
    assert not got[:, 0].any()
    torch.testing.assert_close(got[:, 1:], raw[:, :-1], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_cached_denoising_equals_the_whole_forward(target: Target) -> None:
    network, prefix = adapt(target, [0, 3], 36), tokens(1, 9, seed=5).clamp_max(35)
    at = torch.arange(12)
    see = ((at <= at[:, None]) | (at[:, None] >= 9))[None, None]
    for block in (torch.tensor([[36, 36, 36]]), torch.tensor([[36, 7, 36]])):
        cached = block_session(network, prefix, block, [2, 1, 6])
        whole = network(torch.cat((prefix, block), dim=1), see=see)[:, 9:]
        torch.testing.assert_close(cached, whole, atol=2e-5, rtol=1e-4)


def test_annealing_goes_from_causal_to_full() -> None:
    generator = torch.Generator().manual_seed(4)
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    assert torch.equal(annealed_see(40, 0.0, generator)[0, 0], causal)
    assert bool(annealed_see(40, 1.0, generator).all())
    for progress in (0.2, 0.7):
        see = annealed_see(40, progress, generator)[0, 0]
        assert bool(see[causal].all())
        share = float(see[~causal].float().mean())
        assert abs(share - progress) < 4 * (progress * (1 - progress) / 780) ** 0.5


def test_lora_starts_at_zero_and_merges_to_what_it_computed(target: Target, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    network = adapt(target, [0, 3], 36)
    with torch.no_grad():
        before = network(tokens())
    with_lora(network, 4, ["q_proj", "down_proj"])
    names = [name for name, p in network.named_parameters() if p.requires_grad]
    assert len(names) == 8 and all("lora_" in name for name in names)
    torch.testing.assert_close(network(tokens()), before)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(6)
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        tuned = network(tokens())
    assert not torch.allclose(tuned, before, atol=1e-2)
    with pytest.raises(ValueError, match="merge_lora"):
        save_masked_lm(network, tmp_path)
    merge_lora(network)
    save_masked_lm(network, tmp_path)
    with torch.no_grad():
        loaded = load_masked_lm(tmp_path, target=target)(tokens())
    torch.testing.assert_close(loaded, tuned, atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match="LoRA"):
        with_lora(adapt(target, [0], 36), 4, ["no_such_layer"])


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
