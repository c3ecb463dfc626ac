"""Shards are read while another process writes them: the same rows at the same places."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.data import following
from align.data.following import Followed, ShardsAsWritten
from align.data.synthesis import Synthesis, synthesize
from specalign.common import claims
from specalign.common.errors import UserError
from specalign.lm.model import Target


def recipe_of(folder: Path, *words: str) -> Recipe:
    prompts = folder.with_name("prompts.txt")
    prompts.write_text("".join(f"{i} words\n" for i in range(18)))
    return load_recipe(
        [
            *("recipe=debug_block", f"output={folder}", "data.samples=18", "data.batch_size=6"),
            *(f"data.prompts={prompts}", "data.near_duplicate_threshold=2", "data.follow=true"),
            *("data.max_answer_tokens=8", "data.length=48", *words),
        ]
    )


def stream_of(recipe: Recipe, target: Target) -> Followed:
    later = ShardsAsWritten(recipe, target, recipe.data_folder, quiet=True)
    return Followed(later.take_first(1), later, recipe.data.length, recipe.seed)


def rows(stream: Followed, places: range) -> list[list[int]]:
    return [stream.row(stream.key(place)).tokens_L.tolist() for place in places]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Recipe:
    """A recipe whose data are there."""
    recipe = recipe_of(tmp_path_factory.mktemp("written") / "run")
    synthesize(recipe, target, recipe.data_folder, quiet=True)
    return recipe


def test_rows_depend_on_the_place_alone(written: Recipe, target: Target) -> None:
    stream = stream_of(written, target)
    expected = rows(stream, range(60))
    epoch = stream.starts[-1]
    keys = [stream.key(i) for i in range(2 * epoch)]
    assert sorted(keys[:epoch]) == sorted(keys[epoch:])
    assert rows(stream_of(written, target), range(40, 60)) == expected[40:]


def test_a_dead_writer_is_replaced(
    tmp_path: Path, written: Recipe, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds the folder, writes two shards and dies: the third is written here."""
    monkeypatch.setattr(following, "WAIT_SECONDS", 0.01)
    recipe = recipe_of(tmp_path / "run")
    held = threading.Event()
    held.set()

    def claim(folder: Path, key: str) -> claims.Claim:
        if held.is_set():
            raise UserError("another process writes there")
        return claims.Claim(folder, key)

    monkeypatch.setattr(following, "Claim", claim)

    def write() -> None:
        writer = Synthesis(recipe, target, recipe.data_folder, quiet=True)
        for _ in range(2):
            writer.write_shard()
        held.clear()

    thread = threading.Thread(target=write)
    thread.start()
    found = rows(stream_of(recipe, target), range(40))
    thread.join()
    assert found == rows(stream_of(written, target), range(40))


def test_writing_can_be_forbidden(tmp_path: Path, target: Target) -> None:
    with pytest.raises(UserError, match="shard 0 is missing and nobody writes it"):
        stream_of(recipe_of(tmp_path / "run", "data.write=never"), target)
