"""`python -m align.plan recipe=NAME …`: estimate time, memory and τ of a recipe before it runs.

Parameters, memory, time, expected τ, and what does not fit, with the key to change (exit code 1).
The target's config.json is enough. Where its weights are, a short pilot measures the time.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from align.config.parser import help_text, load_recipe
from align.config.preflight import check_file
from specalign.common.commands import OptionParser, path
from specalign.common.errors import UserError, cli
from specalign.common.files import write_json
from specalign.common.text import say

OPTIONS = """options of align.plan:
  --hardware NAME[xN]   h100, h200, a100, a100-40, l40s, rtx4090; h100x8 = eight of them; default: this machine
  --memory-gb X         memory of a device that is not listed
  --no-pilot            skip the trial run on this machine; no time estimate
  --json FILE           also write the plan as JSON
"""


def parser() -> OptionParser:
    """The options besides the recipe's keys."""
    p = OptionParser(prog="python -m align.plan", add_help=False)
    p.add_argument("--hardware")
    p.add_argument("--memory-gb", type=float)
    p.add_argument("--no-pilot", action="store_true")
    p.add_argument("--json", type=path)
    return p


@cli
def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help", "--help-all"} & {*words}:
        text = help_text("align.plan", __doc__ or "", every="--help-all" in words)
        say(f"{text}\n\n{OPTIONS}", end="")
        return
    options, rest = parser().parse_known_args(words)
    if options.memory_gb is not None and not 0 < options.memory_gb < 1e9:
        raise UserError(f"--memory-gb {options.memory_gb:g}: must be above 0")
    if options.json is not None:
        check_file(options.json, "--json")
    recipe = load_recipe(rest)
    start = time.monotonic()
    from align.planning import plan as planning

    importing = time.monotonic() - start
    is_here = options.hardware is None and options.memory_gb is None
    if options.hardware:
        hardware = planning.find_hardware(options.hardware)
    else:
        hardware = planning.find_local_hardware(recipe)
    if options.memory_gb is not None:
        hardware = replace(hardware, memory=options.memory_gb * 1e9)
    plan = planning.make_plan(recipe, hardware)
    if is_here and plan.target.has_weights and not options.no_pilot and not plan.misfits:
        plan = planning.measure_plan(plan, importing)
    say(planning.render_plan(plan))
    if options.json is not None:
        write_json(options.json, plan.to_dict())
    if plan.misfits:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
