"""The loop under somebody else's processors: p is what transformers' logits processors make of the target's logits at each prefix.

A processor is a function of the text before a token, and the text before every drafted token is known when it is verified. So each row
of a round goes through the processors with its own prefix, and any verifier that is exact for p is exact for the processed p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from align.target.model import Target
from decode.drafters.base import Drafter
from decode.engine.engine import Engine
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import Sampling
from decode.speculation.verification import Outcome, Round

Processors = Callable[[Tensor, Tensor], Tensor]
"""Texts (1, n) and their next logits (1, V) → logits (1, V), as transformers' `LogitsProcessorList`."""
Criteria = Callable[[Tensor, Any], Any]
"""A text (1, n) and None → whether it ends, as transformers' `StoppingCriteriaList`."""


class ProcessedEngine(Engine):
    """One request whose p is processed and whose end is decided by functions of the text.

    Args:
        prompt: without padding. limit: of new tokens. drafting: how the drafter draws: any, exactness does not depend on it.
        processors: the last word on p. criteria: the last word on the end; the target's own ends of text do not count.
        shown: the prompt as processors and criteria see it, left padding included.
        keep: record each token's logits, raw and processed.
        put: called with committed tokens.
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
        put: Callable[[list[int]], object] | None = None,
    ) -> None:
        super().__init__(target, prompt, limit, drafting, drafter, verifier)
        self.processors, self.criteria, self.put = processors, criteria, put
        self.shown = list(shown)
        self.law = Sampling(temperature=0.0 if drafting.greedy else 1.0)
        self.kept: tuple[list[Tensor], list[Tensor]] | None = ([], []) if keep else None
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
        return super()._round(processed, proposal)._replace(sampling=self.law)

    def _texts(self, proposal: Proposal) -> list[Tensor]:
        """The text before each row of a call, (1, n) each: what is committed, and the drafts on the row's path."""
        before, drafts, device = (
            [*self.shown, *self.out.tokens],
            proposal.tokens_K.tolist(),
            self.target.device,
        )
        paths: list[list[int]] = [[]]
        for token, parent in zip(drafts, proposal.tree, strict=True):
            paths.append([*paths[parent + 1], token])
        return [torch.tensor([before + path], device=device) for path in paths]

    def _commit(self, outcome: Outcome) -> int:
        out, request, fresh = self.out, self.request, list[int]()
        for token in (*outcome.accepted, outcome.following)[: self.limit - len(out.tokens)]:
            fresh.append(token)
            text = torch.tensor([self.shown + out.tokens + fresh], device=self.target.device)
            if bool(torch.as_tensor(self.criteria(text, None)).all()):
                out.finish = "stop"
                break
        out.tokens.extend(fresh)
        if not out.finish and len(out.tokens) == self.limit:
            out.finish = self.full
        request.tokens.extend(fresh)
        request.history.extend(fresh)
        if self.kept is not None:
            for kept, rows in zip(self.kept, self.rows, strict=True):
                kept.extend(rows[row] for row in outcome.rows[: len(fresh)])
        if self.put is not None:
            self.put(fresh)
        return min(len(outcome.accepted), len(fresh))
