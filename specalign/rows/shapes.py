"""Reads one row of a file, or a prompt of the Python API, as a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specalign.common.errors import UserError
from specalign.common.text import short
from specalign.rows.conversation import Conversation, Message
from specalign.rows.messages import (
    CONTENT_KEYS,
    ROLE_KEYS,
    UnknownRole,
    UnusableRow,
    decode_json,
    drop_nulls,
    find_unused_keys,
    has_known_role,
    has_role,
    is_conversation,
    is_part,
    read_messages,
    read_text_parts,
    split_turns,
)

CONVERSATIONS = ("messages", "conversations", "conversation")
_TEXTS = (
    "prompt",
    "question",
    "turns",
    "problem",
    "instruction",
    "query",
    "input",
    "text",
    "content",
)
PROMPT_COLUMNS = CONVERSATIONS + _TEXTS
"""Columns that may hold the prompt, in any case. The first one with a user's text is used."""
MATERIAL = dict.fromkeys(("question", "problem", "instruction", "query"), ("input", "context"))
"""By prompt column: the columns appended to it (Alpaca's `input`, SQuAD's `context`)."""
SYSTEM = ("system", "system_prompt", "system_message")
NAMES = ("id", "prompt_id", "category")
"""Columns that name a prompt."""
NO_TEXT = "without a user's text"
_KNOWN_KEYS = {*PROMPT_COLUMNS, *ROLE_KEYS}
_SPEAKERS = {*ROLE_KEYS, "human", "user", "prompter"}


@dataclass
class ParsedRow:
    """A row's conversation, and what of the row is unused.

    columns: non-empty columns that are unused. later_turns: user turns after the first in a list
    without answers. answered: the conversation ends with an answer. keys: unused keys of messages.
    split: the text was split at turn marks.
    """

    conversation: Conversation
    columns: list[str]
    later_turns: int = 0
    answered: bool = False
    keys: tuple[str, ...] = ()
    split: bool = False


@dataclass
class _Value:
    """What a column holds: messages, and fields of `ParsedRow`."""

    messages: list[Message]
    later_turns: int = 0
    keys: tuple[str, ...] = ()
    split: bool = False


def parse_prompt(value: Any) -> ParsedRow:
    """A prompt of the Python API: a user's text as it stands, or any shape of a row.

    Raises:
        UserError: no conversation, or one that a file of prompts would skip.
    """
    if isinstance(value, str):
        return ParsedRow(Conversation.from_text(value), [])
    try:
        if isinstance(value, Conversation):
            messages = read_messages(map(_to_builtin, value.messages))
            _check_messages(messages)
            conversation = replace(value, messages=tuple(messages))
            return ParsedRow(conversation, [], answered=conversation.prompt != conversation)
        if (
            isinstance(value, Mapping)
            and not {str(name).casefold() for name in value} & _KNOWN_KEYS
        ):
            raise UserError(f"the prompt must be text, messages or tokens, not {short(value, 60)}")
        if not isinstance(value, Mapping | Sequence) or isinstance(value, bytes) or not value:
            raise UserError(
                f"a conversation is a text or a list of messages, not {short(value, 60)}"
            )
        return parse_row(_to_builtin(value))
    except UnusableRow as error:
        items = value if isinstance(value, list | tuple) else []
        keys = dict.fromkeys(key for item in items for key in find_unused_keys(item))
        hint = f" (keys of messages not read: {', '.join(keys)})" if keys else ""
        raise UserError(f"the prompt is a conversation {error}{hint}") from None


def as_conversation(value: Any) -> Conversation:
    """The conversation of `parse_prompt`. Raises as it does."""
    return parse_prompt(value).conversation


def _to_builtin(value: Any) -> Any:
    """The value with dicts and lists in place of other mappings and sequences."""
    if isinstance(value, Mapping):
        return {key: _to_builtin(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_to_builtin(item) for item in value]
    return value


def parse_row(row: Any, column: str | None = None) -> ParsedRow:
    """The conversation of a row: text, a list of messages, or an object with a prompt in `column`
    or in one of `PROMPT_COLUMNS`.

    Raises:
        UnusableRow: it has no user's text, or content that is no text.
    """
    if isinstance(row, str | list):
        return _parse_column({"prompt": row}, "prompt")
    if not isinstance(row, dict):
        raise UnusableRow(f"that are no text and no object but {type(row).__name__}")
    row = {str(name): value for name, value in row.items() if not _is_empty(value)}
    if column is not None:
        return _parse_column(row, column, chosen=True)
    names = {name.strip().casefold(): name for name in reversed(row)}
    speaks = has_known_role(row) or {*row} == {"role", "content"}
    if speaks and not {*names} & {*PROMPT_COLUMNS} - {*CONTENT_KEYS}:  # one message a row
        used = [name for name in (*ROLE_KEYS, *CONTENT_KEYS) if name in row]
        return _finish(row, _Value(read_messages([row])), used)
    reason = NO_TEXT
    for key in PROMPT_COLUMNS:
        if key not in names:
            continue
        try:
            return _parse_column(row, names[key])
        except UnusableRow as error:
            if isinstance(error, UnknownRole) and key in CONVERSATIONS:
                raise
            reason = str(error) if reason == NO_TEXT else reason
    raise UnusableRow(reason)


def _parse_column(row: dict[str, Any], name: str, chosen: bool = False) -> ParsedRow:
    """The conversation in one column; `chosen`: by the user, so no other column adds to it."""
    key = name.strip().casefold()
    nested = _find_nested_row(row.get(name), chosen)
    if nested is not None:
        return _parse_nested(row, name, nested)
    value = _read_value(row.get(name), key)
    used = [name]
    if not chosen and len(value.messages) == 1:
        names = {other.strip().casefold(): other for other in reversed(row)}
        for other in MATERIAL.get(key, ()):
            material = row.get(names.get(other, ""))
            if isinstance(material, str):
                value.messages[0]["content"] += f"\n\n{material.strip()}"
                used.append(names[other])
    return _finish(row, value, used)


def _find_nested_row(value: Any, chosen: bool) -> dict[str, Any] | None:
    """An object with messages in a column; in a chosen column an object with any prompt, unless it
    is a message itself."""
    found = decode_json(value)
    if not isinstance(found, dict) or isinstance(value, str) and not _holds_conversation(found):
        return None
    keys = {str(key).casefold() for key in found}
    has_prompt = bool(keys & {*PROMPT_COLUMNS}) and not keys & _SPEAKERS and not is_part(found)
    return found if keys & {*CONVERSATIONS} or chosen and has_prompt else None


def _parse_nested(row: dict[str, Any], name: str, nested: dict[str, Any]) -> ParsedRow:
    """The row in a column. The outer system prompt and tools apply if it has none."""
    nested = {str(key): value for key, value in nested.items() if not _is_empty(value)}
    own = {key.strip().casefold() for key in nested}
    folded = {other: other.strip().casefold() for other in row if other != name}
    shared = [o for o, key in folded.items() if key in (*SYSTEM, "tools") and key not in own]
    parsed = parse_row({**{other: row[other] for other in shared}, **nested})
    unused = [o for o, key in folded.items() if o not in shared and key not in NAMES]
    return replace(parsed, columns=[*parsed.columns, *unused])


def _holds_conversation(value: Any) -> bool:
    """Whether a value is a conversation, or an object with one in a column of `CONVERSATIONS`."""
    items = value.items() if isinstance(value, dict) else ()
    return is_conversation(value) or any(
        str(key).casefold() in CONVERSATIONS and is_conversation(decode_json(item))
        for key, item in items
    )


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {}) or isinstance(value, str) and not value.strip()


