"""A proposal: drafted tokens, and their law, which says how they were drawn. A verifier names the
laws for which it is exact.

    point        chosen in any way: an argmax, a lookup, a beam, the best of many; there is no q
    independent  all drawn in one step, each position from its own q given the prefix alone
    causal       each drawn from a q that depends on the drafted tokens left of it, and on nothing
        else
    unmasked     each drawn from the q of the step that unmasked it, the steps in any order

Drafts of the laws `independent` and `causal` may branch. Siblings stand in draw order and say how
they were drawn: from one q without looking at each other (`iid`), each from its own
(`independent`), or from q without the earlier ones (`without_replacement`). Sorting them or making
them distinct would change the law; chosen siblings make a `point` tree.

What only the values show is checked on CPUs alone, because reading them elsewhere would
synchronise. Of a q with NaN or infinity (a broken drafter) nothing is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from decode.speculation.tree import chain, cut_tree, depths

Law = Literal["point", "independent", "causal", "unmasked"]
LAWS: tuple[str, ...] = get_args(Law)
Siblings = Literal["iid", "independent", "without_replacement"]
SIBLINGS: tuple[str, ...] = get_args(Siblings)

MASS = 1e-4
"""How far from 1 a row of q may sum: torch's own fp32 softmax is off by up to 5e-5 over 256,000
ids. In total variation the output changes by no more."""


@dataclass(frozen=True)
class DraftProbs:
    """q over the target's vocabulary, or over some of it. Not in half precision: a draw from such a
    softmax is no draw from q.

    probs: fp32 or fp64 distributions, (K, V), or (K, S) over the distinct token `ids` (S,); q is
    zero elsewhere. Raises ValueError for another shape or type or, on a CPU, a row that is no
    distribution.
    """

    probs: Tensor
    ids: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.probs.shape)
        if len(shape) != 2 or (self.ids is not None and self.ids.shape != shape[1:]):
            raise ValueError(f"q must be (K, V), or (K, S) with S ids, not {shape}")
        if self.probs.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"q must be float32 or float64, not {self.probs.dtype}")
        if self.probs.device.type != "cpu" or not self.probs.numel():
            return
        for mass, least in zip(
            self.probs.sum(1).tolist(), self.probs.amin(1).tolist(), strict=True
        ):
            if math.isfinite(mass) and (abs(mass - 1) > MASS or least < 0):
                raise ValueError("each row of q must be a distribution: not below 0, sum 1")

    def __len__(self) -> int:
        return self.probs.shape[0]

    def take(self, rows: Tensor | slice) -> DraftProbs:
        return replace(self, probs=self.probs[rows])

    def dense(self, vocab_size: int) -> Tensor:
        """q over the whole vocabulary, (K, V)."""
        if self.ids is None:
            return self.probs
        dense_KV = self.probs.new_zeros(len(self), vocab_size)
        return dense_KV.index_add_(1, self.ids, self.probs)


@dataclass(frozen=True)
class Proposal:
    """K drafted tokens for one prefix, and how they were drawn.

    Args:
        tokens_K: int64 ids in the target's vocabulary.
        q: what each token was drawn from, processors included, one row per token; of siblings drawn
            without replacement the q of the first draw.
        steps_K: the step at which each position was unmasked, of the law `unmasked`.
        parents: a tree (decode/speculation/tree.py); None = a chain.
        siblings: how tokens with one parent were drawn, of drafts with q that branch.
        state_only: of `unmasked` drafts: the positions that a step unmasks, remasks or leaves out
            were decided before that step drew its values.

    Raises:
        ValueError: fields that contradict the law.
    """

    tokens_K: Tensor
    law: Law
    q: DraftProbs | None = None
    steps_K: Tensor | None = None
    parents: tuple[int, ...] | None = None
    siblings: Siblings | None = None
    state_only: bool = False

    def __post_init__(self) -> None:
        unmasked, size = self.law == "unmasked", len(self)
        needs_siblings = self.law != "point" and self.branches
        tree = self.parents
        for ok, rule in (
            (self.law in LAWS, f"law must be one of {LAWS}"),
            (self.tokens_K.dtype == torch.int64 and self.tokens_K.dim() == 1, "tokens: int64 (K,)"),
            ((self.q is None) == (self.law == "point"), "every law except point needs q"),
            (self.q is None or len(self.q) == size, f"q needs {size} rows"),
            ((self.steps_K is not None) == unmasked, "unmask steps are only for the law unmasked"),
            (unmasked or not self.state_only, "state_only is only for the law unmasked"),
            (tree is None or not unmasked, "drafts unmasked out of order cannot branch"),
            (tree is None or len(tree) == size, f"{size} tokens need as many parents"),
            (
                all(-1 <= parent < i for i, parent in enumerate(tree or ())),
                "a parent must be -1 (the root) or stand before its child",
            ),
            (
                (self.siblings in SIBLINGS) if needs_siblings else self.siblings is None,
                f"drafts with q that branch, and no others, need siblings, one of {SIBLINGS}",
            ),
        ):
            if not ok:
                raise ValueError(f"a proposal of law {self.law!r}: {rule}")
        if self.tokens_K.device.type == "cpu" and self._siblings_differ():
            raise ValueError(
                f"siblings drawn {self.siblings} share one q, and these were drawn from different "
                "ones: say siblings='independent'"
            )

    def _siblings_differ(self) -> bool:
        """Whether siblings that are said to share one q have different ones."""
        if self.q is None or self.siblings in (None, "independent"):
            return False
        first = {parent: i for i, parent in reversed(list(enumerate(self.tree)))}
        rest = [i for i, parent in enumerate(self.tree) if i != first[parent]]
        a_PV, b_PV = self.q.probs[rest], self.q.probs[[first[self.tree[i]] for i in rest]]
        return bool(((a_PV != b_PV) & ~(a_PV.isnan() | b_PV.isnan())).any())

    @property
    def tree(self) -> tuple[int, ...]:
        """The parents of all tokens, also of a chain."""
        return chain(len(self)) if self.parents is None else self.parents

    @property
    def branches(self) -> bool:
        """Whether two tokens share a parent."""
        return self.parents is not None and len(set(self.parents)) < len(self.parents)

    def __len__(self) -> int:
        return self.tokens_K.shape[0]

    @property
    def depth(self) -> int:
        """The number of drafted tokens on the longest path."""
        return len(self) if self.parents is None else max(depths(self.parents), default=0)

    def first(self, count: int | None) -> Proposal:
        """The first `count` tokens, which stand before their children, as chosen drafts: for
        verifiers that look at the tokens alone. None = all."""
        if count is None or count >= len(self):
            return self
        parents = None if self.parents is None else self.parents[:count]
        return Proposal(self.tokens_K[:count], "point", parents=parents)

    def cut(self, length: int) -> Proposal:
        """The first `length` tokens; of a tree, those of at most that depth. The law stays true if
        `length` was chosen without looking at the values drawn."""
        if length >= self.depth:
            return self
        if self.parents is None:
            q = None if self.q is None else self.q.take(slice(length))
            steps_K = None if self.steps_K is None else self.steps_K[:length]
            return replace(self, tokens_K=self.tokens_K[:length], q=q, steps_K=steps_K)
        kept, parents = cut_tree(self.parents, length)
        at = torch.tensor(kept, dtype=torch.int64, device=self.tokens_K.device)
        q = None if self.q is None else self.q.take(at)
        siblings = self.siblings if len(set(parents)) < len(parents) else None
        return replace(self, tokens_K=self.tokens_K[at], parents=parents, q=q, siblings=siblings)


def point_proposal(
    tokens: Sequence[int], device: torch.device, parents: tuple[int, ...] | None = None
) -> Proposal:
    tokens_N = torch.tensor(tokens, dtype=torch.int64, device=device)
    return Proposal(tokens_N, "point", parents=parents)


NO_DRAFTS = Proposal(torch.zeros(0, dtype=torch.int64), "point")
