"""One row of a file or a data set, or a prompt of the Python API, as a conversation, whatever its shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from align.common.errors import UserError
from align.common.text import short
from align.rows.conversation import Conversation, Message
from align.rows.messages import (
    CONTENT_KEYS,
    ROLE_KEYS,
    UnknownRole,
    UnusableRow,
    decoded,
    has_known_role,
    has_misspelt_role,
    has_role,
    is_conversation,
    is_marked,
    is_part,
    read_messages,
    split_turns,
    text_of,
    unused_keys,
    without_nulls,
)

CONVERSATIONS = ("messages", "conversations", "conversation")
TEXTS = ("prompt", "question", "turns", "problem", "instruction", "query", "input", "text", "content")
PROMPT_COLUMNS = CONVERSATIONS + TEXTS
"""Columns that may hold the prompt, any case. The first one that holds a user's text counts."""
MATERIAL = dict.fromkeys(("question", "problem", "instruction", "query"), ("input", "context"))
"""By the column of a prompt: those with its material, which follow it after a blank line (Alpaca's
`input`, SQuAD's `context`)."""
SYSTEM = ("system", "system_prompt", "system_message")
NAMES = ("id", "prompt_id", "category")
"""Columns that name a prompt."""
NO_TEXT = "without a user's text"
MARKED = "with turns marked Human: and Assistant:, taken as one text (messages keep the turns apart)"
SPLIT = "split into turns at their marks Human: and Assistant:"
AS_TEXT = "with a prompt that is JSON with a prompt in it, used as raw text (write it as an object, not as a string)"
_SPEAKERS = {*ROLE_KEYS, "human", "user", "prompter"}
_KNOWN_KEYS = {*PROMPT_COLUMNS, *ROLE_KEYS}


@dataclass
class ParsedRow:
    """A row's conversation, and what of the row is not used.

    columns: those that hold something and are not used. later_turns: of a list of the user's turns,
    all but the first one. answered: the conversation ends with answers of the assistant.
    keys: those of its messages that hold something and are not used.
    remarks: on how its text was read, in words that fit a count of rows.
    """

    conversation: Conversation
    columns: list[str]
    later_turns: int
    answered: bool
    keys: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


class _Spoken(NamedTuple):
    """What a value says: messages, and the fields of `ParsedRow`."""

    messages: list[Message]
    later_turns: int = 0
    keys: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def parse_prompt(value: Any) -> ParsedRow:
    """The conversation that a prompt of the Python API is: a user's text as it stands, or any shape that a row may have.

    Raises:
        UserError: it is none, or one that a file of prompts would skip.
    """
    if isinstance(value, str):
        return ParsedRow(Conversation.from_text(value), [], 0, False)
    try:
        if isinstance(value, Conversation):
            messages = read_messages(map(_plain, value.messages))
            _check(messages)
            read = replace(value, messages=tuple(messages))
            return ParsedRow(read, [], 0, read.prompt != read)
        if isinstance(value, Mapping) and not {str(name).casefold() for name in value} & _KNOWN_KEYS:
            raise UserError(f"the prompt must be text, messages or tokens, not {short(value, 60)}")
        if not isinstance(value, Mapping | Sequence) or isinstance(value, bytes) or not value:
            raise UserError(f"a conversation is a text or a list of messages, not {short(value, 60)}")
        return parse_row(_plain(value))
    except UnusableRow as error:
        raise UserError(f"the prompt is a conversation {error}{_list_unused(value)}") from None


def as_conversation(value: Any) -> Conversation:
    """The conversation of `parse_prompt`. Raises as it does."""
    return parse_prompt(value).conversation


def _list_unused(messages: Any) -> str:
    """The keys of messages that are not read, as a hint: one of them may be misspelt."""
    held = messages if isinstance(messages, list | tuple) else ()
    keys = dict.fromkeys(key for message in held for key in unused_keys(message))
    return f" (keys of messages not read: {', '.join(keys)})" if keys else ""


def _plain(value: Any) -> Any:
    """The value with dicts and lists in the place of other mappings and sequences."""
    if isinstance(value, Mapping):
        return {key: _plain(held) for key, held in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(held) for held in value]
    return value


