"""CHAMP (arXiv 2401.06961): 270 competition problems, from their package alone."""

from specalign.common.hub import PackageFile
from specalign.suites.prompt import REASON, Place, Prompt, Row, Suite, find_text


def read_champ(row: Row, number: int) -> Prompt:
    category = str(row.get("category", "math"))
    answer = row.get("_answer")
    return Prompt(find_text(row, "identifier"), find_text(row, "_text") + REASON, category, answer)


PLACE = Place(
    package=PackageFile("champ-dataset", "1.0.0", "champ_dataset/dataset_files/v0.json"),
    under="problems",
)
SUITE = Suite("champ", "CHAMP", "math", read_champ, PLACE, metric="exact match")
