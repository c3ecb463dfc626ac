"""The card says what the run did."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from align.config.parser import load_recipe
from specalign.folder.training_record import read_record
from tests.builders import train_debug_block as run


def test_card_and_record_come_from_the_run(tmp_path: Path, debug_data: Path) -> None:
    module = run(tmp_path, debug_data)
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert str(tmp_path) not in card and str(debug_data) not in card  # cards are published
    assert f"{module.progress.tokens_seen:,} text tokens seen" in card
    saved = read_record(str(tmp_path / "drafter"))
    assert saved is not None and (record := saved.training) is not None
    assert set(record.expected_tau) == {"greedy", "sampling"}
    for kind, one in record.expected_tau.items():
        assert one.tau == module.validation_numbers[f"tau_{kind}"]
        assert f"| {one.tau:.3f} ± {one.standard_error:.3f} (" in card
        assert f"{one.positions:,} positions" in card
    assert f"{record.samples:,} samples, {record.tokens:,} tokens" in card
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    again = load_recipe([f"recipe={tmp_path / 'recipe.yaml'}"])
    assert again.trainer == load_recipe(["recipe=debug_block"]).trainer
