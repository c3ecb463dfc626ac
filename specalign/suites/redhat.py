"""The prompts with which Red Hat measures its speculators: HumanEval and seven files of Spec-Bench."""

from __future__ import annotations

from specalign.suites.prompt import PART, Place, Prompt, Row, Suite, find_text

FILES = (
    "HumanEval.jsonl", "math_reasoning.jsonl", "qa.jsonl", "question.jsonl", "rag.jsonl",
    "summarization.jsonl", "translation.jsonl", "writing.jsonl",
)  # fmt: skip


def read_redhat(row: Row, number: int) -> Prompt:
    """The file's name is the category."""
    turns = row.get("turns")
    content = turns[0] if isinstance(turns, list) and turns else find_text(row, "prompt")
    part = str(row.get(PART, "")).removesuffix(".jsonl")
    return Prompt(f"redhat-{part}-{number}", str(content), part)


SUITE = Suite(
    "redhat",
    "Red Hat's speculator benchmarks",
    "mixed",
    read_redhat,
    Place(
        "RedHatAI/speculator_benchmarks",
        split="train",
        files=FILES,
        revision="2ae86affa2cb97a972b7fc681dd51c04fbff083e",
    ),
)
