"""What surrounds a prompt, and how written prompts begin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.data.batches import with_folder_batch
from align.data.index import read_samples
from align.data.synthesis import synthesize
from align.writing.template import chat_template
from specalign.common.errors import UserError
from specalign.lm.model import Target


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
            load_recipe(["recipe=debug_block", "data.samples=30"]),
            target,
            tmp_path / "data",
            quiet=True,
        )


def test_a_folder_that_was_begun_small_grows_in_its_own_batches(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a few samples no more is written than asked for; with more of them later the first ones stay, to the byte."""
    words = ["recipe=debug_block", "data.prompt_temperature=1.5"]
    few, folder = load_recipe([*words, "data.samples=3"]), tmp_path / "data"
    assert (few.data.batch_size, with_folder_batch(few, folder).data.batch_size) == (3, 3)
    first = synthesize(few, target, folder, quiet=True)
    assert first["batch_size"] == 3
    before = {path.name: path.read_bytes() for path in folder.glob("shard-*")}
    more = load_recipe([*words, "data.samples=8"])
    assert with_folder_batch(more, folder).data.batch_size == 3 and more.data.batch_size == 8
    assert (
        "was started with 3 rows at a time and continues so (data.batch_size=8"
        in capsys.readouterr().err
    )
    grown = synthesize(more, target, folder, quiet=True)
    assert grown["samples"] == 8 and grown["batch_size"] == 3
    assert all((folder / name).read_bytes() == data for name, data in before.items())
    at_once = synthesize(
        load_recipe([*words, "data.samples=8", "data.batch_size=3"]),
        target,
        tmp_path / "b",
        quiet=True,
    )
    assert at_once["batch_size"] == 3


def test_one_question_about_several_documents_is_no_duplicate(
    tmp_path: Path, target: Target
) -> None:
    """The document may be the system prompt; the same document and question twice are near."""
    question = {"role": "user", "content": "Summarise the document above please."}
    talks = [
        [{"role": "system", "content": text}, question]
        for text in ("about rain", "about snow", "about rain")
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    words = [
        "recipe=debug_block",
        f"data.prompts={path}",
        "data.max_prompt_tokens=200",
        "data.answer_temperatures=[1]",
    ]
    manifest = synthesize(load_recipe(words), target, tmp_path / "data", quiet=True)
    assert manifest["samples"] == 2 and manifest["dropped"] == {"near-duplicate": 1}
