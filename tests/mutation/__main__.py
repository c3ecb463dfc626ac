"""Change a line at a time and see whether a test notices.

python -m tests.mutation                          # 120 mutants of four rooms: `make mutants`, four hours on two cores
python -m tests.mutation --rooms decode/engine --per-room 60 --seed 2
python -m tests.mutation --list                   # names, nothing is run

Each mutant lives in a copy of the tree. The tests of its module run first, then those of its room and of tests/contract,
then the others of its package, the slow ones last; the first failure kills it. Results go to runs/mutants.jsonl as they
come and are not sought again; delete the file to start anew. A survivor is killed by a new test or argued in
tests/mutation/equivalent.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
ROOMS = ("decode/speculation", "decode/engine", "decode/drafters", "align/losses")
COPIED = (
    "align",
    "decode",
    "tests",
    "recipes",
    "docs",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "Makefile",
)
LINKED = ("pretrained",)
OWN_LIMIT_S, LIMIT_S, SLOW_LIMIT_S = 600, 1200, 2700
"""A mutant under which its module's tests, other tests or slow tests take longer than this hangs: killed."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description="Which one-line changes do the tests notice?"
    )
    parser.add_argument("--rooms", default=",".join(ROOMS), help="folders, with commas between")
    parser.add_argument("--per-room", type=int, default=30, help="mutants of each, drawn with the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/mutants.jsonl")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    options = parser.parse_args()
    mutants = [m for room in options.rooms.split(",") for m in drawn(room, options.per_room, options.seed)]
    if options.list:
        print("\n".join(m.name for m in mutants))
        return 0
    return report(mutants, judged(mutants, options.workers, options.out))


def drawn(room: str, count: int, seed: int) -> list[Mutant]:
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / room).glob("*.py"))
    found = [m for path in files for m in mutants_of(ROOT, path)]
    return random.Random(f"{seed} {room}").sample(found, min(count, len(found)))


def judged(mutants: list[Mutant], workers: int, out: Path) -> dict[str, str]:
    """What became of each: the stage that killed it, or "survived"."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = out.read_text().splitlines() if out.exists() else []
    results = {row["mutant"]: row["result"] for row in map(json.loads, lines)}
    left = [m for m in mutants if m.name not in results and m.name not in EQUIVALENT]
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(workers) as pool, out.open("a") as log:
        copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(workers):
            copies.put(copy_of_the_tree(Path(scratch) / str(i)))

        def run(mutant: Mutant) -> tuple[Mutant, str, float]:
            copy, start = copies.get(), time.monotonic()
            try:
                return mutant, judge(copy, mutant), time.monotonic() - start
            finally:
                copies.put(copy)

        for i, (mutant, result, seconds) in enumerate(pool.map(run, left), 1):
            results[mutant.name] = result
            log.write(json.dumps({"mutant": mutant.name, "result": result}, ensure_ascii=False) + "\n")
            log.flush()
            print(
                f"{i}/{len(left)} {result} ({seconds:.0f} s) {mutant.path}:{mutant.line} {mutant.new.strip()}",
                flush=True,
            )
    return results


def copy_of_the_tree(to: Path) -> Path:
    to.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)
    for name in LINKED:
        (to / name).symlink_to(ROOT / name)
    return to


def judge(copy: Path, mutant: Mutant) -> str:
    path = copy / mutant.path
    source = path.read_text()
    for name, given, limit in stages(copy, mutant):
        path.write_text(mutant.applied(source))
        try:
            failed = fails(copy, given, limit)
        finally:
            path.write_text(source)
        if failed:
            check_unchanged(copy, tuple(given), limit)
            return name
    return "survived"


UNCHANGED: dict[tuple[str, ...], bool] = {}


def check_unchanged(copy: Path, given: tuple[str, ...], limit: int) -> None:
    """Tests that fail without a mutant too show nothing. Looked into once for each set of tests.

    Raises:
        SystemExit: they fail; the line names them.
    """
    if given not in UNCHANGED:
        UNCHANGED[given] = not fails(copy, list(given), limit)
    if not UNCHANGED[given]:
        raise SystemExit(f"error: {' '.join(given)} fails on the tree as it is: mend that first")


def stages(copy: Path, mutant: Mutant) -> Iterator[tuple[str, list[str], int]]:
    """The tests in the order in which they are likely to fail for the time that they take."""
    package, *rooms, module = Path(mutant.path).parts
    own, room = Path("tests", package, *rooms, f"test_{module}"), Path("tests", package, *rooms)
    if (copy / own).exists():
        yield "killed by its module's tests", [str(own), "-m", "not slow"], OWN_LIMIT_S
    near = [str(room), "tests/contract", *(["tests/decode/test_draws.py"] if package == "decode" else [])]
    yield "killed by its room's tests", [*near, "-m", "not slow", f"--ignore={own}"], LIMIT_S
    yield (
        "killed by its package's tests",
        [f"tests/{package}", "-m", "not slow", *(f"--ignore={n}" for n in near)],
        LIMIT_S,
    )
    yield "killed by a slow test", [f"tests/{package}", "tests/contract", "-m", "slow"], SLOW_LIMIT_S


def fails(copy: Path, given: list[str], limit: int) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *given]
    surroundings = {
        **os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    try:
        done = subprocess.run(command, cwd=copy, env=surroundings, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, 5)  # 5: no test is left here


def report(mutants: list[Mutant], results: dict[str, str]) -> int:
    survivors = [m for m in mutants if results.get(m.name) == "survived" and m.name not in EQUIVALENT]
    argued = [m for m in mutants if m.name in EQUIVALENT]
    for mutant in survivors:
        print(f"SURVIVED {mutant.path}:{mutant.line}\n  - {mutant.old.strip()}\n  + {mutant.new.strip()}")
    killed = len(mutants) - len(survivors) - len(argued)
    print(
        f"{len(mutants)} mutants: {killed} killed, {len(argued)} argued equivalent, {len(survivors)} survived"
    )
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
