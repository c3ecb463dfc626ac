"""Recipes that contradict themselves are refused in one line."""

from __future__ import annotations

import pytest

from align.common.errors import UserError
from align.config.parser import load_recipe


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["stage=finetune"], "stage=finetune: drafter.kind=block is calibrated"),
        (["drafter.kind=masked_lm", "drafter.graph=uniform"], "undoes the mask"),
        (["drafter.kind=ddit", "drafter.heads=3"], "drafter.hidden_size=256 must be a multiple"),
        (["drafter.kind=ddit", "objective.block_lengths=[1,1]"], "objective.block_lengths has 2 entries"),
        (["drafter.kind=ddit", "drafter.lora_rank=4"], "drafter.lora_rank needs drafter.kind=masked_lm"),
        (["drafter.lora_rank=4"], "drafter.lora_rank needs .* or drafter.kind=block with drafter.init"),
        (
            [
                "drafter.init=x",
                "drafter.lora_rank=4",
                "drafter.train=confidence_head",
                "drafter.confidence_head=true",
            ],
            "drafter.lora_rank=4: drafter.train=confidence_head freezes all else",
        ),
        (["drafter.kind=ddit", "drafter.graph=uniform"], "no one-step q to calibrate"),
        (["drafter.kind=ddit", "drafter.graph=uniform", "objective.times=count"], "count counts masks"),
        (
            ["trainer.optimizer=muon", "launch.strategy=fsdp"],
            "trainer.optimizer=muon needs whole matrices: launch.strategy=fsdp",
        ),
        (
            ["trainer.optimizer=muon", "drafter.lora_rank=4", "drafter.init=x"],
            "trainer.optimizer=muon moves whole matrices: drafter.lora_rank=0",
        ),
        (
            ["drafter.attention_bias=false", "drafter.init=x"],
            "drafter.attention_bias=false is of fresh block drafters",
        ),
        (
            ["launch.offload=true"],
            "launch.offload=true: launch.strategy=auto has every weight in every process",
        ),
        (["target.parallel=fsdp"], "target.parallel=fsdp needs several processes \\(launch.devices\\)"),
        (
            ["target.parallel=tp", "launch.devices=2", "data.follow=true"],
            "target.parallel=tp: data.follow=true may write",
        ),
        (["data.text_tokens=2000"], "data.text_tokens=2000 is of data.text, which names nothing"),
        (["data.text_config=x", "data.text=[]"], "data.text_config=x is of data.text, which names nothing"),
        (["data.writer=vllm"], "data.writer='vllm' must be target or openai:URL"),
        (
            ["data.writer=openai:localhost:8000"],
            "no address; an example: data.writer=openai:http://127.0.0.1:8000",
        ),
        (["data.writer=openai:http://a:99999"], "no address"),
        (["data.writer=openai:"], "no address"),
        (["data.writer=openai:http://[::1"], "no address"),
        (["data.writer=openai:http://me:secret@a"], "environment variable SPECALIGN_API_KEY$"),
        (["data.writer=openai:http://a/v1?key=secret"], "environment variable SPECALIGN_API_KEY$"),
    ],
)
def test_impossible_recipes(words: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        load_recipe(["recipe=debug_block", *words])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("recipe=debug_block", "objective.prefix_decay=1.5"),
            "objective.prefix_decay=1.5 must be at most 1",
        ),
        (("recipe=debug_mdlm", "objective.prefix_decay=0.9"), "needs drafter.kind=block"),
    ],
)
def test_impossible_prefixes_are_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_recipe(words)


def test_a_servers_address_is_taken_with_and_without_v1() -> None:
    for url in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"):
        assert (
            load_recipe(["recipe=debug_block", f"data.writer=openai:{url}"]).data.server
            == "http://127.0.0.1:8000"
        )
    assert load_recipe(["recipe=debug_block"]).data.server is None
