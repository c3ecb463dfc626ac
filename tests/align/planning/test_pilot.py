"""A trial writes and trains with the run's own code, and leaves nothing behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from align.common.errors import UserError
from align.config.parser import load_recipe
from align.planning.pilot import Pilot, batch_seconds, pilot, piloted_seconds, step_seconds
from align.planning.text import TextSize, text_size
from align.training.base_module import Interrupted, NonFiniteLoss


@pytest.mark.parametrize(
    "words",
    [["recipe=debug_block"], ["recipe=debug_mdlm"], ["recipe=debug_block", "trainer.keep_features_gb=1"]],
)
def test_a_trial_of_each_kind(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    recipe = load_recipe([*words, f"output={tmp_path / 'run'}"])
    before = load_recipe([*words, f"output={tmp_path / 'run'}"])
    found = pilot(recipe, text_size(recipe))
    assert recipe == before and not (tmp_path / "run").exists() and not list((tmp_path / "tmp").iterdir())
    assert found.text is not None and found.text.there == 0 and found.text.tokens > 20
    assert found.fresh > 0 and found.validation_row > 0 and found.alive[0] == 1.0
    assert all(a >= b for a, b in zip(found.alive, found.alive[1:], strict=False))
    seconds = piloted_seconds(recipe, found.text, found, 1.0)
    assert seconds.writing > 1.0 and seconds.training > 12 * min(found.fresh, found.known)


def test_data_that_are_there_are_read(debug_data: Path, tmp_path: Path) -> None:
    recipe = load_recipe(["recipe=debug_block", f"data.path={debug_data}", f"output={tmp_path}"])
    before = {p.name: p.read_bytes() for p in debug_data.iterdir() if p.name != "index.safetensors"}
    found = pilot(recipe, text_size(recipe))
    assert found.text is None and found.fresh > 0
    assert piloted_seconds(recipe, text_size(recipe), found, 1.0).writing == 0
    assert {p.name: p.read_bytes() for p in debug_data.iterdir() if p.name in before} == before


@pytest.mark.parametrize(
    ("raised", "becomes"),
    [
        (Interrupted("stopped by a signal after step 1; a checkpoint is saved"), KeyboardInterrupt),
        (NonFiniteLoss("the loss at step 1 is not finite; its batch is in a folder"), UserError),
    ],
)
def test_a_trial_that_stops_ends_as_a_command_does(
    raised: Exception,
    becomes: type[BaseException],
    debug_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not as training does: nothing is left of it to go on with."""

    def stops(*args: object, **options: object) -> None:
        raise raised

    monkeypatch.setattr("align.planning.pilot.fit", stops)
    recipe = load_recipe(["recipe=debug_block", f"output={tmp_path}", f"data.path={debug_data}"])
    with pytest.raises(becomes) as found:
        pilot(recipe, text_size(recipe))
    assert "its batch" not in str(found.value) and "checkpoint" not in str(found.value)


def test_a_batch_is_the_sum_of_its_steps() -> None:
    found = Pilot(alive=[1.0, 1.0, 0.9, 0.5, 0.0], costs={1: 1.0, 10: 10.0}, slope=0.1)
    assert step_seconds(found, 5.5, 2) == pytest.approx(5.5 + 1.1)
    # ten rows, ten, nine that still sit among ten, then five
    assert batch_seconds(found, 10) == pytest.approx(10 + 11 + 12 + (5 + 1.5))


def test_the_whole_run_is_scaled_by_counts() -> None:
    recipe = load_recipe(
        [
            "recipe=debug_block",
            "trainer.keep_features_gb=1",
            "trainer.max_steps=100",
            "trainer.validate_every=50",
        ]
    )
    found = Pilot(loading=2, preparing=3, fresh=1.0, known=0.5, validation_row=0.25, saving=4)
    text = TextSize(40, 40, 96 * 0.93)  # forty rows: twenty steps read them all
    assert (
        piloted_seconds(recipe, text, found, 1.0).training
        == 1 + 2 + 3 + 20 * 1.0 + 80 * 0.5 + 2 * 4 * 0.25 + 17 * 4
    )