def parse_row(row: Any, column: str | None = None) -> ParsedRow:
    """The conversation of a row: text, a list of messages, or an object with one of
    `PROMPT_COLUMNS`, or `column`.

    Raises:
        UnusableRow: it has no user's text, or holds what is no text.
    """
    if isinstance(row, str | list):
        row, column = {"prompt": row}, None
    if not isinstance(row, dict):
        raise UnusableRow(f"that are no text and no object but {type(row).__name__}")
    held = {str(name): value for name, value in row.items() if not _is_empty(value)}
    for name in (column,) if column is not None else list(held):
        inner = _row_in(held.get(name), name, chosen=column is not None)
        if inner is not None:
            return _parse_nested(held, name, inner)
    if column is not None:
        return _finish(held, _read_value(held.get(column), column.casefold()), [column])
    names, reason = {name.strip().casefold(): name for name in reversed(held)}, NO_TEXT
    speaks = has_known_role(held) or has_misspelt_role(held)
    if speaks and not {*names} & {*PROMPT_COLUMNS} - {*CONTENT_KEYS}:
        used = [name for name in (*ROLE_KEYS, *CONTENT_KEYS) if name in held]
        return _finish(held, _Spoken(read_messages([held])), used)  # of a file with one message a row
    for name in (name for name in PROMPT_COLUMNS if name in names):
        try:
            spoken = _read_value(held[names[name]], name)
            _check(spoken.messages)
        except UnusableRow as error:
            if isinstance(error, UnknownRole) and name in CONVERSATIONS:
                raise
            reason = str(error) if reason == NO_TEXT else reason
            continue
        material = MATERIAL.get(name, ()) if len(spoken.messages) == 1 else ()
        added = [names[o] for o in material if o in names and isinstance(held[names[o]], str)]
        for other in added:
            spoken.messages[0]["content"] += f"\n\n{held[other].strip()}"
        return _finish(held, spoken, [names[name], *added])
    raise UnusableRow(reason)


def _row_in(value: Any, column: str, chosen: bool) -> dict[str, Any] | None:
    """An object with messages, and perhaps a system prompt and tools, that a prompt's column holds; in a `chosen` column an object
    with any prompt, unless it is a message itself."""
    if not chosen and column.strip().casefold() not in PROMPT_COLUMNS:
        return None
    found = decoded(value) if isinstance(value, str | dict) else None
    if isinstance(value, str) and not _holds_conversation(found):
        return None
    held = {str(key).casefold() for key in found} if isinstance(found, dict) else set()
    asks = chosen and held & {*PROMPT_COLUMNS} and not (held & _SPEAKERS or is_part(found))
    return found if asks or held & {*CONVERSATIONS} else None


def _parse_nested(held: dict[str, Any], name: str, inner: dict[str, Any]) -> ParsedRow:
    """The row in a column. If it has no system prompt or tools, those of the outer row apply."""
    inner = {str(key): value for key, value in inner.items() if not _is_empty(value)}
    own = {key.strip().casefold() for key in inner}
    folded = {other: other.strip().casefold() for other in held if other != name}
    shared = [other for other, key in folded.items() if key in (*SYSTEM, "tools") and key not in own]
    parsed = parse_row({**{other: held[other] for other in shared}, **inner})
    left = [other for other, key in folded.items() if other not in shared and key not in NAMES]
    return replace(parsed, columns=[*parsed.columns, *left])


def _holds_conversation(value: Any) -> bool:
    """Whether a value is a conversation, or an object with one under a key of `CONVERSATIONS`."""
    held = value.items() if isinstance(value, dict) else ()
    return is_conversation(value) or any(
        str(key).casefold() in CONVERSATIONS and is_conversation(decoded(talk)) for key, talk in held
    )


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {}) or isinstance(value, str) and not value.strip()


