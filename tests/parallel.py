"""One recipe under every way of spreading it over processes, on this machine: losses, memory, checkpoints, a kill, going on, the drafter.

    python -m tests.parallel                               # two CPU processes, all ways
    python -m tests.parallel --only ddp,fsdp --out DIR     # some of them; what lies in DIR is not run again
    python -m tests.parallel --words recipe=debug_taps     # another recipe

Each way trains the same steps twice. The first run is undisturbed. Of the second, rank 1 is killed (SIGKILL) after its first checkpoint;
the run must end with one line, and the same command go on. Losses are compared with a single process's. Memory is the most that a process held of
its own (RssAnon) between two steps, beyond what it held after importing everything.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import shutil
import socket
import sys
import time
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from align.common.errors import cli
from align.common.text import say

WAYS = {
    "single": "",
    "ddp": "launch.strategy=ddp",
    "fsdp": "launch.strategy=fsdp",
    "fsdp, offload": "launch.strategy=fsdp launch.offload=true",
    "deepspeed_1": "launch.strategy=deepspeed_1",
    "deepspeed_2": "launch.strategy=deepspeed_2",
    "deepspeed_3": "launch.strategy=deepspeed_3",
    "deepspeed_3, offload": "launch.strategy=deepspeed_3 launch.offload=true",
    "ddp, target fsdp": "launch.strategy=ddp target.parallel=fsdp",
    "ddp, target tp": "launch.strategy=ddp target.parallel=tp",
}
STEPS, EVERY = 8, 3
COMMON = "launch.accelerator=cpu trainer.ema=0.9 trainer.log_every=1 trainer.warmup_steps=2"
RECIPE = "recipe=debug_sedd drafter.hidden_size=512 drafter.layers=4 drafter.heads=8 drafter.cond_dim=128 trainer.anchors=4"
"""Weights enough (14M) for memory to tell the ways apart; a target so small that its own is nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/parallel"))
    parser.add_argument("--only", help="names of ways, with commas")
    parser.add_argument("--words", default=RECIPE, help="further words of the recipe")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    chosen = [*WAYS] if options.only is None else ["single", *options.only.split(",")]
    for name in dict.fromkeys(chosen):
        path = options.out / f"{name}.json"
        if not path.is_file():
            found = measure(name, options.out, options.words, options.steps)
            path.write_text(json.dumps(found, indent=2) + "\n")
            say(f"{name}: {found}", error=True)
    say(table(options.out))


def measure(name: str, out: Path, words: str, steps: int) -> dict[str, Any]:
    """Run one way, undisturbed and killed."""
    processes = 1 if name == "single" else 2
    data = out / "data"
    common = [
        *COMMON.split(),
        *words.split(),
        *WAYS[name].split(),
        f"data.path={data}",
        f"launch.devices={processes}",
    ]
    common += [
        f"trainer.max_steps={steps}",
        f"trainer.checkpoint_every={EVERY}",
        f"trainer.validate_every={steps}",
    ]
    whole, killed = out / name / "whole", out / name / "killed"
    shutil.rmtree(out / name, ignore_errors=True)
    found: dict[str, Any] = {"memory": run(common, processes, whole)}
    found["losses"] = losses(whole)
    newest = max((whole / "checkpoints").glob("step-*.ckpt"), key=lambda p: p.stat().st_mtime)
    files = [newest] if newest.is_file() else [p for p in newest.rglob("*") if p.is_file()]
    found["checkpoint"], found["files"] = sum(p.stat().st_size for p in files), len(files)
    tensors = load_file(str(whole / "drafter" / "model.safetensors"))
    found["drafter"] = {n: [float(t.float().sum()), float(t.float().abs().max())] for n, t in tensors.items()}
    found["parameters"] = sum(t.numel() for t in tensors.values())
    if processes > 1:
        found["end"], found["seconds"] = kill(common, killed)
        run(common, processes, killed)
        found["again"] = losses(killed)
        mine = load_file(str(killed / "drafter" / "model.safetensors"))
        found["same"] = all(
            float((mine[n].float() - t.float()).abs().max()) <= 1e-2 * float(t.float().abs().max())
            for n, t in tensors.items()
        )
    return found


