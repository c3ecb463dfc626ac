"""The options of `decode.eval`, and what they stand for."""

import os
from argparse import BooleanOptionalAction, RawDescriptionHelpFormatter
from collections.abc import Sequence

from decode.cli import Parser, list_systems, parse_whole, path, pop_drafting, pop_sampling
from decode.evaluation.config import DEFAULT_METHODS, TUNING_PROMPTS, EvalConfig
from decode.evaluation.reproductions import REPRODUCTIONS, find_reproduction
from decode.systems.drafter_folders import read_drafters
from decode.systems.parsing import read_methods, read_sweep
from decode.systems.registry import ROLES, SYSTEMS
from specalign.common.errors import UserError
from specalign.suites.long import CONTEXT
from specalign.suites.registry import GROUPS, SUITES, resolve


def parser() -> Parser:
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
    data = (
        "count the prompts that overlap with this training data: a data folder, or a file of rows"
    )
    named = f"comma-separated: {methods}, each with its options, or all; plain is always measured"
    tune = (
        "first tune each method's options on N built-in prompts (5 to 40, default "
        f"{TUNING_PROMPTS}), over the --sweep values or the system's defaults (not for drafter "
        "and combined)"
    )
    limit = "use N prompts of each suite, evenly spread"
    sweep = "measure every combination of option values: draft_tokens=4,8,16 steps=1,2,4"
    add = p.add_argument
    p.add_prompt_options(
        f"comma-separated: {', '.join(SUITES)}; groups {', '.join(GROUPS)} (default builtin)"
    )
    add("--limit", type=parse_whole(1), metavar="N", help=limit)
    p.add_target_options()
    p.add_engine_option()
    p.add_chat_options()
    add("--drafter", help=drafter)
    add("--training-data", type=path, metavar="PATH", help=data)
    add("--methods", help=named)
    add("--sweep", nargs="+", default=[], metavar="KEY=V,V", help=sweep)
    add("--tune", type=parse_whole(5), nargs="?", const=TUNING_PROMPTS, metavar="N", help=tune)
    p.add_drafting_options(
        "options of the methods drafter and combined (--draft-tokens: of every method)"
    )
    p.add_sampling_options("seed for sampling, method order and intervals (default 0)")
    p.set_defaults(temperature=None, batch_sizes=(1,))
    _add_measuring_options(p)
    _add_other_measurements(p)
    return p


def _add_measuring_options(p: Parser) -> None:
    add = p.add_argument
    length = "length limit of an output (default: as published for each suite; 128 for --prompts)"
    batches = "decode N prompts together, for each N: 1,4,8 (default 1)"
    execute = "run generated code to score it, without network, with time and memory limits"
    documents = "texts for the suite long: a file or a folder of your own"
    context = f"tokens of a prompt of the suite long (default {CONTEXT})"
    repeats = "generations per prompt and method (default 1)"
    warmup = "untimed warm-up rounds (default 1)"
    threads = "CPU threads (default: torch's own choice)"
    # OpenMP ends the process silently with far more threads than cores
    thread_count = parse_whole(1, 4 * (os.cpu_count() or 1))
    add("--max-new-tokens", type=parse_whole(1), metavar="N", help=length)
    add("--batch-size", type=parse_sizes, metavar="N,N", dest="batch_sizes", help=batches)
    first = "leave out later turns of conversations"
    add("--first-turn", action="store_true", help=first)
    add("--execute-code", action="store_true", help=execute)
    add("--documents", type=path, metavar="PATH", help=documents)
    add("--context", type=parse_whole(64), default=CONTEXT, metavar="N", help=context)
    add("--repeats", type=parse_whole(1, 1000), default=1, metavar="N", help=repeats)
    add("--warmup", type=parse_whole(0, 1000), default=1, metavar="N", help=warmup)
    add("--threads", type=thread_count, metavar="N", help=threads)
    add("--out", type=path, metavar="DIR", help="output folder (default runs/eval/SUITE-SETTINGS)")
    resume = "resume (default) or replace the measurement in --out"
    add("--resume", action=BooleanOptionalAction, default=True, help=resume)
    add("--no-hf-check", action="store_true", help="skip timing transformers' own generate")


def _add_other_measurements(p: Parser) -> None:
    add = p.add_argument
    server = "measure a running server (an OpenAI-compatible URL) instead of decoding locally"
    baseline = "the same target served without a drafter, for the speed-up"
    flights = "requests in flight at a server (default 1,8,32)"
    names = ", ".join(REPRODUCTIONS)
    add("--reproduce", metavar="NAME", help=f"reproduce a paper's table: {names}")
    tiny = "tiny: run --reproduce on a random target and drafters, briefly (default full)"
    add("--scale", choices=("full", "tiny"), default="full", help=tiny)
    add("--server", metavar="URL", help=server)
    add("--baseline-server", metavar="URL", help=baseline)
    add("--concurrency", type=parse_sizes, default=(1, 8, 32), metavar="N,N", help=flights)


def read_config(arguments: Sequence[str]) -> EvalConfig:
    """The command line as a config. Raises UserError for what is mistyped."""
    typed = vars(parser().parse_args(arguments))
    methods = typed.pop("methods")
    if typed["temperature"] is None and typed["reproduce"]:
        typed["temperature"] = find_reproduction(typed["reproduce"]).temperature
    elif typed["temperature"] is None:
        typed["temperature"] = published_temperature(None if typed["prompts"] else typed["suite"])
    return EvalConfig(
        methods=None if methods is None else read_methods(methods),
        sweep=read_sweep(typed.pop("sweep")),
        sampling=pop_sampling(typed),
        drafting=pop_drafting(typed),
        drafters=read_drafters(typed.pop("drafter")),
        **typed,
    )


def check_servers(config: EvalConfig) -> None:
    """Raises UserError for a baseline alone, or a server and options of decoding here."""
    if config.server is None and config.baseline_server is not None:
        raise UserError("--baseline-server needs --server")
    if config.server is not None and (given := _local_options(config)):
        option = {"drafters": "drafter", "batch_sizes": "batch-size"}.get(given[0], given[0])
        raise UserError(f"--{option.replace('_', '-')} can't be combined with --server")


def _local_options(config: EvalConfig) -> list[str]:
    """The options given that only decoding here reads."""
    unset = EvalConfig()
    names = (
        "target", "drafters", "methods", "sweep", "tune", "drafter_tokenizer", "dtype", "device",
        "trust_remote_code", "template_kwargs", "system", "batch_sizes", "execute_code", "threads",
        "reproduce", "training_data", "engine", "warmup", "no_hf_check",
    )  # fmt: skip
    found = [name for name in names if getattr(config, name) != getattr(unset, name)]
    sampled = ("top_p", "top_k", "seed")
    found += [n for n in sampled if getattr(config.sampling, n) != getattr(unset.sampling, n)]
    return [*found, *config.drafting.given]


def published_temperature(suites: str | None) -> float:
    """The temperature at which all these suites are published; 0 where they differ."""
    chosen = [] if suites is None else resolve(suites)
    found = {suite.temperature for suite in chosen}
    return found.pop() if len(found) == 1 else 0.0


def parse_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes: `1,4,8`."""
    one = parse_whole(1, 1024)
    return tuple(dict.fromkeys(one(size.strip()) for size in text.split(",")))
