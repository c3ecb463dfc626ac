"""`python -m align.sweep FILE.yaml [key=value …]`: run a W&B sweep's file here, without an account.

Trials of a grid, or drawn ones (--method random --count N). Each trial is a run of align.train in its own folder. The same command resumes a
sweep that was stopped. The table at the end has 95% intervals: over seeds where `seed` is swept, else of the held-out texts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from align.common.claims import Claim
from align.common.commands import OptionParser, path
from align.common.errors import UserError, cli, nearest
from align.common.files import expanded, write_text
from align.common.text import say
from align.sweeping.config import read_sweep
from align.sweeping.run import Plan, Stopped, run
from align.sweeping.table import table
from align.sweeping.trials import trials

SHIPPED = Path(__file__).resolve().parents[1] / "recipes" / "sweeps"


def parser() -> OptionParser:
    """The command's options."""
    p = OptionParser(
        prog="python -m align.sweep", description="Run a sweep in W&B's format here, without an account."
    )
    names = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.yaml")))
    p.add_argument("sweep", metavar="FILE", help=f"a sweep's .yaml, or a shipped one: {names}")
    p.add_argument("words", nargs="*", metavar="key=value", help="recipe keys of all trials")
    p.add_argument("--method", choices=("grid", "random"), help="default: the file's")
    p.add_argument(
        "--count", type=int, metavar="N", help="trials (default: the whole grid, or 10 drawn ones)"
    )
    p.add_argument("--seed", type=int, default=0, help="seed of drawn trials (default 0)")
    p.add_argument(
        "--wandb",
        action="store_true",
        help="trials also log to W&B where the file says so (default: metrics.csv alone)",
    )
    p.add_argument("--out", type=path, metavar="DIR", help="default runs/sweeps/NAME")
    return p


@cli
def main(argv: list[str] | None = None) -> None:
    options = parser().parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    if stray := next((word for word in options.words if "=" not in word), None):
        raise UserError(f"{stray!r} is not key=value")
    for name, least in (("count", 1), ("seed", 0)):
        if (value := getattr(options, name)) is not None and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    sweep = read_sweep(find(options.sweep), options.method)
    found = trials(sweep, options.count, options.seed)
    folder = options.out or Path("runs") / "sweeps" / sweep.name
    plan = Plan(folder, tuple(options.words), options.wandb)
    with Claim(folder, "--out"):
        say(f"{len(found)} trials of {sweep.name} in {folder}", error=True)
        try:
            results = run(sweep, found, plan, lambda line: say(line, error=True))
        except Stopped as stop:
            say(str(stop), error=True)
            raise SystemExit(130) from None
        page = table(sweep, found, results)
        write_text(folder / "sweep.md", page + "\n")
    say(f"{page}\n\n{folder / 'sweep.md'}")
    if failed := sum(bool(result.failed) for result in results):
        say(f"{failed} of {len(results)} trials failed; the same command tries them again", error=True)
        raise SystemExit(1)


def find(name: str) -> Path:
    """Find a file, or a shipped sweep by its name. Raises UserError where there is neither."""
    for place in (expanded(name), SHIPPED / f"{name}.yaml"):
        if place.is_file():
            return place
    raise UserError(
        f"sweep {name!r}: no such file{nearest(Path(name).stem, [p.stem for p in SHIPPED.glob('*.yaml')])}"
    )


if __name__ == "__main__":
    main()
