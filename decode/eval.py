"""`python -m decode.eval --suite mtbench`: how much faster, with what certainty, and is the output the same?

Plain decoding and the methods (`--methods all`: every system whose drafter is given) run side by side on every prompt. Each record
is written to `--out` at once; summary, page and table are made from the records (decode/report.py).
"""

from __future__ import annotations

import shlex
import sys
from argparse import BooleanOptionalAction, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from align.common.claims import Claim
from align.common.commands import command
from align.common.errors import UserError, cli
from align.common.terminal import PlainConsole
from align.folder.chat import Chat
from align.target.debug import DEBUG
from align.target.names import check_given
from decode.benchmark.config import TUNING_PROMPTS, TUNING_SUITE, EvalConfig
from decode.benchmark.folder import check_early
from decode.benchmark.plan import DEFAULT_METHODS, buildable, checked_names, make_plan
from decode.cli import Parser, path, whole
from decode.method_names import COMBINED, DRAFTER, LOOKUP, PLAIN
from decode.methods.drafter_spec import check_named, given_drafters
from decode.methods.options import DraftOptions
from decode.methods.registry import ROLES, SYSTEMS
from decode.methods.spec import listing
from decode.suites.registry import GROUPS, SUITES, prompts_of, resolve
from decode.suites.sources import Loaded


