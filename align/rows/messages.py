"""Messages as files hold them, in OpenAI's, ShareGPT's and other spellings, as `Message`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from align.common.text import short
from align.rows.conversation import ROLE_OF, ROLES, TEXT_PARTS, Message, fold_role

ROLE_KEYS = ("role", "from", "speaker")
CONTENT_KEYS = ("content", "value", "text")
_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MEDIA = ("images", "image", "audio", "videos", "video")
_MATERIAL = ("input", "context")
_MESSAGE_KEYS = {
    *ROLE_KEYS,
    *CONTENT_KEYS,
    *_KEPT,
    *_REASONING,
    "function_call",
    "weight",
    "train",
    "refusal",
}


class UnusableRow(ValueError):
    """A row that gives no conversation; the message says why, in words that fit a count of rows."""


class UnknownRole(UnusableRow):
    """A row with a message whose role no chat template knows."""


def has_role(value: Any) -> bool:
    """Whether a value is an object that says who speaks."""
    return isinstance(value, dict) and any(isinstance(value.get(key), str) for key in ROLE_KEYS)


def has_known_role(value: dict[str, Any]) -> bool:
    """Whether an object says who speaks, in a spelling that `ROLE_OF` has."""
    return fold_role(_first(value, ROLE_KEYS)) in ROLE_OF


def has_misspelt_role(value: dict[str, Any]) -> bool:
    """Whether an object is a message whose role is almost a spelling that `ROLE_OF` has."""
    role = value.get("role")
    return (
        isinstance(role, str)
        and is_message(value)
        and not has_known_role(value)
        and _similar_role(role) != ""
    )


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages with known roles; ShareGPT's have a `value` too."""
    return isinstance(value, list) and bool(value) and all(map(_has_speaker, value))


def _has_speaker(value: Any) -> bool:
    if not has_role(value) or not (has_known_role(value) or has_misspelt_role(value)):
        return False
    return "value" in value or _first(value, ROLE_KEYS) != value.get("from")


def unused_keys(value: Any) -> list[str]:
    """The keys of a message that hold something and that `read_messages` does not read."""
    if not isinstance(value, dict):
        return []
    held = {key: content for key, content in value.items() if content not in (None, "", [], {})}
    if has_role(value):
        others = [key for key in held if key not in _MESSAGE_KEYS or key == "refusal"]
        return [*others, *_unused_contents(value, held)]
    return [
        key
        for key, content in held.items()
        if not isinstance(content, str) or fold_role(key) not in ROLE_OF and key not in _MATERIAL
    ]


def _unused_contents(value: dict[str, Any], held: dict[str, Any]) -> list[str]:
    """Keys with other content than the one that is read, and keys of parts beside their text."""
    content = _first(value, CONTENT_KEYS)
    second = [key for key in CONTENT_KEYS if key in held and held[key] != content]
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    beside = dict.fromkeys(key for part in parts for key in part if part[key] and key not in ("type", "text"))
    return [*second, *(f"content.{key}" for key in beside)]


def is_message(value: Any) -> bool:
    """Whether a value is a message and nothing else: the row of a table may have a role too."""
    return has_role(value) and {*value} <= _MESSAGE_KEYS


def read_messages(values: Iterable[Any]) -> list[Message]:
    """A list of messages; entries that are null are left out.

    Raises:
        UnusableRow: an entry that is no message, an unknown role, or content that is no text.
    """
    return [message for value in values if value is not None for message in _messages(value)]


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, dict):
        raise UnusableRow("with messages that are no objects with role and content")
    role = _first(value, ROLE_KEYS)
    if role is not None:
        name = _role(role)
        if name in ("system", "developer") and _first(value, CONTENT_KEYS) is None:
            return []  # a system prompt that is null is absent
        return [_message(value, name)]
    spoken = [
        (key, text) for key, text in value.items() if isinstance(text, str) and fold_role(key) in ROLE_OF
    ]
    if not spoken:
        raise UnusableRow("with messages without a role")
    messages: list[Message] = [
        {"role": _role(key), "content": text} for key, text in spoken
    ]  # {"human": …, "gpt": …}
    messages.sort(key=lambda message: list(ROLES).index(message["role"]))  # the order of keys means nothing
    asked = next((message for message in messages if message["role"] == "user"), None)
    material = [value[key] for key in _MATERIAL if isinstance(value.get(key), str) and value[key].strip()]
    if asked is not None:
        asked["content"] = "\n\n".join([asked["content"], *map(str.strip, material)])
    return messages


