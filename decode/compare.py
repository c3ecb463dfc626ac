"""`python -m decode.compare [A.yaml B.yaml] [key=value …]`: compare recipes by τ after the same
number of training tokens.

The recipes are trained one after the other and save a drafter at each of `trainer.milestones`; all
drafters decode the same prompts. The result is a table with 95% intervals. An interrupted
comparison resumes.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from decode.cli import Parser, load_prompts, parse_whole, path, pop_sampling
from specalign.common.claims import Claim
from specalign.common.errors import cli
from specalign.common.files import write_text
from specalign.common.terminal import PlainConsole
from specalign.common.text import format_title, markdown_text

FOLDER = Path(__file__).resolve().parents[1] / "recipes" / "compare"
RECIPES = (f"{FOLDER}/ours.yaml", f"{FOLDER}/dflash.yaml")


def parser() -> Parser:
    """The command's options."""
    p = Parser(
        prog="python -m decode.compare",
        description="Train recipes on the same text and measure τ of the drafters that they save.",
    )
    p.mixed = True
    add = p.add_argument
    words = (
        "recipes, the reference last (default recipes/compare/ours.yaml and dflash.yaml), and keys "
        "that apply to all of them"
    )
    out = Path("runs/compare")
    add("words", nargs="*", metavar="RECIPE|key=value", help=words)
    p.add_prompt_options("one or more suites, comma-separated (default builtin)")
    limit = "use N prompts of each suite, evenly spread"
    add("--limit", type=parse_whole(1), metavar="N", help=limit)
    add("--device", default="auto", help="device for decoding: auto (default), cpu, cuda or cuda:N")
    p.add_sampling_options("sampling seed (default 0)")
    length = "length limit (default 128)"
    add("--max-new-tokens", type=parse_whole(1), default=128, metavar="N", help=length)
    add("--out", type=path, default=out, metavar="DIR", help=f"output folder (default {out})")
    return p


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    with Claim(options.out, "--out"):
        compare(options, PlainConsole(wide=True))


def compare(options: argparse.Namespace, console: PlainConsole) -> None:
    """Train, measure, and write compare.md. Raises UserError: recipes that can't be compared, or
    unavailable prompts."""
    sampling = pop_sampling(vars(options))
    suites = load_prompts(options, partial(console.say, wrap=False))
    # only now: torch and transformers take seconds to import
    from decode.evaluation import comparison
    from decode.evaluation.runner import GenerationSettings
    from specalign.lm.loading import load_target

    recipes = [word for word in options.words if "=" not in word] or RECIPES
    keys = [word for word in options.words if "=" in word]
    candidates = comparison.read_candidates(recipes, keys)
    milestones = comparison.train(candidates, console)
    recipe = candidates[0].values["target"]
    data = candidates[0].values["data"]
    target = load_target(
        recipe["name"],
        recipe["dtype"],
        options.device,
        revision=recipe["revision"],
        trust_remote_code=recipe["trust_remote_code"],
        template_kwargs=data["template_kwargs"],
        system=data["system"],
        decoding=True,
    )
    settings = GenerationSettings(sampling, options.max_new_tokens)
    records = comparison.measure(milestones, target, suites, settings, options.out, console)
    table = comparison.render_table(milestones, records)
    name = format_title(recipe["name"], target.weights)
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"
    title = f"{name} · {how} · {', '.join(suite.title for suite in suites)}"
    write_text(options.out / "compare.md", f"{markdown_text(title)}\n\n{table}")
    console.say(f"{title}\n\n{table}\n{options.out / 'compare.md'}", wrap=False)


if __name__ == "__main__":
    main()