def parser() -> Parser:
    """The command's options."""
    p = Parser(
        prog="python -m decode.eval",
        description="Measure speed-up, acceptance and losslessness against plain decoding.",
        epilog=f"example: python -m decode.eval --suite mtbench,coding --limit 20\n\n{listing()}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    p.stray = " (suites follow --suite, methods --methods)"
    add = p.add_argument
    drafter = "the drafter's folder (default: the shipped one, for the default target), or several: KIND=FOLDER,… with "
    methods = ", ".join(dict.fromkeys([*DEFAULT_METHODS, *SYSTEMS]))
    tune = (
        f"first choose the best setting of every method, among --sweep's values or the system's own, on N built-in prompts "
        f"(5 to 40, default {TUNING_PROMPTS}); drafter and combined have one setting"
    )
    p.add_prompt_options(f"a comma list of {', '.join(SUITES)}; groups {', '.join(GROUPS)} (default builtin)")
    add("--limit", type=whole(1), metavar="N", help="N prompts of each suite, evenly spread")
    p.add_target_options()
    p.add_chat_options()
    add("--drafter", help=f"{drafter}the kinds {', '.join(ROLES)}")
    add(
        "--methods",
        help=f"a comma list of {methods}, each with its options, or all; plain is always measured",
    )
    add(
        "--sweep",
        nargs="+",
        default=[],
        metavar="KEY=V,V",
        help="every combination: gamma=4,8,16 steps=1,2,4",
    )
    add("--tune", type=whole(5), nargs="?", const=TUNING_PROMPTS, metavar="N", help=tune)
    p.add_drafting_options("how the methods drafter and combined draft (--draft-tokens: every method)")
    p.add_sampling_options("of sampling, the order of methods and the intervals (default 0)")
    add(
        "--max-new-tokens",
        type=whole(1),
        default=128,
        metavar="N",
        help="length limit of an output (default 128)",
    )
    add(
        "--repeats",
        type=whole(1, 1000),
        default=1,
        metavar="N",
        help="generations per prompt and method (default 1)",
    )
    add("--warmup", type=whole(0, 1000), default=1, metavar="N", help="untimed rounds first (default 1)")
    add("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's own choice)")
    add("--out", type=path, metavar="DIR", help="default runs/eval/SUITE-SETTINGS")
    add(
        "--resume",
        action=BooleanOptionalAction,
        default=True,
        help="continue what --out holds, or replace it",
    )
    add("--no-hf-check", action="store_true", help="skip timing transformers' own generate")
    return p


def read_config(arguments: Sequence[str]) -> EvalConfig:
    """The command line as a config. Raises UserError for what is mistyped."""
    typed = vars(parser().parse_args(arguments))
    return EvalConfig(drafting=DraftOptions.out_of(typed), **typed)


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exit code 1 when an output changed beyond rounding, 2 for an input that can't be used."""
    words = sys.argv[1:] if arguments is None else arguments
    config, console = read_config(words), PlainConsole(wide=True)
    with Claim(config.out, "--out") if config.out else nullcontext():
        summary, folder = evaluate(config, console, shlex.join(["python", "-m", "decode.eval", *words]))
    from decode.reporting.render import print_report

    print_report(summary, folder, console, sources=False)  # `evaluate` has named them
    console.say(next_step(summary, config), wrap=False)
    if summary["bugs"]:
        raise SystemExit(1)


def evaluate(config: EvalConfig, console: PlainConsole, typed: str = "") -> tuple[dict[str, Any], Path]:
    """Measure what the config asks for; returns the summary and the folder that holds it.

    Raises:
        UserError: an input that can't be used, before anything is measured.
        SystemExit: exit code 1, --tune found an output that changed beyond rounding.
    """

    def say(lines: Sequence[str], before: str = "") -> None:
        for line in lines:
            console.say(f"{before}{line}", wrap=not before)

    suites, skipped = check(config)
    from decode.benchmark.session import begin
    from decode.benchmark.tuning import OutputChanged, tuned

    plan, left_out = make_plan(config, lambda line: say([line]))
    skipped += left_out
    say([suite.describe() for suite in suites])
    say(skipped, "left out: ")
    if config.tune is None:
        decoders, lines = buildable(config, plan)
        say(lines, "left out: ")
        skipped += lines
    else:
        try:
            config, plan, decoders = tuned(config, plan, console, typed)
        except OutputChanged as found:
            say([str(found)])
            raise SystemExit(1) from None
    return begin(config, plan, decoders, suites, skipped, console, typed).finish()


def check(config: EvalConfig) -> tuple[list[Loaded], list[str]]:
    """The prompts, and a line for each suite that is left out. Checks whatever can be checked before torch is imported.

    Raises:
        UserError: what is misspelt or not there.
    """
    names = checked_names(config.methods)
    config.sampling  # noqa: B018  (refuses numbers out of their range)
    check_given(config.target, config.device, config.dtype)
    chosen = () if config.prompts else resolve(config.suite or "builtin")
    if config.tune and TUNING_SUITE in {suite.name for suite, _ in chosen}:
        raise UserError(
            f"--tune chooses on the prompts of {TUNING_SUITE}: measure on others (--suite mtbench, or --prompts FILE)"
        )
    check_early(config)
    given_drafters(config.drafter)
    check_named(names or [], config.drafter, config.target)
    return prompts_of(config.suite, config.prompts, config.data_dir, config.limit, config.prompts_column)


def next_step(summary: dict[str, Any], config: EvalConfig) -> str:
    """What to type next."""
    if summary["bugs"]:
        return f"Next: the page names each difference; {command('decode.verify')} looks closer"
    if config.target in DEBUG:
        return f"Next: measure a real target; {config.target} is random:  {command('decode.eval', '--suite', 'mtbench')}"
    target = ("--target", config.target) if config.target else ()
    drafter = ("--drafter", config.drafter) if config.drafter else ()
    chat = Chat(config.template_kwargs, config.system).arguments
    able = {
        name: figures
        for name, figures in summary["overall"].items()
        if name.partition(":")[0] not in (PLAIN, LOOKUP) and not figures["lossy"]
    }
    if not able:
        name = (f"target.name={config.target}",) if config.target else ()
        return (
            f"Next: train a drafter for this target:  {command('align.train', 'recipe=block', *name, 'output=runs/mine')}\n"
            f"      then give it with --drafter:  {command('decode.eval', *target, '--drafter', 'runs/mine/drafter')}"
        )
    default = (DRAFTER, COMBINED)  # which decode.generate takes by itself
    best = max(able, key=lambda name: (name in default, able[name]["speedup"] or 0.0))
    if (able[best]["speedup_lo"] or able[best]["speedup"] or 0) > 1:
        method = () if best in default else ("--method", best)
        return f'Next: use it:  {command("decode.generate", *target, *drafter, *method, *chat)} "your prompt"'
    methods = ("--methods", config.methods) if config.methods else ()
    return (
        "Next: train it further (align.train with more trainer.max_steps), or see where it helps:  "
        + command("decode.eval", *target, *drafter, *methods, *chat, "--suite", "coding,math")
    )


if __name__ == "__main__":
    main()
