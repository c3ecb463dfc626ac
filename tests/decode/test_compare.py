"""The command: its words, and the whole of it on the debug twins."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.compare import main, read_config


def test_words_are_recipes_and_keys() -> None:
    config = read_config(["a.yaml", "b.yaml", "trainer.max_steps=9", "--limit", "3"])
    assert (config.recipes, config.overrides, config.limit) == (
        ["a.yaml", "b.yaml"],
        ["trainer.max_steps=9"],
        3,
    )
    later = read_config(["a.yaml", "--limit", "3", "b.yaml", "seed=1"])
    assert (later.recipes, later.overrides) == (["a.yaml", "b.yaml"], ["seed=1"])
    default = read_config([])
    assert all(Path(recipe).is_file() for recipe in default.recipes) and default.overrides == []


@pytest.mark.slow
def test_the_debug_twins_from_nothing_to_the_table(
    tmp_path: Path, prompts: Path, debug_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainings in processes of their own, decoded."""
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(tmp_path)
    twins = [
        str(root / "recipes" / "compare" / f"debug_{name}.yaml") for name in ("ours", "dflash")
    ]
    words = [*twins, "target.device=cpu", "target.dtype=float32", f"data.path={debug_data}"]
    words += ["--prompts", str(prompts), "--max-new-tokens", "8", "--device", "cpu", "--out", "out"]
    main(words)
    text = (tmp_path / "out" / "compare.md").read_text()
    assert len([line for line in text.splitlines() if "| debug_" in line]) == 6
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
