"""The card says what the run did."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from align.config.parser import load_recipe
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
