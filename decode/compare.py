"""`python -m decode.compare [A.yaml B.yaml] [key=value …]`: recipes side by side: τ after so many tokens of training.

The recipes are trained, one after the other, and save a drafter at each of `trainer.milestones`. All drafters then decode the same
prompts. One table and one picture come out, with 95% intervals. A run that was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from align.common.claims import Claim
from align.common.errors import cli
from align.common.files import write_atomically, write_text
from align.common.terminal import PlainConsole
from align.common.text import markdown_text, titled
from decode.cli import Parser, path, whole
from decode.suites.registry import GROUPS, SUITES, prompts_of

FOLDER = Path(__file__).resolve().parents[1] / "recipes" / "compare"
RECIPES = (f"{FOLDER}/ours.yaml", f"{FOLDER}/dflash.yaml")
METHOD = (
    "how every drafter decodes: a method of decode.eval, block (a chain) or block_tree:nodes=8"
    " (default drafter: trees of five, above temperature 0.7 chains)"
)


@dataclass(frozen=True)
class CompareConfig:
    """The options, which --help explains."""

    words: list[str]
    suite: str | None = None
    prompts: Path | None = None
    prompts_column: str | None = None
    data_dir: Path | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    method: str | None = None
    jobs: int = 1
    batch_size: int = 1
    device: str = "auto"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    out: Path = field(default_factory=lambda: Path("runs/compare"))

    @property
    def recipes(self) -> list[str]:
        return [word for word in self.words if "=" not in word] or list(RECIPES)

    @property
    def settings(self) -> list[str]:
        return [word for word in self.words if "=" in word]


def parser() -> Parser:
    """The command's options."""
    p = Parser(
        prog="python -m decode.compare",
        description="Train recipes on the same text and measure τ of the drafters that they save on the way.",
    )
    p.mixed = True
    add = p.add_argument
    words = "recipes, those to compare with last (default recipes/compare/ours.yaml and dflash.yaml), and keys that all of them take"
    add("words", nargs="*", metavar="RECIPE|key=value", help=words)
    p.add_prompt_options(f"a comma list of {', '.join(SUITES)}; groups {', '.join(GROUPS)} (default builtin)")
    add("--limit", type=whole(1), metavar="N", help="N prompts of each suite, evenly spread")
    add("--method", metavar="NAME", help=METHOD)
    add("--jobs", type=whole(1), default=1, metavar="N", help="recipes trained at a time (default 1)")
    batch = "prompts decoded at a time: more are faster on a GPU, where one waits for its calls to be started (default 1)"
    add("--batch-size", type=whole(1), default=1, metavar="N", help=batch)
    add("--device", default="auto", help="of decoding: auto (default), cpu, cuda or cuda:N")
    p.add_chat_options()
    p.add_sampling_options("of sampling (default 0)")
    add("--max-new-tokens", type=whole(1), default=128, metavar="N", help="length limit (default 128)")
    add("--out", type=path, default=Path("runs/compare"), metavar="DIR", help="default runs/compare")
    return p


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    config = CompareConfig(**vars(parser().parse_args(arguments)))
    with Claim(config.out, "--out"):
        compare(config, PlainConsole(wide=True))


def compare(config: CompareConfig, console: PlainConsole) -> str:
    """Train, measure, and write compare.md and compare.png; returns the table.

    Raises:
        UserError: recipes that can't be compared, a method that their drafters can't run, prompts that can't be had.
    """
    suites, skipped = prompts_of(
        config.suite, config.prompts, config.data_dir, config.limit, config.prompts_column
    )
    for line in skipped:
        console.say(f"left out: {line}", wrap=False)
    # only now: torch and transformers take seconds to import
    from align.target.loading import load_target
    from decode.benchmark import comparison
    from decode.benchmark.runner import Settings
    from decode.reporting.learning import curves, points, table
    from decode.speculation.sampling import Sampling

    sampling = Sampling(config.temperature, config.top_p, config.top_k, seed=config.seed)
    found = comparison.candidates(config.recipes, config.settings)
    if config.method:
        comparison.check_method(config.method, found)
    comparison.train(found, console, config.jobs)
    t, d = found[0].values["target"], found[0].values["data"]
    target = load_target(
        t["name"],
        t["dtype"],
        config.device,
        revision=t["revision"],
        trust_remote_code=t["trust_remote_code"],
        template_kwargs=config.template_kwargs or d["template_kwargs"],
        system=d["system"] if config.system is None else config.system,
        decoding=True,
    )
    settings = Settings(sampling, config.max_new_tokens)
    records = comparison.measure(
        found, target, suites, settings, config.out, console, config.method, config.batch_size
    )
    reached = points([m for candidate in found for m in candidate.reached], records)
    text = table(reached, {candidate.name: candidate.parameters for candidate in found})
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"
    title = f"{titled(t['name'], target.weights)} · {how} · {', '.join(suite.title for suite in suites)}"
    title += f" · {config.method}" if config.method else ""
    title += f" · {target.chat.description}" if target.chat else ""
    write_text(config.out / "compare.md", f"{markdown_text(title)}\n\n{text}")
    picture = curves(reached, title)
    write_atomically(config.out / "compare.png", lambda part: part.write_bytes(picture))
    console.say(f"{title}\n\n{text}", wrap=False)
    console.say(f"{config.out / 'compare.md'}, {config.out / 'compare.png'}", wrap=False)
    return text


if __name__ == "__main__":
    main()
