"""Recipes: every shipped one parses, the layers win in their order, what is saved can be run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from align.config.drafter import LOSS_NAMES
from align.config.parser import help_text, load_recipe, parse_command
from align.config.recipe import keys
from align.config.recipe_files import FOLDER, list_recipes
from specalign.common.errors import UserError
from tests.builders import needed_words as needed
from tests.builders import write_recipe as write

COMPARED = sorted((FOLDER / "compare").glob("*.yaml"))


def problem(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(argv)
    return str(caught.value)


@pytest.mark.parametrize("name", list_recipes())
def test_every_shipped_recipe_parses_and_says_what_it_is(name: str) -> None:
    recipe = load_recipe([f"recipe={name}", *needed(name)])
    assert recipe.name == name
    assert recipe.output == f"runs/{name}"
    assert (FOLDER / f"{name}.yaml").read_text().startswith("# ")


@pytest.mark.parametrize("path", COMPARED, ids=lambda path: path.stem)
def test_every_recipe_to_compare_parses_and_says_what_it_is(path: Path) -> None:
    recipe = load_recipe([f"recipe={path}"])
    assert recipe.trainer.milestones and recipe.output == f"runs/compare/{path.stem}"
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("trainer.learning_rate=1e-3", 1e-3),
        ("trainer.learning_rate=1E-03", 1e-3),
        ("trainer.learning_rate=.5", 0.5),
        ("trainer.weight_decay=1", 1.0),
        ("trainer.betas=[0.9, 9e-1]", [0.9, 0.9]),
        ("trainer.logger=wandb", ["wandb"]),
        ("trainer.logger=csv,wandb", ["csv", "wandb"]),
        ("trainer.logger=[csv, tensorboard]", ["csv", "tensorboard"]),
        ("trainer.max_minutes=null", None),
        ("trainer.max_minutes=None", None),
        ("trainer.max_minutes=2", 2.0),
        ("drafter.target_layers=[3]", [3]),
        ("drafter.init_from_target=False", False),
        ("drafter.init=null", None),
        ("data.path=", None),
        ("data.path=a: {b", "a: {b"),
        ("data.path='null'", "null"),
        ("target.revision=1234567", "1234567"),
        ("output=2024", "2024"),
        ("launch.devices=2", 2),
        ("objective.terms={streak: 1}", {"streak": 1.0}),
    ],
)
def test_values_get_the_type_of_their_key(word: str, value: Any) -> None:
    part: Any = load_recipe(["recipe=debug_block", word])
    for name in word.partition("=")[0].split("."):
        part = getattr(part, name)
    assert part == value
    assert type(part) is type(value)


def test_devices_auto_is_resolved() -> None:
    recipe = load_recipe(["recipe=debug_block", "launch.devices=auto", "launch.accelerator=cpu"])
    assert recipe.launch.devices == 1


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
    write(tmp_path, "a.yaml", "trainer: {max_steps: 100, anchors: 7, batch_size: 4}\nname: first\n")
    write(tmp_path, "b.yaml", "base: ./a.yaml\ntrainer: {max_steps: 200, anchors: 8}\n")
    recipe = load_recipe(
        [write(tmp_path, "c.yaml", "base: ./b.yaml\ntrainer.anchors: 9\n"), "trainer.anchors=10"]
    )
    assert (recipe.trainer.max_steps, recipe.trainer.anchors, recipe.trainer.batch_size) == (
        200,
        10,
        4,
    )
    taps, block = load_recipe(["recipe=smollm2_taps"]), load_recipe(["recipe=smollm2_block"])
    assert (taps.drafter.context, block.drafter.context) == ("taps", "shared_kv")
    assert taps.trainer == block.trainer


def test_help_names_every_recipe_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_command(["recipe=nonsense", "--help-all"], "align.train", "Trains.") is None
    printed = capsys.readouterr().out
    assert printed.strip() == help_text("align.train", "Trains.")
    text = printed + " ".join(printed.split())
    assert "python -m align.train" in text
    assert "Trains." in text
    for name in list_recipes():
        assert (FOLDER / f"{name}.yaml").read_text().splitlines()[0].lstrip("# ") in text
    for key in keys().values():
        assert f"  {key.name}=" in text
        assert key.doc
        assert key.doc in text
    assert all(name in text for name in LOSS_NAMES)


def test_an_error_names_where_its_value_stands(tmp_path: Path) -> None:
    mine = write(tmp_path, "mine.yaml", "trainer: {max_steps: 10, warmup_steps: 5}\n")
    assert problem(mine, "trainer.max_steps=x").startswith(
        "command line: trainer.max_steps='x' must be"
    )
    assert problem(mine, "trainer.max_steps=3", "trainer.warmup_steps=4").startswith(
        "trainer.warmup_steps=4 must be at most"
    )
    assert problem(mine, "objective.terms.streek=1") == (
        "objective.terms.streek: unknown loss (did you mean 'streak'?)"
    )
    misspelt = write(tmp_path, "misspelt.yaml", "trainr: {max_steps: 3}\n")
    assert problem(misspelt) == "misspelt.yaml: unknown key 'trainr' (did you mean 'trainer'?)"
    write(tmp_path, "bad.yaml", "seed: x\n")
    assert problem(write(tmp_path, "child.yaml", "base: ./bad.yaml\n")).startswith(
        "bad.yaml: seed='x'"
    )


def test_a_path_with_blanks_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that YAML reads as something else; lists of several are split as ever."""
    monkeypatch.chdir(tmp_path)
    for name in ("my notes", "a, b", "part #1", "key: value", "2024"):
        (tmp_path / name).mkdir()
    (tmp_path / "a.txt").write_text("a")

    def texts(word: str) -> list[str]:
        return load_recipe(["recipe=debug_block", f"data.text={word}"]).data.text

    for name in ("my notes", "a, b", "part #1", "key: value", "2024"):
        assert texts(name) == [name]
    assert (
        texts('["my notes", "c d.txt"]') == texts("[my notes, c d.txt]") == ["my notes", "c d.txt"]
    )
    assert texts("my notes,a.txt") == texts("my notes, a.txt") == ["my notes", "a.txt"]
    assert texts("a.txt,b.txt") == ["a.txt", "b.txt"]
    assert texts("my nots") == ["my nots"]  # which the line that refuses it names whole
    words = ["recipe=debug_block", "trainer.logger=csv tensorboard"]
    assert load_recipe(words).trainer.logger == ["csv", "tensorboard"]
