"""A target's text model as a causal language model of its own: what a wrapper holds computes the same under that class's names."""

from pathlib import Path

import pytest
import torch
import transformers

from specalign.kernels.linear import rows_library
from specalign.lm.inspection.parts import is_tied, text_model
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.target_models import some_text
from tests.target_wrappers import save_wrapper, tiny_wrapper


def wrapped(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Target:
    save_wrapper(tiny_wrapper(kind).to(dtype), folder)
    return load_target(str(folder), "float32", "cpu")


@pytest.mark.parametrize(
    ("kind", "base", "tied"),
    [("gemma3", "Gemma3ForCausalLM", True), ("llava", "LlamaForCausalLM", False)],
)
def test_what_a_wrapper_holds(kind: str, base: str, tied: bool, tmp_path: Path) -> None:
    """One with a scaled embedding that is its head too, one without."""
    target = wrapped(kind, tmp_path)
    found = text_model(target)
    assert (found.base, is_tied(target)) == (base, tied)
    assert torch.equal(found.tensors[found.embedding], target.embedding_VD)
    assert torch.equal(found.tensors[found.head], target.head_weight_VD)
    alone = getattr(transformers, base)(found.config)
    alone.load_state_dict(found.tensors)
    tokens = some_text(target, 20)
    with torch.no_grad():
        logits = alone.eval()(tokens).logits
    torch.testing.assert_close(logits, target.forward(tokens).logits_BLV, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "tied"), [("gemma3", True), ("gemma4", True), ("llava", False)])
def test_a_bf16_checkpoint_is_tied_as_ever(kind: str, tied: bool, tmp_path: Path) -> None:
    """Gemma 4's wrapper reads its embedding by itself, which stays in fp32 then."""
    target = wrapped(kind, tmp_path, torch.bfloat16)
    assert is_tied(target) == tied
    if rows_library() is not None:
        assert target.head_weight_VD.dtype == torch.bfloat16
        assert (target.embedding_VD.dtype == torch.float32) == (kind == "gemma4")


def test_a_text_model_without_a_class_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="no text-only qwen2_vl_text"):
        text_model(wrapped("qwen2_vl", tmp_path))
