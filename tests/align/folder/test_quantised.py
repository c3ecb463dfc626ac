"""A quantised checkpoint whose package or device is not there is one line, said from config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from align.common.errors import UserError
from align.folder import quantised
from align.folder.quantised import METHODS, check_quantised, quantisation
from align.target.names import check_name


def config(method: str, **more: Any) -> dict[str, Any]:
    return {"model_type": "llama", "quantization_config": {"quant_method": method, **more}}


def test_every_method_of_transformers_is_known() -> None:
    theirs = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING}
    assert theirs - {*METHODS} == {"gguf"}  # a file's own kind, which no folder has


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.modules])
def test_a_missing_package_is_named_with_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda module: None)
    method = METHODS[name]
    with pytest.raises(UserError) as caught:
        check_quantised(config(name), "target 'mine'")
    said = str(caught.value)
    start = f"target 'mine': its weights are quantised by {method.title} (config.json: quant_method={name}), which needs"
    assert said.startswith(start) and "\n" not in said
    assert f"pip install {method.install}" in said and method.modules[0] in said
    assert said.endswith("(it runs on a GPU alone)") is method.gpu


def test_a_package_that_is_there_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda module: module)
    for name, method in METHODS.items():
        check_quantised(config(name), "t")
        check_quantised(config(name), "t", "cuda")
        if method.gpu:
            with pytest.raises(UserError, match="runs on a GPU alone, and the device is cpu"):
                check_quantised(config(name), "t", "cpu")
        else:
            check_quantised(config(name), "t", "cpu")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            config("gtpq"),
            "quantised by 'gtpq' .config.json: quant_method., which is unknown .did you mean 'gptq'",
        ),
        (config("modelopt"), "quantised by 'modelopt'.*which is unknown"),
        ({"quantization_config": "gptq"}, "config.json: quantization_config='gptq' must be an object"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method=None must be text"),
    ],
)
def test_what_no_quantisation_is(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"target 'x': .*{says}"):
        check_quantised(values, "target 'x'")


def test_where_it_stands() -> None:
    """In a wrapper it may stand in the text model's part; bitsandbytes has an older spelling."""
    assert quantisation({}) is None and quantisation({"quantization_config": None}) is None
    assert quantisation({"text_config": config("awq")}) == "awq"
    assert quantisation({"quantization_config": {"load_in_4bit": True}}) == "bitsandbytes"


def test_the_older_key_of_compressed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers passes it over, and would take integers for weights."""
    old: dict[str, Any] = {"compression_config": {"format": "int-quantized", "config_groups": {}}}
    said = r"^t: its weights are quantised by compressed-tensors .config.json: compression_config., "
    for values in (old, {"text_config": old}):
        assert quantisation(values) == "compressed-tensors"
        for there, more in (
            (None, "which needs .*: pip install compressed-tensors$"),
            ("x", "a key .*: rename it to quantization_config$"),
        ):
            monkeypatch.setattr(quantised, "find_spec", lambda module, there=there: there)
            with pytest.raises(UserError, match=said + more):
                check_quantised(values, "t")
    with pytest.raises(UserError, match="compression_config='x' must be an object"):
        quantisation({"compression_config": "x"})
    assert quantisation(config("awq") | old) == "awq"


def test_a_folder_is_refused_by_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what commands check before torch is imported."""
    monkeypatch.setattr(quantised, "find_spec", lambda module: None)
    (tmp_path / "config.json").write_text(json.dumps(config("gptq", bits=4)))
    with pytest.raises(
        UserError, match="needs the packages optimum and gptqmodel: pip install optimum gptqmodel"
    ):
        check_name(str(tmp_path))