def _read_value(value: Any, column: str) -> _Spoken:
    """What a column's value says. Raises UnusableRow where that is nothing."""
    in_string, spoken = isinstance(value, str), column in (*CONVERSATIONS, "turns")
    found = decoded(value)
    if in_string and not spoken and not _holds_conversation(found):
        return _turns([value])
    if isinstance(found, dict):
        found = _listed(found)
    if isinstance(found, list) and found:
        items = [_message_in(item) for item in found if item is not None]
        if any(map(has_role, items)) or not in_string and all(isinstance(item, dict) for item in items):
            if all(map(is_part, items)):
                return _turns([text_of(items)])
            keys = dict.fromkeys(key for item in items for key in unused_keys(item))
            return _Spoken(read_messages(items), 0, tuple(keys))
        if all(isinstance(item, str) for item in items) and (spoken or not in_string):
            return _turns(items)
    if in_string and spoken and value.strip()[:1] in ("[", "{"):
        raise UnusableRow("with messages in a string that can't be read")
    if in_string:
        return _turns([value])
    raise UnusableRow(NO_TEXT)


def _message_in(item: Any) -> Any:
    """A message, also where it stands in a string; anything else as it is."""
    found = decoded(item)
    return found if is_conversation([found]) else item


def _turns(texts: list[str]) -> _Spoken:
    """The first of a list of the user's turns as a message; the later ones need answers in
    between. A text with turn marks is split."""
    said = [text for text in texts if text.strip()]
    if len(said) == 1 and (turns := split_turns(said[0])):
        return _Spoken(turns, remarks=(SPLIT,))
    remarks = [AS_TEXT] * any(map(_holds_row, said[:1])) + [MARKED] * any(map(is_marked, said[:1]))
    return _Spoken(
        [{"role": "user", "content": text} for text in said[:1]], len(said[1:]), (), tuple(remarks)
    )


def _holds_row(text: str) -> bool:
    """Whether a text is an object, or a list of objects, with a prompt."""
    found = decoded(text)
    rows = found if isinstance(found, list) else [found]
    return bool(rows) and all(
        isinstance(row, dict) and bool({str(key).casefold() for key in row} & {*PROMPT_COLUMNS})
        for row in rows
    )


def _listed(value: dict[str, Any]) -> Any:
    """Messages out of an object: one message, messages under a key, or messages kept by columns, as
    `datasets` does."""
    for name in CONVERSATIONS:
        if value.get(name) is not None:
            return decoded(value[name])
    columns = {key: held for key, held in value.items() if isinstance(held, list)}
    if {"role", "from"} & {*columns}:
        return [dict(zip(columns, held, strict=True)) for held in zip(*columns.values(), strict=False)]
    return [value]


def _check(messages: list[Message]) -> None:
    """Raises UnusableRow where no user speaks, or a text is no Unicode: JSON may hold half a
    surrogate pair."""
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise UnusableRow(NO_TEXT)
    asked = next((m for m in reversed(messages) if m["role"] != "assistant"), messages[-1])
    if asked["role"] == "user" and not asked["content"].strip():
        raise UnusableRow("whose last user message is empty")
    try:
        "".join(message["content"] for message in messages).encode()
    except UnicodeEncodeError:
        raise UnusableRow("with text that is no Unicode (half of a surrogate pair)") from None


def _finish(held: Mapping[str, Any], spoken: _Spoken, used: list[str]) -> ParsedRow:
    """The conversation with the row's system prompt and tools, and the columns that it leaves."""
    messages = spoken.messages
    _check(messages)
    names = {name.strip().casefold(): name for name in held}
    for name in SYSTEM:
        text = held.get(names.get(name, ""))
        if isinstance(text, str) and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": text}, *messages]
            used.append(names[name])
    tools = _tools(held.get(names.get("tools", "")))
    if tools is not None:
        used.append(names.get("tools", ""))
    conversation = Conversation(tuple(messages), tools or ())
    answered = conversation.prompt != conversation
    columns = [name for name in held if name not in used and name.strip().casefold() not in NAMES]
    return ParsedRow(conversation, columns, spoken.later_turns, answered, spoken.keys, spoken.remarks)


def _tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    """The tools in a column: a list or an object, also as JSON in strings; None for anything
    else."""
    found = decoded(value)
    entries = [decoded(entry) for entry in (found if isinstance(found, list) else [found])]
    if not all(isinstance(entry, dict) for entry in entries):
        return None
    return tuple(without_nulls(entry) for entry in entries)
