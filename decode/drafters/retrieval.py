"""Retrieval (SAM Decoding, arXiv 2411.10666; REST, arXiv 2311.08252): propose what most often followed the longest suffix of the
text that occurred before, in the text itself or in a datastore. No model, no training.

The source with the longer match drafts; the text itself if both are equal. Tokens are chosen by counts: law `point`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode.drafters.base import DraftSession, Request, check_range
from decode.drafters.suffix_automaton import ROOT, Continuation, Datastore, SuffixAutomaton, TextAutomaton
from decode.speculation.proposal import Law, Proposal
from decode.speculation.sampling import Sampling
from decode.speculation.tree_drafts import best_first


class RetrievalDrafter:
    """Proposes what followed in prompt and output, or in a datastore.

    Args:
        draft_tokens: K, how many tokens to draft ahead, of a tree its levels.
        shortest: nothing is proposed after a match of fewer tokens.
        tree_nodes: how many tokens to draft as a tree of the most frequent continuations; 0 = a chain of the most
            frequent one at each step.
        datastore: other texts, as the target's tokens (`decode.drafters.corpus.read_corpus`).

    Raises:
        UserError: a number out of its range.
    """

    name = "retrieval"

    def __init__(
        self,
        draft_tokens: int = 8,
        shortest: int = 2,
        tree_nodes: int = 0,
        datastore: Datastore | None = None,
    ) -> None:
        check_range("draft_tokens", draft_tokens, 1)
        check_range("shortest", shortest, 1, None)
        check_range("tree_nodes", tree_nodes, 0)
        self.draft_tokens, self.shortest, self.tree_nodes = draft_tokens, shortest, tree_nodes
        self.draft_nodes = max(draft_tokens, tree_nodes)
        self.datastore = datastore

    def law(self, sampling: Sampling) -> Law:
        return "point"

    def start(self, request: Request) -> RetrievalSession:
        return RetrievalSession(self, request)


class RetrievalSession(DraftSession):
    """One request's drafts. `text`: the automaton of all its tokens; `match`: state and length of their longest ending in
    the datastore."""

    def __init__(self, drafter: RetrievalDrafter, request: Request) -> None:
        # options are read at every draft; the datastore must stay the one that `match` belongs to
        self.proposer, self.datastore, self.request = drafter, drafter.datastore, request
        self.ends = frozenset(request.target.eos_ids)
        self.text = TextAutomaton()
        self.match = (ROOT, 0)
        self.indexed = 0

    def propose(self, k: int) -> Proposal | None:
        drafter, datastore = self.proposer, self.datastore
        for token in self.request.tokens[self.indexed :]:
            self.text.extend(token)
            if datastore is not None:
                self.match = datastore.match(*self.match, token)
        self.indexed = len(self.request.tokens)
        source: SuffixAutomaton = self.text
        state, length = self.text.repeated
        if datastore is not None and self.match[1] > length:
            source, (state, length) = datastore, self.match
        if length < drafter.shortest:
            return None
        draft = self._tree if drafter.tree_nodes else self._chain
        tokens, parents = draft(source, state, k)
        if not tokens:
            return None
        tokens_K = torch.tensor(tokens, dtype=torch.int64, device=self.request.target.device)
        return Proposal(tokens_K, "point", parents=parents)

    def _after(self, source: SuffixAutomaton, state: int) -> list[Continuation]:
        return source.continuations(state, self.proposer.shortest)

    def _chain(self, source: SuffixAutomaton, state: int, k: int) -> tuple[list[int], tuple[int, ...] | None]:
        """The most frequent continuation at each step; past the end of the text the drafted tokens are continued."""
        tokens: list[int] = []
        while len(tokens) < k and (found := self._after(source, state)):
            tokens.append(found[0].token)
            if tokens[-1] in self.ends:
                break
            state = found[0].state
        return tokens, None

    def _tree(self, source: SuffixAutomaton, state: int, k: int) -> tuple[list[int], tuple[int, ...] | None]:
        """The nodes with the most frequent paths, by the product of their shares."""
        most = self.proposer.tree_nodes
        # (token, state): to `best_first` a node is an index into this, so that equal tokens are told apart
        places: list[tuple[int, int]] = []

        def children(level: int, above: Sequence[int | None]) -> list[tuple[list[float], list[int]]]:
            rows = []
            for node in above:
                token, at = (None, state) if node is None else places[node]
                found = [] if token in self.ends else self._after(source, at)[:most]
                rows.append(
                    ([x.log_share for x in found], list(range(len(places), len(places) + len(found))))
                )
                places.extend((x.token, x.state) for x in found)
            return rows

        nodes, parents = best_first(k, most, children)
        return [places[node][0] for node in nodes], parents
