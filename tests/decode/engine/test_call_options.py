"""What `help` and completion read of the Python API, and what an unknown option is answered with."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
from decode.engine.call_options import check_options

import decode
from decode.speculation.settings import Sampling, SamplingOptions
from specalign.common.errors import UserError


@pytest.mark.parametrize("call", ["generate", "generate_batch", "stream"])
def test_signatures_list_the_sampling_options(call: str) -> None:
    parameters = inspect.signature(getattr(decode.Decoder, call)).parameters
    assert {field.name for field in fields(Sampling)} <= {*parameters}
    assert "options" not in parameters and parameters["top_k"].default == 0


def test_the_signature_of_load_is_its_own() -> None:
    parameters = inspect.signature(decode.load).parameters
    assert [*parameters][:3] == ["target", "drafter", "verifier"] and "unknown" not in parameters
    assert "shipped drafter" in (decode.load.__doc__ or "")


def test_typed_and_checked_options_are_the_same() -> None:
    assert {*SamplingOptions.__annotations__} == {field.name for field in fields(Sampling)}


def test_unknown_options_name_the_call_or_the_nearest() -> None:
    with pytest.raises(
        UserError, match="decode.load has no option 'temperature': it is an option of generate"
    ):
        check_options("decode.load", ["temperature"])
    with pytest.raises(
        UserError, match="stream has no option 'top_n' .did you mean 'top_k'|'top_p'"
    ):
        check_options("stream", ["top_n"])
