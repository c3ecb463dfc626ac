"""The forms that a head's product may take."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from align.target.logits import PLAIN, LogitForm, candidates


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


def test_the_names_under_which_a_scale_stands() -> None:
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"):
        found = candidates(SimpleNamespace(**{name: 0.25, "final_logit_softcapping": 20.0}))
        assert LogitForm(0.25, 20.0) in found, name
