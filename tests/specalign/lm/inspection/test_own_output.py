"""What a model says by itself: behind its head, between its layers and its head, with the positions that `generate` gives."""

import copy

import pytest
import torch

from specalign.common.errors import UserError
from specalign.kernels.linear import rows_library
from specalign.lm.debug import debug_model
from specalign.lm.inspection.own_output import own_output
from specalign.lm.names import ModelSource
from specalign.lm.proof import prove_target
from tests.target_models import some_text, tiny_model, tiny_target


@pytest.mark.parametrize(
    ("kind", "scale", "cap"),
    [("granite", 0.25, None), ("cohere", 0.25, None), ("gemma2", 1.0, 5.0)],
)
def test_what_follows_the_head_is_part_of_p(kind: str, scale: float, cap: float | None) -> None:
    target, model = tiny_target(kind), tiny_model(kind, 260)
    own = own_output(model, target.tokenizer)
    assert (target.logit_form.scale, target.logit_form.cap) == (scale, cap)
    with torch.no_grad():
        logits = target.head(own.head_input_LD)
    torch.testing.assert_close(logits, own.logits_LV, atol=1e-4, rtol=1e-4)
    product, columns = own.head_input_LD @ target.head_weight_VD.T, torch.arange(3, 40, 2)
    assert target.finish is not None
    finished = target.finish(product[:, columns], columns)
    torch.testing.assert_close(finished, own.logits_LV[:, columns], atol=1e-4, rtol=1e-4)


def test_positions_are_given_as_generate_gives_them_and_residuals_may_be_wider() -> None:
    """Without positions Bamba's own forward begins each call at 0; Mamba's residuals are fp32 in any type."""
    assert tiny_target("bamba").chains_only
    half, tokenizer = tiny_model("mamba", 260).to(torch.bfloat16), debug_model("Llama")[1]
    target = prove_target(half, tokenizer, ModelSource("mine"))
    output = target.forward(torch.arange(4, 9)[None], taps=(1,))
    assert output.taps_BLFD is not None
    assert (output.hidden_BLD.dtype, output.taps_BLFD.dtype) == (torch.bfloat16, torch.bfloat16)


def test_several_heads_are_refused() -> None:
    with pytest.raises(UserError, match="does not run: it has no single head over a vocabulary"):
        tiny_target("musicgen")


@pytest.mark.skipif(rows_library() is None, reason="no C library")
@pytest.mark.parametrize(
    ("name", "kept"), [("mamba", "mixer.dt_proj"), ("dots3_note_text", "weights_proj")]
)
def test_a_bf16_checkpoint_of_such_a_model_is_p(name: str, kept: str) -> None:
    tokenizer = debug_model("Llama")[1]
    model = tiny_model(name, len(tokenizer)).bfloat16().float()
    stock, fast = (
        prove_target(copy.deepcopy(model), tokenizer, ModelSource(name), fast=fast)
        for fast in (False, True)
    )
    layers = fast.body.named_modules()
    types = {n: m.weight.dtype for n, m in layers if type(m).__name__ == "RowsLinear"}
    whole = {n for n, dtype in types.items() if dtype == torch.float32}
    assert whole and all(n.endswith(kept) for n in whole) and len(whole) < len(types)
    tokens = some_text(fast, 6)
    got, wanted = (t.forward(tokens).logits_BLV for t in (fast, stock))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert fast.hash == stock.hash
