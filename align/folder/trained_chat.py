"""The chat template switches and the system prompt that a drafter was trained with, in a small file in its folder.

It is a file of this project's: published layouts keep their own config.json, and folders without the file say nothing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from align.common.files import write_json
from align.common.hub import is_hub_id, local_path
from align.common.schema import convert, read_json
from align.common.text import short
from align.folder.chat import Chat, typed
from align.folder.rendering import render
from align.rows.conversation import Conversation

RECORD = "specalign.json"
"""The file's name in a drafter's folder."""


class _Trained(TypedDict):
    template_kwargs: dict[str, Any]
    system: str | None


def save_chat(folder: Path, chat: Chat) -> None:
    """Write the file."""
    write_json(folder / RECORD, {"template_kwargs": dict(chat.kwargs), "system": chat.system})


def read_chat(drafter: str) -> Chat | None:
    """What the drafter of a folder, or of a hub id that is fetched already, was trained with; None = its folder does not say.

    Raises:
        UserError: the file is broken.
    """
    path = local_path(drafter) / RECORD
    if not path.is_file() and is_hub_id(drafter):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(drafter, RECORD)
        path = Path(cached) if isinstance(cached, str) else path
    if not path.is_file():
        return None
    found = convert(read_json(path), _Trained, "", str(path))
    return Chat(found["template_kwargs"], found["system"])


def chat_note(drafter: str, now: Chat, tokenizer: Any) -> str | None:
    """A note where the drafter was trained with other switches or another system prompt than `now`; None where both prompt alike."""
    trained = read_chat(drafter)
    now = replace(now, date=None)  # folders of results fix the date of a template's clock
    if trained is None or trained == now or not getattr(tokenizer, "chat_template", None):
        return None
    with suppress(Exception):  # a template that refuses a conversation is reported where it is used
        if _example(tokenizer, trained) == _example(tokenizer, now):
            return None
    options = f" ({typed(trained.words).strip()})" if trained else ""
    return (
        f"note: drafter {short(drafter, 200)} was trained with {_describe(trained)}; decoding uses {_describe(now)}: fewer drafts may be "
        f"accepted{options}"
    )


def _example(tokenizer: Any, chat: Chat) -> str:
    return render(tokenizer, chat.apply(Conversation.from_text("Hello")), chat.kwargs)


def _describe(chat: Chat) -> str:
    return chat.said or "no template switches and no system prompt"
