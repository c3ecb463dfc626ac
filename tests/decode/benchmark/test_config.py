"""What a measurement is asked to do: numbers out of range, and what is recorded."""

from __future__ import annotations

import pytest

from align.common.errors import UserError
from decode.benchmark.config import EvalConfig


def test_more_threads_than_a_machine_can_start_are_refused() -> None:
    with pytest.raises(UserError, match="--threads=1000000: at most"):
        EvalConfig(threads=1000000)


def test_numbers_out_of_range_are_refused_when_sampling_is_asked_for() -> None:
    assert EvalConfig(temperature=0.7, seed=3).sampling.seed == 3
    with pytest.raises(UserError, match="temperature"):
        _ = EvalConfig(temperature=-1.0).sampling


def test_settings_are_recorded_as_they_were_typed() -> None:
    recorded = EvalConfig(limit=3, tune=4).recorded
    assert (recorded["template_kwargs"], recorded["system"]) == (None, None)  # as in older folders
    switched = EvalConfig(template_kwargs={"enable_thinking": False}, system="Be brief.").recorded
    assert (switched["template_kwargs"], switched["system"]) == ({"enable_thinking": False}, "Be brief.")
    assert (recorded["limit"], recorded["tune"], recorded["verifier"]) == (3, 4, "auto")
