"""A measurement's folder holds its settings; other settings are another measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from specalign.common.errors import UserError
from tests.measurements import run_eval as run

pytestmark = pytest.mark.usefixtures("no_plots")


def test_another_corpus_is_another_measurement(prompts: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "c.txt"
    corpus.write_text("one two three")
    words: tuple[object, ...] = ("--prompts", prompts, "--out", tmp_path / "o")
    words += ("--methods", f"retrieval:corpus={corpus}")
    run(*words)
    run(*words)
    corpus.write_text("three two one")
    with pytest.raises(UserError, match="holds a measurement under other settings .corpus_hash"):
        run(*words)
