"""Which split of a data set a file belongs to, told from whole words of its name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from align.common.errors import UserError, nearest

SPLITS = {
    "train": "train training",
    "test": "test testing",
    "validation": "validation valid val dev",
    "eval": "eval evaluation",
}
"""The words that name a split, between characters that are no letters."""
_SPLIT = {word: split for split, words in SPLITS.items() for word in words.split()}
_WORD = re.compile(r"[^\W\d_]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


class NoSplit(UserError):
    """A folder holds other splits than the wanted one."""


def split_of(path: Path) -> str | None:
    """The split that a relative path names: by the last such word of the file's name, else of the
    folder that is nearest."""
    return next((found[-1] for part in reversed(path.parts) if (found := _splits_in(part))), None)


def _splits_in(name: str) -> list[str]:
    """The splits that a name's words name, in order; trainData is two words."""
    words = _WORD.findall(_CAMEL.sub(" ", name).lower())
    return [_SPLIT[word] for word in words if word in _SPLIT]


def names_phrase(path: Path, phrase: str) -> bool:
    """Whether a relative path holds a configuration's or split's name between characters that are
    no letters or digits."""
    return re.search(rf"(?<![^\W_]){re.escape(phrase)}(?![^\W_])", path.as_posix(), re.IGNORECASE) is not None


def files_of_split(folder: Path, files: Sequence[Path], split: str, where: str) -> tuple[list[Path], str]:
    """The files of a split, and a note on the choice ("" where it needs none).

    Where names tell, a split's files are those that name it; for train, where none does, those that
    name no split. Where no name tells, all files are train; so is a single file that names train
    and another split.

    Raises:
        NoSplit: the names tell of other splits alone; the line begins with `where`.
    """
    relative = {file: file.relative_to(folder) for file in files}
    named = {file: split_of(path) for file, path in relative.items()}
    known = _SPLIT.get(split.lower())
    if known is None:
        chosen = [file for file in files if names_phrase(relative[file], split)]
    else:
        chosen = [file for file in files if named[file] == known]
        if not chosen and known == "train":
            chosen = [file for file in files if named[file] is None]
    if not chosen and known == "train" and len(files) == 1 and known in _splits_in(files[0].name):
        return list(files), f"{files[0].name} names several splits: all of it is train"
    if not chosen and files:
        there = {name for name in named.values() if name} or {"train"}
        raise NoSplit(f"{where}: no split {split!r}{nearest(split, there)}")
    if not any(named.values()):
        return chosen, f"no file's name has a split's word ({', '.join(SPLITS)}): all are train"
    others = [relative[file].as_posix() for file in files if file not in chosen]
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return chosen, f"not of split {split!r} and left out: {', '.join(others[:3])}{more}" if others else ""
