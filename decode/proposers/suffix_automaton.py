"""Suffix automata over tokens: the longest suffix of a text that occurred before, and how often
each token followed it.

A state stands for all strings that end at the same positions (Blumer et al., 1985); built online,
amortised O(1) per token. One of a growing text, and one of many fixed texts (SAM Decoding, arXiv
2411.10666).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ROOT = 0
NOWHERE = -1
"""No state: the root's suffix link, a missing transition."""
END = -1
"""Follows each text of a datastore, so that no match extends into the next text."""
_UNSET = -2


class Continuation(NamedTuple):
    """A token that followed a string: ln of its share among all that did, and the next state."""

    log_share: float
    token: int
    state: int


class SuffixAutomaton(ABC):
    """All substrings of the tokens so far.

    length: of a state's longest string. link: to the state of its longest suffix that occurs at
    more positions. ends: 1 for the state of the whole text up to some token, 0 for one that was
    split off.
    """

    def __init__(self) -> None:
        self.length, self.link, self.ends = array("i", [0]), array("i", [NOWHERE]), array("i", [0])
        # most states have one transition: a dict for each of them would be ten times the memory
        self._token, self._to = array("i", [_UNSET]), array("i", [NOWHERE])
        self._more: dict[int, dict[int, int]] = {}
        self.last = ROOT

    def __len__(self) -> int:
        return len(self.length)

    def step(self, state: int, token: int) -> int:
        """The state after a token; `NOWHERE`: the token never followed."""
        if self._token[state] == token:
            return self._to[state]
        more = self._more.get(state)
        return NOWHERE if more is None else more.get(token, NOWHERE)

    def extend(self, token: int) -> None:
        new, at = self._add_state(self.length[self.last] + 1), self.last
        self.ends[new] = 1
        while at != NOWHERE and (old := self.step(at, token)) == NOWHERE:
            self._connect(at, token, new)
            at = self.link[at]
        if at == NOWHERE:
            self._set_link(new, ROOT)
        elif self.length[old] == self.length[at] + 1:
            self._set_link(new, old)
        else:  # the shorter strings of `old` now end at one more position
            part = self._split(old, self.length[at] + 1)
            while at != NOWHERE and self.step(at, token) == old:
                self._connect(at, token, part)
                at = self.link[at]
            self._set_link(new, part)
        self.last = new

    @abstractmethod
    def count(self, state: int) -> int:
        """The number of positions at which the state's strings end."""

    def continuations(self, state: int, shortest: int) -> list[Continuation]:
        """What followed the state's strings, the most frequent first, the most recent first among
        equals; if nothing did, what followed their longest suffix, of at least `shortest` tokens,
        that has some."""
        while state != NOWHERE and self.length[state] >= shortest:
            found = [(self._token[state], self._to[state]), *self._more.get(state, {}).items()]
            found = [x for x in found if x[0] not in (END, _UNSET)]
            if len(found) == 1:  # its share needs no count
                return [Continuation(0.0, *found[0])]
            if found:
                found.reverse()
                counts = [self.count(to) for _, to in found]
                total = math.log(sum(counts))
                every = [
                    Continuation(math.log(n) - total, *x)
                    for n, x in zip(counts, found, strict=True)
                ]
                return sorted(every, key=lambda x: -x.log_share)
            state = self.link[state]
        return []

    def _add_state(self, length: int) -> int:
        self.length.append(length)
        self.link.append(NOWHERE)
        self.ends.append(0)
        self._token.append(_UNSET)
        self._to.append(NOWHERE)
        return len(self.length) - 1

    def _split(self, old: int, length: int) -> int:
        """Split off a state for the strings of `old` up to that length."""
        part = self._add_state(length)
        self._token[part], self._to[part] = self._token[old], self._to[old]
        if old in self._more:
            self._more[part] = dict(self._more[old])
        self._set_link(part, self.link[old])
        self._set_link(old, part)
        return part

    def _connect(self, state: int, token: int, to: int) -> None:
        if self._token[state] in (_UNSET, token):
            self._token[state], self._to[state] = token, to
        else:
            self._more.setdefault(state, {})[token] = to

    def _set_link(self, state: int, above: int) -> None:
        self.link[state] = above


class TextAutomaton(SuffixAutomaton):
    """The automaton of one growing text. Most matches have one continuation, so counting on demand
    is rare."""

    def __init__(self) -> None:
        super().__init__()
        self._below: dict[int, set[int]] = {}

    @property
    def repeated(self) -> tuple[int, int]:
        """State and length of the longest suffix that occurred before; the root and 0 for none."""
        state = max(self.link[self.last], ROOT)  # longer suffixes end at one position only
        return state, self.length[state]

    def count(self, state: int) -> int:
        found, pending = 0, [state]
        while pending:
            at = pending.pop()
            found += self.ends[at]
            pending.extend(self._below.get(at, ()))
        return found

    def _set_link(self, state: int, above: int) -> None:
        if (before := self.link[state]) != NOWHERE:
            self._below[before].remove(state)
        self._below.setdefault(above, set()).add(state)
        super()._set_link(state, above)


class Datastore(SuffixAutomaton):
    """The automaton of fixed texts, built once and shared by all requests."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        super().__init__()
        for text in texts:
            for token in text:
                self.extend(token)
            self.extend(END)
        self._counts = self.ends[:]
        for state in sorted(range(1, len(self)), key=self.length.__getitem__, reverse=True):
            self._counts[self.link[state]] += self._counts[state]

    def count(self, state: int) -> int:
        return self._counts[state]

    def match(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Extend the longest suffix of a text that occurs here by one token: its state and
        length."""
        while (to := self.step(state, token)) == NOWHERE:
            if state == ROOT:
                return ROOT, 0
            state = self.link[state]
            length = self.length[state]
        return to, length + 1
