"""What a drafter was trained with is in its folder, and a difference is a note."""

import json
from pathlib import Path
from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.folder.chat import Chat
from specalign.folder.training_record import (
    RECORD,
    DrafterRecord,
    ExpectedTau,
    TrainingRecord,
    chat_note,
    read_record,
    save_record,
)
from specalign.lm.loading import load_target

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if enable_thinking is not defined or enable_thinking %}"
    "<think>{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    found = load_target("debug").tokenizer
    found.chat_template = TEMPLATE
    return found


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_record(str(tmp_path)) is None  # a folder of before, or of others
    taus = {"greedy": ExpectedTau(2.5, 0.1, 40)}
    training = TrainingRecord(4, taus, 100, 900, "owner/name", ["docs"], {"gsm8k": 3})
    for chat, of_run in (
        (Chat({"enable_thinking": False}, "Be\nbrief."), None),
        (Chat(), training),
    ):
        save_record(tmp_path, chat, of_run)
        found = DrafterRecord(dict(chat.kwargs), chat.system, of_run)
        assert read_record(str(tmp_path)) == found
    older: dict[str, Any] = {"template_kwargs": {}, "system": None}
    (tmp_path / RECORD).write_text(json.dumps(older))
    assert read_record(str(tmp_path)) == DrafterRecord({}, None)
    (tmp_path / RECORD).write_text(json.dumps({**older, "template_kwargs": 3}))
    with pytest.raises(UserError, match=r"specalign.json"):
        read_record(str(tmp_path))


def test_a_difference_is_noted_with_options(tmp_path: Path, tokenizer: Any) -> None:
    trained = Chat({"enable_thinking": False}, "Be brief.")
    save_record(tmp_path, trained)
    note = chat_note(str(tmp_path), Chat(), tokenizer) or ""
    assert "was trained with enable_thinking=false" in note
    assert "no template variables and no system prompt" in note
    assert note.endswith("(--template-kwargs enable_thinking=false --system 'Be brief.')")
    assert chat_note(str(tmp_path), trained, tokenizer) is None
    save_record(tmp_path, Chat())
    note = chat_note(str(tmp_path), Chat({}, "Be brief."), tokenizer) or ""
    assert "decoding uses system prompt" in note
