"""Recipes: every shipped one parses, the layers win in their order, and what follows from other keys."""

import json
from pathlib import Path
from typing import Any

import pytest

from align.config.drafter import LOSS_NAMES
from align.config.parser import load_recipe, parse_command
from align.config.recipe import keys
from align.config.recipe_files import FOLDER, list_recipes
from specalign.common.errors import UserError
from tests.builders import needed_words as needed
from tests.builders import write_recipe as write

RECIPES = sorted([*FOLDER.glob("*.yaml"), *(FOLDER / "compare").glob("*.yaml")])


def problem(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(argv)
    return str(caught.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_parses_and_says_what_it_is(path: Path) -> None:
    recipe, compared = load_recipe([f"recipe={path}", *needed(path.stem)]), path.parent != FOLDER
    assert recipe.name == path.stem and bool(recipe.trainer.milestones) == compared
    assert recipe.output == f"runs/{'compare/' * compared}{path.stem}"
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("trainer.learning_rate=1e-3", 1e-3),
        ("trainer.learning_rate=.5", 0.5),
        ("trainer.weight_decay=1", 1.0),
        ("trainer.betas=[0.9, 9e-1]", [0.9, 0.9]),
        ("trainer.logger=wandb", ["wandb"]),
        ("trainer.logger=csv,wandb", ["csv", "wandb"]),
        ("trainer.max_minutes=null", None),
        ("trainer.max_minutes=None", None),
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


def test_single_terms_join_and_the_mapping_replaces(tmp_path: Path) -> None:
    added = load_recipe(["recipe=debug_block", "objective.terms.streak=0.5"])
    assert added.objective.terms == {"forward_kl": 1.0, "streak": 0.5}
    write(tmp_path, "base.yaml", "objective.terms.streak: 2\n")
    text = "base: ./base.yaml\nobjective: {terms: {total_variation: 1}}\n"
    child = write(tmp_path, "child.yaml", text)
    assert load_recipe([child]).objective.terms == {"total_variation": 1.0}
    both = ["objective.terms.streak=3", "objective.terms={cross_entropy: 1}"]
    assert load_recipe([child, *both]).objective.terms == {"cross_entropy": 1.0, "streak": 3.0}


def test_base_then_file_then_command_line(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "trainer: {max_steps: 100, anchors: 7, batch_size: 4}\nname: first\n")
    write(tmp_path, "b.yaml", "base: ./a.yaml\ntrainer: {max_steps: 200, anchors: 8}\n")
    last = write(tmp_path, "c.yaml", "base: ./b.yaml\ntrainer.anchors: 9\n")
    trainer = load_recipe([last, "trainer.anchors=10"]).trainer
    assert (trainer.max_steps, trainer.anchors, trainer.batch_size) == (200, 10, 4)
    taps, block = load_recipe(["recipe=smollm2_taps"]), load_recipe(["recipe=smollm2_block"])
    assert (taps.drafter.context, block.drafter.context) == ("taps", "shared_kv")
    assert taps.trainer == block.trainer


def test_help_names_every_recipe_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_command(["recipe=nonsense", "--help-all"], "align.train", "Trains.") is None
    text = capsys.readouterr().out
    assert all(f"  {key.name}=" in text and key.doc for key in keys().values())
    assert all(name in text for name in (*list_recipes(), *LOSS_NAMES))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("recipe=debug_blok", "did you mean 'debug_block'"),
        ("training.max_steps=3", "unknown key 'training.max_steps' (did you mean 'trainer.max_ste"),
        ("trainer=3", "trainer=3: trainer is a group of keys"),
        ("base=smollm2_block", "recipe=NAME"),
        ("trainer.max_steps=1.5", "command line: trainer.max_steps=1.5 must be an integer"),
        ("seed=true", "seed=True must be an integer"),
        ("name=a/b", "name='a/b'"),
        ("output=a\x1bc", "control characters"),
        ("trainer.betas=[0.9", "command line: trainer.betas: not valid YAML"),
        ("trainer.warmup_steps=999", "trainer.warmup_steps=999 must be at most"),
        ("objective.terms.streek=1", "unknown loss (did you mean 'streak'?)"),
    ],
)
def test_an_error_names_its_key(word: str, says: str) -> None:
    assert says in problem(*["recipe=debug_block"] * (not word.startswith("recipe")), word)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "bad.yaml: must contain `key: value` lines"),
        ("trainer: {max_steps: 3\nseed: 1\n", "bad.yaml: not valid YAML: line 2"),
        ("trainr: {max_steps: 3}\n", "bad.yaml: unknown key 'trainr' (did you mean 'trainer'?)"),
        ("trainer: {learning_rate: '1,5'}\n", "bad.yaml: trainer.learning_rate='1,5'"),
        ("base: debug_blok\n", "bad.yaml: base: recipe 'debug_blok': no such recipe"),
        ("base: ./bad.yaml\n", "must be another recipe's name"),
        ("kinds: {taps: 3}\n", "bad.yaml: kinds.taps=3 must be a mapping"),
    ],
)
def test_an_error_names_the_file(text: str, says: str, tmp_path: Path) -> None:
    bad = write(tmp_path, "bad.yaml", text)
    assert says in problem(bad) and says in problem(write(tmp_path, "a.yaml", "base: ./bad.yaml\n"))


