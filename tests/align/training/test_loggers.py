"""The shipped sweep, under the real `wandb sweep` and `wandb agent`, against a stand-in on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from align.config.parser import FOLDER, load_recipe
from tests.wandb_stand_in import StandIn

SWEEP = FOLDER / "sweeps" / "block_objective.yaml"
TRIAL = {"objective.weighting": "uniform", "trainer.learning_rate": 0.0004}


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
def test_agent_runs_the_sweep_as_written(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with StandIn(TRIAL) as service:
        wandb(["sweep", str(SWEEP)], tmp_path, service.url)
        output = wandb(["agent", "--count", "1", "nobody/drafters/sweep1"], tmp_path, service.url)
    assert yaml.safe_load(service.config) == yaml.safe_load(SWEEP.read_text())
    operations = [operation for operation, _ in service.asked]
    assert operations.index("UpsertSweep") < operations.index("CreateAgent") < operations.index("Heartbeat")
    assert service.run_states[0] == {}  # idle; then the trial runs
    assert {"trial1": True} in service.run_states
    run = tmp_path / "runs" / "debug_block"
    recipe = load_recipe([f"recipe={run / 'recipe.yaml'}"])
    assert (recipe.objective.weighting, recipe.trainer.learning_rate) == ("uniform", 0.0004), output
    assert recipe.trainer.logger == ["wandb"]
    assert (run / "drafter" / "model.safetensors").is_file(), output
    assert list(run.glob("wandb/offline-run-*")), "the run was not logged offline"
