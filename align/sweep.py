"""`python -m align.sweep FILE.yaml [key=value …]`: run a W&B sweep file on this machine, without an
account.

Runs the grid, or random trials (--method random --count N), each in its own folder. Rerun the
command to resume: finished trials are skipped, failed ones run again. The table has 95% intervals,
over seeds if `seed` is swept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from align.sweeping.run import list_trials, read_pairs, read_sweep, render_table, run_sweep
from specalign.common.claims import Claim
from specalign.common.commands import OptionParser, path
from specalign.common.errors import UserError, cli, nearest
from specalign.common.files import expand_path, write_text
from specalign.common.text import say

SHIPPED = Path(__file__).resolve().parents[1] / "recipes" / "sweeps"


def parser() -> OptionParser:
    p = OptionParser(
        prog="python -m align.sweep",
        description="Run a W&B sweep file on this machine, without an account.",
    )
    names = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.yaml")))
    p.add_argument(
        "sweep", metavar="FILE", help=f"a sweep's .yaml file, or a shipped sweep: {names}"
    )
    p.add_argument("words", nargs="*", metavar="key=value", help="recipe keys for all trials")
    p.add_argument("--method", choices=("grid", "random"), help="default: the file's")
    p.add_argument(
        "--count", type=int, metavar="N", help="trials (default: the whole grid, or 10 random ones)"
    )
    p.add_argument("--seed", type=int, default=0, help="seed of random trials (default 0)")
    p.add_argument("--out", type=path, metavar="DIR", help="default runs/sweeps/NAME")
    return p


@cli
def main(argv: list[str] | None = None) -> None:
    options = parser().parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    for word in options.words:
        if "=" not in word:
            raise UserError(f"{word!r} is not key=value")
    sweep = read_sweep(find_sweep(options.sweep), options.method)
    trials = list_trials(sweep, options.count, options.seed)
    folder = options.out or Path("runs") / "sweeps" / sweep.name
    with Claim(folder, "--out"):
        say(f"{len(trials)} trials of {sweep.name} in {folder}", error=True)
        results = run_sweep(sweep, trials, folder, read_pairs(options.words))
        page = render_table(sweep, results)
        write_text(folder / "sweep.md", page + "\n")
    say(f"{page}\n\n{folder / 'sweep.md'}")
    failed = sum(bool(result.failed) for result in results)
    if failed:
        say(
            f"{failed} of {len(results)} trials failed; rerun the command to retry them", error=True
        )
        raise SystemExit(1)


def find_sweep(name: str) -> Path:
    """A file, or a shipped sweep by its name. Raises UserError if there is neither."""
    for place in (expand_path(name), SHIPPED / f"{name}.yaml"):
        if place.is_file():
            return place
    shipped = [place.stem for place in SHIPPED.glob("*.yaml")]
    raise UserError(f"sweep {name!r}: no such file{nearest(Path(name).stem, shipped)}")


if __name__ == "__main__":
    main()
