"""Near duplicates are found exactly."""

from __future__ import annotations

import random

import pytest

from align.data.near_duplicates import NearDuplicates


class ByDefinition:
    """Every remembered text is compared with the new one."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self.sets = threshold, list[set[tuple[int, ...]]]()

    def add(self, tokens: list[int]) -> bool:
        new = {tuple(tokens[i : i + 3]) for i in range(max(len(tokens) - 2, 1))}
        for old in self.sets:
            if new & old and len(new & old) / len(new | old) >= self.threshold:
                return False
        self.sets.append(new)
        return True


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.8, 1.0, 1.1])
def test_the_search_finds_what_comparing_all_finds(threshold: float) -> None:
    rng = random.Random(5)
    search, definition = NearDuplicates(threshold), ByDefinition(threshold)
    texts = [[rng.randrange(6) for _ in range(rng.randrange(12))] for _ in range(150)]
    for text in list(texts):  # and each a little changed
        texts.append([token if rng.random() < 0.93 else rng.randrange(262144) for token in text])
    found = [search.add(text) for text in texts]
    assert found == [definition.add(text) for text in texts]
    assert sum(found) > 30 and (threshold > 1 or not all(found))
