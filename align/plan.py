"""`python -m align.plan recipe=NAME …`: what a recipe will cost, before it starts.

Parameters, operations, bytes in memory and on disk, hours, expected τ, price; what does not fit is said, with the key to change, and the
exit code is 1. The target's config.json suffices. On this machine, with the weights here, a short trial measures the time;
--hardware plans for another one.
"""

from __future__ import annotations

import argparse
import sys
import time

STARTED = time.monotonic()

from align.common.commands import OptionParser, path  # noqa: E402
from align.common.errors import UserError, cli  # noqa: E402
from align.common.files import remove_parts, write_json  # noqa: E402
from align.common.provenance import load_average, machine  # noqa: E402
from align.common.text import say  # noqa: E402
from align.config.parser import help_text, load_recipe  # noqa: E402
from align.config.preflight import check_file  # noqa: E402
from align.config.recipe import Recipe  # noqa: E402
from align.planning.hardware import named_hardware  # noqa: E402

OPTIONS = """options of align.plan:
  --hardware NAME[xN]      h100, h200, a100, a100-40, l40s, rtx4090; h100x8 = eight of them; default: this machine's processor
  --memory-gb, --tflops, --bandwidth-gbs X   figures of a device that is not in the list, or instead of the stated ones
  --utilisation X          share of the peak that is reached (default 0.3)
  --rate X                 price of a device and hour
  --no-pilot               no trial on this machine: hours from operations alone
  --json FILE              the plan as JSON, too
"""


def parser() -> OptionParser:
    """The options beside the recipe's words."""
    p = OptionParser(prog="python -m align.plan", add_help=False)
    p.add_argument("--hardware")
    for name in ("--memory-gb", "--tflops", "--bandwidth-gbs", "--utilisation", "--rate"):
        p.add_argument(name, type=float)
    p.add_argument("--no-pilot", action="store_true")
    p.add_argument("--json", type=path)
    return p


@cli
def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help", "--help-all"} & {*words}:
        say(f"{help_text('align.plan', __doc__ or '', every='--help-all' in words)}\n\n{OPTIONS}", end="")
        return
    options, rest = parser().parse_known_args(words)
    check(options)
    if options.json is not None:
        check_file(options.json, "--json")
        remove_parts(options.json)
    recipe = load_recipe(rest)
    fits = plan_and_say(recipe, options)
    if not fits:
        raise SystemExit(1)


def check(options: argparse.Namespace) -> None:
    """Raises UserError for a number that makes no sense, or unknown hardware."""
    for name in ("memory_gb", "tflops", "bandwidth_gbs", "utilisation", "rate"):
        value, key = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is not None and not 0 < value < 1e9:
            raise UserError(f"{key} {value:g}: must be above 0")
    if options.utilisation is not None and options.utilisation > 1:
        raise UserError(f"--utilisation {options.utilisation:g}: a share of the peak, at most 1")
    if options.hardware:
        named_hardware(options.hardware)


def plan_and_say(recipe: Recipe, options: argparse.Namespace) -> bool:
    """Print the plan; whether everything fits."""
    # only now: torch and transformers take seconds to import
    from align.planning.hardware import this_processor, with_stated
    from align.planning.pilot import pilot, piloted_seconds
    from align.planning.plan import add_hours, make_plan
    from align.planning.render import render

    starting = time.monotonic() - STARTED
    stated = (options.memory_gb, options.tflops, options.bandwidth_gbs)
    hardware = with_stated(
        named_hardware(options.hardware) if options.hardware else this_processor(), *stated
    )
    plan = make_plan(recipe, hardware)
    tried = plan.target.weights_here and not hardware.gpu and not options.no_pilot and not any(stated)
    if tried and not plan.misfits:
        say("a short trial: some samples, some steps …", error=True)
        found = pilot(recipe, plan.text)
        if found.text is not None:
            plan = make_plan(recipe, hardware, found.text)
        plan.seconds = piloted_seconds(recipe, plan.text, found, starting)
        load, cores = load_average(), machine()["cores"]
        if load is not None and load > 1.5 * cores:
            plan.notes.append(
                f"the machine was not idle while it was tried (load {load:.1f} on {cores} cores)"
            )
    else:
        add_hours(plan, options.utilisation or 0.3)
    say(render(plan, options.rate))
    if options.json is not None:
        write_json(options.json, plan.as_dict())
    return not plan.misfits


if __name__ == "__main__":
    main()
