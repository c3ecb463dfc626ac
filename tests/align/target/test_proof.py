"""p is the model's own, or it is refused in one line."""

from __future__ import annotations

import pytest
import torch

from align.common.errors import UserError
from align.target import interface
from align.target.logits import PLAIN
from align.target.proof import own_output, proven
from tests.target_models import tiny_model, tiny_target


@pytest.mark.parametrize(
    ("kind", "scale", "cap"), [("granite", 0.25, None), ("cohere", 0.25, None), ("gemma2", 1.0, 5.0)]
)
def test_what_follows_the_head_is_part_of_p(kind: str, scale: float, cap: float | None) -> None:
    target, model = tiny_target(kind), tiny_model(kind, 260)
    own = own_output(model, target.tokenizer)
    assert (target.logit_form.scale, target.logit_form.cap) == (scale, cap)
    with torch.no_grad():
        torch.testing.assert_close(target.head(own.head_input_LD), own.logits_LV, atol=1e-4, rtol=1e-4)
    product, columns = own.head_input_LD @ target.head_weight_VD.T, torch.arange(3, 40, 2)
    assert target.finish is not None
    finished = target.finish(product[:, columns], columns)
    torch.testing.assert_close(finished, own.logits_LV[:, columns], atol=1e-4, rtol=1e-4)
    target.logit_form, without = PLAIN, (scale, cap) == (1.0, None)
    assert without is torch.allclose(target.head(own.head_input_LD), own.logits_LV, atol=1e-2)


def test_a_model_that_scales_by_a_key_of_its_own_is_refused() -> None:
    target, model = tiny_target("granite"), tiny_model("granite", 260)
    plain = model.forward

    def scaled(*args, **kwargs):  # type: ignore[no-untyped-def]
        output = plain(*args, **kwargs)
        output.logits = output.logits * 0.7
        return output

    model.forward = scaled
    with pytest.raises(
        UserError, match="architecture 'granite' can't be run exactly: its logits are not its head's"
    ):
        proven(model, target.tokenizer, "mine")


def test_an_attention_that_is_not_the_models_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss without its sinks: the model's own attention is used instead, with our masks."""
    right = interface.biased_attention
    monkeypatch.setattr(
        interface, "biased_attention", lambda q, k, v, m, s, cap, sinks: right(q, k, v, m, s, cap, None)
    )
    assert tiny_target("gpt_oss").attention == "its own, eager"
