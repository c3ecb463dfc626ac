"""Arguments of a command line: `key=value` in every form that people and W&B's agents write."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

from align.common.errors import UserError, nearest
from align.common.schema import parse_json, read_object, type_name
from align.common.strict_yaml import parse_yaml
from align.common.text import short
from align.config.recipe import GROUPS, keys

COMMAND_LINE = "command line"
"""How messages name the place."""


def read_arguments(argv: Sequence[str], recipes: Sequence[str]) -> dict[str, str]:
    """Read a command line as key → text.

    Args:
        recipes: names of the shipped recipes, for hints.

    Raises:
        UserError: what is no argument, and a key given twice.
    """
    given: dict[str, str] = {}
    words = list(argv)
    while words:
        for key, text in _next_pairs(words, recipes):
            if key in given:
                raise UserError(
                    f"{COMMAND_LINE}: {key} is given twice ({short(given[key])} and {short(text)})"
                )
            given[key] = text
    return given


def _next_pairs(words: list[str], recipes: Sequence[str]) -> list[tuple[str, str]]:
    """Take the next argument off `words`: `key=value`, `--key=value`, `--key value`, or another form of W&B's agents.

    These are a JSON object or a .json file (`${args_json}`, `${args_json_file}`), `+key=value` and `++key=value` for
    Hydra, and a bare `--key` for true (`${args_no_boolean_flags}`).
    """
    word = words.pop(0)
    if word.startswith("{"):
        pairs = parse_json(word, COMMAND_LINE)
        return [(key, as_text(value)) for key, value in pairs.items()]
    if word.endswith(".json") and os.path.isfile(word):
        return [(key, as_text(value)) for key, value in read_object(Path(word)).items()]
    key, equals, text = re.sub(r"^(--|\+{1,2})", "", word).partition("=")
    if equals:
        if key.startswith("~"):
            bare = nearest(key.lstrip("~"), keys())
            raise UserError(f"{COMMAND_LINE}: {short(word)}: keys can't be removed{bare}")
        return [(key, text)]
    is_switch = key.startswith("data.template_kwargs.")
    is_flag = is_switch or key in keys() and keys()[key].type is bool
    is_dotted = "." in key and key in keys()  # its value may look like another argument
    follows = words[0] if words and not _is_argument(words[0], is_dotted) else None
    is_value = follows is not None if is_switch else str(follows).lower() in ("true", "false")
    if is_flag and word.startswith("--") and not is_value:
        return [(key, "true")]
    if follows is None or not word.startswith("--"):
        raise _no_pair(word, key, recipes)
    return [(key, words.pop(0))]


def _is_argument(word: str, only_flags: bool = False) -> bool:
    """Whether the word begins another argument, and is not the value of the one before (which may hold an equals sign).

    Args:
        only_flags: count only words that begin with `--`.
    """
    key, equals, _ = word.partition("=")
    first = key.lstrip("+").partition(".")[0]
    is_pair = bool(equals) and first in {*keys(), *GROUPS, "recipe", "base"}
    return word.startswith("--") or is_pair and not only_flags


def _no_pair(word: str, key: str, recipes: Sequence[str]) -> UserError:
    """The error for a word that is no argument."""
    if key in (*keys(), "recipe"):
        near = f" (write {key}=VALUE, without spaces)"
    else:
        choices = [f"recipe={name}" for name in recipes]
        known = [*keys(), "recipe", *choices, "--help", "--help-all", "--print"]
        near = nearest(f"recipe={key}" if key in recipes else word, known)
    return UserError(f"{COMMAND_LINE}: {short(word)} is not key=value{near}")


def as_text(value: Any) -> str:
    """Write a JSON value as an argument's text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_value(key: str, text: str) -> Any:
    """Parse an argument's text: YAML, or Python's repr of a list or mapping; keys of type text take it as it is."""
    kind = keys()[key].type if key in keys() else None
    optional = type(None) in get_args(kind)
    if text in ("null", "None") or optional and text in ("", "~"):  # None: how W&B's agent spells it
        return None
    if str in (kind, *get_args(kind)) and get_origin(kind) not in (list, dict) and text[:1] not in ("'", '"'):
        return text
    if not text and key in keys():
        raise UserError(f"{COMMAND_LINE}: {key}= has no value; it must be {type_name(kind)}")
    if text[:1] in ("[", "{"):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(text)
            if repr(value) == text:  # Python's spelling, as W&B's agent sends lists and nested parameters
                return value
    return parse_yaml(text, f"{COMMAND_LINE}: {key}")
