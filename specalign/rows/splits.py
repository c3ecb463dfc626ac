"""Tells the split of a data set from a file's name."""

import re
from pathlib import Path

from specalign.common.errors import UserError

SPLITS = {
    "train": "train training trainset",
    "test": "test testing testset heldout",
    "validation": "validation valid val dev devset",
    "eval": "eval evals evaluation evalset",
}
"""Words of names by split, between characters other than letters."""
_SPLIT_OF = {word: split for split, words in SPLITS.items() for word in words.split()}
_WORD = re.compile(r"[^\W\d_]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


class NoSplit(UserError):
    """A folder holds only other splits than the requested one."""


def split_of(path: Path) -> str | None:
    """The split that a relative path names: the last in the file's name, else in its folders'."""
    for part in reversed(path.parts):
        words = _WORD.findall(_CAMEL.sub(" ", part).lower())  # trainData is two words
        named = [_SPLIT_OF[word] for word in words if word in _SPLIT_OF]
        if named:
            return named[-1]
    return None


def belongs_to(path: Path, split: str) -> bool:
    """Whether a relative path may be part of a split: it names this one, or, for train, none. A
    split of any other name must be named literally."""
    known = _SPLIT_OF.get(split.lower())
    if known is None:
        return names_phrase(path, split)
    named = split_of(path)
    return named == known or named is None and known == "train"


def names_phrase(path: Path, phrase: str) -> bool:
    """Whether a relative path contains a name between characters other than letters and digits."""
    pattern = rf"(?<![^\W_]){re.escape(phrase)}(?![^\W_])"
    return re.search(pattern, path.as_posix(), re.IGNORECASE) is not None
