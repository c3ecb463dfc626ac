"""A measurement's folder holds its settings; other settings are another measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decode.evaluation.records import read_run
from specalign.common.errors import UserError
from tests.measurements import run_eval as run

pytestmark = pytest.mark.usefixtures("no_plots")


def test_another_corpus_is_another_measurement(prompts: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "c.txt"
    corpus.write_text("one two three")
    words = (
        "--prompts",
        prompts,
        "--out",
        tmp_path / "o",
        "--methods",
        f"retrieval:corpus={corpus}",
    )
    run(*words)
    run(*words)
    corpus.write_text("three two one")
    with pytest.raises(UserError, match="holds a measurement under other settings .corpus_hash"):
        run(*words)


def test_the_resolved_settings_are_kept(prompts: Path, tmp_path: Path) -> None:
    _, folder = run(
        "--prompts",
        prompts,
        "--out",
        tmp_path / "o",
        "--methods",
        "plain",
        "--seed",
        3,
        "--limit",
        1,
    )
    settings = read_run(folder).settings
    assert (settings["seed"], settings["limit"], settings["dtype"], settings["device"]) == (
        3,
        1,
        "float32",
        "cpu",
    )
    assert settings["threads"] == torch.get_num_threads()
