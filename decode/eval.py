"""`python -m decode.eval --suite mtbench`: measure the speed-up, and check that the output is
unchanged.

Plain decoding and the methods (`--methods all`: every system whose drafter is given) run side by
side on every prompt. Each record is written to `--out` at once; summary, page and table are made
from the records (decode/report.py).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from decode.evaluation.arguments import check_servers, parser, read_config
from decode.evaluation.config import TUNING_SUITE, EvalConfig
from decode.evaluation.execution import check_sandbox
from decode.evaluation.records import check_out
from decode.evaluation.reproductions import find_reproduction, reproduce
from decode.systems.drafter_folders import check_methods
from decode.systems.registry import COMBINED, DRAFTER, LOOKUP, PLAIN
from specalign.common.claims import Claim
from specalign.common.commands import command
from specalign.common.errors import UserError, cli
from specalign.common.files import write_text
from specalign.common.terminal import PlainConsole
from specalign.folder.chat import Chat
from specalign.lm.names import check_given
from specalign.suites.registry import prompts_of, resolve
from specalign.suites.sources import Loaded

__all__ = ["evaluate", "main", "parser", "read_config"]

if TYPE_CHECKING:
    from decode.evaluation.summary import Summary


def run_reproduction(
    name: str, config: EvalConfig, tiny: bool, console: PlainConsole, typed: str
) -> None:
    """Measure a paper's table, print ours next to it, and write it to --out."""
    found = find_reproduction(name)
    if config.suite or config.prompts or config.methods or config.sweep.words or config.tune:
        raise UserError(
            "--reproduce chooses suites and methods: leave out --suite, --prompts, --methods, "
            "--sweep and --tune"
        )
    folder = config.out or Path("runs/reproduce") / name
    if not config.drafters and not tiny:
        raise UserError(f"--reproduce={name} needs --drafter {found.drafters}")
    if not config.drafters:
        from decode.evaluation.stand_ins import make_stand_ins

        config = replace(config, drafters=make_stand_ins(config, folder / "stand-ins"))
    page, bugs = reproduce(name, config, tiny, lambda own: evaluate(own, console, typed))
    write_text(folder / "reproduction.md", page + "\n")
    console.say(page, wrap=False)
    if bugs:
        raise SystemExit(1)


def measure_serving(config: EvalConfig, console: PlainConsole) -> None:
    """Measure servers and print their table."""
    from decode.evaluation.serving import PAGE, measure_servers
    from decode.evaluation.serving_report import HEADER, doubts, serving_rows
    from decode.evaluation.tables import plain_table

    suites, skipped = load_prompts(config)
    for line in [*(suite.describe() for suite in suites), *(f"skipped: {s}" for s in skipped)]:
        console.say(line, wrap=False)
    if any(prompt.later for suite in suites for prompt in suite.prompts):
        console.say("note: servers get only the first turn of each conversation")
    folder = config.out or Path("runs/eval/server")
    with Claim(folder, "--out"):
        rounds = measure_servers(config, folder, suites, console)
    console.print(plain_table("servers", HEADER, serving_rows(rounds)))
    for line in doubts(rounds):
        console.say(line)
    console.say(f"Report: {folder / PAGE}", wrap=False)


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exit code 1 when an output changed beyond rounding, 2 for an unusable input."""
    words = sys.argv[1:] if arguments is None else arguments
    config, console = read_config(words), PlainConsole(wide=True)
    check_servers(config)
    if config.server is not None:
        measure_serving(config, console)
        return
    typed = shlex.join(["python", "-m", "decode.eval", *words])
    if config.reproduce is not None:
        run_reproduction(config.reproduce, config, config.scale == "tiny", console, typed)
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
        console.say(f"skipped: {line}", wrap=False)
    if config.tune is None:
        decoders, refused = make_all_decoders(config, plan)
        for line in refused:
            console.say(f"skipped: {line}", wrap=False)
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
    if config.tune and TUNING_SUITE in {suite.name for suite in chosen}:
        raise UserError(
            f"--tune uses the prompts of {TUNING_SUITE}: measure on others (--suite mtbench, or "
            "--prompts FILE)"
        )
    if config.execute_code:
        check_sandbox()
    data = config.training_data
    if data and not (data.is_file() or (data / "manifest.json").is_file()):
        kinds = "a data folder (align.synthesize) nor a file of rows"
        raise UserError(f"--training-data={str(data)!r}: neither {kinds}")
    if config.out is not None:
        check_out(config.out, config.recorded, config.resume, config.tune is not None)
    if config.methods is not None:
        check_methods(config.methods.methods, config.drafters, config.target)
    return load_prompts(config)


def load_prompts(config: EvalConfig) -> tuple[list[Loaded], list[str]]:
    """The prompts, and a line for each suite that is left out."""
    suites, skipped = prompts_of(
        config.suite,
        config.prompts,
        config.data_dir,
        config.limit,
        config.prompts_column,
        config.documents,
        config.context,
    )
    if config.first_turn:
        suites = [
            replace(suite, prompts=[replace(prompt, later=()) for prompt in suite.prompts])
            for suite in suites
        ]
    return suites, skipped


def suggest_next(summary: Summary, config: EvalConfig) -> str:
    """The next command."""
    from decode.evaluation.verdict import NOISE, judge

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
    if gains[best] <= 1 or judge(summary.overall[best]) == NOISE:
        return "Next: train it further (align.train with more trainer.max_steps)"
    drafter = ("--drafter", ",".join(map(str, config.drafters))) if config.drafters else ()
    method = () if best in default else ("--method", best)
    chat = Chat(config.template_kwargs, config.system).arguments
    use = command("decode.generate", *target, *drafter, *method, *chat)
    return f'Next: use it:  {use} "your prompt"'


if __name__ == "__main__":
    main()
