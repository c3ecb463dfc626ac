"""Commands as they are read and printed: options and the interpreter that runs."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from specalign.common.errors import UserError
from specalign.common.files import expand_path


class OptionParser(argparse.ArgumentParser):
    """`argparse` without abbreviations, with `UserError` for mistakes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the options)")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        if empty := next((w for w in words if w.startswith("--") and w.endswith("=--")), None):
            self.error(f"{empty!r} has no value")  # argparse would read the value as its own mark
        return super().parse_known_args(words, namespace)


def path(text: str) -> Path:
    """An option's path, with `~` in full."""
    if not text:
        raise argparse.ArgumentTypeError("a path is missing")
    try:
        return expand_path(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def interpreter() -> str:
    """The running Python as it can be typed here: from the working folder where that is shorter,
    quoted for a shell."""
    full = sys.executable or "python"
    try:
        near = Path(full).relative_to(Path.cwd())
    except (OSError, ValueError):  # not below the working folder, or that is gone
        return shlex.quote(full)
    return shlex.quote(str(near) if len(near.parts) > 1 else f"./{near}")


def command(module: str, *words: str) -> str:
    """`.venv/bin/python -m MODULE WORD …`; arguments are quoted where a shell asks for it."""
    return " ".join([interpreter(), "-m", module, *map(shlex.quote, words)])
