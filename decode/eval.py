"""`python -m decode.eval --suite mtbench`: how much faster, with what certainty, and is the output the same?

Plain decoding and the methods (`--methods all`: every system whose drafter is there) run side by side on every prompt. Records go to `--out` as they
come; the summary, the page and the table are made from them (decode/report.py).
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
from align.common.errors import UserError, cli
from align.common.terminal import PlainConsole
from decode.benchmark.config import TUNING_PROMPTS, TUNING_SUITE, EvalConfig
from decode.benchmark.folder import check_early
from decode.benchmark.plan import DEFAULT_METHODS, buildable, checked_names, make_plan
from decode.cli import TRUST_HELP, VERIFIER_HELP, Parser, number, path, whole
from decode.method_names import PLAIN
from decode.methods.drafter_spec import given_drafters
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
    names = f"{', '.join(SUITES)}; groups {', '.join(GROUPS)}; comma lists"
    add = p.add_argument
    add("--suite", help=f"{names} (default builtin)")
    add("--prompts", type=path, metavar="FILE", help="your own: .jsonl .json .csv .parquet .txt")
    add("--data-dir", type=path, metavar="DIR", help="local copies of the benchmarks, in the hub's layout")
    add("--target", help="hub id, folder, file.gguf or debug (default SmolLM2-135M-Instruct)")
    add(
        "--drafter",
        help="the drafter's folder (default: the shipped one, for the default target); or several: KIND=FOLDER,… with "
        f"the kinds {', '.join(ROLES)}",
    )
    add(
        "--methods",
        help=f"comma list of {', '.join(dict.fromkeys([*DEFAULT_METHODS, *SYSTEMS]))}, each with its options "
        "(specdiff:gamma=16:steps=4), or all; plain is always measured",
    )
    add(
        "--sweep",
        nargs="+",
        default=[],
        metavar="KEY=V,V",
        help="every combination of these options: gamma=4,8,16 steps=1,2,4",
    )
    add(
        "--tune",
        type=whole(5),
        nargs="?",
        const=TUNING_PROMPTS,
        metavar="N",
        help=f"first choose the setting of every system named (drafter and combined have none) on N built-in prompts "
        f"(default {TUNING_PROMPTS}, 5 to 40), among --sweep's values or the system's own",
    )
    add("--draft-tokens", type=whole(1, 4096), metavar="K", help="draft at most K tokens ahead")
    add(
        "--tree-nodes",
        type=whole(0, 4096),
        metavar="N",
        help="the drafter's tokens a call, branching; 0 = a chain; default: 5 up to temperature 0.7, else 0",
    )
    add(
        "--drafter-tokenizer",
        help="of `drafter`, a standalone one whose vocabulary is not the target's",
    )
    add(
        "--steps",
        type=whole(1, 4096),
        default=1,
        metavar="T",
        help="of `drafter`, a standalone one: passes that unmask a draft (default 1)",
    )
    add(
        "--order",
        default="left_to_right",
        help="in which order: left_to_right (default), blockwise, random, confidence",
    )
    add("--verifier", default="auto", help=f"of drafter and combined: {VERIFIER_HELP}")
    add("--limit", type=whole(1), metavar="N", help="N prompts of each suite, evenly spread")
    add("--max-new-tokens", type=whole(1), default=128, metavar="N", help="default 128")
    add("--temperature", type=number, default=0.0, help="0 = greedy (default)")
    add("--top-p", type=number, default=1.0, help="keep the most probable tokens up to this mass")
    add("--top-k", type=whole(0), default=0, help="keep this many most probable tokens; 0 = all")
    add(
        "--seed", type=whole(0, 2**63 - 1), default=0, help="of sampling, the order of methods, the intervals"
    )
    add("--repeats", type=whole(1, 1000), default=1, metavar="N", help="generations per prompt and method")
    add(
        "--warmup", type=whole(0, 1000), default=1, metavar="N", help="untimed rounds before the first prompt"
    )
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's own choice)")
    add("--out", type=path, metavar="DIR", help="default runs/eval/SUITE-SETTINGS")
    add(
        "--resume",
        action=BooleanOptionalAction,
        default=True,
        help="continue what --out holds, or replace it",
    )
    add("--trust-remote-code", action="store_true", help=TRUST_HELP)
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

    print_report(summary, folder, console)
    console.say(next_step(summary, config), wrap=False)
    if summary["bugs"]:
        raise SystemExit(1)


def evaluate(config: EvalConfig, console: PlainConsole, command: str = "") -> tuple[dict[str, Any], Path]:
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

    config.sampling  # noqa: B018  (which may be out of its range)
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
            config, plan, decoders = tuned(config, plan, console, command)
        except OutputChanged as found:
            say([str(found)])
            raise SystemExit(1) from None
    return begin(config, plan, decoders, suites, skipped, console, command).finish()


def check(config: EvalConfig) -> tuple[list[Loaded], list[str]]:
    """The prompts, and a line for each suite that is left out: all that can be asked before the libraries are imported that
    running a model takes.

    Raises:
        UserError: what is misspelt or not there.
    """
    checked_names(config.methods)
    chosen = () if config.prompts else resolve(config.suite or "builtin")
    if config.tune and TUNING_SUITE in {suite.name for suite, _ in chosen}:
        raise UserError(
            f"--tune chooses on the prompts of {TUNING_SUITE}: measure on others (--suite mtbench, or --prompts FILE)"
        )
    check_early(config)
    given_drafters(config.drafter)
    return prompts_of(config.suite, config.prompts, config.data_dir, config.limit)


def next_step(summary: dict[str, Any], config: EvalConfig) -> str:
    """What to type next."""
    if summary["bugs"]:
        return "Next: the page names each difference; python -m decode.verify looks closer"
    target = f" --target {shlex.quote(config.target)}" if config.target else ""
    drafter = f" --drafter {shlex.quote(config.drafter)}" if config.drafter else ""
    trained = {
        name: f
        for name, f in summary["overall"].items()
        if name.partition(":")[0] not in (PLAIN, "lookup") and not f["lossy"]
    }
    if not trained:
        return (
            "Next: train a drafter for this target:  python -m align.train --help\n"
            f"      then:  python -m decode.eval{target} --drafter FOLDER"
        )
    best = max(trained, key=lambda name: (name in ("drafter", "combined"), trained[name]["speedup"] or 0.0))
    if (trained[best]["speedup_lo"] or trained[best]["speedup"] or 0) > 1:
        method = "" if best in ("drafter", "combined") else f" --method {shlex.quote(best)}"
        return f'Next: use it:  python -m decode.generate{target}{drafter}{method} "your prompt"'
    methods = f" --methods {shlex.quote(config.methods)}" if config.methods else ""
    return (
        "Next: train it further (python -m align.train --help), or see where it helps:  "
        f"python -m decode.eval{target}{drafter}{methods} --suite coding,math"
    )


if __name__ == "__main__":
    main()
