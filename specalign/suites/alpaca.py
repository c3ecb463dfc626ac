"""Alpaca (github.com/tatsu-lab/stanford_alpaca): 52,002 instructions, some with an input. Papers
measure on some of them; --limit chooses how many."""

from specalign.suites.prompt import Place, Prompt, Row, Suite, find_text


def read_alpaca(row: Row, number: int) -> Prompt:
    given = str(row.get("input") or "").strip()
    instruction = find_text(row, "instruction")
    content = f"{instruction}\n\n{given}" if given else instruction
    return Prompt(f"alpaca-{number}", content, "instruction")


PLACE = Place(
    "tatsu-lab/alpaca", split="train", revision="dce01c9b08f87459cf36a430d809084718273017"
)
SUITE = Suite("alpaca", "Alpaca", "chat", read_alpaca, PLACE, excluded=False)
