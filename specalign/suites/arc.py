"""ARC-Challenge (arXiv 1803.05457): grade-school science, multiple choice."""

from specalign.suites.prompt import LETTERS, Place, Prompt, Row, Suite, find_text, list_choices


def read_arc(row: Row, number: int) -> Prompt:
    """Some questions number their choices, so the answer is given by its place."""
    choices = row["choices"]
    labels = [str(label) for label in choices["label"]]
    answer = str(row.get("answerKey", ""))
    reference = LETTERS[labels.index(answer)] if answer in labels else None
    content = list_choices(find_text(row, "question"), choices["text"])
    return Prompt(str(row.get("id", f"arc-{number}")), content, "science", reference)


PLACE = Place(
    "allenai/ai2_arc", "ARC-Challenge", revision="210d026faf9955653af8916fad021475a3f00453"
)
SUITE = Suite("arc", "ARC-Challenge", "reasoning", read_arc, PLACE, metric="multiple choice")
