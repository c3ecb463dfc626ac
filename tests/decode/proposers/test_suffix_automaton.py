"""Suffix automata against searches through the tokens themselves."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from decode.proposers.suffix_automaton import (
    END,
    NOWHERE,
    ROOT,
    Datastore,
    SuffixAutomaton,
    TextAutomaton,
)


def text(length: int, alphabet: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(alphabet, (length,), generator=generator).tolist()


def places(part: list[int], whole: list[int]) -> list[int]:
    """Where occurrences of `part` end."""
    n = len(part)
    return [end for end in range(n, len(whole) + 1) if whole[end - n : end] == part]


def walk(automaton: SuffixAutomaton, part: list[int]) -> int:
    state = ROOT
    for token in part:
        state = automaton.step(state, token)
        if state == NOWHERE:
            break
    return state


CASES = [(60, 2, 0), (60, 3, 1), (40, 1, 2), (80, 5, 3), (50, 2, 4)]


@pytest.mark.parametrize(("length", "alphabet", "seed"), CASES)
def test_the_longest_repeated_ending_at_every_length(length: int, alphabet: int, seed: int) -> None:
    whole, automaton = text(length, alphabet, seed), TextAutomaton()
    assert automaton.repeated == (ROOT, 0)
    for end in range(1, length + 1):
        automaton.extend(whole[end - 1])
        so_far = whole[:end]
        longest = max(n for n in range(end) if n == 0 or len(places(so_far[-n:], so_far)) > 1)
        state, found = automaton.repeated
        assert found == longest
        assert state == walk(automaton, so_far[end - found :])


@pytest.mark.parametrize(("length", "alphabet", "seed"), CASES)
def test_a_datastore_matches_within_its_texts(length: int, alphabet: int, seed: int) -> None:
    texts = [text(length // 3, alphabet, seed * 10 + i) for i in range(3)]
    store, state, found = Datastore(texts), ROOT, 0
    asked = text(length, alphabet + (seed % 2), seed + 50)  # tokens that no text holds among them
    for end, token in enumerate(asked, 1):
        state, found = store.match(state, found, token)
        endings = [
            n for n in range(1, end + 1) if any(places(asked[end - n : end], t) for t in texts)
        ]
        assert found == max(endings, default=0)
        ending = asked[end - found : end]
        assert state == walk(store, ending)
        if found:
            assert store.count(state) == sum(len(places(ending, t)) for t in texts)


@pytest.mark.parametrize(("length", "alphabet", "seed"), CASES)
def test_continuations_are_counted(length: int, alphabet: int, seed: int) -> None:
    whole = text(length, alphabet, seed)
    growing, store = TextAutomaton(), Datastore([whole, whole[:7]])
    for token in whole:
        growing.extend(token)
    for n in (1, 2, 3):
        for start in range(length - n):
            part = whole[start : start + n]
            for automaton, texts in ((growing, [whole]), (store, [whole, whole[:7]])):
                after = Counter(t[e] for t in texts for e in places(part, t) if e < len(t))
                found = automaton.continuations(walk(automaton, part), 1)
                shares = {x.token: x.log_share for x in found}
                assert END not in shares
                if after:
                    assert {
                        t: round(math.exp(s) * after.total()) for t, s in shares.items()
                    } == after
                assert [x.log_share for x in found] == sorted(shares.values(), reverse=True)
                for x in found:
                    assert after == {} or x.state == walk(automaton, [*part, x.token])
