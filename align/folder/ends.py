"""The tokens that end a text, as a model's files name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from align.common.errors import UserError
from align.common.text import say, short

_KEY = "eos_token_id"


def end_ids(value: Any, where: str) -> set[int]:
    """A token's id or a list of ids as a set; None is none. `where`: what says so, for the message.

    Raises:
        UserError: it is neither, or an id is negative.
    """
    if value is None:
        return set()
    found = value if isinstance(value, list | tuple) else [value]
    for i in found:
        if type(i) is not int or i < 0:
            raise UserError(f"{where}: {_KEY}: {short(i, 40)} is no token's id (a whole number from 0 on)")
    return set(found)


def check_ends(config: dict[str, Any], where: str) -> None:
    """Raises UserError where a config.json or generation_config.json names an end that is no token's id."""
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        end_ids(values.get(_KEY), where)


def note_ends(spec: str, ends: Sequence[int], of_tokenizer: int | None) -> None:
    """A line where a text goes on behind the token with which the tokenizer ends one: so it does in transformers' `generate`."""
    if ends and of_tokenizer is not None and of_tokenizer not in ends:
        named = ", ".join(map(str, ends[:8])) + ", …" * (len(ends) > 8)
        say(
            f"note: {spec}: its generation config ends a text at {named}, and not at the tokenizer's {of_tokenizer}",
            error=True,
        )
