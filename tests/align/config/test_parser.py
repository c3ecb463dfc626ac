"""Recipes: every shipped one parses, the layers win in their order, what is saved can be run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from align.config.parser import load_recipe
from align.config.recipe_files import FOLDER
from specalign.common.errors import UserError
from tests.builders import write_recipe as write

COMPARED = sorted((FOLDER / "compare").glob("*.yaml"))


def problem(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(argv)
    return str(caught.value)


@pytest.mark.parametrize("path", COMPARED, ids=lambda path: path.stem)
def test_every_recipe_to_compare_parses_and_says_what_it_is(path: Path) -> None:
    recipe = load_recipe([f"recipe={path}"])
    assert recipe.trainer.milestones and recipe.output == f"runs/compare/{path.stem}"
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("trainer.learning_rate=1e-3", 1e-3),
        ("trainer.betas=[0.9, 9e-1]", [0.9, 0.9]),
        ("trainer.logger=wandb", ["wandb"]),
        ("trainer.logger=csv,wandb", ["csv", "wandb"]),
        ("trainer.max_minutes=null", None),
        ("trainer.max_minutes=2", 2.0),
        ("drafter.target_layers=[3]", [3]),
        ("drafter.init_from_target=False", False),
        ("data.path=", None),
        ("data.path=a: {b", "a: {b"),
        ("data.path='null'", "null"),
        ("target.revision=1234567", "1234567"),
        ("objective.terms={streak: 1}", {"streak": 1.0}),
    ],
)
def test_values_get_the_type_of_their_key(word: str, value: Any) -> None:
    part: Any = load_recipe(["recipe=debug_block", word])
    for name in word.partition("=")[0].split("."):
        part = getattr(part, name)
    assert part == value
    assert type(part) is type(value)


def test_single_terms_join_and_the_mapping_replaces(tmp_path: Path) -> None:
    added = load_recipe(["recipe=debug_block", "objective.terms.streak=0.5"])
    assert added.objective.terms == {"forward_kl": 1.0, "streak": 0.5}
    write(tmp_path, "base.yaml", "objective.terms.streak: 2\n")
    child = write(
        tmp_path, "child.yaml", "base: ./base.yaml\nobjective: {terms: {reverse_kl: 1}}\n"
    )
    assert load_recipe([child]).objective.terms == {"reverse_kl": 1.0}
    both = ["objective.terms.streak=3", "objective.terms={cross_entropy: 1}"]
    assert load_recipe([child, *both]).objective.terms == {"cross_entropy": 1.0, "streak": 3.0}


def test_base_then_file_then_command_line(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "trainer: {max_steps: 100, anchors: 7, batch_size: 4}\n")
    write(tmp_path, "b.yaml", "base: ./a.yaml\ntrainer: {max_steps: 200, anchors: 8}\n")
    last = write(tmp_path, "c.yaml", "base: ./b.yaml\ntrainer.anchors: 9\n")
    found = load_recipe([last, "trainer.anchors=10"]).trainer
    assert (found.max_steps, found.anchors, found.batch_size) == (200, 10, 4)
    taps, block = load_recipe(["recipe=smollm2_taps"]), load_recipe(["recipe=smollm2_block"])
    assert (taps.drafter.context, block.drafter.context) == ("taps", "shared_kv")
    assert taps.trainer == block.trainer


def test_an_error_names_where_its_value_stands(tmp_path: Path) -> None:
    mine = write(tmp_path, "mine.yaml", "trainer: {max_steps: 10, warmup_steps: 5}\n")
    write(tmp_path, "bad.yaml", "seed: x\n")
    child = write(tmp_path, "child.yaml", "base: ./bad.yaml\n")
    for words, says in (
        ((mine, "trainer.max_steps=x"), "command line: trainer.max_steps='x' must be"),
        ((mine, "trainer.warmup_steps=14"), "trainer.warmup_steps=14 must be at most"),
        ((mine, "objective.terms.streek=1"), "objective.terms.streek: unknown loss (did you mean"),
        ((child,), "bad.yaml: seed='x'"),
    ):
        assert problem(*words).startswith(says)


def test_text_that_recipes_share_is_one_targets() -> None:
    """Another target's goes into a folder of its own; a path that is asked for stays."""

    def path(recipe: str, *words: str) -> str | None:
        return load_recipe([f"recipe={recipe}", *words]).data.path

    other, shared = "target.name=org/my model", "runs/smollm2_block/data"
    for recipe in ("smollm2_taps", "smollm2_variable_prefix"):
        assert path(recipe) == shared
        assert path(recipe, other) == f"{shared}-org--my--model"
    assert path("smollm2_taps", other, "data.path=here") == "here"
    assert path("smollm2_block", other) is path("taps", other) is None


def test_a_path_with_blanks_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that YAML reads as something else; lists of several are split."""
    monkeypatch.chdir(tmp_path)
    names = ("my notes", "a, b", "part #1", "key: value", "2024")
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "a.txt").write_text("a")

    def texts(word: str) -> list[str]:
        return load_recipe(["recipe=debug_block", f"data.text={word}"]).data.text

    assert [texts(name) for name in names] == [[name] for name in names]
    assert (
        texts('["my notes", "c d.txt"]') == texts("[my notes, c d.txt]") == ["my notes", "c d.txt"]
    )
    assert texts("my notes,a.txt") == texts("my notes, a.txt") == ["my notes", "a.txt"]
    assert texts("my nots") == ["my nots"]  # the error names it in full
