"""The keyword arguments of the Python API: what `help` and completion list, and what an unknown one
is answered with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from decode.speculation.settings import Sampling
from specalign.common.errors import UserError, nearest

Given = ParamSpec("Given")
Result = TypeVar("Result")
_OPTIONS: dict[str, list[str]] = {}
"""The keyword arguments of each call that `checks_options` decorates."""


def checks_options(call: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """A decorator: an unknown keyword argument raises a `UserError` that names the nearest one. In
    the signature, which `help` and completion read, the fields of `Sampling` replace `**options`.
    `call`: the function's name for users.
    """

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        signature = _full_signature(function)
        _OPTIONS[call] = [name for name in signature.parameters if name != "self"]

        @wraps(function)
        def checked(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            check_options(call, kwargs)
            return function(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def _full_signature(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    known = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(known) == len(signature.parameters):
        return signature
    options = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type
        )
        for f in fields(Sampling)
    ]
    return signature.replace(parameters=[*known, *options])


def check_options(call: str, given: Iterable[str]) -> None:
    """Raises UserError for an option that the call does not have: which other call has it, or the
    nearest of its own."""
    for name in given:
        if name not in _OPTIONS[call]:
            other = next((other for other, names in _OPTIONS.items() if name in names), None)
            hint = f": it is an option of {other}" if other else nearest(name, _OPTIONS[call])
            raise UserError(f"{call} has no option {name!r}{hint}")