def _read_value(value: Any, column: str) -> _Value:
    """The messages in a column. Raises UnusableRow if there are none."""
    holds_turns = column in (*CONVERSATIONS, "turns")
    found = decode_json(value)
    if isinstance(value, str) and not holds_turns and not _holds_conversation(found):
        return _read_turns([value])
    if isinstance(found, dict):
        found = _list_messages(found)
    if isinstance(found, list) and found:
        items = [_decode_message(item) for item in found if item is not None]
        if all(map(is_part, items)):
            return _read_turns([read_text_parts(items)])
        if all(isinstance(item, str) for item in items):
            return _read_turns(items)
        if any(map(has_role, items)) or all(isinstance(item, dict) for item in items):
            keys = dict.fromkeys(key for item in items for key in find_unused_keys(item))
            return _Value(read_messages(items), keys=tuple(keys))
    if not isinstance(value, str):
        raise UnusableRow(NO_TEXT)
    if value.strip()[:1] in ("[", "{"):
        raise UnusableRow("with messages in a string that can't be read")
    return _read_turns([value])


def _decode_message(item: Any) -> Any:
    """A message that is a JSON string as an object; anything else as it is."""
    found = decode_json(item)
    return found if is_conversation([found]) else item


def _read_turns(texts: list[str]) -> _Value:
    """The first of a list of user turns (later ones need answers between them), split at turn
    marks."""
    texts = [text for text in texts if text.strip()]
    turns = split_turns(texts[0]) if len(texts) == 1 else []
    if turns:
        return _Value(turns, split=True)
    return _Value([{"role": "user", "content": text} for text in texts[:1]], len(texts[1:]))


def _list_messages(value: dict[str, Any]) -> Any:
    """The messages of an object: under a key, by columns (as `datasets` stores them), or itself
    one."""
    for name in CONVERSATIONS:
        if value.get(name) is not None:
            return decode_json(value[name])
    columns = {key: items for key, items in value.items() if isinstance(items, list)}
    if {"role", "from"} & {*columns}:
        return [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)
        ]
    return [value]


def _check_messages(messages: list[Message]) -> None:
    """Raises UnusableRow if no user speaks, or a text is not valid Unicode."""
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise UnusableRow(NO_TEXT)
    asked = next((m for m in reversed(messages) if m["role"] != "assistant"), messages[-1])
    if asked["role"] == "user" and not asked["content"].strip():
        raise UnusableRow("whose last user message is empty")
    try:
        "".join(message["content"] for message in messages).encode()
    except UnicodeEncodeError:
        raise UnusableRow("with text that is no Unicode (half of a surrogate pair)") from None


def _finish(row: Mapping[str, Any], value: _Value, used: list[str]) -> ParsedRow:
    """The conversation with the row's system prompt and tools, and the columns it leaves."""
    messages = value.messages
    _check_messages(messages)
    names = {name.strip().casefold(): name for name in row}
    for key in SYSTEM:
        text = row.get(names.get(key, ""))
        if isinstance(text, str) and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": text}, *messages]
            used.append(names[key])
    tools = _read_tools(row.get(names.get("tools", "")))
    if tools:
        used.append(names["tools"])
    conversation = Conversation(tuple(messages), tools)
    unused = [name for name in row if name not in used and name.strip().casefold() not in NAMES]
    answered = conversation.prompt != conversation
    return ParsedRow(conversation, unused, value.later_turns, answered, value.keys, value.split)


def _read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools in a column: a list or an object, also as JSON strings; nothing else is read."""
    found = decode_json(value)
    entries = [decode_json(entry) for entry in (found if isinstance(found, list) else [found])]
    if not all(isinstance(entry, dict) for entry in entries):
        return ()
    return tuple(drop_nulls(entry) for entry in entries)
