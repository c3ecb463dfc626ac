"""A quantised checkpoint whose package or device is missing is refused from its config.json."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.folder.quantised import check_quantised
from specalign.lm.names import check_name


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
