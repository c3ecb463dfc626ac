"""The drafts of two drafters merged into one tree, of which the target accepts the path that it agrees with.

Which tokens the tree holds is a choice, however they were drawn: law `point`.
"""

from __future__ import annotations

from align.target.model import TargetOutput
from decode.drafters.base import Drafter, DraftSession, Request
from decode.speculation.proposal import Law, Proposal
from decode.speculation.sampling import Sampling
from decode.speculation.tree import path_to
from decode.speculation.tree_drafts import prefix_tree


class MergedDrafter:
    """`first` and `second`, both over the target's vocabulary; if only one has a proposal, that one.

    Args:
        first, second: of any law. At most one of them may read the target's hidden states.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first, self.second = first, second
        self.name = f"{first.name}|{second.name}"
        self.draft_tokens = max(first.draft_tokens, second.draft_tokens)
        self.draft_nodes = first.draft_nodes + second.draft_nodes
        self.in_background = any(getattr(one, "in_background", False) for one in (first, second))

    def law(self, sampling: Sampling) -> Law:
        return "point"

    def start(self, request: Request) -> MergedSession:
        return MergedSession(self, self.first.start(request), self.second.start(request), request)


class MergedSession(DraftSession):
    """One request's drafts."""

    def __init__(
        self, drafter: MergedDrafter, first: DraftSession, second: DraftSession, request: Request
    ) -> None:
        assert not (first.taps and second.taps), "two drafters with taps of their own"
        self.drafter, self.sessions, self.request = drafter, (first, second), request
        self.taps = first.taps or second.taps

    def observe(self, output: TargetOutput, kept: int) -> None:
        for session in self.sessions:
            session.observe(output, kept)

    def propose(self, k: int) -> Proposal | None:
        each = (self.drafter.first.draft_tokens, self.drafter.second.draft_tokens)
        found = [s.propose(min(k, most)) for s, most in zip(self.sessions, each, strict=True)]
        paths = [path for proposal in found if proposal is not None for path in _paths(proposal)]
        return prefix_tree(paths, self.request.target.device) if paths else None

    def close(self) -> None:
        for session in self.sessions:
            session.close()


def _paths(proposal: Proposal) -> list[list[int]]:
    """The token sequences from the root to every leaf."""
    tokens = proposal.tokens_K.tolist()
    if proposal.parents is None:
        return [tokens] if tokens else []
    leaves = [i for i in range(len(tokens)) if i not in proposal.parents]
    return [[tokens[i] for i in path_to(proposal.parents, leaf + 1)] for leaf in leaves]