def start(words: list[str], processes: int, output: Path, slow: bool = False) -> list[BaseProcess]:
    """The processes of a run, as a launcher starts them, forked from one that has imported everything."""
    output.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    found: list[BaseProcess] = []
    for rank in range(processes):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        env = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if processes > 1 else {}
        rest = ([*words, f"output={output}"], env, str(output / f"stderr.{rank}"), slow)
        found.append(server().Process(target=one_rank, args=rest))
        found[-1].start()
    return found


def run(words: list[str], processes: int, output: Path) -> list[int]:
    """Bytes of each process, from a run that must end well."""
    first, *others = start(words, processes, output)
    first.join()
    if first.exitcode:
        for other in others:
            other.kill()
        raise SystemExit(
            f"{' '.join(words)} ended with {first.exitcode}\n{(output / 'stderr.0').read_text()[-3000:]}"
        )
    for other in others:
        other.join()
    return [int(path.read_text()) for path in sorted(output.glob("memory.*"))]


def kill(words: list[str], output: Path) -> tuple[list[str], float]:
    """What the run says after rank 1 was killed, and after how many seconds it has ended."""
    first, victim = start(words, 2, output, slow=True)
    while not (output / "checkpoints" / f"step-{EVERY}.json").exists() and first.is_alive():
        time.sleep(0.05)
    victim.kill()
    begun = time.monotonic()
    first.join()
    seconds, errors = time.monotonic() - begun, (output / "stderr.0").read_text()
    said = [line for line in errors.splitlines() if line.startswith("error:")]
    if first.exitcode != 1 or "Traceback" in errors:
        raise SystemExit(f"{' '.join(words)}: ended with {first.exitcode}\n{errors[-3000:]}")
    return said, seconds


def one_rank(words: list[str], env: dict[str, str], errors: str, slow: bool) -> None:
    """`align.train`; it also writes how much memory it held, to memory.RANK of the output folder. `slow`: with time to be killed."""
    for stream, path in ((1, os.devnull), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))  # noqa: SIM115
    os.environ |= env
    from align.train import main as train
    from align.training.base_module import DrafterModule

    base, seen, before = held(), [0], DrafterModule.on_train_batch_start

    def began(module: Any, *args: Any) -> None:
        seen.append(held())
        if slow:
            time.sleep(1.0)
        before(module, *args)

    DrafterModule.on_train_batch_start = began  # type: ignore[method-assign]
    train(words)
    output = Path(next(w for w in words if w.startswith("output=")).removeprefix("output="))
    (output / f"memory.{os.environ.get('RANK') or 0}").write_text(str(max(seen) - base))


@cache
def server() -> ForkServerContext:
    """Where processes are forked from: it imported torch, Lightning and DeepSpeed, which takes ten seconds a process."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "transformers", "datasets", "deepspeed", "align.training.run", "lightning.pytorch"]
    )
    return context


def held() -> int:
    """Bytes that this process holds of its own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def losses(output: Path) -> list[float]:
    with (output / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]


def table(folder: Path) -> str:
    """All results that are there, as Markdown."""
    single = json.loads((folder / "single.json").read_text())
    lines = [
        "| | loss, largest difference | memory of a process, MiB | checkpoint, MiB (files) | rank 1 killed: the run ended | gone on: loss, largest difference | one drafter file |",
        "|---|---|---|---|---|---|---|",
    ]

    def apart(found: list[float]) -> str:
        pairs = zip(found, single["losses"], strict=True)
        return f"{max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs):.0e}"

    for name in WAYS:
        path = folder / f"{name}.json"
        if not path.is_file():
            continue
        found = json.loads(path.read_text())
        memory = " / ".join(f"{n / 2**20:.1f}" for n in found["memory"])
        size = f"{found['checkpoint'] / 2**20:.1f} ({found['files']})"
        same = found["drafter"].keys() == single["drafter"].keys()
        cells = ["–", "–"]
        if "end" in found:
            cells = [f"{len(found['end'])} line, {found['seconds']:.0f} s", apart(found["again"])]
            same = same and found["same"]
        title = name
        for key, value in (
            ("deepspeed_", "ZeRO-"),
            ("fsdp", "FSDP2"),
            ("ddp", "DDP"),
            ("tp", "tensor parallel"),
        ):
            title = title.replace(key, value)
        lines.append(
            f"| {title} | {apart(found['losses'])} | {memory} | {size} | {cells[0]} | {cells[1]} | {'yes' if same else 'NO'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    cli(main)()
