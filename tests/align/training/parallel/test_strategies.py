"""Two CPU processes give the single process's losses, under DDP, FSDP2 and every ZeRO stage, and resume where they stopped."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from align.training import checkpoints
from tests.builders import read_metric as losses
from tests.builders import same_drafter, train_debug_block
from tests.forks import train_in_forks

ROOT = Path(__file__).resolve().parents[4]
WORDS = ("target.device=cpu", "trainer.ema=0.9")

pytestmark = pytest.mark.slow  # processes of their own


def start(
    output: Path, data: Path, *words: str, steps: int = 6, processes: int = 1
) -> subprocess.CompletedProcess[str]:
    """As a launcher does that starts every process itself."""
    return train_in_forks(full(output, data, *words, steps=steps), output.parent, processes)


def full(output: Path, data: Path, *words: str, steps: int) -> list[str]:
    own = (f"output={output}", f"data.path={data}", f"trainer.max_steps={steps}")
    return ["recipe=debug_block", *WORDS, *own, *words]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, debug_data: Path) -> Path:
    output = tmp_path_factory.mktemp("launch") / "alone"
    train_debug_block(output, debug_data, *WORDS, "trainer.max_steps=6")
    return output


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [("ddp", False), ("fsdp", False), ("deepspeed_1", False), ("deepspeed_3", True)],
)
def test_two_processes_train_like_one(
    tmp_path: Path, debug_data: Path, alone: Path, strategy: str, offload: bool
) -> None:
    """The second ZeRO stage is in `test_zero_resumes`."""
    output = tmp_path / "two"
    words = (f"launch.strategy={strategy}", "launch.devices=2", f"launch.offload={offload}")
    done = start(output, debug_data, *words, processes=2)
    assert done.returncode == 0, done.stderr
    # sums over two processes round differently: 1e-6 is far below the losses, which begin at 0.2
    assert losses(output) == pytest.approx(losses(alone), rel=1e-5, abs=1e-6)
    assert same_drafter(output, alone)


def test_zero_resumes(tmp_path: Path, debug_data: Path) -> None:
    output = tmp_path / "two"
    same = ("trainer.min_learning_rate_ratio=1", "trainer.warmup_steps=1")
    words = ("launch.strategy=deepspeed_2", "launch.devices=2", "trainer.checkpoint_every=3", *same)
    # the first half of the same schedule, then the rest
    half = start(output, debug_data, *words, steps=3, processes=2)
    assert half.returncode == 0, half.stderr
    rest = start(output, debug_data, *words, processes=2)
    assert rest.returncode == 0 and "resuming from" in rest.stderr, rest.stderr
    whole = tmp_path / "whole"
    train_debug_block(whole, debug_data, *WORDS, "trainer.max_steps=6", *same)
    assert losses(output) == pytest.approx(losses(whole), rel=1e-5, abs=1e-6)


class Planted:
    """Unpickled, it leaves a file behind."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def __reduce__(self) -> Any:
        return Path.touch, (self.at,)


def test_zero_does_not_run_what_a_checkpoint_holds(tmp_path: Path, debug_data: Path) -> None:
    output, ran = tmp_path / "two", tmp_path / "ran"
    words = ("launch.strategy=deepspeed_2", "trainer.checkpoint_every=3")
    assert start(output, debug_data, *words, steps=3).returncode == 0
    checkpoint = output / "checkpoints" / "step-3.ckpt"
    for file in checkpoint.rglob("*.pt"):
        torch.save({**torch.load(file, weights_only=False), "planted": Planted(ran)}, file)
    os.replace(checkpoint, checkpoints.part(checkpoint))
    checkpoints.seal(checkpoint, checkpoints.read_seal(checkpoint))
    for resume in ("auto", checkpoint):
        again = start(output, debug_data, *words, f"trainer.resume={resume}")
        assert not ran.exists() and "is not unpickled" in again.stderr, again.stderr
        assert again.returncode == 2
