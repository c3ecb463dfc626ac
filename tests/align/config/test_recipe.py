"""Recipes validate themselves; a resolved recipe gives the same recipe again, and a run resumes only with the keys that it recorded."""

from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.recipe import keys, resolve
from align.config.recipe_files import check_record, list_recipes, save_run_record
from specalign.common.errors import UserError
from specalign.common.strict_yaml import dump_yaml
from tests.builders import needed_words as needed
from tests.builders import write_recipe as write

MUON, VLLM = "trainer.optimizer=muon", "trainer.features_writer=vllm:http://a"
PARTS = "target.parallel=fsdp launch.devices=2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("stage=finetune", "stage=finetune: drafter.kind=block needs stage=calibrate"),
        ("drafter.kind=masked_lm drafter.convolution=true", "needs drafter.kind=block"),
        ("drafter.kind=ddit drafter.lora_rank=4", "drafter.lora_rank needs drafter.kind=masked_lm"),
        (f"{MUON} launch.strategy=fsdp", "muon does not support launch.strategy=fsdp"),
        (f"{MUON} drafter.kind=masked_lm drafter.lora_rank=4", "drafter.lora_rank=0"),
        ("launch.offload=true", "needs launch.strategy=deepspeed_N, not auto"),
        ("target.parallel=fsdp", r"needs several processes \(launch.devices\)"),
        (f"{PARTS} trainer.compile_target=true", "compile_target=true needs .*parallel=replicate"),
        ("target.device=cuda:1 launch.devices=2", "target.device=cuda:1 is one GPU"),
        ("data.writer=vllm", "data.writer must be target or openai:URL"),
        ("data.writer=openai:localhost:8000", "URL .openai:http://127.0.0.1:8000."),
        ("data.writer=openai:http://[::1", "must be target or openai:URL"),
        ("data.writer=openai:http://me:secret@a", "variable SPECALIGN_API_KEY has the key$"),
        ("drafter.kind=autoregressive objective.prefix_decay=0.9", "needs drafter.kind=block"),
        ("trainer.features_writer=openai:http://a", "features_writer must be target or vllm:URL"),
        (f"{VLLM} trainer.keep_features_gb=4", "vllm:URL needs .*, trainer.keep_features_gb=0$"),
    ],
)
def test_contradictions(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(["recipe=debug_block", *arguments.split()])


@pytest.mark.parametrize("name", list_recipes())
def test_a_resolved_recipe_gives_the_same_recipe_again(name: str, tmp_path: Path) -> None:
    given = ["objective.terms.streak=1e-5", "output=1e3", "target.revision=010"]
    recipe = load_recipe([f"recipe={name}", *needed(name), *given])
    again = load_recipe([write(tmp_path, "again.yaml", dump_yaml(resolve(recipe)))])
    assert again == recipe
    groups = {group: part for group, part in resolve(recipe).items() if isinstance(part, dict)}
    assert {f"{group}.{key}" for group, part in groups.items() for key in part} < set(keys())


def test_a_run_goes_on_with_the_keys_that_it_began_with(tmp_path: Path) -> None:
    words = ["recipe=debug_block", f"output={tmp_path}"]
    other = [*words, "trainer.learning_rate=1e-2", "data.samples=70"]
    other += ["objective.terms={total_variation: 1}", "seed=4"]
    check_record(load_recipe(words))  # nothing there
    save_run_record(load_recipe(words), [])
    check_record(load_recipe(other))  # stopped before its first checkpoint: nothing to go on with
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-3.ckpt").touch()
    free = ["trainer.max_steps=99", "target.device=cpu", "launch.num_nodes=2"]
    check_record(load_recipe([*words, *free]))
    check_record(load_recipe([*other, "trainer.resume=never"]))
    says = "seed was 0, now 4; data.samples was 48, now 70; .* and 1 more.*resume=never"
    with pytest.raises(UserError, match=says):
        check_record(load_recipe(other))
    record = (tmp_path / "recipe.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text("seed: 0\n")  # of a version that knew fewer keys
    check_record(load_recipe(other[:-1]))
    (tmp_path / "recipe.yaml").write_text(record + "\n: [")
    with pytest.raises(UserError, match="recipe.yaml: not valid YAML"):
        check_record(load_recipe(words))
