"""A proposal: drafted tokens, and their law, which says how they were drawn. A verifier names the
laws for which it is exact.

    point        chosen in any way: an argmax, a lookup, a beam, the best of many; there is no q
    independent  all drawn in one step, each position from its own q given the prefix alone
    causal       each drawn from a q that depends on the drafted tokens left of it, and on nothing else
    unmasked     each drawn from the q of the step that unmasked it, the steps in any order

Drafts of the laws `independent` and `causal` may branch: every token of a tree is drawn from its q
given the tokens on its path, and siblings say how they were drawn: without looking at each other,
from one q (`iid`) or each from its own (`independent`), or from q without the earlier ones
(`without_replacement`). They stand in the order in which they were drawn and are neither sorted nor
made distinct, which would change the law. Siblings that were chosen, such as the most probable
ones, make a `point` tree.

Wrong combinations are refused here: a `point` proposal has no q, every other law needs one, and q
is fp32 or fp64, because a draw from a half-precision softmax is not a draw from q. What only the
values show, a q that is no distribution or siblings that were not drawn from one q, is refused at
once on a CPU. Elsewhere reading values would synchronise, so the engine reads them with the round's
outcome. A q with NaN or infinity comes from a broken drafter: nothing of it is accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from decode.speculation.tree import chain, check_parents, depths, nodes_within

Law = Literal["point", "independent", "causal", "unmasked"]
LAWS: tuple[str, ...] = get_args(Law)
Siblings = Literal["iid", "independent", "without_replacement"]
SIBLINGS: tuple[str, ...] = get_args(Siblings)


MASS = 1e-4
"""How far from 1 the sum of a row of q may be. torch's own softmax in fp32 is off by up to 5e-5
over 256,000 ids. The output's distribution changes by no more, in total variation."""
SEEN_AT_ONCE = frozenset({"cpu"})
"""Devices whose values can be read without waiting."""
FAULTS = (
    "",
    "each row of q must be a distribution: not below 0, sum 1 (processors included)",
    "siblings drawn {siblings} share one q, and these were drawn from different ones: say "
    "siblings='independent'",
)


def _improper(probs: Tensor) -> Tensor:
    """Bool, a scalar: whether a row whose sum is finite is not a distribution."""
    if not probs.numel():
        return probs.new_zeros((), dtype=torch.bool)
    mass = probs.sum(1)
    return ((((mass - 1).abs() > MASS) | (probs.amin(1) < 0)) & mass.isfinite()).any()


def _improper_at_once(probs: Tensor) -> bool:
    """`_improper` on a CPU, where an operator takes longer than the sums of all rows."""
    if not probs.numel():
        return False
    rows = zip(probs.sum(1).tolist(), probs.amin(1).tolist(), strict=True)
    return any(math.isfinite(mass) and (abs(mass - 1) > MASS or least < 0) for mass, least in rows)


@dataclass(frozen=True)
class DraftProbs:
    """q, over the whole vocabulary of the target or over some of it.

    Args:
        probs: fp32 or fp64, each row a distribution: (K, V), or (K, S) over the token ids `ids`.
        ids: int64 (S,), distinct, of a pruned draft vocabulary; q is zero elsewhere. None = the
            whole vocabulary.

    Raises:
        ValueError: another shape or type, or, on a CPU, a row that is no distribution.
    """

    probs: Tensor
    ids: Tensor | None = None

    def __post_init__(self) -> None:
        if self.probs.dim() != 2:
            shape = "(K, V)" if self.ids is None else "(K, S)"
            raise ValueError(f"q must be {shape}, not {tuple(self.probs.shape)}")
        if self.probs.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"q must be float32 or float64, not {self.probs.dtype}: draw and test in full "
                "precision"
            )
        if self.probs.device.type in SEEN_AT_ONCE and _improper_at_once(self.probs):
            raise ValueError(FAULTS[1])
        if self.ids is not None and self.ids.shape != self.probs.shape[1:]:
            columns = self.probs.shape[1]
            raise ValueError(
                f"{columns} columns of q need as many ids, not {tuple(self.ids.shape)}"
            )

    def __len__(self) -> int:
        return self.probs.shape[0]

    def take(self, rows: Tensor | slice) -> DraftProbs:
        """Some of the rows."""
        return replace(self, probs=self.probs[rows])

    def dense(self, vocab_size: int) -> Tensor:
        """Over the whole vocabulary, (K, V)."""
        if self.ids is None:
            return self.probs
        dense_KV = self.probs.new_zeros(len(self), vocab_size)
        return dense_KV.index_add_(1, self.ids, self.probs)


