"""The loop under somebody else's processors: p is what transformers' logits processors make of the
target's logits at each prefix.

A processor is a function of the text before a token, and the text before every drafted token is
known when it is verified. So each row of a round goes through the processors with its own prefix,
and any verifier that is exact for p is exact for the processed p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decode.engine.engine import Engine
from decode.proposers.base import Drafter
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import Sampling
from decode.speculation.verification import Outcome, Round
from specalign.common.errors import UserError
from specalign.lm.model import Target

Processors = Callable[[Tensor, Tensor], Tensor]
"""Texts (1, n) and their next logits (1, V) → logits (1, V), as transformers'
`LogitsProcessorList`."""
Criteria = Callable[[Tensor, Any], Any]
"""A text (1, n) and its tokens' processed logits, (1, V) each, or None → whether it ends, as
transformers' `StoppingCriteriaList`."""


class ProcessedEngine(Engine):
    """One request whose p is processed and whose end is decided by functions of the text.

    Args:
        prompt: without padding. limit: of new tokens. drafting: how the drafter draws: any,
            exactness does not depend on it.
        processors: the last word on p. criteria: the last word on the end; the target's own ends of
            text do not count.
        shown: the prompt as processors and criteria see it, left padding included.
        keep: record each token's logits, raw and processed.
        scored: give criteria the processed logits, which `keep` records.
        put: called with committed tokens.

    Attributes:
        end: how many new tokens the text had when a criterion was met; 0 = it was not.
        together: the requests that are written on until all of them have met a criterion.
    """

    def __init__(
        self,
        target: Target,
        prompt: list[int],
        limit: int,
        drafting: Sampling,
        drafter: Drafter | None,
        verifier: str,
        *,
        processors: Processors,
        criteria: Criteria,
        shown: Sequence[int],
        keep: bool = False,
        scored: bool = False,
        put: Callable[[list[int]], object] | None = None,
    ) -> None:
        super().__init__(target, prompt, limit, drafting, drafter, verifier)
        self.processors, self.criteria, self.put = processors, criteria, put
        self.shown = list(shown)
        self.law = Sampling(temperature=0.0 if drafting.greedy else 1.0)
        self.kept: tuple[list[Tensor], list[Tensor]] | None = ([], []) if keep else None
        self.scored = scored
        self.end, self.together = 0, [self]
        self.eos = frozenset()

    def _round(self, logits_MV: Tensor, proposal: Proposal) -> Round:
        texts = self._texts(proposal)
        rows = [
            self.processors(text, row[None].clone())[0]
            for text, row in zip(texts, logits_MV.float(), strict=True)
        ]
        processed = torch.stack(rows)
        if self.kept is not None:  # verification overwrites what it is given
            self.rows = logits_MV.float().clone(), processed.clone()
        if not self.law.greedy:  # a row without probabilities must not reach those before it: it counts where it is reached
            lost_M = ~processed.amax(-1).isfinite()
            self.lost = lost_M.tolist()
            processed[lost_M] = 0.0
        return super()._round(processed, proposal)._replace(sampling=self.law)

    def _texts(self, proposal: Proposal) -> list[Tensor]:
        """The text before each row of a call, (1, n) each: what is committed, and the drafts on the
        row's path."""
        before, drafts, device = (
            [*self.shown, *self.out.tokens],
            proposal.tokens_K.tolist(),
            self.target.device,
        )
        paths: list[list[int]] = [[]]
        for token, parent in zip(drafts, proposal.tree, strict=True):
            paths.append([*paths[parent + 1], token])
        return [torch.tensor([before + path], device=device) for path in paths]

    def _append(self, outcome: Outcome) -> int:
        out, request, fresh = self.out, self.request, list[int]()
        chosen = zip(outcome.rows, (*outcome.accepted, outcome.following), strict=True)
        for row, token in list(chosen)[: self.limit - len(out.tokens)]:
            if not self.law.greedy and self.lost[row]:
                raise UserError(
                    f"logits_processor: token {len(out.tokens) + len(fresh) + 1} has no "
                    "probabilities left (all -inf, or not a number)"
                )
            fresh.append(token)
            if self.kept is not None:
                for kept, rows in zip(self.kept, self.rows, strict=True):
                    kept.append(rows[row])
            if self._ends(out.tokens + fresh):
                out.finish = "stop"
                break
        out.tokens.extend(fresh)
        if not out.finish and len(out.tokens) == self.limit:
            out.finish, self.end = self.full, self.end or self.limit
        request.tokens.extend(fresh)
        request.history.extend(fresh)
        if self.put is not None:
            self.put(fresh)
        return min(len(outcome.accepted), len(fresh))

    def _ends(self, tokens: list[int]) -> bool:
        """Whether these new tokens are all that has to be written."""
        if not self.end:
            text = torch.tensor([self.shown + tokens], device=self.target.device)
            scores = tuple(row[None] for row in self.kept[1]) if self.scored and self.kept else None
            if bool(torch.as_tensor(self.criteria(text, scores)).all()):
                self.end = len(tokens)
        ends = [one.end for one in self.together]
        return all(ends) and len(tokens) >= max(ends)
