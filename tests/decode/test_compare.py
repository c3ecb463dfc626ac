"""The command: its words, and the whole of it on the debug twins."""

from pathlib import Path

import pytest

from decode.compare import RECIPES, main, parser


def test_words_are_recipes_and_keys() -> None:
    later = parser().parse_args(["a.yaml", "--limit", "3", "b.yaml", "seed=1"])
    assert (later.words, later.limit) == (["a.yaml", "b.yaml", "seed=1"], 3)
    assert all(Path(recipe).is_file() for recipe in RECIPES)


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
