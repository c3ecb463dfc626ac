"""Retrieval (SAM Decoding, arXiv 2411.10666; REST, arXiv 2311.08252): propose what most often
followed the longest suffix of the text that occurred before, in the text itself or in a datastore.
No model, no training.

The source with the longer match drafts; the text itself if both are equal. Law `point`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from decode.proposers.base import DraftSession, Proposer, Request
from decode.proposers.lookup import TokenIndex, Tokens
from decode.speculation.proposal import Proposal, point_proposal
from decode.speculation.tree_drafts import best_first
from specalign.common.errors import UserError
from specalign.common.files import expand_path, read_text
from specalign.lm.model import Target
from specalign.rows.tables import kind_of, read_rows

END = -1
"""Follows each text of a datastore, so that no match extends into the next text."""


class Datastore(TokenIndex):
    """Fixed texts, indexed once and shared by all requests."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        super().__init__([token for text in texts for token in (*text, END)])
        places = np.flatnonzero(self.tokens[1:] != END) + 1
        self.places = places[np.argsort(self.tokens[places - 1], kind="stable")]
        self.last = self.tokens[self.places - 1]

    def places_after(self, token: int) -> Tokens:
        first, end = np.searchsorted(self.last, [token, token + 1])
        return self.places[first:end]


def rank_continuations(source: TokenIndex, places: Tokens) -> list[tuple[float, int]]:
    """The tokens at these places, each with ln of its share, the most frequent first; among equals
    the one that was seen first most recently."""
    if len(places) == 1:
        return [(0.0, int(source.tokens[places[0]]))]
    counts = Counter(source.tokens[places].tolist())
    total = math.log(len(places) or 1)
    rows = [(math.log(count) - total, token) for token, count in reversed(counts.items())]
    return sorted(rows, key=lambda row: -row[0])


class RetrievalSession(DraftSession):
    proposer: RetrievalProposer

    def __init__(self, proposer: RetrievalProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.text = TokenIndex()

    def propose(self, k: int) -> Proposal | None:
        self.text.follow(self.request.tokens)
        source, store, text = self.text, self.proposer.datastore, self.text.tokens
        places, length = source.match(text)
        if store is not None:
            stored, stored_length = store.match(text)
            if stored_length > length:
                source, places, length = store, stored, stored_length
        if length < self.proposer.shortest:
            return None
        nodes = self.proposer.tree_nodes
        drafts, parents = self._rank_paths(source, places, k, nodes or k, nodes or 1)
        tree = parents if nodes else None
        return point_proposal(drafts, self.request.target.device, tree) if drafts else None

    def _rank_paths(
        self, source: TokenIndex, places: Tokens, levels: int, nodes: int, width: int
    ) -> tuple[list[int], tuple[int, ...]]:
        """The nodes with the most frequent paths, by the product of their shares, at most `width`
        after each; of width 1 the most frequent continuation at each step."""
        # to `best_first` a node is an index into these, which keeps equal tokens apart
        paths: list[list[int]] = []
        reached: list[Tokens] = []

        def children(level: int, above: Sequence[int | None]) -> list[tuple[list[float], range]]:
            rows = []
            for parent in above:
                path = [] if parent is None else paths[parent]
                at = places if parent is None else self._step(source, reached[parent], path)
                shares: list[float] = []
                if not path or path[-1] not in self.request.target.eos_ids:
                    for share, token in rank_continuations(source, at)[:width]:
                        shares.append(share)
                        paths.append([*path, token])
                        reached.append(at)
                rows.append((shares, range(len(paths) - len(shares), len(paths))))
            return rows

        chosen, parents = best_first(levels, nodes, children)
        return [paths[i][-1] for i in chosen], parents

    def _step(self, source: TokenIndex, places: Tokens, path: list[int]) -> Tokens:
        """The places after a path whose last token was found at `places`; if nothing follows there,
        those after its longest suffix that has a continuation, with the text before it."""
        after = places[source.tokens[places] == path[-1]] + 1
        after = after[after < len(source.tokens)]
        after = after[source.tokens[after] != END]
        if len(after):
            return after
        found, length = source.match(np.append(self.text.tokens, path))
        return found if length >= self.proposer.shortest else found[:0]


@dataclass(eq=False)
class RetrievalProposer(Proposer):
    """Proposes what followed in prompt and output, or in a datastore.

    Args:
        draft_tokens: K, how many tokens to draft ahead, of a tree its levels.
        shortest: nothing is proposed after a match of fewer tokens.
        tree_nodes: tokens of a tree of the most frequent continuations; 0 = a chain.
        datastore: other texts, as the target's tokens (`read_corpus`).
    """

    name = "retrieval"
    session = RetrievalSession
    draft_tokens: int = 8
    shortest: int = 2
    tree_nodes: int = 0
    datastore: Datastore | None = None

    def __post_init__(self) -> None:
        self.draft_nodes = max(self.draft_tokens, self.tree_nodes)


def read_corpus(file: str, target: Target) -> list[list[int]]:
    """The texts of a file, tokenized as plain text: of `.txt` one text; of `.jsonl`, `.json`,
    `.csv`, `.parquet` the key `text` of each row. Raises UserError for broken content, or nothing
    in it."""
    path = expand_path(file)
    plain = kind_of(path) == ".txt"
    rows = [{"text": read_text(path)}] if plain else list(read_rows(path))
    tokens = []
    for number, row in enumerate(rows, 1):
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise UserError(f"{path}, row {number}: needs a string under the key 'text'")
        if text.strip():
            # half a surrogate pair, which JSON can hold, is not text
            tokens.append(target.text_tokens(text.encode(errors="replace").decode()))
    if not tokens:
        raise UserError(f"{path} contains no text")
    return tokens


def index_corpus(file: str | None, target: Target) -> Datastore | None:
    return None if file is None else Datastore(read_corpus(file, target))
