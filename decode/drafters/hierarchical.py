"""A drafter whose own drafts come from a cheaper drafter and are verified in between (hierarchical speculative decoding,
arXiv 2510.19705): the middle model M decodes speculatively, and what it says are the drafts.

M's speculation keeps M's law, so k of its tokens are a draw from M whatever drafted for it: law `causal` with
q_i = M(· | text, x_<i), the row that verified them; at temperature 0 M's argmax, law `point`. It goes on until there are
exactly k and never drafts beyond, so how many there are says nothing of their values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from align.common.errors import UserError
from align.target.model import Target, TargetOutput
from decode.drafters.autoregressive import CausalContext, check_vocabulary
from decode.drafters.base import Drafter, DraftSession, Request, shared, within
from decode.drafters.block import BlockProposer
from decode.speculation.proposal import DenseQ, Law, Proposal
from decode.speculation.sampling import Sampling, best, couple, probs
from decode.speculation.tree import chain, depths, follow, path_to
from decode.speculation.verifiers import choose, verify

DRAFT_TOKENS = 8
_NOTHING = Proposal(torch.zeros(0, dtype=torch.int64), "point")


class HierarchicalDrafter:
    """A causal language model with a cheaper drafter of its own, as the engine sees it.

    Args:
        model: M, over the target's vocabulary and on its device.
        inner: what drafts for M, of any law, from the text alone: one that reads hidden states would need M's.
        draft_tokens: K, of M's tokens.

    Raises:
        UserError: fewer than one draft, an inner drafter that reads hidden states; when a request begins, another
            vocabulary or device than the target's.
    """

    def __init__(self, model: Target, inner: Drafter, draft_tokens: int = DRAFT_TOKENS) -> None:
        within("draft_tokens", draft_tokens, 1, None)
        innermost: Any = inner  # behind CopyingDrafter and its like
        while not isinstance(innermost, BlockProposer) and hasattr(innermost, "inner"):
            innermost = innermost.inner
        if isinstance(innermost, BlockProposer):
            raise _reads_states(inner)
        self.model, self.inner = model, inner
        self.name = f"hierarchical+{inner.name}"
        self.draft_tokens = self.draft_nodes = draft_tokens

    def law(self, sampling: Sampling) -> Law:
        return "point" if sampling.greedy else "causal"

    def start(self, request: Request) -> HierarchicalDrafts:
        check_vocabulary(self.model, request.target)
        if self.model.device != request.target.device:
            raise UserError(
                f"drafter {self.model.spec!r} is on {self.model.device}, target {request.target.spec!r} on "
                f"{request.target.device}: a hierarchical drafter needs the same device"
            )
        return HierarchicalDrafts(self, request)


def _reads_states(inner: Drafter) -> UserError:
    return UserError(
        f"inner drafter {inner.name!r} reads its verifier's hidden states: a hierarchical drafter takes one that reads "
        "the text alone (lookup, autoregressive, a standalone diffusion drafter)"
    )


class HierarchicalDrafts:
    """One request's drafts. `middle` is M's own request: the text, and behind it what M has said in this round."""

    taps: tuple[int, ...] = ()
    rewinds = True
    """The text may be another one, or shorter, than at the last call."""

    def __init__(self, drafter: HierarchicalDrafter, request: Request) -> None:
        self.drafter, self.request = drafter, request
        # coupled drafts are made with the noise that the target will use
        self.law: Law = drafter.law(request.sampling) if request.noise is None else "point"
        self.context = CausalContext(drafter.model, request.cache.capacity + drafter.inner.draft_nodes)
        self.middle = Request(
            drafter.model,
            list(request.tokens),
            self.context.cache,
            request.sampling,
            request.generator,
            request.history.fork(),
            request.noise,
        )
        self.inner = self._begin()

    def _begin(self) -> DraftSession:
        session = self.drafter.inner.start(self.middle)
        if session.taps:
            raise _reads_states(self.drafter.inner)
        return session

    def observe(self, output: TargetOutput, kept: int) -> None:
        """The text itself is all that it needs."""

    def propose(self, k: int) -> Proposal | None:
        # the last draft is not read
        k = min(k, self.drafter.model.context_limit + 1 - len(self.request.tokens))
        if k < 1:
            return None
        self._go_back()
        first, rows = len(self.middle.tokens), list[Tensor]()
        while (left := first + k - len(self.middle.tokens)) > 0:
            rows.append(self._round(left))
        tokens_K = torch.tensor(self.middle.tokens[first:], device=self.drafter.model.device)
        return Proposal(tokens_K, self.law, None if self.law == "point" else DenseQ(torch.cat(rows)))

    def _go_back(self) -> None:
        """M's text becomes the committed one. An inner session that cannot lose tokens begins anew."""
        middle, text = self.middle, self.request.tokens
        lost = shared(middle.tokens, text) < len(middle.tokens)
        middle.tokens[:] = text
        middle.history = self.request.history.fork()
        if lost and not getattr(self.inner, "rewinds", False):
            self.inner = self._begin()

    @torch.no_grad()
    def _round(self, left: int) -> Tensor:
        """One call of M, which adds at least one and at most `left` tokens to its text; the rows that they were drawn from,
        (R, V)."""
        middle, model = self.middle, self.drafter.model
        # a call adds its drafts and one more
        most = min(self.drafter.inner.draft_tokens, left - 1)
        draft = (self.inner.propose(most) if most > 0 else None) or _NOTHING
        draft = draft.cut(most)
        if draft.branches and model.chains_only:
            raise UserError(f"drafter {model.spec!r} windows its attention by place: drafts may not branch")
        drafts = draft.tokens_K.tolist()
        logits_MV = self.context.read(self.context.follow(middle.tokens), drafts, draft.parents)
        parents = chain(len(drafts)) if draft.parents is None else draft.parents
        end, following, p_MV = self._verify_draft(logits_MV, draft, parents)
        path = path_to(parents, end)
        self.context.keep(len(drafts), path)
        said = [*(drafts[i] for i in path), following]
        middle.tokens.extend(said)
        middle.history.extend(said)
        return p_MV[[0, *(i + 1 for i in path)]]

    def _verify_draft(
        self, logits_MV: Tensor, draft: Proposal, parents: tuple[int, ...]
    ) -> tuple[int, int, Tensor]:
        """The node where M's path through the drafts ends, its token after it, and its p at every node (at temperature 0
        the logits)."""
        middle, sampling = self.middle, self.middle.sampling
        tokens_N = draft.tokens_K.to(logits_MV.device)
        before = middle.history.rows(tokens_N, parents)
        if sampling.greedy:
            p_MV, said_M = logits_MV, best(logits_MV, sampling, before)
        else:
            p_MV = probs(logits_MV, sampling, before, overwrite=True)
            if middle.noise is None:
                name = choose(draft.law, sampling.temperature)
                end_B, next_B = verify(name, [draft], p_MV[None], [middle.generator])
                return int(end_B), int(next_B), p_MV
            places = [len(middle.tokens) + depth for depth in (0, *depths(parents))]
            said_M = couple(p_MV, middle.noise, places)
        end_B, next_B = follow(tokens_N[None], (parents,), said_M[None])
        return int(end_B), int(next_B), p_MV
