"""Command lines of `key=value` arguments, also in the forms of W&B's agents."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

from align.config.recipe import GROUPS, keys
from specalign.common.errors import UserError, nearest
from specalign.common.schema import parse_json, read_object, type_name
from specalign.common.strict_yaml import parse_yaml
from specalign.common.text import short

COMMAND_LINE = "command line"
"""The place in messages."""


def read_arguments(argv: Sequence[str], recipes: Sequence[str]) -> dict[str, str]:
    """Read a command line as key → text.

    Args:
        recipes: names of the shipped recipes, for hints.

    Raises:
        UserError: not an argument, or a key given twice.
    """
    given: dict[str, str] = {}
    arguments = list(argv)
    while arguments:
        for key, text in _take_pairs(arguments, recipes):
            if key in given:
                values = f"{short(given[key])} and {short(text)}"
                raise UserError(f"{COMMAND_LINE}: {key} is given twice ({values})")
            given[key] = text
    return given


def _take_pairs(arguments: list[str], recipes: Sequence[str]) -> list[tuple[str, str]]:
    """Take the next argument off `arguments`: `key=value`, `--key=value`, `--key value`, or another
    form of W&B's agents.

    These are a JSON object or a .json file (`${args_json}`, `${args_json_file}`), `+key=value` and
    `++key=value` for Hydra, and a bare `--key` for true (`${args_no_boolean_flags}`).
    """
    argument = arguments.pop(0)
    if argument.startswith("{"):
        pairs = parse_json(argument, COMMAND_LINE)
        return [(key, as_text(value)) for key, value in pairs.items()]
    if argument.endswith(".json") and os.path.isfile(argument):
        return [(key, as_text(value)) for key, value in read_object(Path(argument)).items()]
    key, equals, text = re.sub(r"^(--|\+{1,2})", "", argument).partition("=")
    if equals:
        return [(key, text)]
    known = keys().get(key)
    is_switch = key.startswith("data.template_kwargs.")
    is_flag = is_switch or known is not None and known.type is bool
    is_dotted = "." in key and known is not None  # its value may contain an equals sign
    follows = arguments[0] if arguments and not _is_argument(arguments[0], is_dotted) else None
    is_value = follows is not None if is_switch else str(follows).lower() in ("true", "false")
    if is_flag and argument.startswith("--") and not is_value:
        return [(key, "true")]
    if follows is not None and argument.startswith("--"):
        return [(key, arguments.pop(0))]
    choices = [f"recipe={name}" for name in recipes]
    near = nearest(f"recipe={key}" if key in recipes else argument, [*keys(), "recipe", *choices])
    if known is not None or key == "recipe":
        near = f" (write {key}=VALUE, without spaces)"
    raise UserError(f"{COMMAND_LINE}: {short(argument)} is not key=value{near}")


def _is_argument(argument: str, only_flags: bool = False) -> bool:
    """Whether this starts another argument, and is not the value of the previous one (which may
    contain an equals sign).

    Args:
        only_flags: only what begins with `--` does.
    """
    key, equals, _ = argument.partition("=")
    first = key.lstrip("+").partition(".")[0]
    is_pair = bool(equals) and first in {*keys(), *GROUPS, "recipe", "base"}
    return argument.startswith("--") or is_pair and not only_flags


def as_text(value: Any) -> str:
    """Write a JSON value as an argument's text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_value(key: str, text: str) -> Any:
    """Parse an argument's text: YAML, or Python's repr of a list or mapping; keys of type text take
    it as it is."""
    kind = keys()[key].type if key in keys() else None
    kinds = (kind, *get_args(kind))
    is_empty = type(None) in kinds and text in ("", "~")
    if is_empty or text in ("null", "None"):  # None: how W&B's agent spells it
        return None
    if str in kinds and get_origin(kind) not in (list, dict) and text[:1] not in ("'", '"'):
        return text
    if not text and kind is not None:
        raise UserError(f"{COMMAND_LINE}: {key}= has no value; it must be {type_name(kind)}")
    if text[:1] in ("[", "{"):  # W&B's agent sends lists and nested parameters as Python's repr
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(text)
            if repr(value) == text:
                return value
    return parse_yaml(text, f"{COMMAND_LINE}: {key}")
