"""`python -m decode.eval --suite mtbench`: how much faster, with what certainty, and is the output the same?

Plain decoding, prompt lookup and the drafter run side by side on every prompt. Records go to `--out` as they
come; the summary, the page and the table are made from them (decode/report.py).
"""

from __future__ import annotations

import datetime
import os
import shlex
import sys
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from align.errors import UserError, cli, nearest
from decode.arguments import Parser, number, whole
from decode.generate import VERIFIER_HELP
from decode.provenance import git_commit, machine, versions
from decode.records import PLAIN, Run, append, write_run
from decode.settings import folder_name, open_folder, settings_of
from decode.suites.registry import GROUPS, SUITES, resolve
from decode.suites.sources import Loaded, choose, load_prompts_file, load_suite
from decode.summary import plural

if TYPE_CHECKING:
    from align.target import Target
    from decode.decoder import Decoder
    from decode.measure import Settings, Task

METHODS = (PLAIN, "lookup", "drafter", "combined")
"""`combined` is the drafter, with lookup in front of it where the text repeats itself."""


def parser() -> Parser:
    """The command's options."""
    p = Parser(
        prog="python -m decode.eval",
        description="Measure speed-up, acceptance and losslessness against plain decoding.",
        epilog="example: python -m decode.eval --suite mtbench,coding --limit 20",
    )
    names = f"{', '.join(SUITES)}; groups {', '.join(GROUPS)}; comma lists"
    add = p.add_argument
    add("--suite", help=f"{names} (default builtin)")
    add("--prompts", type=Path, metavar="FILE", help="your own: .jsonl .json .csv .parquet .txt")
    add("--data-dir", type=Path, metavar="DIR", help="local copies of the benchmarks, in the hub's layout")
    add("--target", help="hub id, folder, file.gguf or debug (default SmolLM2-135M-Instruct)")
    add("--drafter", help="the drafter's folder (default: the shipped one, for the default target)")
    add("--methods", help=f"comma list of {', '.join(METHODS)}; plain is always measured")
    add("--draft-tokens", type=whole(1), metavar="K", help="draft at most K tokens ahead")
    add(
        "--tree-nodes",
        type=whole(0),
        metavar="N",
        help="the drafter's tokens a call, branching; 0 = a chain; default: 5 up to temperature 0.7, else 0",
    )
    add("--drafter-tokenizer", help="of a standalone drafter whose vocabulary is not the target's")
    add(
        "--steps",
        type=whole(1),
        default=1,
        metavar="T",
        help="standalone drafters: passes that unmask a draft (default 1)",
    )
    add(
        "--order", default="left_to_right", help="in which order: left_to_right (default), random, confidence"
    )
    add("--verifier", default="auto", help=VERIFIER_HELP)
    add("--limit", type=whole(1), metavar="N", help="N prompts of each suite, evenly spread")
    add("--max-new-tokens", type=whole(1), default=128, metavar="N", help="default 128")
    add("--temperature", type=number, default=0.0, help="0 = greedy (default)")
    add("--top-p", type=number, default=1.0, help="keep the most probable tokens up to this mass")
    add("--top-k", type=whole(0), default=0, help="keep this many most probable tokens; 0 = all")
    add("--seed", type=whole(0), default=0, help="of sampling, the order of methods, the intervals")
    add("--repeats", type=whole(1), default=1, metavar="N", help="generations per prompt and method")
    add("--warmup", type=whole(0), default=1, metavar="N", help="untimed rounds before the first prompt")
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's own choice)")
    add("--out", type=Path, metavar="DIR", help="default runs/eval/SUITE-SETTINGS")
    add(
        "--resume",
        action=BooleanOptionalAction,
        default=True,
        help="continue what --out holds, or replace it",
    )
    add("--no-hf-check", action="store_true", help="skip timing transformers' own generate")
    return p


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exit code 1 when an output changed beyond rounding, 2 for an input that can't be used."""
    options = parser().parse_args(arguments)
    console = Console()
    command = shlex.join(["python", "-m", "decode.eval", *(sys.argv[1:] if arguments is None else arguments)])
    summary, folder = evaluate(options, console, command)
    from decode.report import print_report

    print_report(summary, folder, console)
    console.print(next_step(summary, options), markup=False, highlight=False, soft_wrap=True)
    if summary["bugs"]:
        raise SystemExit(1)


