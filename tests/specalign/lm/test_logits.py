"""The forms that a head's product may take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specalign.lm.logits import NEVER, PLAIN, LogitForm, candidates, over_the_head


def test_scale_then_cap() -> None:
    x = torch.tensor([-8.0, 0.0, 3.0])
    assert PLAIN(x) is x
    torch.testing.assert_close(LogitForm(0.5, 2.0)(x), 2.0 * torch.tanh(x * 0.5 / 2.0))


def test_every_value_of_a_config_as_factor_and_divisor_the_plain_form_first() -> None:
    config = SimpleNamespace(logits_scaling=4.0, final_logit_softcapping=30.0, logit_scale=True)
    found = list(candidates(config))
    assert found[0] == PLAIN
    assert {(form.scale, form.cap) for form in found} == {
        (scale, cap) for scale in (1.0, 4.0, 0.25) for cap in (None, 30.0)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_that_a_model_never_writes(dtype: torch.dtype) -> None:
    """The lowest number at every place, and what a head has beyond a model's logits; low at one place is none."""
    lowest = torch.finfo(dtype).min
    given = torch.tensor([[1.0, lowest, lowest, 2.0], [3.0, lowest, 4.0, lowest]], dtype=dtype)
    logits, never = over_the_head(given, 6)
    assert never is not None and never.tolist() == [False, True, False, False, True, True]
    assert logits.dtype == torch.float32 and (logits[:, never] == NEVER).all()
    assert logits[:, [0, 2, 3]].tolist() == given[:, [0, 2, 3]].float().tolist()
    same, none = over_the_head(given[:, :1], 1)
    assert none is None and same.tolist() == [[1.0], [3.0]]
