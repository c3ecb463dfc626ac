"""Options of commands, commands as they can be typed, and the list of a package's commands."""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from specalign.common.errors import UserError
from specalign.common.files import expand_path
from specalign.common.text import say


class OptionParser(argparse.ArgumentParser):
    """`argparse` without abbreviations, with `UserError` for mistakes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the options)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            if word.startswith("--") and word.endswith("=--"):  # argparse would return a list
                self.error(f"{word!r} has no value")
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
    """The running Python, quoted for a shell; relative to the working folder if it is below it."""
    full = Path(sys.executable or "python")
    try:
        near = full.relative_to(Path.cwd())
    except (OSError, ValueError):  # not below the working folder, or that is gone
        return shlex.quote(str(full))
    return shlex.quote(str(near))


def command(module: str, *arguments: str) -> str:
    """`.venv/bin/python -m MODULE ARGUMENT …`, quoted for a shell."""
    return " ".join([interpreter(), "-m", module, *map(shlex.quote, arguments)])


def print_listing(package: Path, arguments: Sequence[str] | None = None) -> None:
    """Print the commands of a package, each with the first sentence of its docstring. Imports none
    of them. Raises UserError: arguments, as in `python -m decode verify`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(argument not in ("-h", "--help") for argument in arguments):
        listing = command(package.name)
        raise UserError(f"{package.name} takes no arguments ({listing} lists the commands)")
    say(f"usage: {interpreter()} -m COMMAND …   (--help: its options)\n\ncommands:")
    for file in sorted(package.glob("*.py")):
        source = file.read_text(encoding="utf-8")
        if file.name.startswith("__") or '__name__ == "__main__"' not in source:
            continue
        docstring = ast.get_docstring(ast.parse(source)) or ""
        first = " ".join(docstring.partition("\n\n")[0].split())
        about = first.rpartition("`: ")[2] or first
        say(f"  {package.name + '.' + file.stem:<18}{about}")
