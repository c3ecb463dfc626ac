"""Drafting while the target verifies (DuoDecoding, arXiv 2503.00784; Double, 2601.05524). As soon
as a draft is proposed, a thread begins the next one, on the guess that the draft will be accepted
whole and followed by the drafter's own next token. If the guess is right the next draft costs no
time; otherwise it is discarded and drafted again.

The law is that of the inner drafter: the next draft is drawn from q after the guessed text with a
separate generator, and whether the guess is right does not depend on that generator. The drafter
needs a different device than the target, or idle cores.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from decode.proposers.base import DraftSession, Proposer, Request, WrappingProposer, WrappingSession
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import make_generator
from decode.speculation.tree import path_to
from decode.speculation.tree_drafts import prefix_tree

_OWN_STREAM = 0x0A17
"""XORed with the request's seed, it seeds the generator of drafts made ahead."""


class OverlappedSession(WrappingSession):
    def __init__(self, proposer: OverlappedProposer, request: Request) -> None:
        device, seed = request.target.device, request.sampling.fixed_seed
        self.guessed = replace(
            request,
            tokens=list(request.tokens),
            generator=make_generator(seed ^ _OWN_STREAM, device),
            history=request.history.fork(),
        )
        super().__init__(proposer, request, self.guessed)
        self.worker = ThreadPoolExecutor(1)
        self.ahead: Future[Proposal | None] | None = None

    def propose(self, k: int) -> Proposal | None:
        ahead = self._join()
        if ahead is not None and self.guessed.tokens == self.request.tokens:
            draft = ahead.result()
        else:
            self._set_guess([])
            draft = self._draft(k + 1)
        if draft is None:
            return None
        tokens = draft.tokens_K.tolist()
        if len(tokens) > k:
            self._set_guess(tokens[: k + 1])
        if len(self.request.tokens) < len(self.guessed.tokens) < self.request.cache.capacity - k:
            # A thread lives for one draft: OpenMP keeps a team per living thread, and with more of
            # them than cores every team sleeps between products, which halves the speed of all
            # later decoding in the process.
            self.worker = ThreadPoolExecutor(1)
            self.ahead = self.worker.submit(self._draft, k + 1)
            self.worker.shutdown(wait=False)
        return draft.cut(k)

    def _set_guess(self, tokens: list[int]) -> None:
        """Set the text that the inner drafter sees: the committed one followed by `tokens`."""
        self.guessed.tokens[:] = [*self.request.tokens, *tokens]
        self.guessed.history = self.request.history.fork()
        self.guessed.history.extend(tokens)

    @torch.no_grad()
    def _draft(self, k: int) -> Proposal | None:
        return self.inner.propose(k)

    def _join(self) -> Future[Proposal | None] | None:
        """Wait for the thread to end; returns its draft, if there was one."""
        self.worker.shutdown()
        ahead, self.ahead = self.ahead, None
        return ahead

    def close(self) -> None:
        self._join()
        super().close()


class OverlappedProposer(WrappingProposer):
    """`inner`, drafting one round ahead. It drafts chains of at least two tokens from a text that
    can be rewound; its last drafted token is the guess."""

    in_background = True
    session = OverlappedSession

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner, "overlap")
        self.draft_tokens = self.draft_nodes = inner.draft_tokens - 1


class MergedSession(DraftSession):
    proposer: MergedProposer

    def __init__(self, proposer: MergedProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.sessions = [one.start(request) for one in proposer.drafters]

    def propose(self, k: int) -> Proposal | None:
        paths: list[list[int]] = []
        for drafter, session in zip(self.proposer.drafters, self.sessions, strict=True):
            found = session.propose(min(k, drafter.draft_tokens))
            if found is not None:
                tokens, tree = found.tokens_K.tolist(), found.tree
                leaves = [i for i in range(len(tokens)) if i not in tree]
                paths += [[tokens[i] for i in path_to(tree, leaf + 1)] for leaf in leaves]
        return prefix_tree(paths, self.request.target.device) if paths else None

    def close(self) -> None:
        for session in self.sessions:
            session.close()


class MergedProposer(Proposer):
    """The drafts of two drafters of any law, without taps, as one tree. Law `point`: which tokens
    it holds is a choice."""

    in_background = True
    session = MergedSession

    def __init__(self, first: Proposer, second: Proposer) -> None:
        self.drafters = (first, second)
        self.name = f"{first.name}|{second.name}"
        self.draft_tokens = max(first.draft_tokens, second.draft_tokens)
        self.draft_nodes = first.draft_nodes + second.draft_nodes
