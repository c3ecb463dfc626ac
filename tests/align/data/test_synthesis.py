"""Generated data: resumable after a kill, duplicates and wrong settings, whole conversations."""

from pathlib import Path
from typing import Any

import pytest

from align.config.parser import load_recipe
from align.data import synthesis
from align.data.synthesis import synthesize
from align.writing.template import chat_template
from specalign.common.errors import UserError
from specalign.folder.chat import Chat
from specalign.lm.model import Target
from specalign.rows import shards as data
from specalign.rows.conversation import Conversation
from specalign.rows.shapes import as_conversation
from specalign.rows.shards import read_samples
from tests.builders import shallow_target, switching_target
from tests.loopback_server import Loopback

SHORT = ["recipe=debug_block", "data.max_answer_tokens=6"]


@pytest.fixture(scope="module")
def target() -> Target:
    return shallow_target(1)


def write(target: Target, folder: Path, *words: str) -> dict[str, Any]:
    return synthesize(load_recipe([*SHORT, *words]), target, folder, quiet=True)


def test_written_prompts_begin_as_asked(tmp_path: Path, target: Target) -> None:
    words = ["data.samples=24", "data.batch_size=128", "data.answer_temperatures=[0.0, 1.0]"]
    write(target, tmp_path / "data", *words, "data.prompt_openings=['', 'ab', 'xyz']")
    samples = read_samples(tmp_path / "data")
    prefix = len(chat_template(target).prefix)
    found = set()
    for i in range(len(samples)):
        prompt = target.detokenize(samples[i][prefix : int(samples.answer_start[i])].tolist())
        found |= {(t, float(samples.temperature[i])) for t in ("ab", "xyz") if prompt.startswith(t)}
    assert found == {("ab", 0.0), ("ab", 1.0), ("xyz", 0.0), ("xyz", 1.0)}
    with pytest.raises(UserError, match="leaves no room"):
        write(target, tmp_path / "more", *words, f"data.prompt_openings=['{'a b ' * 40}']")


def test_samples_that_were_there_before_are_dropped(tmp_path: Path, target: Target) -> None:
    path = tmp_path / "p.txt"
    path.write_text("rain\nsnow\nrain\n")
    words = [f"data.prompts={path}", "data.batch_size=2", "data.answer_temperatures=[0]"]
    manifest = write(target, tmp_path / "data", *words)
    assert manifest["samples"] == 2 and manifest["dropped"] == {"duplicate": 1}


@pytest.mark.slow
def test_other_settings_are_refused(tmp_path: Path) -> None:
    words = ["data.samples=2", "data.batch_size=64", "data.template_kwargs.enable_thinking=false"]
    system = "data.system=Be brief."
    d = load_recipe([*SHORT, *words, system]).data
    target = switching_target()
    target.chat = Chat(d.template_kwargs, d.system)
    manifest = write(target, tmp_path, *words, system)
    assert manifest["template_kwargs"] == {"enable_thinking": False}
    written = target.tokenizer.decode(read_samples(tmp_path)[0].tolist())
    assert "<|im_start|>system\nBe brief.<|im_end|>" in written and "assistant\n<none>" in written
    with pytest.raises(UserError, match="system is 'Be brief.', this recipe says 'Be long.'"):
        write(target, tmp_path, *words, "data.system=Be long.")
    with pytest.raises(UserError, match="template_kwargs is {'enable_thinking': False}"):
        write(target, tmp_path, words[0], system)


def test_nothing_is_kept(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthesis, "FRUITLESS_BATCHES", 3)
    words = ["data.samples=50", "data.batch_size=2"]
    with pytest.raises(UserError, match="no sample of 3 batches in a row was kept"):
        write(target, tmp_path / "data", *words, "data.max_prompt_tokens=1")


CHAT = [
    {"role": "system", "content": "You are the one who answers everything that is asked of you."},
    {"role": "user", "content": "First?"},
    {"role": "assistant", "content": "given answer"},
    {"role": "user", "content": "Second?"},
    {"role": "assistant", "content": "left out"},
]


def talk(i: int) -> Conversation:
    messages = [dict(m) for m in CHAT]
    messages[1]["content"] = "".join(chr(97 + (7 * i + j * (i + 1)) % 26) for j in range(30))
    return as_conversation(messages)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Conversation]:
    """What data.prompts holds."""
    found: list[Conversation] = []
    monkeypatch.setattr(synthesis, "read_prompts", lambda *_: found)
    return found


GIVEN = ["data.prompts=p", "data.max_prompt_tokens=200", "data.batch_size=4"]


@pytest.mark.slow
def test_every_turn_is_answered(tmp_path: Path, target: Target, given: list[Conversation]) -> None:
    """In this process and by a server alike."""
    given += [*(talk(i) for i in range(5)), as_conversation("One turn?")]
    words = [*GIVEN, "data.turns=all", "data.samples=6", "data.answer_temperatures=[0.0]"]
    write(target, tmp_path / "a", *words)
    samples = read_samples(tmp_path / "a")
    texts = [target.tokenizer.decode(samples[i].tolist()) for i in range(len(samples))]
    assert len(texts) >= 4
    assert not any("given answer" in text or "left out" in text for text in texts)
    assert all(text.count("Second?") == 1 for text in texts[:-1])
    with Loopback(target) as server:
        write(target, tmp_path / "b", *words, f"data.writer=openai:{server.url}")
    other = read_samples(tmp_path / "b")
    assert other.lengths.equal(samples.lengths)
    assert all(other[i].equal(samples[i]) for i in range(len(samples)))


def test_long_prompts_are_left_out_or_cut(
    tmp_path: Path, target: Target, given: list[Conversation], capsys: pytest.CaptureFixture[str]
) -> None:
    given += [talk(0), as_conversation("Hi"), as_conversation("Why so?")]
    limit = ["data.prompts=p", "data.max_prompt_tokens=110"]
    recipe = load_recipe([*SHORT, *limit, "data.batch_size=2"])
    dropped = synthesize(recipe, target, tmp_path / "a")["dropped"]
    assert dropped["prompt too long"] == 1
    out = capsys.readouterr().out
    assert "samples dropped: 1 prompt too long (of 3 prompts; the limit is data.max_prompt" in out
    cut = write(target, tmp_path / "b", *limit, "data.long_prompts=cut")
    assert "prompt too long" not in cut["dropped"]


def test_a_folder_keeps_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a later day have the date of the first one."""
    target = switching_target()
    clock = "{{ strftime_now('%d %b %Y') }}"
    target.tokenizer.chat_template = clock + target.tokenizer.chat_template
    monkeypatch.setattr("align.writing.template.today", lambda: "2026-11-28")
    (tmp_path / "p.txt").write_text("".join(f"{i} words\n" for i in range(6)))
    words = [f"data.prompts={tmp_path}/p.txt"]
    words.append("data.batch_size=3")
    first = write(target, tmp_path / "a", *words, "data.samples=3")
    assert first["date"] == "2026-11-28" and first["rendered_sha256"]
    write(target, tmp_path / "whole", *words, "data.samples=6")
    monkeypatch.setattr("align.writing.template.today", lambda: "2026-11-29")
    again = write(target, tmp_path / "a", *words, "data.samples=6")
    assert again == data.read_manifest(tmp_path / "whole")
