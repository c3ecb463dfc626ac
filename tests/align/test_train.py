"""The commands `align.train` and `align.synthesize`: exit codes, and what they say."""

import json
import re
from pathlib import Path

import pytest

from align import synthesize
from align.train import main


def test_a_non_finite_loss_stops_the_run(
    tmp_path: Path, debug_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=debug_block", f"output={tmp_path}", f"data.path={debug_data}"]
    words += ["trainer.learning_rate=100", "trainer.weight_decay=1"]  # weights grow by 99 each step
    words += ["trainer.max_steps=40", "trainer.gradient_clip=0", "trainer.warmup_steps=0"]
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "is not finite" in capsys.readouterr().err


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing written that would keep the settings of a first try."""
    words = ["recipe=debug_block", f"output={tmp_path}/out"]
    with pytest.raises(SystemExit) as stop:
        synthesize.main([*words, "data.writer=openai:http://127.0.0.1:9"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


WORDS = ["recipe=debug_block", "trainer.max_steps=1", "trainer.warmup_steps=0"]
WORDS += ["data.samples=2", "trainer.anchors=8"]


def test_one_command_says_what_it_writes_and_refuses_other_keys_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "o"
    words = [*WORDS, "data.validation_fraction=0.5", f"output={output}"]
    main(words)
    out, err = capsys.readouterr()
    first = err.splitlines()[0]
    assert first.startswith(f"{output}/data lacks data: generating 2 samples, 2 at a time")
    assert "(data.write=never fails instead)" in first and "samples dropped: " in out
    assert re.search(r"/python[\d.]* -m decode.eval --suite builtin --target debug --drafter ", out)
    before = (output / "recipe.yaml").read_bytes()
    with pytest.raises(SystemExit):
        main([*words, "trainer.learning_rate=0.01"])
    assert "other settings (trainer.learning_rate was 0.0008, now 0.01)" in capsys.readouterr().err
    assert (output / "recipe.yaml").read_bytes() == before
    main([*words, "trainer.log_every=3"])  # which changes no weight
    resumed = f"resuming from {output}/checkpoints/step-1.ckpt, 1 of 1 steps"
    assert resumed in capsys.readouterr().err
    assert json.loads((output / "data/manifest.json").read_text())["samples"] == 2
