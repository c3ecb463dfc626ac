"""A pilot writes and trains with the run's own code, and leaves nothing behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.planning.memory import TextSize, read_text_size
from align.planning.pilot import Pilot, run_pilot, scale_seconds


@pytest.mark.parametrize(
    "words", [["recipe=debug_mdlm"], ["recipe=debug_block", "trainer.keep_features_gb=1"]]
)
def test_a_pilot(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    words = [*words, f"output={tmp_path / 'run'}", "data.batch_size=24"]
    recipe = load_recipe(words)
    pilot = run_pilot(recipe, read_text_size(recipe))
    assert recipe == load_recipe(words)
    assert not (tmp_path / "run").exists() and not list((tmp_path / "tmp").iterdir())
    assert pilot.text is not None and pilot.text.written == 0 and pilot.text.tokens > 20
    assert pilot.fresh > 0 and pilot.validation_row > 0 and pilot.sample > 0
    seconds = scale_seconds(recipe, pilot.text, pilot, 1.0)
    assert seconds.writing > 1.0 and seconds.training > 12 * min(pilot.fresh, pilot.stored)


def test_the_whole_run_is_scaled_by_counts() -> None:
    words = [
        "trainer.keep_features_gb=1",
        "trainer.max_steps=100",
        "trainer.validate_every=50",
        "data.batch_size=8",
    ]
    recipe = load_recipe(["recipe=debug_block", *words])
    pilot = Pilot(
        loading=2, preparing=3, sample=7, fresh=1.0, stored=0.5, validation_row=0.25, saving=4
    )
    text = TextSize(40, 0, 96 * 0.93, kept=0.5)  # forty rows: twenty steps read all of them
    seconds = scale_seconds(recipe, text, pilot, 1.0)
    assert seconds.writing == 1 + 2 + 80 * 7
    assert seconds.training == 1 + 2 + 3 + 20 * 1.0 + 80 * 0.5 + 2 * 4 * 0.25 + 17 * 4
    ended = load_recipe(["recipe=debug_block", *words, "trainer.max_minutes=0.5"])
    assert scale_seconds(ended, text, pilot, 1.0).training == 1 + 2 + 3 + 30
