"""What is missing is written before training; what was written with other settings is taken as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.draft_vocab import frequent_tokens
from align.data.stream import TEXT
from align.data.supply import is_missing, open_supply
from specalign.common.claims import LOCK
from specalign.common.errors import UserError
from specalign.lm.model import Target
from tests.target_models import tiny_target


def recipe_of(folder: Path, *words: str) -> Recipe:
    prompts = folder.parent / "prompts.txt"
    prompts.write_text("".join(f"{i} words\n" for i in range(40)))
    first = ["recipe=debug_block", f"output={folder}", "data.batch_size=4"]
    first += [] if any(word.startswith("data.samples=") for word in words) else ["data.samples=8"]
    return load_recipe(
        [
            *first,
            f"data.prompts={prompts}",
            "data.near_duplicate_threshold=2",
            "data.max_answer_tokens=8",
            "data.length=48",
            *words,
        ]
    )


def test_missing_own_words_are_written(tmp_path: Path, target: Target) -> None:
    with pytest.raises(UserError, match="data are missing, and data.write=never"):
        open_supply(recipe_of(tmp_path / "run", "data.write=never"), target)
    recipe = recipe_of(tmp_path / "run")
    supply = open_supply(recipe, target, quiet=True)
    assert len(supply.training) + len(supply.validation) == 8 and supply.exact
    assert "training on 6 samples" in supply.line(recipe) and "warning" not in supply.line(recipe)
    more = recipe_of(tmp_path / "run", "data.samples=12")
    assert is_missing(more, target) and not is_missing(recipe, target)
    other = recipe_of(
        tmp_path / "run", "data.samples=40", "data.top_k=3"
    )  # another recipe's folder
    assert not is_missing(other, target)
    (recipe.data_folder / LOCK).touch()  # its writer was killed after the last shard
    assert "warning: the recipe asks for 40 samples" in open_supply(other, target).line(other)
    assert not (recipe.data_folder / LOCK).exists()
    fewer = recipe_of(tmp_path / "run", "data.samples=3")
    assert (
        "asks for 3 samples" in (said := open_supply(fewer, target).line(fewer))
        and "all are read" in said
    )


def test_text_that_was_written_otherwise_is_said(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Taken as it is, with a note of what differs."""
    recipe = recipe_of(tmp_path / "run")
    open_supply(recipe, target, quiet=True)

    def note(*words: str) -> str:
        again = recipe_of(tmp_path / "run", *words)
        capsys.readouterr()
        open_supply(again, target)
        return capsys.readouterr().err

    assert note() == note("seed=3") == note("data.samples=7") == ""
    said = note("data.max_prompt_tokens=70", "data.top_k=2")
    start = f"note: {recipe.data_folder} was written with "
    assert said.startswith(
        f"{start}data.top_k=0, data.max_prompt_tokens={recipe.data.max_prompt_tokens}:"
    )


def test_text_comes_before_own_words(tmp_path: Path, target: Target) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i} of the text\n" for i in range(60)))
    words = [f"data.text=[{path}]", "data.exclude=[]", "data.text_share=0.5", "trainer.max_steps=6"]
    recipe = recipe_of(tmp_path / "run", *words, "trainer.batch_size=2", "trainer.warmup_steps=1")
    open_supply(recipe, target, quiet=True)
    (recipe.data_folder / "text" / LOCK).touch()
    supply = open_supply(recipe, target, quiet=True)
    assert not (recipe.data_folder / "text" / LOCK).exists()
    stream = supply.stream(recipe)
    assert [stream.key(place) >= TEXT for place in range(12)] == [True] * 6 + [False] * 6
    assert bool((supply.validation.temperature >= 0).all())  # τ is told by own words alone
    assert supply.text is not None and "for 50% of the steps" in supply.line(recipe)
    size = 12
    both, own = (
        frequent_tokens(supply.training, target, size, text) for text in (supply.text, None)
    )
    assert both is not None and own is not None and not torch.equal(both, own)
    assert data.read_manifest(recipe.data_folder)["samples"] == 8


def test_rows_longer_than_a_table_of_places_are_refused(tmp_path: Path) -> None:
    """GPT-Neo and MPT count places in a packed row; Whisper's decoder names its context in another key."""
    for name, key in (("gpt_neo", "max_position_embeddings"), ("mpt", "max_seq_len")):
        target = tiny_target(name, **{key: 40})
        with pytest.raises(
            UserError,
            match=r"data.length=48: target .* its context is 40 tokens \(data.length=40\)",
        ):
            open_supply(recipe_of(tmp_path / "data"), target)
    assert tiny_target("whisper", max_target_positions=64).context_limit == 64
