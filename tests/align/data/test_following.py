"""Shards are followed while they are written, by another process or by oneself: the same rows at the same places."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.data import following
from align.data import shards as data
from align.data.following import Followed, ShardsAsWritten
from align.data.synthesis import Synthesis, synthesize
from specalign.common import claims
from specalign.common.errors import UserError
from specalign.lm.model import Target


def recipe_of(folder: Path, *words: str) -> Recipe:
    prompts = folder.with_name("prompts.txt")
    folder.parent.mkdir(exist_ok=True)
    prompts.write_text("".join(f"{i} words\n" for i in range(18)))
    first = ["recipe=debug_block", f"output={folder}", "data.samples=18", "data.batch_size=6"]
    return load_recipe(
        [
            *first,
            f"data.prompts={prompts}",
            "data.near_duplicate_threshold=2",
            "data.max_answer_tokens=8",
            "data.length=48",
            "data.follow=true",
            *words,
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


def test_nobody_else_writes(tmp_path: Path, written: Recipe, target: Target) -> None:
    """Writing and training in turn: no shard earlier than it is needed, and the folder and rows of an undisturbed writer."""
    recipe = recipe_of(tmp_path / "run")
    stream = stream_of(recipe, target)
    assert data.read_manifest(recipe.data_folder)["shards"] == 1
    expected = stream_of(written, target)
    places = range(60)
    assert rows(stream, places) == rows(expected, places)
    epoch = stream.starts[-1]
    assert sorted(stream.key(i) for i in range(epoch)) == sorted(
        stream.key(epoch + i) for i in range(epoch)
    )
    for path in written.data_folder.glob("shard-*"):
        assert (recipe.data_folder / path.name).read_bytes() == path.read_bytes()
    assert rows(stream_of(recipe, target), range(40, 60)) == rows(
        expected, range(40, 60)
    )  # resumed there


def test_a_writer_is_waited_for_and_taken_over_from(
    tmp_path: Path, written: Recipe, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds the folder, writes two shards and dies: the third is written here."""
    monkeypatch.setattr(following, "WAIT_SECONDS", 0.01)
    recipe, held = recipe_of(tmp_path / "run"), threading.Event()
    held.set()

    class Claim(claims.Claim):
        def __init__(self, folder: Path, key: str) -> None:
            if held.is_set():
                raise UserError("process 7 writes there")
            super().__init__(folder, key)

    monkeypatch.setattr(following, "Claim", Claim)

    def write() -> None:
        writer = Synthesis(recipe, target, recipe.data_folder, quiet=True)
        for _ in range(2):
            time.sleep(0.05)
            writer.write_shard()
        held.clear()

    thread = threading.Thread(target=write)
    thread.start()
    found = rows(stream_of(recipe, target), range(40))
    thread.join()
    assert found == rows(stream_of(written, target), range(40))
    assert (
        data.read_manifest(recipe.data_folder)["sha256"]
        == data.read_manifest(written.data_folder)["sha256"]
    )


def test_writing_is_refused_where_it_is_forbidden(tmp_path: Path, target: Target) -> None:
    recipe = recipe_of(tmp_path / "run", "data.write=never")
    with pytest.raises(UserError, match="shard 0 is missing and nobody writes it"):
        stream_of(recipe, target)
