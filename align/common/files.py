"""Files that are either whole or not there, and are read without running what they hold."""

from __future__ import annotations

import os
import pickle
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from align.common.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write(temporary path)` beside `path`, then rename: a kill leaves the old file or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(part))
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def load_tensors(path: Path, allowed: Sequence[Any] = (), **options: Any) -> Any:
    """`torch.load` that builds tensors, plain containers and objects of the `allowed` classes, and runs nothing else.

    Raises:
        ForeignObject: the file names another class or function.
    """
    import torch

    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            raise ForeignObject(path, foreign[1]) from None
        raise


class ForeignObject(UserError):
    """A file of tensors asks for something else to be built or run."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(f"{path}: holds {name} objects, not tensors alone, and is not unpickled")
