"""The prompts of this project."""

from __future__ import annotations

from decode.suites import builtin
from decode.suites.sources import load_suite


def test_builtin_has_forty_distinct_prompts_in_four_categories() -> None:
    loaded = load_suite(builtin.SUITE)
    assert (
        len(loaded.prompts)
        == 40
        == len({p.content for p in loaded.prompts})
        == len({p.id for p in loaded.prompts})
    )
    counts = {
        c: sum(p.category == c for p in loaded.prompts) for c in ("chat", "reasoning", "coding", "math")
    }
    assert set(counts.values()) == {10}
