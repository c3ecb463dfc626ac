"""JSON from disk, and values of any origin, as the types that the code expects."""

import json
import math
import re
import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints, is_typeddict

from specalign.common.errors import UserError, nearest
from specalign.common.files import check_ordinary
from specalign.common.text import cut, short

JsonObject = dict[str, Any]
"""The values of a JSON or YAML object by name."""
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises UserError if it is missing, unreadable, or no JSON."""
    try:
        check_ordinary(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: not readable ({reason})") from None
    return parse_json(text, str(path))


def read_object(path: Path) -> JsonObject:
    """The object in a JSON file. Raises UserError as `read_json` does, and for another value."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: must contain an object, not {type(value).__name__}")
    return value


def read_config(folder: Path) -> JsonObject:
    """The folder's config.json. Raises UserError if it is missing or broken."""
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: no config.json")
    return read_object(folder / "config.json")


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text. Raises UserError for broken JSON, NaN, half a surrogate."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number")

    try:
        value = json.loads(text, parse_constant=refuse)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not readable JSON ({cut(str(error), 120)})") from None


def convert(value: Any, kind: Any, name: str, where: str) -> Any:
    """`value` as `kind`, without guessing: an int may stand for a float, a mapping for a dataclass.

    kind: a plain type, Literal, X | None, list[X], dict[str, X], Any, a dataclass or a TypedDict
    (whose other keys stay). Raises UserError, with `where: name`, if it is something else.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        return convert(value, next(a for a in arguments if a is not types.NoneType), name, where)
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
        hint = nearest(str(value), arguments)
        raise UserError(f"{where}: {name}={short(value)} is unknown{hint}")
    if origin is list and isinstance(value, list):
        return [convert(v, arguments[0], f"{name}[{i}]", where) for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {str(k): convert(v, arguments[1], f"{name}.{k}", where) for k, v in value.items()}
    if (is_dataclass(kind) or is_typeddict(kind)) and isinstance(value, dict):
        return _convert_members(value, kind, name, where)
    if kind is float and type(value) is int and finite(value):
        return float(value)
    if type(value) is kind:  # exactly: a bool is an int
        return value
    raise UserError(f"{where}: {name}={short(value)} must be {type_name(kind)}")


def _convert_members(value: JsonObject, kind: Any, name: str, where: str) -> Any:
    hints = _hints(kind)
    prefix = f"{name}." if name else ""
    if is_typeddict(kind):
        needed = kind.__required_keys__
    else:
        needed = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}
    if missing := sorted(needed - value.keys()):
        raise UserError(f"{where}: {prefix}{missing[0]} is missing")
    members = {
        k: convert(value[k], hint, f"{prefix}{k}", where) for k, hint in hints.items() if k in value
    }
    return {**value, **members} if is_typeddict(kind) else kind(**members)


@cache
def _hints(kind: Any) -> JsonObject:
    return get_type_hints(kind)


def finite(value: Any) -> bool:
    """Whether it is a number, no truth value, that a finite float holds."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # JSON's integers have no limit
        return False


def type_name(kind: Any) -> str:
    """A type in words: `an integer`, `a list of numbers`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is types.NoneType else type_name(a) for a in arguments)
    if origin is Literal:
        return "|".join(arguments)
    if origin is list:
        plurals = {int: " of integers", float: " of numbers", bool: " of booleans", str: " of text"}
        return "a list" + plurals.get(arguments[0], "")
    if origin is dict and arguments[1] is float:
        return "a mapping of names to numbers"
    if origin is dict or is_dataclass(kind) or is_typeddict(kind):
        return "a mapping"
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}[kind]