def test_a_path_with_blanks_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that YAML reads as something else; lists of several are split as ever."""
    monkeypatch.chdir(tmp_path)

    def texts(word: str) -> list[str]:
        return load_recipe(["recipe=debug_block", f"data.text={word}"]).data.text

    (tmp_path / "a.txt").write_text("a")
    for name in ("my notes", "a, b", "part #1", "key: value", "2024"):
        (tmp_path / name).mkdir()
        assert texts(name) == [name]
    for both in ('["my notes", "c d.txt"]', "[my notes, c d.txt]"):
        assert texts(both) == ["my notes", "c d.txt"]
    assert texts("my notes,a.txt") == texts("my notes, a.txt") == ["my notes", "a.txt"]
    assert texts("a.txt,b.txt") == ["a.txt", "b.txt"]
    assert texts("my nots") == ["my nots"]  # which the line that refuses it names whole
    words = ["recipe=debug_block", "trainer.logger=csv tensorboard"]
    assert load_recipe(words).trainer.logger == ["csv", "tensorboard"]


def folder(path: Path, config: dict[str, object], record: dict[str, object] | None = None) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if record is not None:
        (path / "drafter.json").write_text(json.dumps(record))
    return f"drafter.init={path}"


ADAPT = ("recipe=adapt", "target.name=debug")


def test_adapt_takes_the_kind_of_the_drafter_that_it_starts_from(tmp_path: Path) -> None:
    def adapt(name: str, config: dict[str, object], *record: dict[str, object]) -> Any:
        return load_recipe([*ADAPT, folder(tmp_path / name, config, *record)])

    taps = adapt("a", {"architectures": ["DFlashDraftModel"]})
    assert (taps.drafter.kind, taps.drafter.context) == ("block", "taps")
    assert taps.trainer.max_steps == 600
    masked = adapt("b", {"architectures": ["AdaptedMaskedLM"]}, {"block_size": 5})
    assert (masked.drafter.kind, masked.drafter.lora_rank) == ("masked_lm", 16)
    assert (masked.drafter.block_size, masked.objective.diffusion) == (5, "masked_nll")
    ddit = adapt("c", {"model_type": "mdlm"})
    assert (ddit.drafter.kind, ddit.drafter.lora_rank) == ("ddit", 0)
    causal = adapt("d", {"architectures": ["LlamaForCausalLM"]})
    assert (causal.drafter.kind, causal.objective.weighting) == ("autoregressive", "uniform")
    shipped = load_recipe(ADAPT).drafter
    assert (shipped.context, shipped.init) == ("shared_kv", "pretrained/smollm2-135m-block")


def test_sections_of_unknown_kinds_and_a_kind_without_a_drafter(tmp_path: Path) -> None:
    bad = write(tmp_path, "bad.yaml", "kinds: {tabs: {seed: 1}}\n")
    assert problem(bad) == "bad.yaml: kinds: unknown kind 'tabs' (did you mean 'taps'?)"
    auto = problem("recipe=debug_block", "drafter.kind=auto")
    assert "drafter.kind=auto needs drafter.init" in auto


def test_a_recipe_without_a_model_names_all_that_it_needs() -> None:
    one = "command line: recipe=block needs target.name=… (target.name: Hub id"
    assert problem("recipe=block").startswith(one)
    both = problem("recipe=variable_prefix")
    assert "recipe=variable_prefix needs target.name=… and drafter.init=…" in both
    assert "unknown key 'max_steps'" in problem("recipe=block", "max_steps=3")


def test_the_warm_up_and_the_first_batch_fit_a_small_run() -> None:
    block = ["recipe=block", "target.name=debug"]
    few = load_recipe([*block, "trainer.max_steps=10", "data.samples=8"])
    assert (few.trainer.warmup_steps, few.data.batch_size) == (3, 8)
    assert load_recipe(["recipe=debug_block", "trainer.max_steps=1"]).trainer.warmup_steps == 0
    many = load_recipe([*block, "trainer.max_steps=9999", "data.samples=9999"])
    assert (many.trainer.warmup_steps, many.data.batch_size) == (50, 128)
