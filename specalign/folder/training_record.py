"""The template variables and system prompt that a drafter was trained with, stored in a separate
file in its folder, because published layouts have their own config.json."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from huggingface_hub import try_to_load_from_cache

from specalign.common.files import write_json
from specalign.common.hub import is_hub_id, local_path
from specalign.common.schema import JsonObject, convert, read_json
from specalign.common.text import short
from specalign.folder.chat import Chat, quote_arguments
from specalign.folder.rendering import render
from specalign.rows.conversation import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECORD = "specalign.json"
"""The file's name in a drafter's folder."""


class _Trained(TypedDict):
    template_kwargs: JsonObject
    system: str | None


def save_chat(folder: Path, chat: Chat) -> None:
    """Write the file."""
    write_json(folder / RECORD, {"template_kwargs": dict(chat.kwargs), "system": chat.system})


def read_chat(drafter: str) -> Chat | None:
    """The chat settings that a drafter was trained with; None if unknown. Raises UserError: a
    broken file."""
    path = local_path(drafter) / RECORD
    if not path.is_file() and is_hub_id(drafter):
        cached = try_to_load_from_cache(drafter, RECORD)
        path = Path(cached) if isinstance(cached, str) else path
    if not path.is_file():
        return None
    found = convert(read_json(path), _Trained, "", str(path))
    return Chat(found["template_kwargs"], found["system"])


def chat_note(drafter: str, now: Chat, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A note if the drafter was trained with another prompt format than `now`, else None."""
    trained = read_chat(drafter)
    now = replace(now, date=None)  # folders of results fix the date
    if trained is None or trained == now or not getattr(tokenizer, "chat_template", None):
        return None
    with suppress(Exception):  # a refusing template is reported where it is used
        hello = Conversation.from_text("Hello")
        texts = {render(tokenizer, c.apply(hello), c.kwargs) for c in (trained, now)}
        if len(texts) == 1:
            return None
    options = f" ({quote_arguments(trained.arguments).strip()})" if trained else ""
    plain = "no template variables and no system prompt"
    return (
        f"note: drafter {short(drafter, 200)} was trained with {trained.description or plain}; "
        f"decoding uses {now.description or plain}: fewer drafts may be accepted{options}"
    )
