"""MMLU-Pro (arXiv 2406.01574): 12,032 questions of 14 subjects with up to ten choices."""

from specalign.suites.prompt import Place, Prompt, Row, Suite, find_text, list_choices


def read_mmlu_pro(row: Row, number: int) -> Prompt:
    content = list_choices(find_text(row, "question"), row["options"])
    key = f"mmlu_pro-{row.get('question_id', number)}"
    return Prompt(key, content, str(row.get("category", "")), row.get("answer"))


PLACE = Place("TIGER-Lab/MMLU-Pro", revision="30527804ea8854662078e457808040d872ecdf29")
SUITE = Suite(
    "mmlu_pro",
    "MMLU-Pro",
    "reasoning",
    read_mmlu_pro,
    PLACE,
    metric="multiple choice",
    max_new_tokens=2048,
)
