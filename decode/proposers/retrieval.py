"""Retrieval (SAM Decoding, arXiv 2411.10666; REST, arXiv 2311.08252): propose what most often
followed the longest suffix of the text that occurred before, in the text itself or in a datastore.
No model, no training.

The source with the longer match drafts; the text itself if both are equal. Law `point`.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode.proposers.base import DraftSession, Proposer, Request
from decode.proposers.suffix_automaton import (
    ROOT,
    Continuation,
    Datastore,
    SuffixAutomaton,
    TextAutomaton,
)
from decode.speculation.proposal import Proposal, point_proposal
from decode.speculation.tree_drafts import best_first
from specalign.common.errors import UserError
from specalign.common.files import expand_path, read_text
from specalign.lm.model import Target
from specalign.rows.tables import kind_of, read_rows


class RetrievalSession(DraftSession):
    """`text`: the automaton of all its tokens; `match`: state and length of their longest ending in
    the datastore."""

    proposer: RetrievalProposer

    def __init__(self, proposer: RetrievalProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.datastore = proposer.datastore
        self.text = TextAutomaton()
        self.match = (ROOT, 0)
        self.indexed = 0

    def propose(self, k: int) -> Proposal | None:
        for token in self.request.tokens[self.indexed :]:
            self.text.extend(token)
            if self.datastore is not None:
                self.match = self.datastore.match(*self.match, token)
        self.indexed = len(self.request.tokens)
        source: SuffixAutomaton = self.text
        state, length = self.text.repeated
        if self.datastore is not None and self.match[1] > length:
            source, (state, length) = self.datastore, self.match
        if length < self.proposer.shortest:
            return None
        tokens, parents = self._draft(source, state, k)
        return point_proposal(tokens, self.request.target.device, parents) if tokens else None

    def _draft(
        self, source: SuffixAutomaton, state: int, k: int
    ) -> tuple[list[int], tuple[int, ...] | None]:
        """The nodes with the most frequent paths, by the product of their shares; of a chain the
        most frequent continuation at each step."""
        ends, shortest = self.request.target.eos_ids, self.proposer.shortest
        if not self.proposer.tree_nodes:
            tokens: list[int] = []
            while len(tokens) < k and (found := source.continuations(state, shortest)):
                tokens.append(found[0].token)
                if tokens[-1] in ends:
                    break
                state = found[0].state
            return tokens, None
        # to `best_first` a node is an index into this, which keeps equal tokens apart
        nodes: list[Continuation] = []

        def children(level: int, above: Sequence[int | None]) -> list[tuple[list[float], range]]:
            rows = []
            for parent in above:
                found: list[Continuation] = []
                if parent is None or nodes[parent].token not in ends:
                    at = state if parent is None else nodes[parent].state
                    found = source.continuations(at, shortest)[: self.proposer.tree_nodes]
                places = range(len(nodes), len(nodes) + len(found))
                rows.append(([x.log_share for x in found], places))
                nodes.extend(found)
            return rows

        chosen, parents = best_first(k, self.proposer.tree_nodes, children)
        return [nodes[i].token for i in chosen], parents


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

    def __init__(
        self,
        draft_tokens: int = 8,
        shortest: int = 2,
        tree_nodes: int = 0,
        datastore: Datastore | None = None,
    ) -> None:
        self.draft_tokens, self.shortest, self.tree_nodes = draft_tokens, shortest, tree_nodes
        self.draft_nodes = max(draft_tokens, tree_nodes)
        self.datastore = datastore


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
