"""Target-written data: exact draws, the same text whatever the batch, and a kill that changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.data import shards as data
from align.data import synthesis
from align.data.index import read_samples
from align.data.synthesis import synthesize
from specalign.common.errors import UserError
from specalign.common.text import say_once
from specalign.folder.chat import Chat
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from specalign.rows.shapes import as_conversation
from tests.builders import shallow_target, switching_target
from tests.loopback_server import Loopback

SHORT = ["recipe=debug_block", "data.max_answer_tokens=6"]


@pytest.fixture(scope="module")
def target() -> Target:
    return shallow_target(1)


def test_switches_and_system_prompt_are_in_the_text_and_in_the_manifest(tmp_path: Path) -> None:
    """And data written with others are not gone on with."""
    words = [
        "recipe=debug_block",
        "data.samples=2",
        "data.batch_size=2",
        "data.max_answer_tokens=4",
    ]
    own = [*words, "data.template_kwargs.enable_thinking=false", "data.system=Be brief."]
    d = load_recipe(own).data
    target = switching_target()
    target.chat = Chat(d.template_kwargs, d.system)
    manifest = synthesize(load_recipe(own), target, tmp_path, quiet=True)
    assert (manifest["template_kwargs"], manifest["system"]) == (
        {"enable_thinking": False},
        "Be brief.",
    )
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
        return {path: path.read_bytes() for path in folder.iterdir()}

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


def test_settings_under_which_nothing_new_is_written_end(tmp_path: Path, target: Target) -> None:
    """Greedy prompts are all the same one."""
    recipe = load_recipe(
        [*SHORT, "data.samples=50", "data.batch_size=2", "data.prompt_temperature=0"]
    )
    with pytest.raises(
        UserError, match="nothing of 20 batches in a row was kept .dropped so far: "
    ):
        synthesize(recipe, target, tmp_path / "data", quiet=True)


def test_a_folder_in_which_nothing_was_kept_binds_nobody(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings gave no sample, so others may write there; the same ones say once more why not."""
    monkeypatch.setattr(synthesis, "FRUITLESS_BATCHES", 3)
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


CHAT = [
    {"role": "system", "content": "You are the one who answers everything that is asked of you."},
    {"role": "user", "content": "First?"},
    {"role": "assistant", "content": "given answer"},
    {"role": "user", "content": "Second?"},
    {"role": "assistant", "content": "left out"},
]


def conversations(monkeypatch: pytest.MonkeyPatch, *found: Conversation) -> None:
    monkeypatch.setattr(synthesis, "read_prompts", lambda *_: list(found))


def talk(i: int, more: str = "") -> Conversation:
    messages = [dict(m) for m in CHAT]
    messages[1]["content"] = "".join(chr(97 + (7 * i + j * (i + 1)) % 26) for j in range(30))
    messages[3]["content"] += more
    return as_conversation(messages)


