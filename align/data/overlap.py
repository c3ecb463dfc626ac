"""Text that shares a passage with a benchmark is no training text: n-grams of words against everything the suites hold."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from html import unescape
from typing import Any

from align.benchmarks.own import BUILTIN, TASKS
from align.benchmarks.places import PLACES, Place
from align.common.errors import UserError, nearest
from align.common.files import expanded
from align.common.hub import package_file
from align.rows.hub_rows import hub_rows, is_hub_usable
from align.rows.json_forms import EVERY
from align.rows.tables import read_rows

GRAM = 13
"""Words in a row that two texts must share, GPT-3's number (arXiv 2005.14165, appendix C)."""
SHORTEST = 8
"""A text of fewer words is too common to be looked for; one of fewer than `GRAM` is looked for as a whole."""
QUESTION = 5
"""A question is looked for from so many words on."""
_HEAD = 4
_WORD = re.compile(r"[^\W_]+")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[abfnrtv])")
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,300}>")


def words(text: str) -> list[str]:
    """Lower-case words, without punctuation; the same ones of a text as it stands, in HTML, and in a string of source code or JSON."""
    if "\\" in text:
        text = _ESCAPE.sub(lambda found: chr(int(found[1] or found[2] or "20", 16)), text)
    if "<" in text:
        text = _TAG.sub(" ", text)
    if "&" in text:
        text = unescape(text)
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def _least(text: str) -> int:
    return QUESTION if text.rstrip().endswith("?") else SHORTEST


def _hash(found: list[str], start: int, size: int) -> int:
    return hash(tuple(found[start : start + size]))


class Passages:
    """The word n-grams of texts that must not be met again.

    Args:
        texts: each is taken by its runs of `GRAM` words; one of `SHORTEST` to `GRAM` words whole, and a question from `QUESTION` words
            on; a shorter one not at all.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        # hashes of 64 bits: the runs themselves take a gigabyte
        self._grams: set[int] = set()
        # of texts shorter than a run, by their beginning
        self._sizes: defaultdict[int, set[int]] = defaultdict(set)
        for text in texts:
            found = words(text)
            size = min(GRAM, len(found))
            for i in range(len(found) - size + 1 if size >= _least(text) else 0):
                self._grams.add(_hash(found, i, size))
                if size < GRAM:
                    self._sizes[_hash(found, i, _HEAD)].add(size)

    def __len__(self) -> int:
        return len(self._grams)

    def met_in(self, text: str, before: str = "") -> bool:
        """Whether a passage stands in the text, or ends in it and begins in what stands `before` it."""
        if not self._grams:
            return False
        # no run of words lies in what stands before alone
        found = words(before + text)[max(0, len(words(before)) - GRAM + 1) :]
        for i in range(len(found) - QUESTION + 1):
            sizes = self._sizes.get(_hash(found, i, _HEAD), ())
            if any(_hash(found, i, size) in self._grams for size in (GRAM, *sizes)):
                return True
        return False


def check_excluded(source: str) -> None:
    """Raises UserError for an entry of `data.exclude` that is neither `suites` nor a file."""
    if source != "suites" and not expanded(source, "data.exclude").is_file():
        raise UserError(f"data.exclude={source!r}: no such file{nearest(source, ['suites'])}")


def excluded(sources: Iterable[str]) -> tuple[Passages, dict[str, str]]:
    """The passages of `data.exclude`, and why a benchmark could not be had, by its name.

    Args:
        sources: `suites`, or files of rows of which every text counts.

    Raises:
        UserError: a file that can't be read.
    """
    texts: list[str] = []
    missing: dict[str, str] = {}
    for source in sources:
        if source != "suites":
            rows = list(read_rows(expanded(source, "data.exclude"), EVERY))
            if not rows:
                raise UserError(f"data.exclude={source!r} holds no rows")
            texts += _strings(rows)
            continue
        texts += _strings([BUILTIN, TASKS])
        for name, place in PLACES.items():
            try:
                texts += _strings(_rows(place))
            except UserError as error:
                missing[name] = str(error)
    return Passages(texts), missing


def _rows(place: Place) -> list[Any]:
    """From the hub, which has the whole of it, else from the package."""
    tried = []
    if place.hub is not None:
        try:
            if not is_hub_usable():
                raise UserError("the hub does not answer")
            return list(hub_rows(place.hub, place.split, place.config))
        except UserError as error:
            tried.append(str(error))
    if place.package is not None:
        try:
            return list(read_rows(package_file(place.package, place.version, place.member), EVERY))
        except UserError as error:
            tried.append(str(error))
    raise UserError("; ".join(tried))


def _strings(value: Any) -> Iterator[str]:
    """Every text in a row, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)
