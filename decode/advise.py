"""`python -m decode.advise --target … --drafter …`: measure how many tokens to draft on this
machine, by batch size.

Decodes prompts plainly and with chains and trees of several sizes, at several temperatures and
batch sizes, and prints what is fastest.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from decode.cli import Parser, load_prompts, number, parse_whole, path, target_options
from decode.speculation.settings import Sampling
from specalign.common.claims import Claim
from specalign.common.errors import cli
from specalign.common.files import write_text
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
    chain = "the longest chain to try (default: the drafter's)"
    temperatures = several(temperature)
    batches = several(parse_whole(1, 1024))
    length = "length limit of an output (default 48)"
    out = Path("runs/advice")
    p.add_target_options()
    p.add_engine_option()
    p.add_chat_options()
    add("--drafter", help=drafter)
    p.add_prompt_options("one or more suites, comma-separated (default builtin)")
    limit = "prompts of each suite (default 6)"
    add("--limit", type=parse_whole(1), default=6, metavar="N", help=limit)
    hot, sizes = "to measure (default 0,1)", "to measure (default 1,4,16)"
    add("--temperatures", type=temperatures, default=[0, 1], metavar="T,…", help=hot)
    add("--batches", type=batches, default=[1, 4, 16], metavar="N,…", help=sizes)
    add("--draft-tokens", type=parse_whole(1, 64), metavar="K", help=chain)
    add("--max-new-tokens", type=parse_whole(4), default=48, metavar="N", help=length)
    add("--out", type=path, default=out, metavar="DIR", help=f"output folder (default {out})")
    return p


def temperature(text: str) -> float:
    """A temperature. Raises UserError for one out of range."""
    return Sampling(number(text)).temperature


def several(parse: Callable[[str], float]) -> Callable[[str], list[float]]:
    """A parser of values separated by commas."""
    return lambda text: sorted({parse(word) for word in text.split(",")})


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    check_given(options.target, options.device, options.dtype)
    with Claim(options.out, "--out"):
        page = write_advice(options)
    say(page)


def write_advice(options: argparse.Namespace) -> str:
    """Measure, write advice.md, and return the page. Raises UserError: a target or drafter that is
    unavailable or can't draft."""
    from decode.evaluation.advice import measure_speeds, open_decoders, render_advice
    from specalign.lm.loading import load_target

    suites = load_prompts(options, partial(say, error=True))
    name = options.target or DEFAULT_TARGET
    target = load_target(name, decoding=True, **target_options(options))
    sizes, make_decoder = open_decoders(
        target, name, options.drafter, options.draft_tokens, options.engine
    )
    measured = measure_speeds(
        sizes,
        make_decoder,
        [prompt.content for suite in suites for prompt in suite.prompts],
        options.temperatures,
        options.batches,
        options.max_new_tokens,
    )
    here, load = machine(), load_average()
    drafter = options.drafter or "the shipped drafter"
    title = f"{name}, {drafter}, {target.dtype_name}, {here['processor']}"
    page = f"# {markdown_text(title)}\n\n{render_advice(measured)}"
    if load and load > 1.5 * here["cores"]:
        page += f"\n\nThe machine was busy (load {load:.1f} on {here['cores']} cores)."
    write_text(options.out / "advice.md", page + "\n")
    return f"{page}\n\n{options.out / 'advice.md'}"


if __name__ == "__main__":
    main()
