"""The counts of a quick verdict and of a thorough one."""

from __future__ import annotations

from dataclasses import fields

from decode.losslessness.config import QUICK, THOROUGH, VerifyConfig


def test_a_thorough_verdict_sees_more_of_everything() -> None:
    config = VerifyConfig()
    assert {name: getattr(config, name) for name in QUICK} == QUICK
    assert QUICK.keys() == THOROUGH.keys() <= {f.name for f in fields(VerifyConfig)}
    assert all(THOROUGH[name] > QUICK[name] for name in QUICK)
