"""Commands as they are read and printed: options and the interpreter that runs."""

import argparse
import shlex
import sys
from contextlib import suppress
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


def command(module: str, *arguments: str) -> str:
    """`.venv/bin/python -m MODULE ARGUMENT …`, quoted for a shell; Python's path is relative to the
    working folder if it is below it."""
    python = Path(sys.executable or "python")
    with suppress(OSError, ValueError):  # not below the working folder, or that is gone
        python = python.relative_to(Path.cwd())
    return shlex.join([str(python), "-m", module, *arguments])