def _message(value: Mapping[str, Any], role: str) -> Message:
    if any(value.get(key) for key in _MEDIA):
        raise UnusableRow("with parts that are no text (images, sound)")
    kept = {key: without_nulls(decoded(value[key])) for key in _KEPT if value.get(key) not in (None, "", [])}
    if (reasoning := _first(value, _REASONING)) and isinstance(reasoning, str):
        kept["reasoning_content"] = reasoning
    call = decoded(value.get("function_call"))
    if isinstance(call, dict) and "tool_calls" not in kept:  # OpenAI's older form
        kept["tool_calls"] = [{"type": "function", "function": without_nulls(call)}]
    return {"role": role, "content": text_of(_first(value, CONTENT_KEYS)), **kept}


def _first(value: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((value[key] for key in keys if value.get(key) is not None), None)


def _role(spelled: Any) -> str:
    if fold_role(spelled) not in ROLE_OF:
        similar = _similar_role(spelled)
        hint = f" (did you mean '{similar}'?)" if similar else ""
        raise UnknownRole(f"with an unknown role, {short(spelled, 30)}{hint}")
    return ROLE_OF[fold_role(spelled)]


def _similar_role(spelled: Any) -> str:
    """The role of the closest spelling; "" if none is close."""
    close = get_close_matches(fold_role(spelled), ROLE_OF, n=1, cutoff=0.7)
    return ROLE_OF[close[0]] if close else ""


def text_of(content: Any) -> str:
    """The text of a message's content: a string, nothing, or parts, joined by line ends as vLLM
    joins them.

    Raises:
        UnusableRow: parts that are no text (images, sound), or content of another type.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise UnusableRow("with content that is no text")
    return "\n".join(_part(part) for part in content if part is not None)


_MARKS = (re.compile(r"\n\n(Human|Assistant):"), re.compile(r"\s*### (Human|Assistant):"))
_MARKED = re.compile(r"\A(Human|User):.*^(Assistant|AI):", re.DOTALL | re.MULTILINE)


def split_turns(text: str) -> list[Message]:
    """The turns of a text that begins with `\n\nHuman:` (HH-RLHF) or `### Human:` (Guanaco) and marks each turn so; none of any other
    text."""
    for marks in _MARKS:
        before, *parts = marks.split(text.replace("\r\n", "\n"))
        roles = parts[::2]
        if before or roles[:1] != ["Human"] or "Assistant" not in roles:
            continue
        turns = [
            {"role": _role(role), "content": said.strip()}
            for role, said in zip(roles, parts[1::2], strict=True)
        ]
        while not turns[-1]["content"] and turns[-1]["role"] == "assistant":
            turns.pop()  # where an answer is to begin
        return turns
    return []


def is_marked(text: str) -> bool:
    """Whether a text looks like a conversation that `split_turns` does not split: an instruction may follow its last turn."""
    return bool(_MARKED.search(text))


def is_part(value: Any) -> bool:
    """Whether a value is a part of a message's content."""
    return isinstance(value, dict) and isinstance(value.get("type"), str) and not has_role(value)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) and part.get("type") in TEXT_PARTS else None
    if not isinstance(text, str):
        raise UnusableRow("with parts that are no text (images, sound)")
    return text


def decoded(value: Any) -> Any:
    """What a string holds as JSON, or as Python writes lists (tables of pandas saved as CSV); else
    the value itself."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{", '"'):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            with warnings.catch_warnings():  # of escapes in what is no Python
                warnings.simplefilter("ignore")
                found = read(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return decoded(found) if isinstance(found, str) and found != value else found
    return value


def without_nulls(value: Any) -> Any:
    """The value without keys that hold null, which tables of several schemas are filled with."""
    if isinstance(value, dict):
        return {key: without_nulls(held) for key, held in value.items() if held is not None}
    return [without_nulls(held) for held in value] if isinstance(value, list) else value
