"""Commands with hostile words, values, files and prompts: none may end in a traceback, hang, crash or raw control characters.

python -m tests.fuzz --minutes 10
python -m tests.fuzz --case 1234 --seed 0        # one again, with its output

All commands are called in one process, so that a case takes a tenth of a second. Case N of a seed is always the same. Each runs in a worker process, which is replaced when a case ends it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from align.common.text import say
from tests.fuzz.worker import fuzz


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Hostile input to every command."
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", type=int, help="so many, whatever the time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first case's number")
    parser.add_argument("--case", type=int, help="one case, with its output")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="fuzz-") as scratch:
        if options.case is not None:
            from tests.fuzz.cases import Corpus, run

            found = run(Corpus(Path(scratch)), options.seed, options.case, show=True)
            say(found or "nothing wrong")
            return bool(found)
        count, findings = fuzz(Path(scratch), options.seed, options.minutes, options.cases, options.first)
    for line in findings:
        say(line)
    say(f"{count} cases, {len(findings)} findings (seed {options.seed})")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
