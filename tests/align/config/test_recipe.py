"""Recipes validate themselves: limits of keys, contradictions, defaults; a resolved recipe gives the same recipe again."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.recipe import keys, resolve
from align.config.recipe_files import list_recipes
from specalign.common.errors import UserError
from specalign.common.strict_yaml import dump_yaml
from tests.builders import needed_words as needed
from tests.builders import write_recipe as write


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("stage=finetune", "stage=finetune: drafter.kind=block needs stage=calibrate"),
        ("drafter.kind=ddit drafter.graph=uniform", "such a drafter cannot draft"),
        ("drafter.kind=masked_lm drafter.convolution=true", "needs drafter.kind=block"),
        ("drafter.kind=ddit drafter.heads=3", "drafter.hidden_size=256 must be a multiple"),
        ("drafter.kind=ddit objective.block_lengths=[1,1]", "block_lengths has 2 entries"),
        ("drafter.kind=ddit drafter.lora_rank=4", "drafter.lora_rank needs drafter.kind=masked_lm"),
        ("trainer.optimizer=muon launch.strategy=fsdp", "needs whole matrices"),
        (
            "trainer.optimizer=muon drafter.kind=masked_lm drafter.lora_rank=4",
            "drafter.lora_rank=0",
        ),
        ("launch.offload=true", "launch.strategy=auto has every weight in every process"),
        ("target.parallel=fsdp", r"needs several processes \(launch.devices\)"),
        ("launch.accelerator=cpu target.device=cuda", "contradicts launch.accelerator=cpu"),
        ("target.device=cuda:1 launch.devices=2", "target.device=cuda:1 names one GPU"),
        ("data.writer=vllm", "data.writer='vllm' must be target or openai:URL"),
        ("data.writer=openai:localhost:8000", "URL .openai:http://127.0.0.1:8000."),
        ("data.writer=openai:http://a:99999", "must be target or openai:URL"),
        ("data.writer=openai:http://[::1", "must be target or openai:URL"),
        ("data.writer=openai:http://me:secret@a", "environment variable SPECALIGN_API_KEY$"),
        ("drafter.kind=autoregressive objective.prefix_decay=0.9", "needs drafter.kind=block"),
    ],
)
def test_contradictions(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(["recipe=debug_block", *arguments.split()])


@pytest.mark.parametrize("name", list_recipes())
def test_a_resolved_recipe_gives_the_same_recipe_again(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(
        [
            f"recipe={name}",
            *needed(name),
            "objective.terms.streak=1e-5",
            "output=1e3",
            "target.revision=010",
        ]
    )
    again = load_recipe([write(tmp_path, "again.yaml", dump_yaml(resolve(recipe)))])
    assert again == recipe
    assert {f"{g}.{k}" for g, v in resolve(recipe).items() if isinstance(v, dict) for k in v} < set(
        keys()
    )
