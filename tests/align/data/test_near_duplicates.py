"""Near duplicates are found without error, in memory and over restarts."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from align.data.near_duplicates import NearDuplicates, journal_of


def test_near_duplicates() -> None:
    seen = NearDuplicates(0.8)
    assert seen.add(list(range(30)))
    assert not seen.add(list(range(30)))
    assert not seen.add([*range(29), 99])
    assert seen.add(list(range(15)) + list(range(50, 65)))
    assert seen.add([1]) and not seen.add([1]) and seen.add([2])
    assert seen.add([]) and not seen.add([]) and seen.add([1, 2])


class ByDefinition:
    """Every remembered text is compared with the new one."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self.sets = threshold, list[set[tuple[int, ...]]]()

    def add(self, tokens: list[int]) -> bool:
        new = {tuple(tokens[i : i + 3]) for i in range(max(len(tokens) - 2, 1))}
        if any(new & old and len(new & old) / len(new | old) >= self.threshold for old in self.sets):
            return False
        self.sets.append(new)
        return True


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 0.75, 0.8, 0.9, 1.0, 1.1])
def test_the_search_finds_what_comparing_all_finds(threshold: float) -> None:
    rng = random.Random(5)
    search, definition = NearDuplicates(threshold), ByDefinition(threshold)
    texts = [[rng.randrange(6) for _ in range(rng.randrange(12))] for _ in range(150)]
    for text in list(texts):  # of most of them a second one, a little changed
        texts.append([token if rng.random() < 0.93 else rng.randrange(262144) for token in text])
    said = [(search.add(text), definition.add(text)) for text in texts]
    assert (
        all(a == b for a, b in said)
        and sum(a for a, _ in said) > 30
        and (threshold > 1 or not all(a for a, _ in said))
    )


def test_a_file_keeps_what_was_kept_and_forgets_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "seen.sqlite"
    one, two, three = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
    seen = NearDuplicates(0.8, path)
    assert not seen.holds("one") and seen.add(one)
    seen.keep("one")
    seen.mark()
    assert seen.add(two)
    seen.forget()
    assert seen.add(two)
    seen.close()  # as a killed process does
    seen = NearDuplicates(0.8, path)
    assert seen.holds("one") and not seen.holds("two") and not seen.add(one) and seen.add(two)
    seen.clear()
    assert not seen.holds("one") and seen.add(one) and seen.add(three)
    seen.keep("one and three")
    seen.close()
    seen = NearDuplicates(0.8, path)
    assert seen.holds("one and three") and not seen.add(three) and seen.add(two)


@pytest.mark.parametrize("torn", [b"no database", b""])
def test_a_file_that_is_no_database_is_begun_anew(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "seen.sqlite"
    seen = NearDuplicates(0.8, path)
    assert seen.add([1, 2, 3])
    seen.keep("one")
    path.write_bytes(torn or path.read_bytes()[:4096])
    again = NearDuplicates(0.8, path)
    assert not again.holds("one") and again.add([1, 2, 3])


def test_a_folder_that_takes_no_file_leaves_memory(tmp_path: Path) -> None:
    (tmp_path / "seen.sqlite").mkdir()
    seen = NearDuplicates(0.8, tmp_path / "seen.sqlite")
    assert seen.add([1, 2, 3]) and not seen.add([1, 2, 3])
    seen.keep("one")
    assert seen.holds("one")


def test_another_process_in_the_same_file_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "seen.sqlite"
    one, two = NearDuplicates(0.8, path), NearDuplicates(0.8, path)
    two._table.execute("PRAGMA busy_timeout = 0")
    assert one.add([1, 2, 3])
    with pytest.raises(OSError, match="seen.sqlite: database is locked"):
        two.add([4, 5, 6])


def test_what_was_added_before_a_mark_stays(tmp_path: Path) -> None:
    seen = NearDuplicates(0.8, tmp_path / "seen.sqlite")
    assert seen.add([1, 2, 3])
    seen.keep("one")
    seen.clear()
    assert seen.add([4, 5, 6])
    seen.mark()
    assert seen.add([7, 8, 9])
    seen.forget()
    assert seen.add([1, 2, 3]) and not seen.add([4, 5, 6]) and seen.add([7, 8, 9])


def test_what_a_killed_process_had_not_kept_is_taken_back(tmp_path: Path) -> None:
    """And its journal goes with the next opening."""
    file = tmp_path / "near.sqlite"
    first = NearDuplicates(0.7, file)
    first.add(list(range(20)))
    first.keep("one")
    first.close()
    source = (
        "import os, sys; from pathlib import Path; from align.data.near_duplicates import NearDuplicates as N; "
        "n = N(0.7, Path(sys.argv[1])); n.add(list(range(50, 90))); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", source, str(file)], check=True)
    assert journal_of(file).exists()
    again = NearDuplicates(0.7, file)
    assert not journal_of(file).exists() and again.holds("one")
    assert again.add(list(range(50, 90))) and not again.add(list(range(20)))
    again.close()