def evaluate(options: Any, console: Console, command: str = "") -> tuple[dict[str, Any], Path]:
    """Measure what the options ask for; returns the summary and the folder that holds it.

    Raises:
        UserError: an input that can't be used, before anything is measured.
    """
    from decode.sampling import Sampling

    sampling = Sampling(options.temperature, options.top_p, options.top_k, seed=options.seed)
    _check_folder(options.out)
    spec, drafter = _target_and_drafter(options, console)
    methods = _methods(options.methods, drafter)
    suites, skipped = prompts_of(options)
    for loaded in suites:
        console.print(loaded.describe(), markup=False, highlight=False)
    decoders = _decoders(spec, drafter, methods, options)
    return _measure(options, decoders, suites, skipped, sampling, drafter, console, command)


def _check_folder(folder: Path | None) -> None:
    if folder is not None and folder.exists() and not folder.is_dir():
        raise UserError(f"--out={str(folder)!r} is a file, not a folder")


def _target_and_drafter(options: Any, console: Console) -> tuple[str, str | None]:
    """The target's spec and the drafter's folder; None = no drafter was given and none is shipped for this
    target.
    """
    from align.target import DEFAULT_TARGET
    from decode.generate import DEFAULT_DRAFTER

    spec = options.target or DEFAULT_TARGET
    if options.drafter is not None:
        if options.drafter in ("lookup", "none"):
            raise UserError(
                f"--drafter={options.drafter!r}: name a drafter's folder; lookup and plain are --methods"
            )
        return spec, options.drafter
    if spec == DEFAULT_TARGET and (DEFAULT_DRAFTER / "config.json").is_file():
        return spec, str(DEFAULT_DRAFTER)
    if options.methods is None:
        note = f"note: no --drafter given and none is shipped for {spec}: lookup alone is measured"
        console.print(note, markup=False, highlight=False)
    return spec, None


def _methods(names: str | None, drafter: str | None) -> list[str]:
    """The methods in the order of `METHODS`, plain always first."""
    if names is None:
        return [m for m in METHODS if m in (PLAIN, "lookup") or drafter is not None]
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    if not wanted:
        raise UserError(f"--methods={names!r} names no method{nearest('', METHODS)}")
    for name in wanted:
        if name not in METHODS:
            raise UserError(f"--methods: unknown method {name!r}{nearest(name, METHODS)}")
    for name in ("drafter", "combined"):
        if name in wanted and drafter is None:
            raise UserError(f"--methods={name} needs --drafter FOLDER: none is shipped for this target")
    return [m for m in METHODS if m == PLAIN or m in wanted]


def prompts_of(options: Any) -> tuple[list[Loaded], list[str]]:
    """The suites with their prompts, cut to `--limit`, and a line for each that a group named and no source
    has. Read are `suite`, `prompts`, `data_dir` and `limit`.
    """
    found: list[Loaded] = []
    skipped: list[str] = []
    if options.prompts is not None:
        if options.suite is not None and ("," in options.suite or options.suite in GROUPS):
            raise UserError("--prompts takes the place of one suite: give --suite one name, or leave it out")
        if options.data_dir is not None:
            raise UserError("--prompts and --data-dir are two places for prompts: give one")
        found.append(load_prompts_file(options.prompts, options.suite))
    else:
        for suite, named in resolve(options.suite or "builtin"):
            try:
                found.append(load_suite(suite, options.data_dir))
            except UserError as error:
                if named:
                    raise
                skipped.append(str(error))
        if not found:
            raise UserError(skipped[0])
    cut = [Loaded(s.name, s.title, s.group, choose(s.prompts, options.limit), s.source) for s in found]
    return cut, skipped


def _decoders(spec: str, drafter: str | None, methods: Sequence[str], options: Any) -> dict[str, Decoder]:
    """One decoder per method, all on the same target."""
    import torch

    import decode

    if options.threads is not None:
        most = 4 * (os.cpu_count() or 1)  # far beyond the cores OpenMP ends the process without a word
        if options.threads > most:
            raise UserError(f"--threads={options.threads}: at most {most} on this machine")
        torch.set_num_threads(options.threads)
    specs = {PLAIN: None, "lookup": "lookup", "drafter": drafter, "combined": drafter}
    own = {name: getattr(options, name) for name in ("verifier", "steps", "order", "drafter_tokenizer")}
    decoders: dict[str, Decoder] = {}
    target: str | Target = spec
    for method in reversed(
        methods
    ):  # the drafter first: a wrong folder is refused before the target is loaded
        decoders[method] = decode.load(
            target,
            specs[method],
            dtype=options.dtype,
            device=options.device,
            draft_tokens=options.draft_tokens,
            tree_nodes=options.tree_nodes,
            copying=method == "combined",
            **(own if method in ("drafter", "combined") else {}),
        )
        target = decoders[method].target
    return {method: decoders[method] for method in methods}


