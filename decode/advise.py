"""`python -m decode.advise --target … --drafter …`: how much to draft on this machine, and up to
which batch size drafting pays.

Times the target's forward pass over batches, rows and contexts, and drafting and acceptance on
prompts over temperatures. From these costs it computes what is fastest at any batch of 1 to 32,
contexts of 256 to 8k tokens, and temperatures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode.cli import Parser, parse_whole, path
from specalign.common.claims import Claim
from specalign.common.errors import cli
from specalign.common.files import write_json, write_text
from specalign.common.provenance import load_average, machine
from specalign.common.text import markdown_text, say
from specalign.lm.names import DEFAULT_TARGET, check_given


def parser() -> Parser:
    p = Parser(
        prog="python -m decode.advise",
        description=(__doc__ or "").partition(": ")[2].partition("\n\n")[0],
    )
    add = p.add_argument
    drafter = "a drafter's folder, or lookup (default: the shipped one, for the default target)"
    temps, chain = "default 0,0.5,1,1.5", "the longest chain (default: the drafter's)"
    trees = "tree sizes, of block drafters (default 5,8)"
    count, out = parse_whole(1, 64), Path("runs/advice")
    p.add_target_options()
    p.add_chat_options()
    add("--drafter", help=drafter)
    p.add_prompt_options("the prompts (default builtin)")
    add(
        "--temperatures", type=temperatures, default=[0.0, 0.5, 1.0, 1.5], metavar="T,…", help=temps
    )
    add("--draft-tokens", type=count, metavar="K", help=chain)
    add("--trees", type=tree_sizes, default=[5, 8], metavar="N,…", help=trees)
    for name, least, most, default, text in (
        ("--limit", 2, 1000, 6, "prompts of each suite"),
        ("--max-new-tokens", 4, 4096, 48, "length limit of an output"),
        ("--most-batch", 1, 32, 32, "the largest batch"),
        ("--long", 64, 2**20, 8192, "the longest context"),
        ("--seed", 0, 2**63 - 1, 0, "of sampled outputs"),
    ):
        about = f"{text} (default {default})"
        add(name, type=parse_whole(least, most), default=default, metavar="N", help=about)
    add("--out", type=path, default=out, metavar="DIR", help=f"default {out}")
    return p


def temperatures(text: str) -> list[float]:
    return _read_list(text, float, 10, "numbers from 0 to 10")


def tree_sizes(text: str) -> list[int]:
    return [n for n in _read_list(text, int, 64, "integers from 0 (no trees) to 64") if n]


def _read_list(text: str, kind: type, most: int, what: str) -> list[Any]:
    try:
        values = sorted({kind(word) for word in text.split(",")})
    except ValueError:
        values = [-1]
    if not all(0 <= value <= most for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: {what}, separated by commas")
    return values


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    check_given(options.target, options.device, options.dtype)
    with Claim(options.out, "--out"):
        from specalign.suites.registry import prompts_of

        suites, skipped = prompts_of(
            options.suite, options.prompts, options.data_dir, options.limit, options.prompts_column
        )
        for line in skipped:
            say(f"skipped: {line}", error=True)
        page = write_advice(options, [p.content for s in suites for p in s.prompts])
    say(page)


def write_advice(options: argparse.Namespace, prompts: Sequence[Any]) -> str:
    """Measure, write advice.md and advice.json, and return the page.

    Raises:
        UserError: a target or drafter that is unavailable or can't draft.
    """
    from decode.evaluation.advice import (
        CONTEXTS,
        MeasurementOptions,
        advise,
        measure_costs,
        open_decoders,
        render,
        to_dict,
    )
    from specalign.lm.loading import load_target

    name = options.target or DEFAULT_TARGET
    target = load_target(
        name,
        options.dtype,
        options.device,
        trust_remote_code=options.trust_remote_code,
        template_kwargs=options.template_kwargs,
        system=options.system,
        decoding=True,
    )
    make_decoder, longest, branches = open_decoders(
        target, name, options.drafter, options.draft_tokens
    )
    measured = MeasurementOptions(
        prompts,
        options.temperatures,
        options.max_new_tokens,
        longest,
        options.trees if branches else [],
        options.long,
        options.most_batch,
        options.seed,
    )
    costs = measure_costs(target, make_decoder, measured)
    contexts = [c for c in CONTEXTS if c <= target.context_limit] or [target.context_limit]
    advice = advise(costs, contexts, options.most_batch)
    processor, cores, load = machine()["processor"], machine()["cores"], load_average()
    title = f"{name}, {options.drafter or 'the shipped drafter'}, {target.dtype_name}, {processor}"
    page = f"# {markdown_text(title)}\n\n{render(costs, advice)}"
    if load and load > 1.5 * cores:
        page += f"\n\nThe machine was busy (load {load:.1f} on {cores} cores)."
    write_text(options.out / "advice.md", page + "\n")
    write_json(options.out / "advice.json", to_dict(costs, advice))
    return f"{page}\n\n{options.out / 'advice.md'}"


if __name__ == "__main__":
    main()
