"""Reads one row of a file, or a prompt of the Python API, as a conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specalign.common.errors import UserError
from specalign.common.text import short
from specalign.rows.conversation import (
    CONTENT_KEYS,
    ROLE_KEYS,
    Conversation,
    Message,
    Tool,
    UnusableRow,
    decode_json,
    drop_nulls,
    has_known_role,
    has_role,
    is_conversation,
    is_part,
    read_messages,
    read_text_parts,
)

CONVERSATIONS = ("messages", "conversations", "conversation")
_TEXTS = "prompt question turns problem instruction query input text content"
PROMPT_COLUMNS = (*CONVERSATIONS, *_TEXTS.split())
"""Columns that may hold the prompt, in any case. The first one with a user's text is used."""
MATERIAL = dict.fromkeys(("question", "problem", "instruction", "query"), ("input", "context"))
"""By prompt column: the columns appended to it (Alpaca's `input`, SQuAD's `context`)."""
SYSTEM = ("system", "system_prompt", "system_message")
NAMES = ("id", "prompt_id", "category")
"""Columns that name a prompt."""
NO_TEXT = "without a user's text"


@dataclass
class ParsedRow:
    """A row's conversation, and what of the row is unused.

    columns: non-empty columns that are unused. later_turns: user turns after the first in a list
    without answers. answered: the conversation ends with an answer.
    """

    conversation: Conversation
    columns: list[str]
    later_turns: int = 0
    answered: bool = False


def parse_prompt(value: object) -> ParsedRow:
    """A prompt of the Python API: a user's text as it stands, or any shape of a row. Raises
    UserError for what a file of prompts would skip."""
    if isinstance(value, str):
        return ParsedRow(Conversation.from_text(value), [])
    known = {*PROMPT_COLUMNS, *ROLE_KEYS}
    if isinstance(value, Mapping) and not {str(name).casefold() for name in value} & known:
        raise UserError(f"the prompt must be text, messages or tokens, not {short(value, 60)}")
    is_row = isinstance(value, Mapping | Sequence | Conversation) and not isinstance(value, bytes)
    if not is_row or not value:
        raise UserError(f"a conversation is a text or a list of messages, not {short(value, 60)}")
    try:
        if not isinstance(value, Conversation):
            return parse_row(_to_builtin(value))
        messages = read_messages(map(_to_builtin, value.messages))
        _check_messages(messages)
    except UnusableRow as error:
        raise UserError(f"the prompt is a conversation {error}") from None
    conversation = replace(value, messages=tuple(messages))
    return ParsedRow(conversation, [], answered=conversation.prompt != conversation)


def as_conversation(value: object) -> Conversation:
    """The conversation of `parse_prompt`. Raises as it does."""
    return parse_prompt(value).conversation


def _to_builtin(value: object) -> object:
    """The value with dicts and lists in place of other mappings and sequences."""
    if isinstance(value, Mapping):
        return {key: _to_builtin(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_to_builtin(item) for item in value]
    return value


def parse_row(row: object, column: str | None = None) -> ParsedRow:
    """The conversation of a row: text, a list of messages, or an object with a prompt in `column`
    or in one of `PROMPT_COLUMNS`. Raises UnusableRow if no user's text is there."""
    if isinstance(row, str | list):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise UnusableRow(f"that are {type(row).__name__}, neither text nor an object")
    row = {str(name): value for name, value in row.items() if not _is_empty(value)}
    if column is not None:
        return _parse_column(row, column, chosen=True)
    names = _fold_names(row)
    if has_known_role(row) and not {*names} & {*PROMPT_COLUMNS} - {*CONTENT_KEYS}:
        used = [name for name in (*ROLE_KEYS, *CONTENT_KEYS) if name in row]  # a message a row
        return _finish(row, read_messages([row]), used)
    reason = NO_TEXT
    for key in PROMPT_COLUMNS:
        if key not in names:
            continue
        try:
            return _parse_column(row, names[key])
        except UnusableRow as error:
            if key in CONVERSATIONS and str(error) != NO_TEXT:
                raise
            reason = str(error) if reason == NO_TEXT else reason
    raise UnusableRow(reason)


def _fold_names(row: Mapping[str, object]) -> dict[str, str]:
    """A row's column names by their form in lower case."""
    return {name.strip().casefold(): name for name in reversed([*row])}


def _parse_column(row: dict[str, object], name: str, chosen: bool = False) -> ParsedRow:
    """The conversation in one column; `chosen`: by the user, so no other column adds to it."""
    key = name.strip().casefold()
    messages, later_turns = _read_value(row.get(name), key)
    used = [name]
    if not chosen and len(messages) == 1:
        names = _fold_names(row)
        for other in MATERIAL.get(key, ()):
            material = row.get(names.get(other, ""))
            if isinstance(material, str):
                messages[0]["content"] += f"\n\n{material.strip()}"
                used.append(names[other])
    return _finish(row, messages, used, later_turns)


def _is_empty(value: object) -> bool:
    return value is None or value in ("", [], {}) or isinstance(value, str) and not value.strip()


def _read_value(value: object, column: str) -> tuple[list[Message], int]:
    """The messages in a column, and how many later turns are left out, or UnusableRow."""
    holds_turns = column in (*CONVERSATIONS, "turns")
    found = decode_json(value)
    if isinstance(value, str) and not holds_turns and not is_conversation(found):
        return _read_turns([read_text_parts(value)])
    if isinstance(found, dict):
        found = _list_messages(found)
    if isinstance(found, list):
        messages = [decode_json(item) for item in found]  # each may be a string of JSON
        found = messages if all(map(has_known_role, messages)) else found
    if isinstance(found, list) and found:
        if all(map(is_part, found)):
            return _read_turns([read_text_parts(found)])
        if all(isinstance(item, str) for item in found):
            return _read_turns(found)
        if any(map(has_role, found)) or all(isinstance(item, dict) for item in found):
            return read_messages(found), 0
    if not isinstance(value, str):
        raise UnusableRow(NO_TEXT)
    if value.strip()[:1] in ("[", "{"):
        raise UnusableRow("with messages in a string that can't be read")
    return _read_turns([value])


def _read_turns(texts: list[str]) -> tuple[list[Message], int]:
    """The first of a list of user turns, as later ones need answers between them."""
    texts = [text for text in texts if text.strip()]
    return [{"role": "user", "content": text} for text in texts[:1]], len(texts[1:])


def _list_messages(value: dict[str, object]) -> list[object]:
    """The messages of an object: by columns (as `datasets` stores them), or itself one."""
    columns = {key: items for key, items in value.items() if isinstance(items, list)}
    if not {"role", "from"} & {*columns}:
        return [value]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)]


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
        raise UnusableRow(
            "with text that is not valid Unicode (half of a surrogate pair)"
        ) from None


def _finish(
    row: Mapping[str, object], messages: list[Message], used: list[str], later_turns: int = 0
) -> ParsedRow:
    """The conversation with the row's system prompt and tools, and the columns it leaves."""
    _check_messages(messages)
    names = _fold_names(row)
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
    return ParsedRow(conversation, unused, later_turns, conversation.prompt != conversation)


def _read_tools(value: object) -> tuple[Tool, ...]:
    """The tools in a column: a list or an object, also as JSON strings; nothing else is read."""
    found = decode_json(value)
    entries = [decode_json(entry) for entry in (found if isinstance(found, list) else [found])]
    if not all(isinstance(entry, dict) for entry in entries):
        return ()
    return tuple(drop_nulls(entry) for entry in entries)
