"""The shipped sweep, under the real `wandb sweep` and `wandb agent`, against a stand-in on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from align.config.parser import load_recipe
from align.config.recipe_files import FOLDER
from align.training.loggers import MetricsFile, find_run_id
from specalign.common.errors import UserError
from tests.wandb_stand_in import StandIn

SWEEP = FOLDER / "sweeps" / "block_objective.yaml"
TRIALS = (
    {"objective.weighting": "uniform", "trainer.learning_rate": 0.0004},
    {"objective.weighting": "d_pace", "trainer.learning_rate": 0.0008},
)


def environment(folder: Path, url: str) -> dict[str, str]:
    """What a user's shell has, with the stand-in for a service and `python` of this environment first on the path."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(FOLDER.parent),
        "HOME": str(folder),
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": "0" * 40,
        "WANDB_ENTITY": "nobody",
        "WANDB_PROJECT": "drafters",
        "WANDB_ERROR_REPORTING": "false",  # nothing leaves this machine
        "OMP_NUM_THREADS": "1",
    }


def wandb(words: list[str], folder: Path, url: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "wandb", *words],
        cwd=folder,
        env=environment(folder, url),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    return output


@pytest.mark.slow
def test_agent_runs_each_trial_of_the_sweep_in_its_own_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with StandIn(*TRIALS) as service:
        wandb(["sweep", str(SWEEP)], tmp_path, service.url)
        output = wandb(["agent", "--count", "2", "nobody/drafters/sweep1"], tmp_path, service.url)
    assert yaml.safe_load(service.config) == yaml.safe_load(SWEEP.read_text())
    operations = [operation for operation, _ in service.asked]
    assert (
        operations.index("UpsertSweep")
        < operations.index("CreateAgent")
        < operations.index("Heartbeat")
    )
    assert service.run_states[0] == {}  # idle; then the trial runs
    assert {"trial1": True} in service.run_states and {"trial2": True} in service.run_states
    sweep = tmp_path / "runs" / "debug_block" / "sweep1"
    for name, trial in zip(("trial1", "trial2"), TRIALS, strict=True):
        run = sweep / name
        recipe = load_recipe([f"recipe={run / 'recipe.yaml'}"])
        found = (recipe.objective.weighting, recipe.trainer.learning_rate)
        assert found == tuple(trial.values()), output
        assert recipe.trainer.logger == ["wandb"]
        assert recipe.data.path == "runs/debug_block/data"  # written once
        assert (run / "drafter" / "model.safetensors").is_file(), output
        assert MetricsFile(run / "metrics.csv").read()
        assert list(run.glob("wandb/offline-run-*")), "the run was not logged offline"
    assert output.count("holds no data: the target writes") == 1


def test_a_run_goes_on_under_its_own_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    first = find_run_id(tmp_path, fresh=False)
    assert find_run_id(tmp_path, fresh=False) == first != find_run_id(tmp_path, fresh=True)
    monkeypatch.setenv("WANDB_RUN_ID", "agents")
    assert find_run_id(tmp_path, fresh=False) == "agents"
    monkeypatch.delenv("WANDB_RUN_ID")
    assert find_run_id(tmp_path, fresh=False) == "agents"  # the run that the agent began


@pytest.mark.parametrize(
    ("raw", "steps"),
    [
        (b"step,a\n1,2.0\n\xff\xfe,\x00\n", ["1"]),
        ("step,a\n²,1.0\n3,1.0\n".encode(), ["3"]),
        (b"step,a\n" + b"9" * 5000 + b",1.0\n4,1.0\n", ["4"]),
        (b"", []),
    ],
)
def test_damaged_metrics_are_left_out_line_by_line(
    tmp_path: Path, raw: bytes, steps: list[str]
) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(raw)
    assert [row["step"] for row in MetricsFile(path).read()] == steps
    MetricsFile(path).rewind(9)


def test_a_broken_id_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    for raw in (b"\xff\xfe", b"a\x1b[31m", b"../x", b"a\nb"):
        (tmp_path / "wandb-run-id").write_bytes(raw)
        with pytest.raises(UserError, match="wandb-run-id: not the id"):
            find_run_id(tmp_path, False)
    (tmp_path / "wandb-run-id").write_text("abc-1\n")
    assert find_run_id(tmp_path, False) == "abc-1"
