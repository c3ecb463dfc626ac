"""Command-line options whose mistakes are one line that names the option and the nearest valid one."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from align.common.errors import UserError, nearest
from align.common.files import expanded


class Parser(argparse.ArgumentParser):
    """`argparse` with `UserError` for mistakes, and no abbreviations."""

    stray = ""
    """What to say of a word that is no option's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the options)")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Raises UserError naming the first argument that no option takes."""
        words = sys.argv[1:] if args is None else args
        if empty := next((w for w in words if w.startswith("--") and w.endswith("=--")), None):
            self.error(f"{empty!r} has no value")  # argparse takes the value for its own mark
        parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            options = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
            hint = nearest(unknown[0].split("=")[0], options) if unknown[0].startswith("-") else self.stray
            self.error(f"unrecognized argument {unknown[0]!r}{hint}")
        return parsed


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A whole number between the two."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text!r} is more than {most}")
        return value

    return parse


def path(text: str) -> Path:
    """A path, `~` in full."""
    if not text:
        raise argparse.ArgumentTypeError("a path is missing")
    try:
        return expanded(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


TRUST_HELP = "run Python code that comes with these models (default: refuse them)"
VERIFIER_HELP = (
    "auto (default), greedy, point_mass, self_selection, token, block, recursive, k_seq, traversal, hybrid, gumbel; lossy_typical and "
    "lossy_top_beta change the output's distribution"
)
