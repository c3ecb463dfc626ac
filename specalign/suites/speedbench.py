"""SPEED-Bench (arXiv 2604.09557): 880 prompts in eleven categories, and long inputs. Its prompts may not
be redistributed: everybody runs its preparation, whose result is read here."""

from __future__ import annotations

from specalign.suites.prompt import Place, Prompt, Row, Suite, find_turns

HOW = "run nvidia/SPEED-Bench's preparation script (see its dataset card)"
INPUTS = ("1k", "2k", "8k", "16k", "32k")


def read_speedbench(row: Row, number: int) -> Prompt:
    first, *later = find_turns(row, "turns")
    key = f"speedbench-{row.get('question_id', number)}"
    return Prompt(key, first, str(row.get("category", "")), later=tuple(later))


SUITE = Suite(
    "speedbench",
    "SPEED-Bench",
    "mixed",
    read_speedbench,
    Place(config="qualitative", how=HOW),
    max_new_tokens=4096,
)
LONG = tuple(
    Suite(
        f"speedbench_{size}",
        f"SPEED-Bench, inputs of {size}",
        "long",
        read_speedbench,
        Place(config=f"throughput_{size}", how=HOW),
        max_new_tokens=4096,
    )
    for size in INPUTS
)
