"""The launchers of docs/scale.md start CPU processes, at tiny size, as it is written there."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import read_metric, read_weights
from tests.forks import ONE_THREAD

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8").partition("## Start a run")[2]
SIZES = {"recipe": "debug_block", "trainer.batch_size": "2", "target.device": "cpu"}
SIZES |= {"trainer.max_steps": "2", "trainer.warmup_steps": "1"}


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "processes"), [("torchrun", "2"), ("deepspeed", "1")])
def test_a_line_of_the_page(
    tmp_path: Path, debug_data: Path, launcher: str, processes: str
) -> None:
    output = tmp_path / "two"
    lines = PAGE.partition("\n## ")[0].splitlines()
    (line,) = [x for x in lines if x.startswith(f"    {launcher} ")]
    before, _, after = line.partition("  #")[0].partition("align.train ")
    options = dict(word.split("=", 1) for word in shlex.split(after))
    options |= SIZES | {"output": str(output), "data.path": str(debug_data)}
    options["launch.devices"] = processes
    words = [f"{key}={value}" for key, value in options.items()]
    env = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    name = "--master-port" if launcher == "torchrun" else "--master_port"
    own = shlex.split(before.replace("8", processes))[1:]
    command = [launcher, name, port, *own, "align.train", *words]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert read_weights(output) and len(read_metric(output)) == 2
