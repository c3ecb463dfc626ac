"""BIG-Bench Hard (arXiv 2210.09261): 27 tasks, asked without examples."""

from specalign.suites.prompt import PART, Place, Prompt, Row, Suite, find_text

TASKS = (
    "boolean_expressions", "causal_judgement", "date_understanding", "disambiguation_qa",
    "dyck_languages", "formal_fallacies", "geometric_shapes", "hyperbaton",
    "logical_deduction_five_objects", "logical_deduction_seven_objects",
    "logical_deduction_three_objects", "movie_recommendation", "multistep_arithmetic_two",
    "navigate", "object_counting", "penguins_in_a_table", "reasoning_about_colored_objects",
    "ruin_names", "salient_translation_error_detection", "snarks", "sports_understanding",
    "temporal_sequences", "tracking_shuffled_objects_five_objects",
    "tracking_shuffled_objects_seven_objects", "tracking_shuffled_objects_three_objects",
    "web_of_lies", "word_sorting",
)  # fmt: skip
ASK = "\n\nReason step by step, then end with the line: The answer is X."


def read_bbh(row: Row, number: int) -> Prompt:
    """The task's name is the category."""
    task = str(row.get(PART, ""))
    content = find_text(row, "input") + ASK
    return Prompt(f"bbh-{task}-{number}", content, task, find_text(row, "target"))


PLACE = Place("lukaemon/bbh", parts=TASKS)
SUITE = Suite("bbh", "BIG-Bench Hard", "reasoning", read_bbh, PLACE, metric="last line")
