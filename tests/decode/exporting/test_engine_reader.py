"""Engines' own classes are asked where they are installed; `test_ladder.py` and `test_reader.py` hold what they compute."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from align.common.errors import UserError
from align.target.model import Target
from decode.engine.compiled import stock_model
from decode.exporting.engine_reader import PackageReader, SpeculatorsReader, TransformersReader, package
from decode.exporting.ladder import replay
from decode.exporting.registry import FORMATS
from tests.builders import PROMPT, overfit_block_network

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


def test_calls_are_the_engines_own_and_a_head_with_a_bias_is_read_as_it_drafts(
    tmp_path: Path, target: Target
) -> None:
    """transformers drafts through the target's head, bias included; how many drafts were accepted is counted in its calls."""
    FORMATS["transformers"].write(overfit_block_network(target, PROMPT), tmp_path / "out", torch.float32, "")
    model = copy.deepcopy(stock_model(target))
    rows, generator = model.get_output_embeddings().weight, torch.Generator().manual_seed(1)
    head = torch.nn.Linear(rows.shape[1], rows.shape[0])
    with torch.no_grad():
        head.weight.copy_(rows)
        head.bias.copy_(torch.randn(len(rows), generator=generator))
    model.set_output_embeddings(head)
    reader, counts = TransformersReader(tmp_path / "out", model), list[list[int]]()
    for bias in (head.bias, torch.nn.Parameter(torch.zeros(len(rows)))):
        head.bias = bias
        tokens, accepted = reader.generate(PROMPT, 24)
        assert len(tokens) == 24 and len(accepted) + sum(accepted) == 23
        assert replay(reader, PROMPT, tokens) == accepted
        counts.append(accepted)
    assert max(counts[1]) > 1 and counts[0] != counts[1]
    assert not model._forward_pre_hooks
