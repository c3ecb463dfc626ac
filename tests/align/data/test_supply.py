"""Missing data are written before training; data of other settings are used as they are."""

from pathlib import Path

import pytest
import torch

from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.data.draft_vocab import frequent_tokens
from align.data.packing import TEXT
from align.data.supply import is_missing, open_supply
from specalign.common.errors import UserError
from specalign.lm.model import Target
from tests.target_models import tiny_target


def recipe_of(folder: Path, *words: str) -> Recipe:
    prompts = folder.parent / "prompts.txt"
    prompts.write_text("".join(f"{i} words\n" for i in range(40)))
    first = ["recipe=debug_block", f"output={folder}", f"data.prompts={prompts}"]
    first += ["data.max_answer_tokens=8", "data.length=48"]
    keyed = ["data.samples=8", "data.batch_size=4", *words]
    return load_recipe([*first, *{word.partition("=")[0]: word for word in keyed}.values()])


def test_missing_rows(tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="data is missing and data.write=never"):
        open_supply(recipe_of(tmp_path / "run", "data.write=never"), target)
    recipe = recipe_of(tmp_path / "run")
    supply = open_supply(recipe, target, quiet=True)
    assert len(supply.training) + len(supply.validation) == 8 and supply.exact
    assert "training on 6 samples" in supply.line(recipe) and "warning" not in supply.line(recipe)
    assert not is_missing(recipe, target)
    assert is_missing(recipe_of(tmp_path / "run", "data.samples=12"), target)
    capsys.readouterr()
    other = recipe_of(tmp_path / "run", "data.samples=40", "data.top_k=3")
    assert not is_missing(other, target)
    assert "warning: the recipe asks for 40 samples" in open_supply(other, target).line(other)
    note = f"note: {recipe.data_folder} was generated with data.top_k=0;"
    assert capsys.readouterr().err.startswith(note)


def test_other_text_comes_first(tmp_path: Path, target: Target) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i} of the text\n" for i in range(60)))
    words = [f"data.text=[{path}]", "data.exclude=[]", "data.text_share=0.5", "trainer.max_steps=6"]
    recipe = recipe_of(tmp_path / "run", *words, "trainer.batch_size=2", "trainer.warmup_steps=1")
    supply = open_supply(recipe, target, quiet=True)
    stream = supply.stream(recipe, 6)
    assert [stream.key(place) >= TEXT for place in range(12)] == [True] * 6 + [False] * 6
    assert bool((supply.validation.temperature >= 0).all())  # of the target's own text alone
    assert supply.text is not None and "first 50% of the steps" in supply.line(recipe)
    both = frequent_tokens(supply.training, target, 12, supply.text)
    own = frequent_tokens(supply.training, target, 12)
    assert both is not None and own is not None and not torch.equal(both, own)


def test_rows_longer_than_a_table_of_positions_are_refused(tmp_path: Path) -> None:
    """GPT-Neo and MPT count positions in a packed row."""
    for name, key in (("gpt_neo", "max_position_embeddings"), ("mpt", "max_seq_len")):
        target = tiny_target(name, **{key: 40})
        with pytest.raises(UserError, match=r"data.length=48: target .* its context is 40 tokens"):
            open_supply(recipe_of(tmp_path / "data"), target)
