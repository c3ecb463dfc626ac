"""The prompts with which Red Hat measures its speculators: HumanEval and seven files of Spec-Bench."""

from specalign.suites.prompt import PART, Place, Prompt, Row, Suite, find_text, find_turns

FILES = (
    "HumanEval.jsonl", "math_reasoning.jsonl", "qa.jsonl", "question.jsonl", "rag.jsonl",
    "summarization.jsonl", "translation.jsonl", "writing.jsonl",
)  # fmt: skip


def read_redhat(row: Row, number: int) -> Prompt:
    """The file's name is the category."""
    has_turns = row.get("turns") is not None
    content = find_turns(row, "turns")[0] if has_turns else find_text(row, "prompt")
    part = str(row.get(PART, "")).removesuffix(".jsonl")
    return Prompt(f"redhat-{part}-{number}", content, part)


PLACE = Place(
    "RedHatAI/speculator_benchmarks",
    split="train",
    files=FILES,
    revision="2ae86affa2cb97a972b7fc681dd51c04fbff083e",
)
SUITE = Suite("redhat", "Red Hat's speculator benchmarks", "mixed", read_redhat, PLACE)
