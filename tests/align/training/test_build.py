"""What is trained, from a recipe: a published checkpoint, a tiny model, or a line that says what is missing."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.training.run import train
from specalign.common.errors import UserError
from specalign.formats.block import load_drafter
from specalign.formats.standalone import load_standalone
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.models.ddit import DDiT
from specalign.models.ddit_layers import DDiTConfig
from tests.builders import needed_words
from tests.published_blocks import backbone, pruned, speculators_config, write
from tests.published_ddits import state, write_hub

FEW = ["data.samples=16", "data.batch_size=128"]
"""In few batches: most prompts of a random target do not end."""


@pytest.fixture(scope="module")
def written() -> dict[str, Path]:
    """Data that a run here wrote, by what decides on them."""
    return {}


def with_data(recipe: Recipe, written: dict[str, Path]) -> None:
    """Gives the run the data that an earlier one wrote by the same settings; the run compares them with its own."""
    key = f"{recipe.target} {replace(recipe.data, prompts_column='', prompts_config=None, prompts_revision=None)}"
    own = Path(recipe.output) / "data"
    if key in written and written[key].exists():
        shutil.copytree(written[key], own)
    written.setdefault(key, own)


@pytest.mark.slow
def test_a_published_checkpoint_by_its_recipe(tmp_path: Path, written: dict[str, Path]) -> None:
    """SEDD's hub layout → stage=finetune → a drafter with its noise."""
    gpt2 = load_target("debug-gpt2", dtype="float32", device="cpu")
    config = DDiTConfig(gpt2.vocab_size + 1, 32, 2, 2, 16, scale_by_sigma=True, attention="full")
    sizes = {"hidden_size": 32, "n_blocks": 2, "n_heads": 2, "cond_dim": 16, "scale_by_sigma": True}
    noise = {"type": "geometric", "sigma_min": 1e-3, "sigma_max": 7.0}
    values = {"tokens": gpt2.vocab_size, "graph": {"type": "absorb"}}
    write_hub(tmp_path / "sedd", {**values, "noise": noise, "model": sizes}, state(DDiT(config)))
    words = (f"drafter.init={tmp_path / 'sedd'}", f"output={tmp_path / 'run'}", "drafter.window=16")
    recipe = load_recipe(["recipe=debug_gpt2xl_calib", *words, *FEW])
    with_data(recipe, written)
    train(recipe, quiet=True)
    values = json.loads((tmp_path / "run/drafter/config.json").read_text())
    assert values["noise"] == noise
    again = load_standalone(tmp_path / "run/drafter", gpt2)
    assert isinstance(again.network, DDiT) and again.network.config == config
    assert again.config.schedule["sigma_max"] == 7.0


def test_unfit_folders_are_refused_first(tmp_path: Path, target: Target) -> None:
    config = speculators_config(target, speculators_model_type="eagle3")
    theirs = write(tmp_path / "theirs", config, backbone(target))
    words = (f"drafter.init={theirs}", f"output={tmp_path / 'run'}")
    with pytest.raises(UserError, match="speculators_model_type='eagle3'"):
        train(load_recipe(["recipe=debug_adapt_taps", *words]), quiet=True)
    assert not (tmp_path / "run" / "data").exists()


def test_published_drafter_is_calibrated(tmp_path: Path, debug_data: Path, target: Target) -> None:
    """All of it; its architecture and its own head stay."""
    tensors = backbone(target) | pruned(target, 0.3)
    theirs = write(tmp_path / "theirs", speculators_config(target), tensors)
    words = (f"drafter.init={theirs}", f"output={tmp_path / 'run'}", f"data.path={debug_data}")
    recipe = load_recipe(["recipe=debug_adapt_taps", *words, "trainer.learning_rate=1e-2"])
    module = train(recipe, quiet=True)
    card = (tmp_path / "run/drafter/README.md").read_text()
    assert "license: other\n" in card and "started from theirs" in card
    trained = sum(p.numel() for p in module.trained_parameters().values())
    assert f"| trainable parameters | {trained:,} |" in card
    before, after = load_drafter(theirs, target), load_drafter(tmp_path / "run/drafter", target)
    made = {"target": "debug", "target_sha256": target.hash}
    assert after.config == replace(before.config, **made) and after.head is not None
    assert before.head is not None and torch.equal(after.head, before.head.bfloat16().float())
    now, was = dict(after.named_parameters()), dict(before.named_parameters())
    assert not any(torch.equal(was[n].bfloat16().float(), now[n]) for n in now)


TWINS = sorted(p.stem for p in (Path(__file__).parents[3] / "recipes").glob("debug_*.yaml"))
ELSEWHERE = "block|sedd|mdlm|autoregressive|variable_prefix|confidence|taps|adapt_taps"
"""Trained by other tests."""


@pytest.mark.slow
@pytest.mark.parametrize("twin", [t for t in TWINS if not re.fullmatch(f"debug_({ELSEWHERE})", t)])
def test_published_recipes_run_tiny(twin: str, tmp_path: Path, written: dict[str, Path]) -> None:
    recipe = load_recipe([f"recipe={twin}", f"output={tmp_path}", *FEW])
    if recipe.drafter.lora_rank:
        pytest.importorskip("peft")
    with_data(recipe, written)
    module = train(recipe, quiet=True)
    assert module.validation_numbers["bound"] > 0
    name = twin.removeprefix("debug_")
    # which follows from drafter.init
    kind = [f"drafter.kind={recipe.drafter.kind}"] if name == "adapt" else []
    published = load_recipe([f"recipe={name}", *needed_words(name), *kind])
    assert (published.stage, published.drafter.kind) == (recipe.stage, recipe.drafter.kind)
    assert published.objective.terms == recipe.objective.terms
