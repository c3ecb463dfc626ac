"""Engines' own classes are asked where they are installed; `test_ladder.py` and `test_reader.py` hold what they compute."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from align.common.errors import UserError
from decode.exporting.engine_reader import PackageReader, SpeculatorsReader, TransformersReader, package

HERE = importlib.util.find_spec("dflash") is not None


def test_a_package_is_asked_for_where_it_is() -> None:
    assert TransformersReader.installed() and PackageReader.installed() == HERE
    assert SpeculatorsReader.installed() == (importlib.util.find_spec("speculators") is not None)


@pytest.mark.skipif(HERE, reason="the package is installed")
def test_a_package_that_is_not_installed_says_what_to_type() -> None:
    with pytest.raises(UserError, match="pip install dflash"):
        package()


def test_code_in_a_folder_is_not_run_whatever_standard_input_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "other", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 4))
    head = torch.nn.Linear(2, 2)
    model = SimpleNamespace(
        device=torch.device("cpu"), get_input_embeddings=lambda: head, get_output_embeddings=lambda: head
    )
    with pytest.raises(UserError, match="code of its own"):
        TransformersReader(tmp_path, model)
    assert not (tmp_path / "ran").exists()
