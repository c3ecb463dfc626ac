"""`python -m align.plan recipe=NAME …`: estimate time, memory and τ of a recipe before it runs.

Prints parameters, memory, time and expected τ, and names the keys to change if something does not
fit (exit code 1). The target's config.json is enough; if its weights are local, a short trial
measures the time.
"""

import sys

from align.config.parser import help_text, load_recipe
from specalign.common.commands import OptionParser
from specalign.common.errors import cli
from specalign.common.text import say

OPTIONS = """options of align.plan:
  --hardware NAME|GB    h100, h200, a100, a100-40, l40s, rtx4090, or a GPU's memory in GB;
                        default: this machine
  --no-pilot            skip the trial run on this machine; no time estimate
"""


def parser() -> OptionParser:
    p = OptionParser(prog="python -m align.plan", add_help=False)
    p.add_argument("--hardware")
    p.add_argument("--no-pilot", action="store_true")
    return p


@cli
def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help", "--help-all"} & {*words}:
        text = help_text("align.plan", __doc__ or "", every="--help-all" in words)
        say(f"{text}\n\n{OPTIONS}", end="")
        return
    options, rest = parser().parse_known_args(words)
    recipe = load_recipe(rest)
    # imported late: torch and transformers take seconds
    from align.planning.pilot import run_pilot, scale_seconds
    from align.planning.plan import find_hardware, find_local_hardware, make_plan, render_plan

    named = options.hardware
    hardware = find_hardware(named) if named else find_local_hardware(recipe)
    plan = make_plan(recipe, hardware)
    seconds = None
    if plan.target.has_weights and not (named or options.no_pilot or plan.misfits):
        say("running a short trial …", error=True)
        seconds = scale_seconds(recipe, plan.written, *run_pilot(recipe))
    say(render_plan(plan, seconds))
    if plan.misfits:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
