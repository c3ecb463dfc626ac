"""A target without its weights says of itself what it says with them."""

from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.data.supply import open_supply
from align.data.synthesis import synthesize
from align.writing.outline import Outline, open_writer, outline
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.rows import shards as data
from tests.builders import shallow_target
from tests.loopback_server import Loopback
from tests.target_models import save_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A debug model in hub layout."""
    target, path = shallow_target(1), tmp_path_factory.mktemp("model") / "debug"
    save_target(target, path)
    return path


def recipe_of(name: Path | str, *words: str) -> Recipe:
    own = ["recipe=debug_block", f"target.name={name}", "data.samples=8", "data.batch_size=4"]
    return load_recipe([*own, "data.max_answer_tokens=6", *words])


def test_next_to_a_server_no_weights_are_loaded(folder: Path) -> None:
    served = "data.writer=openai:http://127.0.0.1:9"
    assert isinstance(open_writer(recipe_of(folder)), Target)
    assert isinstance(open_writer(recipe_of(folder, served)), Outline)
    with pytest.raises(UserError, match="has no variable 'thinking'"):
        outline(recipe_of(folder, "data.template_kwargs.thinking=true"))


@pytest.mark.slow
def test_text_without_weights_is_compared(folder: Path, tmp_path: Path) -> None:
    """By its greedy answers, when training opens it."""
    target = load_target(str(folder))
    words = [f"data.path={tmp_path}", "data.answer_temperatures=[0.0]"]
    with Loopback(target) as server:
        recipe = recipe_of(folder, *words, f"data.writer=openai:{server.url}")
        found = synthesize(recipe, outline(recipe), tmp_path, quiet=True)
    assert found["target_sha256"] is None
    supply = open_supply(recipe_of(folder, *words), target, quiet=True)
    assert len(supply.training) + len(supply.validation) == 8
    with pytest.raises(UserError, match="does not match target.name='debug-qwen2'"):
        open_supply(recipe_of("debug-qwen2", *words), load_target("debug-qwen2"), quiet=True)
    manifest = data.read_manifest(tmp_path) | {"writer": "target"}
    data.write_manifest(tmp_path, manifest)
    with pytest.raises(UserError, match="another sha256"):
        open_supply(recipe_of(folder, *words), target, quiet=True)
