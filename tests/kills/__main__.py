"""Commands are killed at any moment and run again, and find their disk full: nothing is lost, and nothing is said but lines.

python -m tests.kills --kills 300 --full-disks 60 --seed 0
python -m tests.kills --kills 200 --full-disks 0 --only synthesize features train sweep
python -m tests.kills --point kill-17 --seed 0       # one again

Every point ends in a comparison with the undisturbed run. A process is forked from this one, which has imported torch and
all else that takes seconds; that it ends as a fresh one does is checked first. Linux alone; full disks need the right to mount.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from align.common.text import say

ALONE = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
    "JE_ARROW_MALLOC_CONF": "background_thread:false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline", "PYTHONHASHSEED": "0",
}  # fmt: skip
"""With these no library starts a thread when it is imported, which a fork would lose."""


MODULES = (
    "align.features", "align.outputs.store", "align.plan", "align.planning.pilot", "align.planning.plan", "align.planning.render", "align.sweep",
    "align.synthesize", "align.train", "align.training.run", "align.writing.served", "datasets", "decode.advise", "decode.advising.run", "decode.benchmark.session", "decode.eval", "decode.export", "decode.exporting.parity", "httpx2",
    "decode.verification.pair", "decode.verification.run", "decode.systems.load", "decode.reporting.render", "decode.verify",
    "torch.utils.tensorboard", "transformers.models.llama.modeling_llama",
)  # fmt: skip


def main() -> int:
    options = _parser().parse_args()
    if any(os.environ.get(name) != value for name, value in ALONE.items()):
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.kills", *sys.argv[1:]], {**os.environ, **ALONE}
        )
    import_all()
    from tests.kills.points import Place

    root = Path(tempfile.mkdtemp(prefix="kills-"))
    me = os.getpid()
    try:
        points = [f"kill-{i}" for i in range(options.kills)] + [
            f"disk-{i}" for i in range(options.full_disks)
        ]
        points = options.point or points
        place = Place(root, not options.no_fresh and not options.point, options.only)
        try:
            findings = _run(place, points, options.seed)
        finally:
            place.close()
    finally:
        if os.getpid() == me and not options.keep:
            shutil.rmtree(root, ignore_errors=True)
    return bool(findings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description="Kills and full disks.")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--full-disks", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--point", nargs="+", help="these alone: kill-N, disk-N")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="WORD", help="scenarios whose name holds one of these"
    )
    parser.add_argument("--no-fresh", action="store_true", help="do not compare with fresh processes first")
    parser.add_argument("--keep", action="store_true", help="leave the folder of the last point")
    return parser


def import_all() -> None:
    """What commands import when they run."""
    for name in MODULES:
        importlib.import_module(name)


def _run(place: object, points: list[str], seed: int) -> list[str]:
    """All points; what was found."""
    from tests.kills.points import Place, full_disk, kill

    assert isinstance(place, Place)
    findings, counts, begun = [], {"kill": 0, "disk": 0}, time.monotonic()
    for i, point in enumerate(points, 1):
        kind, _, number = point.partition("-")
        said: list[str] = []
        try:
            found = {"kill": kill, "disk": full_disk}[kind](place, seed, int(number), said.append)
        except (subprocess.CalledProcessError, PermissionError) as error:
            why = getattr(error, "stderr", None) or error
            say(f"full disks are left out: no disk can be mounted here ({why})")
            break
        except RuntimeError as error:
            found = str(error)
        counts[kind] += 1
        line = f"{i}/{len(points)} {point} · {' · '.join(said)}"
        say(f"{line} · {'FOUND: ' + found if found else 'ok'}")
        if found:
            findings.append(point)
            say(f"   again: python -m tests.kills --seed {seed} --point {point}")
    say(
        f"{counts['kill']} kills, {counts['disk']} full disks, {len(findings)} findings (seed {seed}, "
        f"{(time.monotonic() - begun) / 60:.0f} minutes){': ' + ', '.join(findings) if findings else ''}"
    )
    return findings


if __name__ == "__main__":
    sys.exit(main())