def _measure(
    options: Any,
    decoders: dict[str, Decoder],
    suites: Sequence[Loaded],
    skipped: list[str],
    sampling: Any,
    drafter: str | None,
    console: Console,
    command: str,
) -> tuple[dict[str, Any], Path]:
    """Plan, continue or begin the folder, run what is missing, report."""
    from decode import measure
    from decode.report import make_report

    prepared = []
    for loaded in suites:
        pairs, refused = measure.tokenised(decoders[PLAIN], loaded.prompts)
        if refused:
            skipped.append(f"{loaded.name}: {plural(len(refused), 'prompt')}, the first is {refused[0]}")
        prepared.append((loaded, pairs))
    if not any(pairs for _, pairs in prepared):
        raise UserError(f"no prompt can be answered: {skipped[0]}")
    settings = settings_of(options, decoders, drafter, prepared)
    folder = options.out or Path("runs/eval") / folder_name(suites, settings)
    run = Run(
        settings=settings,
        suites=[
            {"name": s.name, "title": s.title, "group": s.group, "prompts": len(pairs), "source": s.source}
            for s, pairs in prepared
        ],
        command=command,
        machine=machine(),
        versions=versions(),
        git_commit=git_commit(),
        skipped=skipped,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    run, records = open_folder(folder, run, not options.resume)
    tasks = measure.plan(
        [(s.name, pairs) for s, pairs in prepared], list(decoders), options.repeats, options.seed
    )
    missing = list(measure.remaining(tasks, records))
    if records:
        note = f"continuing {folder}: {len(tasks) - len(missing)} of {len(tasks)} rounds are there"
        note += "" if missing else " (--no-resume measures again)"
        console.print(note, markup=False, highlight=False)
    if missing:
        common = measure.Settings(sampling, options.max_new_tokens)
        _run_tasks(folder, run, decoders, missing, common, options, console)
    summary, _ = make_report(folder)
    return summary, folder


def _run_tasks(
    folder: Path,
    run: Run,
    decoders: dict[str, Decoder],
    tasks: Sequence[Task],
    settings: Settings,
    options: Any,
    console: Console,
) -> None:
    """Warm up, time transformers once, then one task after another, each task's records written when it is
    done.
    """
    from decode.baseline import against_transformers
    from decode.measure import run_task, warm_up
    from decode.progress import TaskProgress

    warm_up(decoders, list(tasks[0].tokens), settings, options.warmup)
    if not options.no_hf_check and run.baseline is None:
        console.print("timing plain decoding against transformers' own generate …", markup=False)
        run.baseline = against_transformers(
            decoders[PLAIN], [list(tasks[0].tokens)], min(options.max_new_tokens, 64)
        )
        write_run(folder, run)
    with TaskProgress(console, len(tasks), list(decoders)) as progress:
        for task in tasks:
            records = run_task(decoders, task, settings, partial(progress.step, task.prompt.id))
            append(folder, records)
            progress.done(records)


def next_step(summary: dict[str, Any], options: Any) -> str:
    """What to type next."""
    target = f" --target {shlex.quote(options.target)}" if options.target else ""
    drafter = f" --drafter {shlex.quote(options.drafter)}" if options.drafter else ""
    figures = summary["overall"].get("drafter")
    if figures is None:
        return (
            "Next: train a drafter for this target:  python -m align.train --help\n"
            f"      then:  python -m decode.eval{target} --drafter FOLDER"
        )
    if (figures["speedup_lo"] or figures["speedup"] or 0) > 1:
        return f'Next: use it:  python -m decode.generate{target}{drafter} "your prompt"'
    return (
        "Next: train it further (python -m align.train --help), or see where it helps:  "
        f"python -m decode.eval{target}{drafter} --suite coding,math"
    )


if __name__ == "__main__":
    main()
