"""`python -m decode.compare [A.yaml B.yaml] [key=value …]`: compare recipes by τ after the same
number of training tokens.

The recipes are trained one after the other and save a drafter at each of `trainer.milestones`; all
drafters decode the same prompts. The result is a table and a picture with 95% intervals. An
interrupted comparison resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decode.cli import Parser, parse_whole, path, pop_sampling
from decode.speculation.settings import Sampling
from decode.systems.parsing import Method, read_method
from specalign.common.claims import Claim
from specalign.common.errors import cli
from specalign.common.files import write_atomically, write_text
from specalign.common.schema import JsonObject
from specalign.common.terminal import PlainConsole
from specalign.common.text import format_title, markdown_text
from specalign.suites.registry import GROUPS, SUITES, prompts_of

FOLDER = Path(__file__).resolve().parents[1] / "recipes" / "compare"
RECIPES = (f"{FOLDER}/ours.yaml", f"{FOLDER}/dflash.yaml")


@dataclass(frozen=True)
class CompareConfig:
    """The options of `decode.compare` (see its --help)."""

    words: list[str]
    sampling: Sampling
    method: Method | None = None
    suite: str | None = None
    prompts: Path | None = None
    prompts_column: str | None = None
    data_dir: Path | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    batch_size: int = 1
    device: str = "auto"
    template_kwargs: JsonObject = field(default_factory=dict)
    system: str | None = None
    out: Path = Path("runs/compare")

    @property
    def recipes(self) -> list[str]:
        return [word for word in self.words if "=" not in word] or list(RECIPES)

    @property
    def overrides(self) -> list[str]:
        """The keys that all recipes take."""
        return [word for word in self.words if "=" in word]


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
    method = (
        "method used with every drafter, as in decode.eval: block (a chain) or "
        "block_tree:tree_nodes=8 (default: trees of five, chains above temperature 0.7)"
    )
    batch = "prompts decoded at a time; larger batches are faster on a GPU (default 1)"
    out = Path("runs/compare")
    count = parse_whole(1)
    add("words", nargs="*", metavar="RECIPE|key=value", help=words)
    p.add_prompt_options(
        f"comma-separated: {', '.join(SUITES)}; groups {', '.join(GROUPS)} (default builtin)"
    )
    add("--limit", type=count, metavar="N", help="use N prompts of each suite, evenly spread")
    add("--method", metavar="NAME", help=method)
    add("--batch-size", type=count, default=1, metavar="N", help=batch)
    add("--device", default="auto", help="device for decoding: auto (default), cpu, cuda or cuda:N")
    p.add_chat_options()
    p.add_sampling_options("sampling seed (default 0)")
    limit = "length limit (default 128)"
    add("--max-new-tokens", type=count, default=128, metavar="N", help=limit)
    add("--out", type=path, default=out, metavar="DIR", help=f"output folder (default {out})")
    return p


def read_config(arguments: Sequence[str] | None) -> CompareConfig:
    """The command line as a config. Raises UserError for what is mistyped."""
    typed = vars(parser().parse_args(arguments))
    method = typed.pop("method")
    return CompareConfig(
        sampling=pop_sampling(typed),
        method=None if method is None else read_method(method),
        **typed,
    )


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    config = read_config(arguments)
    with Claim(config.out, "--out"):
        compare(config, PlainConsole(wide=True))


def compare(config: CompareConfig, console: PlainConsole) -> str:
    """Train, measure, and write compare.md and compare.png; returns the table.

    Raises:
        UserError: recipes that can't be compared, a method that their drafters can't run, or
            unavailable prompts.
    """
    suites, skipped = prompts_of(
        config.suite, config.prompts, config.data_dir, config.limit, config.prompts_column
    )
    for line in skipped:
        console.say(f"left out: {line}", wrap=False)
    # only now: torch and transformers take seconds to import
    from decode.evaluation import comparison
    from decode.evaluation.learning import curves, points, table
    from decode.evaluation.runner import GenerationSettings
    from specalign.lm.loading import load_target

    candidates = comparison.read_candidates(config.recipes, config.overrides)
    method = config.method
    if method is not None:
        comparison.check_method(method, candidates)
    comparison.train(candidates, console)
    recipe = candidates[0].values["target"]
    data = candidates[0].values["data"]
    target = load_target(
        recipe["name"],
        recipe["dtype"],
        config.device,
        revision=recipe["revision"],
        trust_remote_code=recipe["trust_remote_code"],
        template_kwargs=config.template_kwargs or data["template_kwargs"],
        system=data["system"] if config.system is None else config.system,
        decoding=True,
    )
    sampling = config.sampling
    settings = GenerationSettings(sampling, config.max_new_tokens)
    name = None if method is None else method.name
    records = comparison.measure(
        candidates, target, suites, settings, config.out, console, name, config.batch_size
    )
    reached = points([m for candidate in candidates for m in candidate.reached], records)
    text = table(reached, {candidate.name: candidate.parameters for candidate in candidates})
    facts = [
        format_title(recipe["name"], target.weights),
        "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}",
        ", ".join(suite.title for suite in suites),
        name or "",
        target.chat.description if target.chat else "",
    ]
    title = " · ".join(filter(None, facts))
    write_text(config.out / "compare.md", f"{markdown_text(title)}\n\n{text}")
    picture = curves(reached, title)
    write_atomically(config.out / "compare.png", lambda part: part.write_bytes(picture))
    console.say(f"{title}\n\n{text}", wrap=False)
    console.say(f"{config.out / 'compare.md'}, {config.out / 'compare.png'}", wrap=False)
    return text


if __name__ == "__main__":
    main()
