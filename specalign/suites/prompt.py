"""Prompts and suites."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specalign.common.hub import PackageFile
from specalign.common.schema import JsonObject
from specalign.rows.conversation import Conversation

Row = Mapping[str, Any]
PART = "part"
"""The key under which a row names the file or configuration that it is from, where a suite has
several."""
REASON = "\n\nReason step by step and put the final answer in \\boxed{}."
CHOOSE = "Reason step by step, then end with the line: The answer is (X)."
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TURN = "#"
"""Before the number of a later turn, in a prompt's id."""


@dataclass(frozen=True)
class Prompt:
    """One request to the target.

    content: the user's text, or messages with role and content, or these with tools.
    reference: what the suite's metric compares an answer with; None = answers are not scored.
    later: further turns of the user, each after the target's own answer.
    raw: the target continues the text itself, without its chat template.
    cut: the text before the last line is cut so that the prompt has at most this many tokens.
    """

    id: str
    content: str | list[JsonObject] | Conversation
    category: str = ""
    reference: Any = None
    later: tuple[str, ...] = ()
    raw: bool = False
    cut: int | None = None

    @property
    def turn_ids(self) -> list[str]:
        """The ids of its turns; the first one's is its own."""
        return [self.id, *(f"{self.id}{TURN}{n}" for n in range(2, len(self.later) + 2))]


@dataclass(frozen=True)
class Place:
    """Where a benchmark's rows are.

    hub, config, split, revision: on the Hub. files: the data files of a Hub id that has no
        configurations. parts: several configurations, or files, that are read one after another
        and name the rows' part.
    package, under: the file that replaces it without the Hub, and the key of the rows in a JSON
        file that holds others too. package_note: which part of the benchmark that holds.
    how, prepared: the command that makes a local copy in `{folder}` of one that is not on the Hub,
        and the folder in there that the source's own script makes.
    """

    hub: str | None = None
    config: str | None = None
    split: str = "test"
    package: PackageFile | None = None
    package_note: str = ""
    under: str | None = None
    files: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    revision: str | None = None
    how: str = ""
    prepared: str = ""


@dataclass(frozen=True)
class Suite:
    """A benchmark: where its rows are, and how to read one.

    read: the prompt of a row and its number, or None for a row of another benchmark in the same
        file; raises KeyError for a missing column.
    metric: how answers are scored (decode/evaluation/accuracy.py); "" = they are not.
    max_new_tokens, temperature: as published.
    rows: of a suite that this project ships.
    excluded: whether `data.exclude=suites` keeps its texts out of training data; not for a suite
        whose rows are training data themselves.
    """

    name: str
    title: str
    group: str
    read: Callable[[Row, int], Prompt | None]
    place: Place = Place()
    metric: str = ""
    max_new_tokens: int = 1024
    temperature: float = 0.0
    rows: Sequence[Row] = ()
    excluded: bool = True


def find_text(row: Row, *columns: str) -> str:
    """The text of the first of `columns` with any, stripped. Raises KeyError(first column) if there
    is none."""
    for column in columns:
        value = row.get(column)
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise KeyError(columns[0])


def read_prefix(row: Row, number: int, suite: str, words: int, category: str) -> Prompt | None:
    """A text to continue from its first words, without a chat template; None if it has no more."""
    found = find_text(row, "text").split()
    if len(found) <= words:
        return None
    return Prompt(f"{suite}-{number}", " ".join(found[:words]), category, raw=True)


def find_turns(row: Row, *columns: str) -> tuple[str, ...]:
    """The user's turns: a list of texts, or of objects with `content`. Raises KeyError(first
    column) if there is no text."""
    found = next((row[column] for column in columns if row.get(column)), None)
    turns = [turn.get("content") if isinstance(turn, Mapping) else turn for turn in found or []]
    texts = tuple(turn for turn in turns if isinstance(turn, str))
    if not isinstance(found, list) or not texts or len(texts) < len(turns):
        raise KeyError(columns[0])
    return texts


def list_choices(question: str, choices: Sequence[object]) -> str:
    """A question, its lettered choices, and what to answer. Raises TypeError for choices that are
    no list."""
    if isinstance(choices, str):
        raise TypeError(f"choices {choices!r} are not a list")
    lines = [
        f"({letter}) {str(choice).strip()}"
        for letter, choice in zip(LETTERS, choices, strict=False)
    ]
    return "\n".join([question, "", *lines, "", CHOOSE])
