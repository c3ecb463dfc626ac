"""Command lines of `key=value` arguments, also in the forms of W&B's agents, and their values."""

import ast
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

from align.config.recipe import keys
from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path
from specalign.common.schema import convert, parse_json, read_object, type_name
from specalign.common.strict_yaml import parse_yaml
from specalign.common.text import short

COMMAND_LINE = "command line"  # the place in messages
_PATHS = ("data.text", "data.exclude")  # lists of paths, which may contain spaces


def read_arguments(argv: Sequence[str], recipes: Sequence[str]) -> dict[str, str]:
    """A command line as key → text. `recipes`: names for hints. Raises UserError: not an argument,
    or a key given twice."""
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
    form of W&B's agents: a JSON object or a .json file (`${args_json}`, `${args_json_file}`),
    `+key=value` and `++key=value` for Hydra, a bare `--key` for true (`${args_no_boolean_flags}`).
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
    if argument.startswith("--"):
        is_switch = key.startswith("data.template_kwargs.")
        is_flag = is_switch or known is not None and known.type is bool
        follows = arguments[0] if arguments and not arguments[0].startswith("--") else None
        is_value = follows is not None if is_switch else str(follows).lower() in ("true", "false")
        if is_flag and not is_value:
            return [(key, "true")]
        if follows is not None:
            return [(key, arguments.pop(0))]
    choices = [f"recipe={name}" for name in recipes]
    near = nearest(f"recipe={key}" if key in recipes else argument, [*keys(), "recipe", *choices])
    if known is not None or key == "recipe":
        near = f" (write {key}=VALUE, without spaces)"
    raise UserError(f"{COMMAND_LINE}: {short(argument)} is not key=value{near}")


def as_text(value: object) -> str:
    """Write a JSON value as an argument's text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_value(key: str, text: str) -> Any:
    """Parse an argument's text: YAML, or Python's repr of a list or mapping. Keys of type text take
    it as it is, and lists of text an existing path."""
    kind = keys()[key].type if key in keys() else None
    kinds = (kind, *get_args(kind))
    if get_origin(kind) is list and str in kinds and _exists(text):
        return text
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


def convert_value(value: object, kind: object, name: str, where: str) -> object:
    """`value` as `kind`; a whole float (`6.0`, `1e3`) may stand for an integer, and a text for a
    list: an existing path, or entries with commas and, unless they are paths, spaces between them.
    Raises UserError."""
    value = _with_integers(value, kind)
    is_list = any(get_origin(k) is list for k in (kind, *get_args(kind)))
    if isinstance(value, str) and is_list:
        entries = [part.strip() for part in value.split(",") if part.strip()]
        if name not in _PATHS:
            entries = [word for entry in entries for word in entry.split()]
        value = [value] if _exists(value) else entries
    return convert(value, kind, name, where)


def _with_integers(value: object, kind: object) -> object:
    """Whole floats as integers where `kind` asks for integers: W&B draws floats for q_uniform."""
    kinds = (kind, *get_args(kind))
    if isinstance(value, float) and value.is_integer() and int in kinds:
        return int(value)
    lists = [k for k in kinds if get_origin(k) is list]
    if isinstance(value, list) and lists:
        return [_with_integers(item, get_args(lists[0])[0]) for item in value]
    return value


def _exists(path: str) -> bool:
    try:
        return bool(path.strip()) and expand_path(path).exists()
    except (OSError, UserError):  # not a possible file name
        return False
