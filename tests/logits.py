"""Random drafters and targets whose statistics are known in float64."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from align.losses.divergence_gradients import TargetPlaces, target_places
from align.losses.divergences import DraftRows, RowStatistics, row_statistics
from specalign.diffusion.noise import LOG_ZERO


@dataclass
class Case:
    """A random drafter and target; statistics of its rows in fp32, and in float64 by a plain formula."""

    rows: DraftRows
    places: TargetPlaces
    head_VD: Tensor
    draft_vocab: Tensor | None
    shape: tuple[int, int]
    temperature: float = 1.0
    bias_V: Tensor | float = 0.0
    """What `finish` adds to the target's logits."""

    @property
    def head_VdD(self) -> Tensor:
        ids = self.draft_vocab
        return self.head_VD if ids is None else self.head_VD[ids].contiguous()

    @property
    def leaves(self) -> list[Tensor]:
        given = (self.rows.hidden_RD, self.rows.z_Rr, self.rows.basis_rV)
        return [x for x in given if x is not None]

    def statistics(self, chunk_rows: int = 1024) -> RowStatistics:
        """With a confidence head that sums hidden states."""
        found = row_statistics(
            self.rows, self.places, self.head_VdD, self.draft_vocab, self.shape, chunk_rows
        )
        return replace(found, confidence=self.rows.hidden_RD.sum(-1).view(self.shape))

    def reference(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Every statistic in float64 over the whole vocabulary, q = 0 outside the draft vocabulary; and its leaves."""
        leaves = [x.detach().double().requires_grad_() for x in self.leaves]
        logits = leaves[0] @ self.head_VdD.double().t()
        if len(leaves) > 1:
            logits = logits + leaves[1] @ leaves[2]
        q_draft = logits.softmax(-1)
        vocabulary = len(self.head_VD)
        ids = torch.arange(vocabulary) if self.draft_vocab is None else self.draft_vocab
        q = torch.zeros(len(q_draft), vocabulary, dtype=torch.float64).index_copy(1, ids, q_draft)
        target = self.places.hidden_PD[self.rows.place_R].double() @ self.head_VD.double().t()
        target = target + self.bias_V
        p = (target / self.temperature).softmax(-1)
        inside = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
        safe_q = torch.where(inside, q, 1.0)
        label = self.places.next_P[self.rows.place_R]
        q_label = safe_q.gather(1, label[:, None])[:, 0]
        values = {
            "log_q_label": torch.where(inside[label], q_label.log(), LOG_ZERO),
            "forward_kl": torch.where(inside, p * (p / safe_q).log(), 0.0).sum(-1),
            "total_variation": (p - q).abs().sum(-1) / 2,
            "acceptance": torch.minimum(p, q).sum(-1),
            "p_label": p.gather(1, label[:, None])[:, 0],
            "match": (q.argmax(-1) == p.argmax(-1)).double(),
            "greedy_label": (label == p.argmax(-1)).double(),
        }
        return {name: value.view(self.shape) for name, value in values.items()}, leaves


def make(
    seed: int = 0,
    anchors: int = 6,
    block: int = 3,
    vocabulary: int = 17,
    kept: int | None = None,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
    temperature: float = 1.0,
    biased: bool = False,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    width, positions, rows = 5, 11, anchors * block
    head = torch.randn(vocabulary, width, generator=g).to(dtype)
    hidden_p = torch.randn(positions, width, generator=g).to(dtype)
    following = torch.randint(0, vocabulary, (positions,), generator=g)
    draft_vocab = torch.randperm(vocabulary, generator=g)[:kept].sort().values if kept else None
    bias = torch.linspace(-1, 1, vocabulary) if biased else 0.0

    def logits(x: Tensor) -> Tensor:
        return x.float() @ head.float().t() + bias

    def finish(x: Tensor, ids: Tensor | None) -> Tensor:
        return x + (bias if ids is None else bias[ids])

    options = {"temperature": temperature, "finish": finish if biased else None}
    places = target_places(hidden_p, following, logits, chunk=4, **options)
    hidden = torch.randn(rows, width, generator=g).to(dtype).requires_grad_()
    where = torch.randint(0, positions, (rows,), generator=g)
    draft = DraftRows(hidden, where, where.numpy())
    if rank:
        draft.z_Rr = torch.randn(rows, rank, generator=g).to(dtype).requires_grad_()
        draft.basis_rV = torch.randn(rank, kept or vocabulary, generator=g).requires_grad_()
    return Case(draft, places, head, draft_vocab, (anchors, block), temperature, bias)


DIFFERENTIABLE = ("log_q_label", "forward_kl", "total_variation")


KINDS = {
    "full": {},
    "pruned": {"kept": 9},
    "one_token": {"kept": 1},
    "markov": {"rank": 3},
    "pruned_markov": {"kept": 8, "rank": 2},
    "warm_target": {"temperature": 0.7},
    "hot_target": {"temperature": 2.0, "kept": 9, "rank": 2},
    "finished": {"temperature": 0.7, "biased": True},
    "finished_pruned": {"kept": 9, "biased": True},
}
"""Options of `make`, by name."""
