"""Command lines of `key=value` arguments, also in the forms of W&B's agents."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from contextlib import suppress
from typing import get_args, get_origin

from align.config.recipe import keys
from specalign.common.errors import UserError, nearest
from specalign.common.schema import type_name
from specalign.common.strict_yaml import parse_yaml
from specalign.common.text import short

COMMAND_LINE = "command line"
"""The place in messages."""


def read_arguments(argv: Sequence[str], recipes: Sequence[str]) -> dict[str, str]:
    """Read a command line of `key=value` as key → text; `--key=value` (W&B) and `+key=value`
    (Hydra) are the same. `recipes`: names of the shipped recipes, for hints. Raises UserError: not
    an argument, or a key given twice."""
    given: dict[str, str] = {}
    for argument in argv:
        key, equals, text = argument.partition("=")
        key = key.removeprefix("--").lstrip("+")
        if not equals:
            choices = [*keys(), "recipe", *(f"recipe={name}" for name in recipes)]
            near = nearest(f"recipe={key}" if key in recipes else key, choices)
            if key in keys() or key == "recipe":
                near = f" (write {key}=VALUE, without spaces)"
            raise UserError(f"{COMMAND_LINE}: {short(argument)} is not key=value{near}")
        if key in given:
            values = f"{short(given[key])} and {short(text)}"
            raise UserError(f"{COMMAND_LINE}: {key} is given twice ({values})")
        given[key] = text
    return given


def read_value(key: str, text: str) -> object:
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
            value: object = ast.literal_eval(text)
            if repr(value) == text:
                return value
    return parse_yaml(text, f"{COMMAND_LINE}: {key}")
