"""What surrounds a prompt, and how written prompts begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.common.errors import UserError
from align.config.parser import load_recipe
from align.data.index import read_samples
from align.data.synthesis import synthesize
from align.folder.chat import Chat
from align.target.model import Target
from align.writing.rows import chat_template
from tests.builders import switching_target


@pytest.mark.slow
def test_written_prompts_begin_as_asked(tmp_path: Path, target: Target) -> None:
    openings = ["", "ab", "xyz"]
    words = ["recipe=debug_block", "data.samples=24", "data.answer_temperatures=[0.0, 1.0]"]
    recipe = load_recipe([*words, "data.prompt_openings=['', 'ab', 'xyz']"])
    synthesize(recipe, target, tmp_path / "data", quiet=True)
    samples = read_samples(tmp_path / "data")
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


def test_a_system_prompt_stands_before_the_prompt_and_needs_a_template() -> None:
    target = switching_target()
    target.chat = Chat({"enable_thinking": False}, "Be brief.")
    template, decode = chat_template(target), target.tokenizer.decode
    assert decode(template.prefix) == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert decode(template.turn) == "<|im_end|>\n<|im_start|>assistant\n<none>"
    target.tokenizer.chat_template = None
    with pytest.raises(UserError, match="data.system: target 'debug' has no chat template"):
        chat_template(target)
