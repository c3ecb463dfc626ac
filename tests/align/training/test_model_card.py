"""The card says what the run did."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from align.config.parser import load_recipe
from align.training.model_card import RunNumbers, write_card
from specalign.common.hub import DEFAULT_TARGET
from specalign.models.standalone import DiffusionConfig
from tests.builders import train_debug_block as run


def test_card_and_record_come_from_the_run(tmp_path: Path, debug_data: Path) -> None:
    module = run(tmp_path, debug_data)
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert str(tmp_path) not in card and str(debug_data) not in card  # cards are published
    assert f"{module.progress.tokens_seen:,} text tokens seen" in card
    assert f"{module.validation_numbers['tau_sampling']:.3f}" in card
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert (
        versions["torch"] == torch.__version__.split("+")[0]
        or versions["torch"] == torch.__version__
    )
    again = load_recipe([f"recipe={tmp_path / 'recipe.yaml'}"])
    assert again.trainer == load_recipe(["recipe=debug_block"]).trainer


def test_the_card_says_how_the_target_was_prompted() -> None:
    words = [
        "recipe=debug_block",
        "data.template_kwargs={enable_thinking: false}",
        "data.system=Be brief.",
    ]
    manifest = {
        "samples": 1,
        "tokens": 2,
        "prompt_temperature": 1.0,
        "answer_temperatures": [0.0],
        "seed": 0,
    }
    run = RunNumbers(1, 1, 1, 1.0, 1, {})
    config = DiffusionConfig(3, 256, target="debug", target_sha256="ab")
    card = write_card(load_recipe(words), config, manifest, run)
    assert '| prompted with | enable_thinking=false · system prompt "Be brief." |' in card
    assert "--template-kwargs enable_thinking=false --system 'Be brief.' \"your prompt\"" in card
    plain = write_card(load_recipe(words[:1]), config, manifest, run)
    assert 'decode.generate --drafter FOLDER --target debug "your prompt"' in plain
    assert "prompted" not in plain
    for name, typed in (
        (DEFAULT_TARGET, ""),
        ("owner/model", " --target owner/model"),
        ("/a b/c d", " --target '/a b/c d'"),
    ):
        config = DiffusionConfig(3, 256, target=name, target_sha256="ab")
        card = write_card(load_recipe(words[:1]), config, manifest, run)
        assert f'decode.generate --drafter FOLDER{typed} "your prompt"' in card
