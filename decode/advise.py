"""`python -m decode.advise --target … --drafter …`: how much to draft here, and from which batch size on not to.

Calls of the target are timed over batches, rows and contexts, drafting and acceptance on prompts, over temperatures. From these costs follows what
is fastest at any batch of 1 to 32, contexts of 256 to 8k tokens, and temperatures. --check decodes at five points that were not measured, and
says how far off the advice is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from align.common.claims import Claim
from align.common.errors import cli
from align.common.files import write_json, write_text
from align.common.provenance import load_average, machine
from align.common.text import markdown_text, say
from align.target.names import DEFAULT_TARGET, check_given
from decode.cli import Parser, path, whole


def parser() -> Parser:
    """The command's options."""
    p = Parser(
        prog="python -m decode.advise",
        description="How much to draft on this machine, and from which batch size on drafting costs more than it gives.",
    )
    add = p.add_argument
    p.add_target_options()
    p.add_chat_options()
    add("--drafter", help="a drafter's folder, or lookup (default: the shipped one, for the default target)")
    p.add_prompt_options("the prompts (default builtin)")
    add("--limit", type=whole(2, 1000), default=6, metavar="N", help="prompts of each suite (default 6)")
    add("--max-new-tokens", type=whole(4, 4096), default=48, metavar="N", help="of each output (default 48)")
    add(
        "--temperatures",
        type=numbers,
        default=[0.0, 0.5, 1.0, 1.5],
        metavar="T,…",
        help="default 0,0.5,1,1.5",
    )
    add("--draft-tokens", type=whole(1, 64), metavar="K", help="the longest chain (default: the drafter's)")
    add(
        "--trees",
        type=counts,
        default=[5, 8],
        metavar="N,…",
        help="tree sizes, of block drafters (default 5,8)",
    )
    add(
        "--most-batch",
        type=whole(1, 32),
        default=32,
        metavar="N",
        help="the largest batch that is timed (default 32)",
    )
    add(
        "--long",
        type=whole(64, 2**20),
        default=8192,
        metavar="N",
        help="the longest context that is timed (default 8192)",
    )
    add("--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="of sampled outputs (default 0)")
    add("--check", action="store_true", help="decode at five points that were not measured")
    add("--out", type=path, default=Path("runs/advice"), metavar="DIR", help="default runs/advice")
    return p


def numbers(text: str) -> list[float]:
    """Temperatures, ascending."""
    try:
        found = sorted({float(word) for word in text.split(",")})
    except ValueError:
        found = [-1.0]
    if not all(0 <= t <= 10 for t in found):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers from 0 to 10 with commas between")
    return found


def counts(text: str) -> list[int]:
    """Tree sizes, ascending; none for an empty text or 0."""
    try:
        found = sorted({int(word) for word in text.split(",") if word})
    except ValueError:
        found = [-1]
    if not all(0 <= n <= 64 for n in found):
        raise argparse.ArgumentTypeError(
            f"{text!r}: whole numbers from 1 to 64 with commas between, or 0 for none"
        )
    return [n for n in found if n]


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = parser().parse_args(arguments)
    check_given(options.target, options.device, options.dtype)
    with Claim(options.out, "--out"):
        from decode.suites.registry import prompts_of

        suites, skipped = prompts_of(
            options.suite, options.prompts, options.data_dir, options.limit, options.prompts_column
        )
        for line in skipped:
            say(f"left out: {line}", error=True)
        page = advise_and_save(options, [p.content for s in suites for p in s.prompts])
    say(page)


def advise_and_save(options: argparse.Namespace, contents: Sequence[Any]) -> str:
    """Measure, write advice.md and advice.json, and return the page.

    Raises:
        UserError: a target or drafter that can't be had, or that does not draft.
    """
    # only now: torch and transformers take seconds to import
    from align.target.loading import load_target
    from decode.advising.advice import advise, contexts_up_to
    from decode.advising.pair import decoders
    from decode.advising.render import as_dict, render
    from decode.advising.run import BATCHES, Trial, check, measure

    given = vars(options)
    name = given["target"] or DEFAULT_TARGET
    target = load_target(
        name,
        given["dtype"],
        given["device"],
        trust_remote_code=given["trust_remote_code"],
        template_kwargs=given["template_kwargs"],
        system=given["system"],
        decoding=True,
    )
    made, longest, branches = decoders(target, name, given["drafter"], given["draft_tokens"])
    trial = Trial(
        contents,
        given["temperatures"],
        given["max_new_tokens"],
        longest,
        given["trees"] if branches else [],
        given["long"],
        [b for b in BATCHES if b <= given["most_batch"]],
        given["seed"],
    )

    def tell(line: str) -> None:
        say(line, error=True)

    costs = measure(target, made, trial, tell)
    found = advise(costs, contexts_up_to(target.context_limit), trial.temperatures, trial.batches)
    points = check(costs, made, trial, tell) if given["check"] else []
    said = (
        f"{name}, {given['drafter'] or 'the shipped drafter'}, {target.dtype_name}, {machine()['processor']}"
    )
    load, cores = load_average(), machine()["cores"]
    busy = (
        f"\n\nThe machine was not idle (load {load:.1f} on {cores} cores)."
        if load and load > 1.5 * cores
        else ""
    )
    page = f"# {markdown_text(said)}{busy}\n\n{render(costs, found, points)}"
    out: Path = given["out"]
    write_text(out / "advice.md", page + "\n")
    write_json(out / "advice.json", as_dict(costs, found, points))
    return f"{page}\n\n{out / 'advice.md'}"


if __name__ == "__main__":
    main()
