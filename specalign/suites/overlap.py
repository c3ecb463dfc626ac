"""Decontamination: finds texts that share word n-grams with benchmarks."""

import re
import unicodedata
from collections.abc import Hashable, Iterable, Iterator, Mapping
from html import unescape
from typing import Generic, TypeVar

from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path
from specalign.rows.tables import EVERY, read_rows
from specalign.suites.registry import SUITES
from specalign.suites.sources import read_place

GRAM = 13
"""Words in a row that two texts must share, as for GPT-3 (arXiv 2005.14165, appendix C)."""
SHORTEST = 8
"""Texts of fewer words are too common to search for; those of fewer than `GRAM` count whole."""
_SHORTEST_QUESTION = 5
_WORD = re.compile(r"[^\W_]+")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[abfnrtv])")
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,300}>")

_Owner = TypeVar("_Owner", bound=Hashable)


def split_words(text: str) -> list[str]:
    """Lower-case words without punctuation, equal for plain text, HTML, and strings of JSON or
    source code."""
    if "\\" in text:
        text = _ESCAPE.sub(lambda found: chr(int(found[1] or found[2] or "20", 16)), text)
    text = unescape(_TAG.sub(" ", text))
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


class Passages(Generic[_Owner]):
    """The word n-grams of the texts of several owners (benchmarks, or prompts), as 64-bit hashes by
    n: runs of `GRAM` words, and whole texts of fewer."""

    def __init__(self, texts: Mapping[_Owner, Iterable[str]]) -> None:
        self.owners = list(texts)
        self._grams: dict[int, dict[int, frozenset[_Owner]]] = {}
        for owner, text in ((owner, text) for owner, own in texts.items() for text in own):
            words, alone = split_words(text), frozenset({owner})
            size = min(GRAM, len(words))
            if size < (_SHORTEST_QUESTION if text.rstrip().endswith("?") else SHORTEST):
                continue
            grams = self._grams.setdefault(size, {})
            for gram in _hash_grams(words, size):
                others = grams.get(gram, alone)
                grams[gram] = others if owner in others else others | alone

    def find_in(self, text: str) -> set[_Owner]:
        """The owners of the passages that occur in the text."""
        words = split_words(text) if self._grams else []
        return {
            owner
            for size, grams in self._grams.items()
            for gram in grams.keys() & _hash_grams(words, size)
            for owner in grams[gram]
        }


def _hash_grams(words: list[str], size: int) -> Iterator[int]:
    return (hash(tuple(words[i : i + size])) for i in range(len(words) - size + 1))


def check_excluded(source: str) -> None:
    """Raises UserError for an entry of `data.exclude` that is neither `suites` nor a file."""
    if source != "suites" and not expand_path(source, "data.exclude").is_file():
        raise UserError(f"data.exclude={source!r}: no such file{nearest(source, ['suites'])}")


def read_excluded(sources: Iterable[str]) -> tuple[Passages[str], dict[str, str]]:
    """The passages of `data.exclude` by benchmark or file, and why a benchmark is unavailable, by
    its name. `sources`: `suites`, or files of rows of which every text counts. Raises UserError: a
    file that can't be read."""
    texts: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    for source in sources:
        if source != "suites":
            rows = list(read_rows(expand_path(source, "data.exclude"), EVERY))
            if not rows:
                raise UserError(f"data.exclude={source!r} contains no rows")
            texts[source] = [*find_strings(rows)]
            continue
        for suite in SUITES.values():
            if not suite.excluded:
                continue
            try:
                rows = list(suite.rows or read_place(suite.place, EVERY)[0])
                texts[suite.name] = [*find_strings(rows)]
            except UserError as error:
                missing[suite.name] = str(error)
    return Passages(texts), missing


def find_strings(value: object) -> Iterator[str]:
    """Every string in a row, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from find_strings(item)
