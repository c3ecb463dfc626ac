"""Change a line at a time and see whether a test notices.

python -m tests.mutation                          # 120 mutants of four rooms: `make mutants`
python -m tests.mutation --rooms decode/engine --per-room 60 --seed 2
python -m tests.mutation --only Engine._commit    # of these mutants, those with this in their name
python -m tests.mutation --list                   # names, nothing is run

While a mutant is alive, one folder of tests after the other is run on the tree as it is, and recorded with the lines that each
test executes. Then every mutant that is still alive, in a copy of the tree, meets those that execute its line, until one fails;
at most two minutes of each folder at a time. All goes to runs/mutants/, a folder for each state of the code, and nothing is done
twice: after an interruption it goes on, and with new tests only their files are recorded and run against the survivors.
A survivor is killed by a new test or argued in tests/mutation/equivalent.py.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from tempfile import TemporaryDirectory

from align.common.text import say
from tests.mutation import choice, recording
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.forks import warm_up
from tests.mutation.judging import Timed, copy_of_the_tree, judge
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.recording import Test

ROOT = Path(__file__).parents[2]
ROOMS = ("decode/speculation", "decode/engine", "decode/drafters", "align/losses")


@dataclass
class Fate:
    """What became of a mutant: what killed it, or the keys of the tests that it survived."""

    killed: str = ""
    survived: set[str] = field(default_factory=set)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description="Which one-line changes do the tests notice?"
    )
    parser.add_argument("--rooms", default=",".join(ROOMS), help="folders, with commas between")
    parser.add_argument("--per-room", type=int, default=30, help="mutants of each, drawn with the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="those alone whose name holds this")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/mutants")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    options = parser.parse_args()
    rooms = options.rooms.split(",")
    drawn = [m for room in rooms for m in drawn_from(room, options.per_room, options.seed)]
    mutants = [m for m in drawn if options.only in m.name]
    if options.list:
        say("\n".join(m.name for m in mutants))
        return 0
    warm_up()
    tests: list[Test] = []
    with TemporaryDirectory() as scratch, get_context("fork").Pool(options.workers) as pool:
        root = copy_of_the_tree(ROOT, Path(scratch))  # as it is now, whatever is edited meanwhile
        tree = partial(copy_of_the_tree, root, Path(scratch))
        folder = options.out / recording.key_of_the_tree(root)
        folder.mkdir(parents=True, exist_ok=True)
        fates = read_fates(folder / "fates.jsonl")
        for i, tests_of in enumerate(recording.FOLDERS, 1):
            if not alive(mutants, fates):
                break
            tests += recorded(root, folder, tests_of, pool, tree)
            # a mutant does not meet other rooms' tests before its own
            ripe = [m for m in mutants if m.tests not in recording.FOLDERS[i:]]
            judge_all(ripe, tests, fates, folder / "fates.jsonl", pool, tree)
    return report(mutants, tests, fates)


def drawn_from(room: str, count: int, seed: int) -> list[Mutant]:
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / room).glob("*.py"))
    found = [m for path in files for m in mutants_of(ROOT, path)]
    return random.Random(f"{seed} {room}").sample(found, min(count, len(found)))


def recorded(root: Path, folder: Path, tests_of: str, pool: Pool, tree: Callable[[], Path]) -> list[Test]:
    files = recording.files_in(root, tests_of)
    left = [path for path in files if not recording.recorded_to(folder, root, path).exists()]
    start = time.monotonic()
    for i, path in enumerate(pool.imap_unordered(partial(_record, folder, tree), left), 1):
        say(f"{tests_of}: recorded {i}/{len(left)} ({time.monotonic() - start:.0f} s) {path}")
    found = [test for path in files for test in recording.read(recording.recorded_to(folder, root, path))]
    for test in found:
        if not test.passed:
            say(f"left out: {test.name} does not pass on the tree as it is")
    return [test for test in found if test.passed]


def _record(folder: Path, tree: Callable[[], Path], path: str) -> str:
    recording.record(folder, tree(), path, ROOMS)
    return path


def judge_all(
    mutants: list[Mutant],
    tests: list[Test],
    fates: dict[str, Fate],
    out: Path,
    pool: Pool,
    tree: Callable[[], Path],
) -> None:
    """Runs what these tests have not yet been run against, and adds it to the fates."""
    keys, left = {test.name: test.key for test in tests}, []
    for mutant in mutants:
        fate = fates.setdefault(mutant.name, Fate())
        fresh = [t for t in choice.reaching(ROOT, mutant, tests) if t.key not in fate.survived]
        if fresh and not fate.killed and mutant.name not in EQUIVALENT:
            batches = choice.batches(mutant, fresh)
            left.append((mutant, [{test.name: test.seconds for test in batch} for batch in batches]))
    with out.open("a") as log:
        for i, done in enumerate(pool.imap_unordered(partial(_judge, tree), left), 1):
            mutant, killed, survived, seconds = done
            row = {"mutant": mutant.name, "killed": killed, "survived": [keys[name] for name in survived]}
            log.write(json.dumps(row, ensure_ascii=False) + "\n")
            log.flush()
            fates[mutant.name].killed = killed
            fates[mutant.name].survived.update(row["survived"])
            what = f"killed: {killed}" if killed else f"survived {len(survived)} tests"
            say(f"{i}/{len(left)} ({seconds:.0f} s) {mutant.name}\n    {what}")


def _judge(
    tree: Callable[[], Path], work: tuple[Mutant, list[Timed]]
) -> tuple[Mutant, str, list[str], float]:
    start = time.monotonic()
    return work[0], *judge(tree(), *work), time.monotonic() - start


def read_fates(path: Path) -> dict[str, Fate]:
    fates: dict[str, Fate] = {}
    for row in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        fate = fates.setdefault(row["mutant"], Fate())
        fate.killed = row["killed"]
        fate.survived.update(row["survived"])
    return fates


def alive(mutants: list[Mutant], fates: dict[str, Fate]) -> list[Mutant]:
    """Those that neither a test nor an argument has done away with."""
    return [m for m in mutants if m.name not in EQUIVALENT and not fates.get(m.name, Fate()).killed]


def report(mutants: list[Mutant], tests: list[Test], fates: dict[str, Fate]) -> int:
    argued, left = [m for m in mutants if m.name in EQUIVALENT], alive(mutants, fates)
    for mutant in left:
        keys = {test.key for test in choice.reaching(ROOT, mutant, tests)}
        met = f"survived {len(keys & fates[mutant.name].survived)} of {len(keys)} tests"
        say(f"{mutant.path}:{mutant.line} {met if keys else 'no test reaches it'}")
        say(f"  - {mutant.old.strip()}\n  + {mutant.new.strip()}")
    killed = len(mutants) - len(left) - len(argued)
    say(f"{len(mutants)} mutants: {killed} killed, {len(argued)} argued equivalent, {len(left)} alive")
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())
