"""The messages of one request and its tools, read in OpenAI's, ShareGPT's and other spellings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from specalign.common.schema import JsonObject
from specalign.common.text import short

Message = JsonObject
"""role: system, developer, user, assistant or tool. content: a string, "" if there is none. Keys
used by chat templates (tool_calls, tool_call_id, name, reasoning_content) are kept."""

ROLES = {
    "system": "system sys",
    "developer": "developer",
    "user": "user human prompter usr customer end_user instruction question",
    "assistant": "assistant gpt model bot chatbot ai chatgpt answer response output completion "
    "function_call tool_call",
    "tool": "tool function ipython observation tool_response tool_result function_response",
}
"""Role names used in data sets, by the corresponding chat template role."""
ROLE_OF = {spelling: role for role, spellings in ROLES.items() for spelling in spellings.split()}


Tool = JsonObject
"""A tool's JSON schema."""
ROLE_KEYS = ("role", "from", "speaker")
CONTENT_KEYS = ("content", "value", "text")
_COPIED_KEYS = ("tool_calls", "tool_call_id", "name")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MEDIA_KEYS = ("images", "image", "audio", "videos", "video")
_KNOWN_KEYS = {
    *ROLE_KEYS, *CONTENT_KEYS, *_COPIED_KEYS, *_REASONING_KEYS, "weight", "train", "refusal",
}  # fmt: skip
_TEXT_PARTS = (None, "text", "input_text", "output_text")


class UnusableRow(ValueError):
    """A row without a usable conversation. The message completes "3 rows skipped: …"."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and the tools declared for them as JSON schemas."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    @classmethod
    def from_text(cls, text: str) -> Conversation:
        """A single user message."""
        return cls(({"role": "user", "content": text},))

    @property
    def text(self) -> str | None:
        """The user's text if the conversation is one plain user message, else None."""
        text: str = self.messages[0]["content"] if self.messages else ""
        return text if self == Conversation.from_text(text) else None

    @property
    def prompt(self) -> Conversation:
        """The conversation without trailing assistant messages: what the target continues."""
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        return Conversation(self.messages[:end], self.tools)


def fold_role(spelling: object) -> str:
    """A role in the spelling of `ROLE_OF`: lower case, underscores for spaces and hyphens."""
    return str(spelling).strip().casefold().replace("-", "_").replace(" ", "_")


def has_role(value: object) -> TypeGuard[JsonObject]:
    """Whether a value is an object with a speaker."""
    roles = [value.get(key) for key in ROLE_KEYS] if isinstance(value, dict) else []
    return any(isinstance(role, str) and role for role in roles)


def has_known_role(value: object) -> bool:
    """Whether a value is an object with a speaker that `ROLE_OF` lists."""
    return has_role(value) and fold_role(_first(value, ROLE_KEYS)) in ROLE_OF


def is_message(value: object) -> TypeGuard[JsonObject]:
    """Whether a value is a message and nothing else; a table may have a column `role` too."""
    return has_role(value) and {*value} <= _KNOWN_KEYS


def is_conversation(value: object) -> bool:
    """Whether a value is a list of messages with known roles."""
    if not isinstance(value, list) or not value or not all(map(has_known_role, value)):
        return False
    # mails have "from" too: ShareGPT's messages have a "value"
    return all("value" in item or _first(item, ROLE_KEYS) != item.get("from") for item in value)


def is_part(value: object) -> TypeGuard[JsonObject]:
    """Whether a value is a typed part of a message's content."""
    return isinstance(value, dict) and isinstance(value.get("type"), str) and not has_role(value)


def _is_text_part(value: object) -> bool:
    return is_part(value) and value["type"] in _TEXT_PARTS and isinstance(value.get("text"), str)


def read_messages(values: Iterable[object]) -> list[Message]:
    """A list of messages, without null entries and system and user messages without content.

    Raises UnusableRow for an entry that is not a message, an unknown role, or content that is
    not text."""
    messages = []
    for value in values:
        if value is None:
            continue
        if not has_role(value):
            raise UnusableRow("with messages without a role")
        role = _read_role(_first(value, ROLE_KEYS))
        holds_content = any(value.get(key) is not None for key in (*CONTENT_KEYS, *_MEDIA_KEYS))
        if holds_content or role in ("assistant", "tool"):
            messages.append(_read_message(value, role))
    return messages


def _read_message(value: Mapping[str, object], role: str) -> Message:
    if any(value.get(key) for key in _MEDIA_KEYS):
        raise UnusableRow("with parts that are not text (images, audio)")
    message: Message = {"role": role, "content": read_text_parts(_first(value, CONTENT_KEYS))}
    for key in _COPIED_KEYS:
        if value.get(key) not in (None, "", []):
            message[key] = drop_nulls(decode_json(value[key]))
    if isinstance(value.get("function_call"), dict):  # OpenAI's older form
        called = {"type": "function", "function": drop_nulls(value["function_call"])}
        message.setdefault("tool_calls", [called])
    reasoning = _first(value, _REASONING_KEYS)
    if reasoning and isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    return message


def _first(value: Mapping[str, object], keys: Iterable[str]) -> object:
    found = [value[key] for key in keys if value.get(key) is not None]
    return next((item for item in found if item != ""), found[0] if found else None)


def _read_role(spelling: object) -> str:
    role = ROLE_OF.get(fold_role(spelling))
    if role is None:
        raise UnusableRow(f"with an unknown role, {short(spelling, 30)}")
    return role


def read_text_parts(content: object) -> str:
    """The text of a message's content: a string, nothing, or parts joined by line ends as in vLLM;
    parts may also be stored as a string of JSON.

    Raises UnusableRow for anything else (images, audio)."""
    if isinstance(content, str):
        stored = decode_json(content)
        is_stored = isinstance(stored, list) and stored and all(map(_is_text_part, stored))
        return read_text_parts(stored) if is_stored else content
    if content is None:
        return ""
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list):
        raise UnusableRow("with content that is not text")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) and kind in _TEXT_PARTS else part
        if isinstance(text, str):
            texts.append(text)
        elif part is not None and not (kind and text is None):
            raise UnusableRow("with parts that are not text (images, audio)")
    return "\n".join(texts)


def decode_json(value: object) -> Any:
    """The value in a string of JSON that holds a list or an object; anything else unchanged."""
    text = value.strip() if isinstance(value, str) else ""
    if text[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return value


def drop_nulls(value: object) -> Any:
    """The value without null keys, which tables with mixed schemas are filled with."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value
