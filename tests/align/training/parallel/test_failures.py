"""A process that dies or stops responding ends the run with one error; the same command resumes."""

from pathlib import Path

import pytest

from tests.forks import train_in_forks

ROOT = Path(__file__).resolve().parents[4]


def arguments(output: Path, data: Path, *more: str) -> list[str]:
    own = [f"output={output}", f"data.path={data}", "target.device=cpu", "launch.devices=2"]
    return ["recipe=debug_block", *own, "trainer.checkpoint_every=2", *more]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "plant"), [("ddp", "1 dies"), ("fsdp", "1 sleeps")])
def test_others_do_not_wait(tmp_path: Path, debug_data: Path, strategy: str, plant: str) -> None:
    output = tmp_path / "two"
    more = (f"launch.strategy={strategy}", "trainer.max_steps=6", "launch.timeout=10")
    mine = arguments(output, debug_data, *more)
    done = train_in_forks(mine, tmp_path, 2, plant)
    assert done.returncode not in (0, None) and not (output / "drafter").exists(), done.stderr
    if plant == "1 sleeps":
        again = train_in_forks(mine, tmp_path, 2)
        assert again.returncode == 0 and "step-2.ckpt" in again.stderr
        assert (output / "drafter" / "model.safetensors").is_file()
