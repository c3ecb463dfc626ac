"""Target-written data: exact draws, the same text whatever the batch, and a kill that changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.common.errors import UserError
from align.config.parser import load_recipe
from align.data import shards as data
from align.data.synthesis import chat_template, synthesize
from align.target.model import Target


@pytest.mark.slow
def test_written_prompts_begin_as_asked(tmp_path: Path, target: Target) -> None:
    openings = ["", "ab", "xyz"]
    words = ["recipe=debug_block", "data.samples=24", "data.answer_temperatures=[0.0, 1.0]"]
    recipe = load_recipe([*words, "data.prompt_openings=['', 'ab', 'xyz']"])
    synthesize(recipe, target, tmp_path / "data", quiet=True)
    samples = data.read_samples(tmp_path / "data")
    prefix = len(chat_template(target).prefix)
    met = set()
    for i in range(len(samples)):
        prompt = samples[i][prefix : int(samples.answer_start[i])].tolist()
        for text in openings[1:]:
            tokens = target.tokenizer(text, add_special_tokens=False)["input_ids"]
            if prompt[: len(tokens)] == tokens:
                met.add((text, float(samples.temperature[i])))
    assert {("ab", 0.0), ("ab", 1.0), ("xyz", 0.0), ("xyz", 1.0)} <= met
    with pytest.raises(UserError, match="leaves no room"):
        many = load_recipe([*words, f"data.prompt_openings=['{'a b ' * 40}']"])
        synthesize(many, target, tmp_path / "more", quiet=True)
    with pytest.raises(UserError, match="(prompt_openings|answer_temperatures) is"):
        synthesize(
            load_recipe(["recipe=debug_block", "data.samples=30"]), target, tmp_path / "data", quiet=True
        )


def test_a_folder_older_than_openings_goes_on(tmp_path: Path, target: Target) -> None:
    recipe = load_recipe(["recipe=debug_block", "data.samples=8"])
    synthesize(recipe, target, tmp_path / "data", quiet=True)
    manifest = data.read_manifest(tmp_path / "data")
    del manifest["prompt_openings"]
    data.write_manifest(tmp_path / "data", manifest)
    more = load_recipe(["recipe=debug_block", "data.samples=12"])
    assert synthesize(more, target, tmp_path / "data", quiet=True)["samples"] == 12
