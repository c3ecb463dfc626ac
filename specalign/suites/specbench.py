"""Spec-Bench (arXiv 2401.07851): 480 requests in six categories."""

from specalign.suites.prompt import Place, Prompt, Row, Suite, find_turns

MTBENCH = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]


def read_specbench(row: Row, number: int) -> Prompt:
    """MT-Bench's eight categories count as one, multi-turn conversation, as in the paper."""
    first, *later = find_turns(row, "turns")
    category = str(row.get("category", ""))
    category = "mt_bench" if category in MTBENCH else category
    key = f"specbench-{row.get('question_id', number)}"
    return Prompt(key, first, category, later=tuple(later))


FILE = (
    "raw.githubusercontent.com/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
    "/data/spec_bench/question.jsonl"
)


PLACE = Place(how=f"curl -o {{folder}}/specbench.jsonl https://{FILE}")
SUITE = Suite("specbench", "Spec-Bench", "mixed", read_specbench, PLACE)