def test_a_sample_is_the_whole_conversation_up_to_the_targets_own_answer(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And conversations that share a long system prompt are not taken for each other."""
    prompts = [talk(i) for i in range(6)]
    conversations(monkeypatch, *prompts, prompts[0])
    words = [
        *SHORT,
        "data.samples=7",
        "data.prompts=p",
        "data.max_prompt_tokens=200",
        "data.batch_size=4",
    ]
    manifest = synthesize(load_recipe(words), target, tmp_path, quiet=True)
    samples = read_samples(tmp_path)
    assert manifest["dropped"].get("near-duplicate") == 1
    starts = [samples[i][: int(samples.answer_start[i])].tolist() for i in range(len(samples))]
    wanted = [target.chat_tokens(c.prompt) for c in prompts]
    assert len(starts) >= 5 and all(ids in wanted for ids in starts)
    assert "given answer" in target.tokenizer.decode(starts[0])
    before = {path: path.read_bytes() for path in tmp_path.glob("shard*")}
    next(iter(before)).unlink()
    assert synthesize(load_recipe(words), target, tmp_path, quiet=True) == manifest
    assert {path: path.read_bytes() for path in tmp_path.glob("shard*")} == before


def test_every_answer_is_the_targets_own_where_all_turns_are_asked_for(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process and by a server alike, and after a stop as without one."""
    conversations(monkeypatch, *(talk(i) for i in range(5)), as_conversation("One turn?"))
    words = [
        *SHORT,
        "data.turns=all",
        "data.prompts=p",
        "data.max_prompt_tokens=200",
        "data.batch_size=4",
    ]
    words += ["data.answer_temperatures=[0.0]"]
    whole = synthesize(load_recipe([*words, "data.samples=6"]), target, tmp_path / "a", quiet=True)
    samples = read_samples(tmp_path / "a")
    texts = [target.tokenizer.decode(samples[i].tolist()) for i in range(len(samples))]
    assert whole["turns"] == "all" and len(texts) >= 4
    assert not any("given answer" in text or "left out" in text for text in texts)
    assert all(text.count("Second?") == 1 for text in texts[:-1])
    first = target.chat_tokens(as_conversation(list(talk(0).messages[:2])))
    assert samples[0].tolist()[: len(first)] == first
    synthesize(load_recipe([*words, "data.samples=2"]), target, tmp_path / "b", quiet=True)
    with Loopback(target) as server:
        served = [*words, f"data.writer=openai:{server.url}", "data.samples=6"]
        synthesize(load_recipe(served), target, tmp_path / "c", quiet=True)
    other = read_samples(tmp_path / "c")
    assert [other[i].tolist() for i in range(len(other))] == [s.tolist() for s in map(samples.__getitem__, range(len(samples)))]  # fmt: skip


def test_long_and_refused_prompts_are_named_and_counted(
    tmp_path: Path,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    conversations(
        monkeypatch, talk(0, "x" * 300), as_conversation("Hi"), as_conversation("Why so?")
    )
    words = [*SHORT, "data.prompts=p", "data.batch_size=2"]
    assert synthesize(load_recipe(words), target, tmp_path / "a")["dropped"]["prompt too long"] == 1
    assert (
        "1 of 3 prompts are longer than data.max_prompt_tokens=40 and left out; "
        in capsys.readouterr().err
    )
    cut = synthesize(load_recipe([*words, "data.long_prompts=cut"]), target, tmp_path / "b")
    assert "prompt too long" not in cut["dropped"]
    with pytest.raises(UserError, match="long_prompts is 'drop', this recipe says 'cut'"):
        synthesize(load_recipe([*words, "data.long_prompts=cut"]), target, tmp_path / "a")
    conversations(monkeypatch, talk(0, "x" * 300))
    with pytest.raises(UserError, match="no prompt fits .*data.max_prompt_tokens=.* keeps all"):
        synthesize(load_recipe(words), target, tmp_path / "c")


def test_a_folder_keeps_the_date_of_its_first_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples that are written another day, and shards that are mended then, say the same date."""
    target = switching_target()
    target.tokenizer.chat_template = (
        "{{ strftime_now('%d %b %Y') }}" + target.tokenizer.chat_template
    )
    words = [*SHORT, "data.batch_size=4"]
    monkeypatch.setattr("align.writing.template.today", lambda: "2026-11-28")
    first = synthesize(load_recipe([*words, "data.samples=8"]), target, tmp_path / "a")
    assert first["date"] == "2026-11-28" and first["rendered_sha256"]
    said = f"reads the clock; the samples of {tmp_path / 'a'} say 28 Nov 2026"
    assert said in capsys.readouterr().err
    synthesize(load_recipe([*words, "data.samples=14"]), target, tmp_path / "whole", quiet=True)
    monkeypatch.setattr("align.writing.template.today", lambda: "2026-11-29")
    data.shard_path(tmp_path / "a", 0).unlink()
    again = synthesize(load_recipe([*words, "data.samples=14"]), target, tmp_path / "a", quiet=True)
    assert again == data.read_manifest(tmp_path / "whole")


def test_a_folder_records_that_its_template_draws_at_random(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say_once.cache_clear()
    target = switching_target()
    target.tokenizer.chat_template = "{{ range(99) | random }}" + target.tokenizer.chat_template
    words = [*SHORT, "data.batch_size=4", "data.samples=8"]
    manifest = synthesize(load_recipe(words), target, tmp_path / "a")
    assert manifest["template_seed"] == 0 and manifest["rendered_sha256"]
    assert "draws at random" in capsys.readouterr().err
    data.shard_path(tmp_path / "a", 0).unlink()
    assert synthesize(load_recipe(words), target, tmp_path / "a", quiet=True) == manifest
