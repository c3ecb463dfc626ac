"""The drafts of two drafters merged into one tree. Which tokens it holds is a choice: law
`point`."""

from __future__ import annotations

from decode.proposers.base import Drafter, DraftSession, Request
from decode.speculation.proposal import Proposal
from decode.speculation.tree import path_to
from decode.speculation.tree_drafts import prefix_tree


class MergedDrafter(Drafter):
    """`first` and `second`, of any law, both over the target's vocabulary and without taps."""

    in_background = True

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.drafters = (first, second)
        self.name = f"{first.name}|{second.name}"
        self.draft_tokens = max(first.draft_tokens, second.draft_tokens)
        self.draft_nodes = first.draft_nodes + second.draft_nodes

    def start(self, request: Request) -> MergedSession:
        return MergedSession(self, request)


class MergedSession(DraftSession):
    def __init__(self, drafter: MergedDrafter, request: Request) -> None:
        self.request, self.limits = request, [one.draft_tokens for one in drafter.drafters]
        self.sessions = [one.start(request) for one in drafter.drafters]

    def propose(self, k: int) -> Proposal | None:
        found = [
            s.propose(min(k, most)) for s, most in zip(self.sessions, self.limits, strict=True)
        ]
        paths = [path for x in found if x is not None for path in split_paths(x)]
        return prefix_tree(paths, self.request.target.device) if paths else None

    def close(self) -> None:
        for session in self.sessions:
            session.close()


def split_paths(proposal: Proposal) -> list[list[int]]:
    """The token sequences from the root to every leaf."""
    tokens = proposal.tokens_K.tolist()
    leaves = [i for i in range(len(tokens)) if i not in proposal.tree]
    return [[tokens[i] for i in path_to(proposal.tree, leaf + 1)] for leaf in leaves]
