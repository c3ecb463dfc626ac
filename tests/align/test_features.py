"""What `align.features` stores is what training reads: no call of the target, and the weights of a run that kept it in memory."""

from pathlib import Path

import pytest
import torch

from align import features
from align.outputs.cache import Row
from tests.builders import read_weights as weights
from tests.builders import train_debug_block as run


@pytest.mark.slow
def test_training_from_disk_is_training_from_memory(
    tmp_path: Path,
    debug_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["trainer.max_steps=6", "trainer.validate_every=6"]
    memory, disk, lazy = tmp_path / "memory", tmp_path / "disk", tmp_path / "lazy"
    run(memory, debug_data, *words, "trainer.keep_features_gb=1")
    stored = [*words, "trainer.features_gb=1"]
    run(lazy, debug_data, *stored)  # stores what it computes
    features.main(["recipe=debug_block", f"output={disk}", f"data.path={debug_data}", *stored])
    assert " rows, 0.00" in capsys.readouterr().out

    def never(*args: object) -> Row:
        raise AssertionError("the target is asked again")

    with monkeypatch.context() as patch:
        patch.setattr("align.outputs.cache.compute_row", never)
        run(disk, debug_data, *stored)
    one, two, three = weights(memory), weights(disk), weights(lazy)
    assert all(torch.equal(one[n], two[n]) and torch.equal(one[n], three[n]) for n in one)


def test_without_room_nothing_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        features.main(["recipe=debug_block"])
    assert "trainer.features_gb=0 stores nothing" in capsys.readouterr().err
