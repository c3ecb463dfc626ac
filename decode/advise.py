"""`python -m decode.advise --target … --drafter …`: measure how many tokens to draft on this
machine, by batch size.

Times the target's forward pass over batches, rows and contexts, and drafting and acceptance on
prompts over temperatures. From these costs it computes what is fastest at any batch of 1 to 32,
contexts of 256 to 8k tokens, and temperatures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from decode.cli import Parser, number, parse_whole, path
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
    temps, chain = (
        "temperatures to measure (default 0,0.5,1,1.5)",
        "the longest chain to try (default: the drafter's)",
    )
    trees = "tree sizes to try with block drafters; 0 = none (default 5,8)"
    out = Path("runs/advice")
    p.add_target_options()
    p.add_chat_options()
    add("--drafter", help=drafter)
    p.add_prompt_options("one or more suites, comma-separated (default builtin)")
    add(
        "--temperatures",
        type=several(temperature),
        default=[0, 0.5, 1, 1.5],
        metavar="T,…",
        help=temps,
    )
    add("--draft-tokens", type=parse_whole(1, 64), metavar="K", help=chain)
    add("--trees", type=several(parse_whole(0, 64)), default=[5, 8], metavar="N,…", help=trees)
    for name, least, most, default, text in (
        ("--limit", 2, 1000, 6, "prompts of each suite"),
        ("--max-new-tokens", 4, 4096, 48, "length limit of an output"),
        ("--most-batch", 1, 32, 32, "the largest batch to try"),
        ("--long", 64, 2**20, 8192, "the longest context to try"),
        ("--seed", 0, 2**63 - 1, 0, "seed of sampled outputs"),
    ):
        about = f"{text} (default {default})"
        add(name, type=parse_whole(least, most), default=default, metavar="N", help=about)
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
    from decode.evaluation import advice, decoding_costs
    from specalign.lm.loading import load_target
    from specalign.suites.registry import prompts_of

    suites, skipped = prompts_of(
        options.suite, options.prompts, options.data_dir, options.limit, options.prompts_column
    )
    for line in skipped:
        say(f"skipped: {line}", error=True)
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
    make_decoder, longest, branches = decoding_costs.open_decoders(
        target, name, options.drafter, options.draft_tokens
    )
    measured = decoding_costs.MeasurementOptions(
        prompts=[prompt.content for suite in suites for prompt in suite.prompts],
        temperatures=options.temperatures,
        max_new_tokens=options.max_new_tokens,
        chain=longest,
        trees=[nodes for nodes in options.trees if nodes and branches],
        context=options.long,
        batch=options.most_batch,
        seed=options.seed,
    )
    costs = decoding_costs.measure_costs(target, make_decoder, measured)
    contexts = [c for c in advice.CONTEXTS if c <= target.context_limit] or [target.context_limit]
    processor, cores, load = machine()["processor"], machine()["cores"], load_average()
    title = f"{name}, {options.drafter or 'the shipped drafter'}, {target.dtype_name}, {processor}"
    found = advice.advise(costs, contexts, options.most_batch)
    page = f"# {markdown_text(title)}\n\n{advice.render(costs, found)}"
    if load and load > 1.5 * cores:
        page += f"\n\nThe machine was busy (load {load:.1f} on {cores} cores)."
    write_text(options.out / "advice.md", page + "\n")
    return f"{page}\n\n{options.out / 'advice.md'}"


if __name__ == "__main__":
    main()
