"""SPEED-Bench (arXiv 2604.09557): 880 prompts in eleven categories, and long inputs. Its prompts may not
be redistributed: everybody runs its preparation, whose result is read here."""

from functools import partial

from specalign.common.errors import UserError
from specalign.suites.prompt import Place, Prompt, Row, Suite, find_turns

HOW = (
    "run python prepare_data.py --dataset speed --config {config} --output_dir {{folder}} in "
    "examples/specdec_bench of github.com/NVIDIA/Model-Optimizer"
)
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Begins the turns that the script has not filled in."""
INPUTS = ("1k", "2k", "8k", "16k", "32k")


def place(config: str) -> Place:
    """What the authors' script prepares for one configuration."""
    return Place(config=config, how=HOW.format(config=config), prepared=f"speed/{config}")


def read_speedbench(
    row: Row, number: int, suite: str = "speedbench", config: str = "qualitative"
) -> Prompt:
    first, *later = find_turns(row, "turns")
    if any(turn.startswith(PLACEHOLDER) for turn in (first, *later)):
        how = HOW.format(config=config).format(folder="DIR")
        raise UserError(f"suite {suite!r}: row {number + 1} is not prepared: {how}")
    key = f"speedbench-{row.get('question_id', number)}"
    return Prompt(key, first, str(row.get("category", "")), later=tuple(later))


SUITE = Suite(
    "speedbench", "SPEED-Bench", "mixed", read_speedbench, place("qualitative"), max_new_tokens=4096
)
LONG = tuple(
    Suite(
        f"speedbench_{size}",
        f"SPEED-Bench, inputs of {size}",
        "long",
        partial(read_speedbench, suite=f"speedbench_{size}", config=f"throughput_{size}"),
        place(f"throughput_{size}"),
        max_new_tokens=4096,
    )
    for size in INPUTS
)
