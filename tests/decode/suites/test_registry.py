"""Names, groups and hub ids of the suites."""

from __future__ import annotations

from decode.suites.registry import GROUPS, SUITES, resolve


def test_names_groups_and_lists() -> None:
    assert [s.name for s, _ in resolve("mtbench, humaneval,mtbench")] == ["mtbench", "humaneval"]
    assert [s.name for s, own in resolve("math")] == list(GROUPS["math"])
    assert {s.name: own for s, own in resolve("math,gsm8k")} == {
        "gsm8k": True, "math500": False, "aime": False, "champ": False,
    }  # fmt: skip
    assert all(name in SUITES for members in GROUPS.values() for name in members)
    assert {"reasoning", "coding", "math"} <= GROUPS.keys()


def test_the_real_hub_ids() -> None:
    assert {name: suite.place.hub for name, suite in SUITES.items() if suite.place.hub} == {
        "mtbench": "HuggingFaceH4/mt_bench_prompts",
        "humaneval": "openai/openai_humaneval",
        "gsm8k": "openai/gsm8k",
        "math500": "HuggingFaceH4/MATH-500",
        "aime": "math-ai/aime25",
        "gpqa": "Idavidrein/gpqa",
    }
