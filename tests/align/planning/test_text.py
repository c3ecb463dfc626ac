"""How much text there will be: as a data folder says, else assumed, and said to be so."""

from __future__ import annotations

from pathlib import Path

from align.config.parser import load_recipe
from align.data.shards import read_manifest
from align.planning.text import text_size


def test_a_data_folder_says_it(debug_data: Path) -> None:
    recipe = load_recipe(["recipe=debug_block", f"data.path={debug_data}", "data.samples=500"])
    found, manifest = text_size(recipe), read_manifest(debug_data)
    assert (found.samples, found.there) == (500, manifest["samples"])
    assert found.tokens == manifest["tokens"] / manifest["samples"]
    assert 0 < found.kept <= 1 and 0 < found.answers < 1
    assert found.total == 500 * found.tokens
    assert str(debug_data) in found.source


def test_without_one_it_is_assumed(tmp_path: Path) -> None:
    recipe = load_recipe(["recipe=debug_block", f"output={tmp_path}"])
    found = text_size(recipe)
    assert (found.samples, found.there) == (48, 0)
    assert found.tokens < recipe.data.max_prompt_tokens + recipe.data.max_answer_tokens
    assert "as SmolLM2 wrote" in found.source
    assert found.rows(96) * 96 >= found.total > 0