@dataclass(frozen=True)
class Proposal:
    """K drafted tokens for one prefix, and how they were drawn.

    Args:
        tokens_K: int64 ids in the target's vocabulary.
        law: how they were drawn, see the module's docstring. `independent` and `causal` rows of q
            are what each token was actually drawn from, processors included.
        q: None for `point`, needed by every other law. One row per token; of siblings drawn without
            replacement each row is the q of the first draw.
        steps_K: the step at which each position was unmasked; needed by `unmasked` and by no other
            law.
        parents: a tree: the index of every token's parent, before its own, -1 for the prefix itself
            (decode/speculation/tree.py). None = a chain.
        siblings: how tokens with one parent were drawn; needed where `independent` or `causal`
            drafts branch.
        state_only: of `unmasked` drafts: the positions that a step unmasks, remasks or leaves out
            were decided before that step drew its values. (An order by the confidence of sampled
            tokens is not state-only.)

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
        if self.law not in LAWS:
            raise ValueError(f"unknown law {self.law!r} (one of: {', '.join(LAWS)})")
        if self.tokens_K.dim() != 1 or self.tokens_K.dtype != torch.int64:
            raise ValueError(
                f"drafted tokens must be int64 (K,), not {self.tokens_K.dtype} "
                f"{tuple(self.tokens_K.shape)}"
            )
        if (self.q is None) != (self.law == "point"):
            raise ValueError(
                f"law {self.law!r} {'needs the q of its draw' if self.q is None else 'has no q'}"
            )
        if self.q is not None and len(self.q) != len(self):
            raise ValueError(f"{len(self)} drafted tokens, but {len(self.q)} rows of q")
        if (self.steps_K is None) != (self.law != "unmasked"):
            raise ValueError(
                f"law {self.law!r} {'needs' if self.steps_K is None else 'has no'} unmask steps"
            )
        if self.state_only and self.law != "unmasked":
            raise ValueError(f"state_only belongs to unmasked drafts, not to law {self.law!r}")
        if self.parents is not None:
            if self.law == "unmasked":
                raise ValueError(
                    "a tree of law 'unmasked': drafts unmasked out of order cannot branch"
                )
            if len(self.parents) != len(self):
                raise ValueError(f"{len(self)} drafted tokens, but {len(self.parents)} parents")
            check_parents(self.parents)
        if (self.siblings is not None) != (self.law != "point" and self.branches):
            what = (
                "need to say how siblings were drawn"
                if self.siblings is None
                else "have no siblings"
            )
            raise ValueError(f"these drafts of law {self.law!r} {what}{self._shape}")
        if self.siblings is not None and self.siblings not in SIBLINGS:
            raise ValueError(f"unknown siblings {self.siblings!r} (one of: {', '.join(SIBLINGS)})")
        if (
            self.q is not None
            and self.tokens_K.device.type in SEEN_AT_ONCE
            and bool(self._unlike())
        ):
            raise ValueError(self.fault_in(2))

    def faults(self) -> Tensor | None:
        """What is wrong with the values: an index into `FAULTS`, (1,), int64; None where they were
        checked at once."""
        if self.q is None or self.q.probs.device.type in SEEN_AT_ONCE:
            return None
        return torch.where(_improper(self.q.probs), 1, 2 * self._unlike().long())[None]

    def fault_in(self, number: int) -> str:
        """The fault of that number, in words; "" for 0."""
        return FAULTS[number].format(siblings=self.siblings)

    def _unlike(self) -> Tensor:
        """Bool, a scalar: whether siblings that are said to share one q have different ones."""
        no = self.tokens_K.new_zeros((), dtype=torch.bool)
        if self.q is None or self.siblings in (None, "independent"):
            return no
        first = {parent: i for i, parent in reversed(list(enumerate(self.tree)))}
        pairs = [(i, first[parent]) for i, parent in enumerate(self.tree) if i != first[parent]]
        if not pairs:
            return no
        own, other = torch.tensor(pairs, device=self.q.probs.device).T
        a_PV, b_PV = self.q.probs[own], self.q.probs[other]
        return ((a_PV != b_PV) & ~(a_PV.isnan() | b_PV.isnan())).any()

    @property
    def _shape(self) -> str:
        return "" if self.parents is None else f" (parents {self.parents})"

    @property
    def tree(self) -> tuple[int, ...]:
        """The parents of all tokens; those of a chain too."""
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

    def cut(self, length: int) -> Proposal:
        """The first `length` tokens; of a tree, those of at most that depth. The law stays true if
        `length` was chosen without looking at the values drawn."""
        if length >= self.depth:
            return self
        if self.parents is not None:
            kept = nodes_within(self.parents, length)
            place = {old: new for new, old in enumerate(kept)}
            parents = tuple(place.get(self.parents[i], -1) for i in kept)
            at = torch.tensor(kept, dtype=torch.int64, device=self.tokens_K.device)
            q = None if self.q is None else self.q.take(at)
            siblings = self.siblings if len(set(parents)) < len(parents) else None
            return replace(
                self, tokens_K=self.tokens_K[at], parents=parents, q=q, siblings=siblings
            )
        q = None if self.q is None else self.q.take(slice(length))
        steps_K = None if self.steps_K is None else self.steps_K[:length]
        return replace(self, tokens_K=self.tokens_K[:length], q=q, steps_K=steps_K)


NO_DRAFTS = Proposal(torch.zeros(0, dtype=torch.int64), "point")
