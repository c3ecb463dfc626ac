"""Configs that no target has are refused in one line."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.folder.config import check_ends, check_quantised, end_ids, note_settings
from specalign.lm.names import check_name


def test_ids_and_what_are_none() -> None:
    for value, ids in ((None, set()), (0, {0}), ([2, 7, 2], {2, 7})):
        assert end_ids(value, "a") == ids
    check_ends({"eos_token_id": [2], "text_config": {"eos_token_id": 3}}, "a")
    for config in (
        {"eos_token_id": "2"},
        {"text_config": {"eos_token_id": [2, -1]}},
        {"eos_token_id": [None]},
    ):
        with pytest.raises(UserError, match="^a: eos_token_id: .* is not a token id"):
            check_ends(config, "a")


def test_settings_that_change_a_text_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for ends, own in (((2, 3), 3), ((), 3), ((2,), None)):
        note_settings("m", own, ends, {"top_k": 5, "min_length": 0})
    assert capsys.readouterr().err == ""
    note_settings("m", 30, range(20), {"num_beams": 4})
    said = capsys.readouterr().err
    assert "note: m: its generation config ends texts at 0, 1, 2, 3, 4, 5, 6, 7, …, not" in said
    assert "not at the tokenizer's 30" in said and "sets num_beams=4, which is not applied" in said


def config(method: str, **more: Any) -> dict[str, Any]:
    return {"model_type": "llama", "quantization_config": {"quant_method": method, **more}}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (config("gtpq"), "quant_method=gtpq.: Unknown quantization type"),
        ({"quantization_config": "gptq"}, "quantization_config='gptq' must be an object"),
        ({"quantization_config": {"bits": 4}}, "quant_method=None"),
    ],
)
def test_unknown_quantisation(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"target 'x': .*{says}"):
        check_quantised(values, "target 'x'")


@pytest.mark.skipif(find_spec("gptqmodel") is not None, reason="the package is installed")
def test_a_missing_package(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("awq", bits=4)))
    with pytest.raises(UserError, match="quant_method=awq.: .*pip install gptqmodel"):
        check_name(str(tmp_path))
    with pytest.raises(UserError, match="quant_method=awq"):
        check_quantised({"text_config": config("awq", bits=4)}, "x")
    check_quantised({"quantization_config": None}, "x")
