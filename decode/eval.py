"""`python -m decode.eval --suite mtbench`: measure the speed-up, and check that the output is
unchanged.

Plain decoding and the methods (`--methods all`: every system whose drafter is given) run side by
side on every prompt. Each record is written to `--out` at once; summary, page and table are made
from the records (decode/report.py).
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import BooleanOptionalAction, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from decode.cli import Parser, list_systems, parse_whole, path, pop_drafting, pop_sampling
from decode.evaluation.config import (
    DEFAULT_METHODS,
    TUNING_PROMPTS,
    TUNING_SUITE,
    EvalConfig,
    ServerConfig,
)
from decode.evaluation.execution import check_sandbox
from decode.evaluation.records import check_out
from decode.evaluation.reproductions import REPRODUCTIONS, find_reproduction, reproduce
from decode.systems.drafter_folders import check_methods, read_drafters
from decode.systems.parsing import read_methods, read_sweep
from decode.systems.registry import COMBINED, DRAFTER, LOOKUP, PLAIN, ROLES, SYSTEMS
from specalign.common.claims import Claim
from specalign.common.commands import command
from specalign.common.errors import UserError, cli
from specalign.common.files import write_text
from specalign.common.terminal import PlainConsole
from specalign.folder.chat import Chat
from specalign.lm.names import check_given
from specalign.suites.long import CONTEXT
from specalign.suites.registry import GROUPS, SUITES, prompts_of, resolve
from specalign.suites.sources import Loaded

if TYPE_CHECKING:
    from decode.evaluation.summary import Summary


def parser() -> Parser:
    """The command's options."""
    p = Parser(
        prog="python -m decode.eval",
        description="Measure speed-up, acceptance and losslessness against plain decoding.",
        epilog=f"example: python -m decode.eval --suite mtbench,coding --limit 20\n\n{list_systems()}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    p.stray = " (suites follow --suite, methods --methods)"
    methods = ", ".join(dict.fromkeys([*DEFAULT_METHODS, *SYSTEMS]))
    drafter = (
        "the drafter's folder (default: the shipped one, for the default target), or several: "
        f"KIND=FOLDER,… ({', '.join(ROLES)})"
    )
    named = f"comma-separated: {methods}, each with its options, or all; plain is always measured"
    tune = (
        "first tune each method's options on N built-in prompts (5 to 40, default "
        f"{TUNING_PROMPTS}), over --sweep's values or the system's own; drafter and combined have "
        "none to tune"
    )
    sweep = "measure every combination of option values: draft_tokens=4,8,16 steps=1,2,4"
    length = "length limit of an output (default: as published for each suite; 128 for --prompts)"
    batches = "decode N prompts together, for each N: 1,4,8 (default 1)"
    server = "measure a running server (an OpenAI-compatible URL) in place of decoding here"
    baseline = "the same target served without a drafter, for the speed-up"
    flights = "requests in flight at a server (default 1,8,32)"
    execute = "run the answers' code to score it: no network, limits of time and memory"
    documents = "texts for the suite long: a file or a folder of your own"
    context = f"tokens of a prompt of the suite long (default {CONTEXT})"
    repeats = "generations per prompt and method (default 1)"
    warmup = "untimed warm-up rounds (default 1)"
    threads = "CPU threads (default: torch's own choice)"
    # OpenMP ends the process silently with far more threads than cores
    thread_count = parse_whole(1, 4 * (os.cpu_count() or 1))
    add = p.add_argument
    p.add_prompt_options(
        f"comma-separated: {', '.join(SUITES)}; groups {', '.join(GROUPS)} (default builtin)"
    )
    add(
        "--limit",
        type=parse_whole(1),
        metavar="N",
        help="use N prompts of each suite, evenly spread",
    )
    p.add_target_options()
    p.add_chat_options()
    add("--drafter", help=drafter)
    add("--methods", help=named)
    add("--sweep", nargs="+", default=[], metavar="KEY=V,V", help=sweep)
    add("--tune", type=parse_whole(5), nargs="?", const=TUNING_PROMPTS, metavar="N", help=tune)
    p.add_drafting_options(
        "options of the methods drafter and combined (--draft-tokens: of every method)"
    )
    p.add_sampling_options("seed for sampling, method order and intervals (default 0)")
    p.set_defaults(temperature=None)
    add("--max-new-tokens", type=parse_whole(1), metavar="N", help=length)
    add(
        "--batch-size",
        type=parse_sizes,
        default=(1,),
        metavar="N,N",
        dest="batch_sizes",
        help=batches,
    )
    names = ", ".join(REPRODUCTIONS)
    add("--reproduce", metavar="NAME", help=f"measure a paper's table again: {names}")
    tiny = "tiny: the code of --reproduce on a few short answers of a small target (default full)"
    add("--scale", choices=("full", "tiny"), default="full", help=tiny)
    add("--server", metavar="URL", help=server)
    add("--baseline-server", metavar="URL", help=baseline)
    add("--concurrency", type=parse_sizes, default=(1, 8, 32), metavar="N,N", help=flights)
    add("--execute-code", action="store_true", help=execute)
    add("--documents", type=path, metavar="PATH", help=documents)
    add("--context", type=parse_whole(64), default=CONTEXT, metavar="N", help=context)
    add("--repeats", type=parse_whole(1, 1000), default=1, metavar="N", help=repeats)
    add("--warmup", type=parse_whole(0, 1000), default=1, metavar="N", help=warmup)
    add("--threads", type=thread_count, metavar="N", help=threads)
    add("--out", type=path, metavar="DIR", help="output folder (default runs/eval/SUITE-SETTINGS)")
    resume = "resume the measurement in --out, or replace it"
    add("--resume", action=BooleanOptionalAction, default=True, help=resume)
    add("--no-hf-check", action="store_true", help="skip timing transformers' own generate")
    return p


def read_config(arguments: Sequence[str]) -> EvalConfig:
    """The command line as a config. Raises UserError for what is mistyped."""
    typed = vars(parser().parse_args(arguments))
    methods = typed.pop("methods")
    if typed["temperature"] is None:
        typed["temperature"] = published_temperature(None if typed["prompts"] else typed["suite"])
    for name in ("server", "baseline_server", "concurrency", "reproduce", "scale"):
        typed.pop(name)
    return EvalConfig(
        methods=None if methods is None else read_methods(methods),
        sweep=read_sweep(typed.pop("sweep")),
        sampling=pop_sampling(typed),
        drafting=pop_drafting(typed),
        drafters=read_drafters(typed.pop("drafter")),
        **typed,
    )


def read_servers(arguments: Sequence[str], config: EvalConfig) -> ServerConfig | None:
    """The servers to measure; None = decoding here. Raises UserError for a baseline alone, or
    options of decoding here."""
    typed = parser().parse_args(arguments)
    if typed.server is None:
        if typed.baseline_server is not None:
            raise UserError("--baseline-server is compared with --server, which is not given")
        return None
    for name in ("methods", "drafter", "sweep", "tune", "target"):
        if getattr(typed, name):
            raise UserError(f"--{name} applies to decoding here: a server has its own")
    return ServerConfig(
        typed.server,
        typed.baseline_server,
        typed.concurrency,
        config.sampling.temperature,
        max(config.repeats, 2),
        config.out or Path("runs/eval/server"),
    )


def run_reproduction(
    name: str, config: EvalConfig, tiny: bool, console: PlainConsole, typed: str
) -> None:
    """Measure a paper's table, print ours next to it, and write it to --out."""
    found = find_reproduction(name)
    if config.suite or config.prompts or config.methods:
        raise UserError("--reproduce chooses suites and methods: leave out --suite and --methods")
    if not config.drafters and not tiny:
        raise UserError(f"--reproduce={name} needs --drafter {found.drafters}")
    page = reproduce(name, config, tiny, lambda own: evaluate(own, console, typed))
    folder = config.out or Path("runs/reproduce") / name
    write_text(folder / "reproduction.md", page + "\n")
    console.say(page, wrap=False)


def measure_serving(servers: ServerConfig, config: EvalConfig, console: PlainConsole) -> None:
    """Measure servers and print their table."""
    from decode.evaluation.serving import HEADER, PAGE, measure_servers, serving_rows
    from decode.evaluation.tables import plain_table

    suites, skipped = load_prompts(config)
    for line in [*(suite.describe() for suite in suites), *(f"left out: {s}" for s in skipped)]:
        console.say(line, wrap=False)
    limits = {suite.name: config.limit_of(suite.name) for suite in suites}
    with Claim(servers.out, "--out"):
        rounds, folder = measure_servers(servers, suites, limits, console)
    console.print(plain_table("servers", HEADER, serving_rows(rounds)))
    console.say(f"Report: {folder / PAGE}", wrap=False)


def published_temperature(suites: str | None) -> float:
    """The temperature at which all these suites are published; 0 where they differ."""
    chosen = [] if suites is None else resolve(suites)
    found = {suite.temperature for suite, _ in chosen}
    return found.pop() if len(found) == 1 else 0.0


def parse_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes: `1,4,8`."""
    one = parse_whole(1, 1024)
    return tuple(dict.fromkeys(one(size.strip()) for size in text.split(",")))


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exit code 1 when an output changed beyond rounding, 2 for an unusable input."""
    words = sys.argv[1:] if arguments is None else arguments
    config, console = read_config(words), PlainConsole(wide=True)
    if (servers := read_servers(words, config)) is not None:
        measure_serving(servers, config, console)
        return
    typed = shlex.join(["python", "-m", "decode.eval", *words])
    chosen = parser().parse_args(words)
    if chosen.reproduce is not None:
        run_reproduction(chosen.reproduce, config, chosen.scale == "tiny", console, typed)
        return
    with Claim(config.out, "--out") if config.out else nullcontext():
        summary, folder = evaluate(config, console, typed)
    from decode.evaluation.page import print_report

    print_report(summary, folder, console, sources=False)  # `evaluate` has printed them
    console.say(suggest_next(summary, config), wrap=False)
    if summary.bugs:
        raise SystemExit(1)


def evaluate(config: EvalConfig, console: PlainConsole, typed: str = "") -> tuple[Summary, Path]:
    """Measure what the config asks for; returns the summary and the folder that holds it.

    Raises:
        UserError: an unusable input, before anything is measured.
        SystemExit: exit code 1, --tune found an output that changed beyond rounding.
    """
    suites, skipped = check(config)
    from decode.evaluation.plan import make_all_decoders, make_plan
    from decode.evaluation.session import measure
    from decode.evaluation.tuning import OutputChanged, tune

    plan, left_out = make_plan(config, console.say)
    skipped += left_out
    for suite in suites:
        console.say(suite.describe())
    for line in skipped:
        console.say(f"left out: {line}", wrap=False)
    if config.tune is None:
        decoders, refused = make_all_decoders(config, plan)
        for line in refused:
            console.say(f"left out: {line}", wrap=False)
        skipped += refused
    else:
        try:
            config, plan, decoders = tune(config, plan, console, typed)
        except OutputChanged as error:
            console.say(str(error))
            raise SystemExit(1) from None
    summary, _, folder = measure(config, plan, decoders, suites, skipped, console, typed)
    return summary, folder


def check(config: EvalConfig) -> tuple[list[Loaded], list[str]]:
    """The prompts, and a line for each suite that is left out. Checks all that can be checked
    without torch.

    Raises:
        UserError: an unusable input.
    """
    check_given(config.target, config.device, config.dtype)
    chosen = () if config.prompts else resolve(config.suite or "builtin")
    if config.tune and TUNING_SUITE in {suite.name for suite, _ in chosen}:
        raise UserError(
            f"--tune uses the prompts of {TUNING_SUITE}: measure on others (--suite mtbench, or "
            "--prompts FILE)"
        )
    if config.execute_code:
        check_sandbox()
    if config.out is not None:
        check_out(config.out, config.recorded, config.resume, config.tune is not None)
    if config.methods is not None:
        check_methods(config.methods.methods, config.drafters, config.target)
    return load_prompts(config)


def load_prompts(config: EvalConfig) -> tuple[list[Loaded], list[str]]:
    """The prompts, and a line for each suite that is left out."""
    return prompts_of(
        config.suite,
        config.prompts,
        config.data_dir,
        config.limit,
        config.prompts_column,
        config.documents,
        config.context,
    )


def suggest_next(summary: Summary, config: EvalConfig) -> str:
    """The next command."""
    if summary.bugs:
        return f"Next: the report lists each difference; {command('decode.verify')} checks further"
    target = ("--target", config.target) if config.target else ()
    gains = {}
    for name, figures in summary.overall.items():
        trained = name.partition(":")[0] not in (PLAIN, LOOKUP) and not figures.lossy
        if trained and figures.speedup is not None:
            gains[name] = figures.speedup.lo or figures.speedup.value
    if not gains:
        key = (f"target.name={config.target}",) if config.target else ()
        train = command("align.train", "recipe=block", *key, "output=runs/mine")
        measure = command("decode.eval", *target, "--drafter", "runs/mine/drafter")
        return f"Next: train a drafter for this target:  {train}\n      then measure it:  {measure}"
    default = (DRAFTER, COMBINED)  # what decode.generate uses by default
    best = max(gains, key=lambda name: (name in default, gains[name]))
    if gains[best] <= 1:
        return "Next: train it further (align.train with more trainer.max_steps)"
    drafter = ("--drafter", ",".join(map(str, config.drafters))) if config.drafters else ()
    method = () if best in default else ("--method", best)
    chat = Chat(config.template_kwargs, config.system).arguments
    use = command("decode.generate", *target, *drafter, *method, *chat)
    return f'Next: use it:  {use} "your prompt"'


if __name__ == "__main__":
    main()
