"""Commands are killed between two file operations, rerun, and end as an undisturbed run does."""

import csv
import hashlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specalign.lm.loading import load_target
from tests.builders import saved_taps_drafter
from tests.forks import fork_server

STEPS = (
    "output=out data.path=DATA trainer.max_steps=6 trainer.checkpoint_every=2 "
    "trainer.validate_every=4 trainer.ema=0.9 trainer.anchors=8 trainer.validation_rows=2"
)
PAIR = "--target debug --device cpu --drafter INPUTS/drafter --out out"
COMMANDS = {
    "synthesize": "align.synthesize recipe=debug_block output=out data.samples=6 data.batch_size=24",
    "train": f"align.train recipe=debug_block {STEPS}",
    "train a diffusion drafter": f"align.train recipe=debug_mdlm {STEPS}",
    "features": f"align.features recipe=debug_taps {STEPS} trainer.features_gb=0.1",
    "eval": f"decode.eval {PAIR} --dtype float32 --prompts INPUTS/p.jsonl "
    "--methods lookup,drafter --max-new-tokens 6 --no-hf-check",
    "export": f"decode.export {PAIR} --format dflash,speculators --no-check",
}
KILLS = [(0.5, 0.3), (0.9,)]
"""Where the runs of a command are killed one after another, as a share of an undisturbed run's file operations."""
CHANGES = (
    "open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree",
)  # fmt: skip
TIMES = re.compile(
    r"seconds|per_s(econd)?$|speedup|_ms$|_share$|^against_first$|started|load|spread|verdict"
    r"|sha256|sizes|^states$|^python$|^numpy$"
)
"""Keys whose values depend on the clock."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    saved_taps_drafter(folder / "drafter", load_target("debug", "float32", "cpu"))
    prompts = ["Say one one one.", "Why is the sky blue?"]
    (folder / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in prompts)
    )
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_commands_resume(name: str, inputs: Path, debug_data: Path, tmp_path: Path) -> None:
    words = COMMANDS[name].replace("INPUTS", str(inputs)).replace("DATA", str(debug_data)).split()
    code, operations = run(words, tmp_path / "whole")
    assert code == 0, (tmp_path / "whole/log").read_text()
    expected = read_results(tmp_path / "whole/out")
    for number, points in enumerate(KILLS):
        folder = tmp_path / str(number)
        for point in points:
            code, _ = run(words, folder, kill_at=max(1, int(point * operations)))
            assert code == -signal.SIGKILL, (folder / "log").read_text()
            if (folder / "out").exists():
                read_results(folder / "out")  # nothing is torn
        code, _ = run(words, folder)
        log = (folder / "log").read_text()
        assert code == 0 and "Traceback" not in log, log
        assert read_results(folder / "out") == expected
        assert not any((folder / "tmp").iterdir())


def run(words: list[str], folder: Path, kill_at: int = 0) -> tuple[int, int]:
    """A command's exit code, and how many file operations it did."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    process = fork_server().Process(target=run_forked, args=(words, str(folder), kill_at))
    process.start()
    process.join(300)
    process.kill()
    process.join()
    count = folder / "count"
    return process.exitcode or 0, int(count.read_text()) if count.exists() else 0


def run_forked(words: list[str], folder: str, kill_at: int) -> None:
    """In the forked process: run the command, and kill it before file operation number `kill_at`."""
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))  # noqa: SIM115
    os.environ["TMPDIR"], tempfile.tempdir = f"{folder}/tmp", None
    main = importlib.import_module(words[0]).main
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in CHANGES or not isinstance(arguments[0], str | Path):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if os.path.abspath(arguments[0]).startswith(f"{folder}/out"):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    main(words[1:])
    Path("count").write_text(str(count))


def read_results(folder: Path) -> dict[str, Any]:
    """What each file holds, without what depends on the clock. Raises where one is torn."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix in READERS:
            found[name] = drop_times(READERS[path.suffix](path))
        elif path.is_file():
            found[name] = None
    return found


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


READERS: dict[str, Callable[[Path], Any]] = {
    ".safetensors": load_file,
    ".ckpt": lambda path: torch.load(path, weights_only=True),
    ".json": lambda path: json.loads(path.read_text()),
    ".jsonl": lambda path: [json.loads(line) for line in path.read_text().splitlines()],
    ".csv": read_table,
}


def drop_times(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        raw = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return str(value.dtype), tuple(value.shape), hashlib.sha256(raw).hexdigest()
    if isinstance(value, Mapping):
        return {str(k): drop_times(v) for k, v in value.items() if not TIMES.search(str(k))}
    if isinstance(value, list | tuple):
        return [drop_times(v) for v in value]
    return repr(value)
