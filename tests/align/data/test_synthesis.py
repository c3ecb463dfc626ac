"""Target-written data: exact draws, the same text whatever the batch, and a kill that changes nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from align.common.errors import UserError
from align.config.parser import load_recipe
from align.data import shards as data
from align.data import synthesis
from align.data.index import read_samples
from align.data.synthesis import synthesize
from align.folder.chat import Chat
from align.target.model import Target
from tests.builders import shallow_target, switching_target

SHORT = ["recipe=debug_block", "data.max_answer_tokens=6"]


@pytest.fixture(scope="module")
def target() -> Target:
    return shallow_target(1)


def test_a_folder_older_than_openings_goes_on(tmp_path: Path, target: Target) -> None:
    recipe = load_recipe(["recipe=debug_block", "data.samples=8"])
    synthesize(recipe, target, tmp_path / "data", quiet=True)
    manifest = data.read_manifest(tmp_path / "data")
    for key in ("prompt_openings", "template_kwargs", "system"):
        del manifest[key]
    data.write_manifest(tmp_path / "data", manifest)
    more = load_recipe(["recipe=debug_block", "data.samples=12"])
    assert synthesize(more, target, tmp_path / "data", quiet=True)["samples"] == 12


def test_switches_and_system_prompt_are_in_the_text_and_in_the_manifest(tmp_path: Path) -> None:
    """And data written with others are not gone on with."""
    words = ["recipe=debug_block", "data.samples=2", "data.batch_size=2", "data.max_answer_tokens=4"]
    own = [*words, "data.template_kwargs.enable_thinking=false", "data.system=Be brief."]
    d = load_recipe(own).data
    target = switching_target()
    target.chat = Chat(d.template_kwargs, d.system)
    manifest = synthesize(load_recipe(own), target, tmp_path, quiet=True)
    assert (manifest["template_kwargs"], manifest["system"]) == ({"enable_thinking": False}, "Be brief.")
    samples = read_samples(tmp_path)
    written = target.tokenizer.decode(samples[0].tolist())
    assert "<|im_start|>system\nBe brief.<|im_end|>" in written and "assistant\n<none>" in written
    for other, says in (
        ([*own[:-1], "data.system=Be long."], "system is 'Be brief.', this recipe says 'Be long.'"),
        (
            [*words, "data.system=Be brief."],
            "template_kwargs is {'enable_thinking': False}, this recipe says {}",
        ),
    ):
        with pytest.raises(UserError, match=says):
            synthesize(load_recipe(other), target, tmp_path, quiet=True)


def test_damaged_and_missing_shards_are_written_again(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe([*SHORT, "data.samples=12", "data.batch_size=4"])
    folder = tmp_path / "data"
    manifest = synthesize(recipe, target, folder, quiet=True)

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.iterdir() if path.suffix != ".sqlite"}

    before = contents()
    assert manifest["shards"] >= 3 and len(manifest["sha256"]) == manifest["shards"]
    data.shard_path(folder, 0).unlink()
    torn = data.shard_path(folder, 1)
    torn.write_bytes(torn.read_bytes()[:-1] + b"\x07")
    with pytest.raises(UserError, match="shard-00000"):
        read_samples(folder)
    assert synthesize(recipe, target, folder) == manifest
    assert contents() == before
    assert capsys.readouterr().out.count("written again: ") == 2


def test_mending_remembers_the_texts_of_all_shards_and_no_others(tmp_path: Path, target: Target) -> None:
    """The last batch leaves texts over, and is written again behind others."""
    recipe, folder = (
        load_recipe(["recipe=debug_block", "data.samples=10", "data.batch_size=4"]),
        tmp_path / "data",
    )
    manifest = synthesize(recipe, target, folder, quiet=True)

    def remembered() -> list[bytes]:
        with closing(sqlite3.connect(folder / "near-duplicates.sqlite")) as table:
            return sorted(grams for (grams,) in table.execute("SELECT grams FROM texts"))

    before = remembered()
    assert len(before) == 10
    data.shard_path(folder, manifest["shards"] - 1).unlink()
    (folder / "near-duplicates.sqlite").unlink()
    assert synthesize(recipe, target, folder, quiet=True) == manifest
    assert remembered() == before


def test_settings_under_which_nothing_new_is_written_end(tmp_path: Path, target: Target) -> None:
    """Greedy prompts are all the same one."""
    recipe = load_recipe([*SHORT, "data.samples=50", "data.batch_size=2", "data.prompt_temperature=0"])
    with pytest.raises(UserError, match="nothing of 20 batches in a row was kept .dropped so far: "):
        synthesize(recipe, target, tmp_path / "data", quiet=True)


def test_a_folder_in_which_nothing_was_kept_binds_nobody(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings gave no sample, so others may write there; the same ones say once more why not."""
    monkeypatch.setattr(synthesis, "FRUITLESS", 3)
    folder = tmp_path / "data"
    greedy = [*SHORT, "data.samples=50", "data.batch_size=2", "data.max_prompt_tokens=1"]
    for _ in range(2):
        with pytest.raises(UserError, match="nothing of 3 batches in a row was kept"):
            synthesize(load_recipe(greedy), target, folder, quiet=True)
    assert data.read_manifest(folder)["samples"] == 0
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two\nthree four\n")
    own = [*SHORT, f"data.prompts={prompts}", "data.samples=2", "data.batch_size=2"]
    assert synthesize(load_recipe(own), target, folder, quiet=True)["samples"] == 2
    monkeypatch.setattr(synthesis.Batches, "write", lambda *_: None)  # the prompts have ended
    none = [*own, f"data.path={tmp_path / 'other'}"]
    with pytest.raises(UserError, match="none of the 2 prompts of data.prompts=.* gave a sample"):
        synthesize(load_recipe(none), target, tmp_path / "other", quiet=True)
