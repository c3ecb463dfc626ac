"""The block drafter: one network that drafts K tokens in one pass over a block [last token, MASK × …].

It is conditioned on the target, in one of two ways:

- `shared_kv`: layer i is initialised from a target layer and attends to that layer's own keys and values for the
  context; the target's last hidden state before the block is added, projected, to every position's input.
- `taps` (DFlash, arXiv 2602.06036): hidden states after chosen target layers are fused, `H_ctx = RMSNorm(fc[h_1; …;
  h_F])`, and every layer makes context keys and values from them. Parameter names are the published ones.

The block attends to itself in both directions. Embedding and head are the target's, frozen and not stored. A block has R rows,
row r at the place r after the last token. Which of them draft is the config's `block_layout`: in `anchor_first` R = K and row r
predicts the token of place r+1; in `fill_in` R = K+1 and row r ≥ 1 predicts the token of its own place, while row 0 predicts
nothing. Hidden states that leave this file are those of the K rows that draft, the first draft's first.

With self-conditioning the block is read twice: the second pass adds to each position's input what the first one's hidden
state said about the token there. Both depend on the context alone, so q is exact as it is with one pass.

A variable-prefix drafter (D²SD, arXiv 2606.04446) is the same network trained over [last token, x_1..x_j, MASK …] as
well: given the first j drafts it predicts those after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from align.common.batch import Anchors, Batch
from align.kernels.layers import LayerStack
from align.kernels.linear import Matrix, RowsLinear, fast_linear, few_rows, rounded, settled
from align.kernels.replacing import speed_up_linears
from align.kernels.tree import TreeHead
from align.models.block_config import BlockConfig
from align.models.block_layers import BlockLayer, ConfidenceHead, RMSNorm
from align.models.block_stack import draft_stack, tree_head
from align.models.markov import MarkovHead, VanillaHead, markov_head
from align.models.target_features import TargetFeatures
from align.target.model import Target


@dataclass
class _RoundedWeights:
    """The weights that `BlockDrafter.prepare_for_drafting` rounds: the head's rows (Vd, D), and the Markov basis with its last linear
    layer multiplied in (Vd, r)."""

    head: Matrix
    basis: Matrix | None


class BlockDrafter(nn.Module):
    """The network q. Its parameters are the trainable ones; the target is referenced, not owned."""

    draft_vocab: Tensor | None
    head: Tensor | None

    def __init__(
        self,
        config: BlockConfig,
        target: Target,
        draft_vocab: Tensor | None = None,
        head_VdD: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self._target = [target]  # in a list, so that it is not a submodule
        self.blocks = [BlockLayer(config, i) for i in range(len(config.init_layer_ids))]
        self.layers = nn.ModuleList(self.blocks)  # under their published names
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        taps = config.context == "taps"
        self.fc = nn.Linear(
            config.hidden_size * (len(config.target_layer_ids) if taps else 1), config.hidden_size, bias=False
        )
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("draft_vocab", draft_vocab, persistent=draft_vocab is not None)
        if config.own_head != (head_VdD is not None):
            raise ValueError("own_head and the head's rows go together")
        self.register_buffer("head", head_VdD, persistent=head_VdD is not None)
        self.markov = self.new_markov() if config.markov_rank else None
        self.confidence = self.new_confidence() if config.confidence_head else None
        self.places = nn.Parameter(torch.zeros(config.rows, config.hidden_size)) if config.places else None
        self.estimate: nn.Linear | None = None
        if config.self_conditioning:
            self.add_estimate()
        self._head: Tensor | None = None
        self._rounded: _RoundedWeights | None = None
        self.updates: list[Any] = []
        """Low-rank updates in training (`align.models.block_parts.with_low_rank`), until they are merged."""
        self.stack: LayerStack | None = None
        """Its layers in one call, after `prepare_for_drafting`, where they are of that kind."""
        self.tree: TreeHead | None = None
        """Trees of its drafts in one call, likewise."""

    def add_estimate(self) -> None:
        """What a second pass is shown of the first; nothing yet, and nothing is drawn for it."""
        width, device = self.config.hidden_size, self.norm.weight.device
        self.estimate = nn.utils.skip_init(nn.Linear, width, width, bias=False, device=device)
        nn.init.zeros_(self.estimate.weight)

    def estimated(self, hidden: Tensor) -> Tensor:
        """What a pass adds to the next one's input rows, from its hidden states, both (…, R, D): to each token's row what the row
        that predicts it says; the anchor's token is known."""
        assert self.estimate is not None
        predicted = hidden[..., 1:, :] if self.config.fill_in else hidden[..., :-1, :]
        return F.pad(self.estimate(predicted), (0, 0, 1, 0))

    def drafting(self, hidden: Tensor) -> Tensor:
        """Of a block's rows those that draft, (…, R, D) → (…, K, D)."""
        return hidden[..., 1:, :] if self.config.fill_in else hidden

    def new_markov(self) -> MarkovHead:
        """A Markov head after the config, its weights not yet initialised."""
        c = self.config
        return markov_head(
            c.markov,
            c.hidden_size,
            c.markov_rank,
            c.markov_width,
            self.draft_size,
            c.vocab_size,
            c.markov_bias,
        )

    def new_confidence(self) -> ConfidenceHead:
        """A confidence head after the config, at its start."""
        c = self.config
        before = {"": c.hidden_size, "markov": c.markov_rank, "hidden": 0}[c.confidence_input]
        return ConfidenceHead(c.hidden_size, before)

    @property
    def target(self) -> Target:
        return self._target[0]

    @property
    def draft_size(self) -> int:
        """Vd: how many tokens the drafter can propose."""
        return self.config.draft_vocab_size or self.config.vocab_size

    @property
    def head_weight_VdD(self) -> Tensor:
        """The frozen head's rows for the draft vocabulary, (Vd, D): the target's, or those that came with the drafter."""
        if self.head is not None:
            return self.head
        weight = self.target.head_weight_VD.detach()
        if (
            self._head is None or self._head.device != weight.device
        ):  # a target in parts moves after the drafter is made
            self._head = weight if self.draft_vocab is None else weight[self.draft_vocab].contiguous()
        return self._head

    def _tables(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary tables for (rows, L) positions, by the target's own module or one for each layer's kind, (rows, L, w)."""
        if rotaries := self.config.rotaries:
            each = [rotary.tables(positions, self.config.head_dim) for rotary in rotaries]
            cos, sin = (torch.cat(tables, dim=-1).to(x.dtype) for tables in zip(*each, strict=True))
            return cos, sin
        cos, sin = self.target.body.rotary_emb(x, positions)
        return cos, sin

    def rotary(self, x: Tensor, positions_1L: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """`_tables` of one row of positions, all below `end`, out of those that the target keeps, where it does."""
        if (kept := self.target.fused) is None or self.config.rotaries:
            return self._tables(x, positions_1L)
        cos, sin = kept.rotary(x[0], positions_1L[0], end)
        return cos[None], sin[None]

    def inputs(self, tokens: Tensor, hidden_before: Tensor) -> Tensor:
        """Blocks' tokens (…, R) and the target's state before each block (…, D) as input rows, (…, R, D)."""
        return self.conditioned(self.target.embed(tokens).detach(), hidden_before)

    def conditioned(self, embedded: Tensor, hidden_before: Tensor) -> Tensor:
        """Blocks' embedded tokens (…, R, D) with the target's state before each block (…, D) → input rows."""
        placed = self.placed(embedded)
        if self.config.context == "taps":
            return placed
        return placed + self.given(hidden_before)[..., None, :]

    def given(self, hidden_before: Tensor) -> Tensor:
        """What every row of a block is given of the target's state before it, (…, D) → (…, D)."""
        given: Tensor = self.fc(self.hidden_norm(hidden_before))
        return given

    def placed(self, embedded: Tensor) -> Tensor:
        """Blocks' embedded tokens (…, R, D) with what stands for their places, where the drafter has that."""
        return embedded if self.places is None else embedded + self.places[: embedded.shape[-2]]

    def masked(self, tokens: Tensor, clean: Tensor | int = 0) -> Tensor:
        """Blocks (…, R), the anchor first, with MASK in place of all but the anchor and the `clean` (…) tokens after it."""
        steps = torch.arange(tokens.shape[-1], device=tokens.device)
        kept = steps <= (clean[..., None] if isinstance(clean, Tensor) else clean)
        return torch.where(kept, tokens, self.config.mask_token_id)

    def forward(
        self,
        batch: Batch,
        features: TargetFeatures,
        anchors: Anchors,
        clean_BA: Tensor | None = None,
        conditioned_BA: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of all blocks' drafts, (B, A, K, D), ready for the head.

        `clean_BA`: how many tokens after its anchor each block shows; None = none of them. `conditioned_BA`: with
        self-conditioning, the blocks whose second pass sees the first one's estimates; None = all, as in decoding.
        """
        index, size = anchors.index_BA, self.config.rows
        rows = torch.arange(index.shape[0], device=index.device)[:, None]
        before = features.hidden_BLD[rows, (index - 1).clamp_min(0)]
        tokens = batch.tokens_BL[rows[..., None], anchors.places(batch.tokens_BL.shape[1], size)]
        x = self.inputs(self.masked(tokens, 0 if clean_BA is None else clean_BA), before)
        positions = batch.positions_BL[rows, index][..., None] + torch.arange(size, device=index.device)
        cos, sin = (t.unflatten(0, index.shape) for t in self._tables(x, positions.flatten(0, 1)))
        places = torch.arange(batch.tokens_BL.shape[1], device=index.device)
        see = (places < index[..., None]) & (
            batch.document_BL[:, None, :] == batch.document_BL[rows, index][..., None]
        )
        contexts = self._training_context(batch, features)

        def through(x: Tensor) -> Tensor:  # all R rows
            for layer, context in zip(self.blocks, contexts, strict=True):
                x = layer(x, cos, sin, context, see)
            return self.norm(x)

        if self.estimate is None:
            return self.drafting(through(x))
        with torch.no_grad():  # an estimate is an input like any other
            first = through(x)
        added = self.estimated(first)
        if conditioned_BA is not None:
            added = added * conditioned_BA[..., None, None]
        return self.drafting(through(x + added))

    def _training_context(self, batch: Batch, features: TargetFeatures) -> list[tuple[Tensor, Tensor]]:
        if self.config.context == "shared_kv":
            return list(zip(features.keys, features.values, strict=True))
        assert features.taps_BLFD is not None
        return self.context_keys_values(features.taps_BLFD, batch.positions_BL)

    def context_keys_values(self, taps_BLFD: Tensor, positions_BL: Tensor) -> list[tuple[Tensor, Tensor]]:
        """`taps` context: each layer's keys and values of the fused features, (B, Hkv, L, d)."""
        fused = self.hidden_norm(self.fc(taps_BLFD.flatten(2)))
        cos, sin = self._tables(fused, positions_BL)
        return [layer.keys_values(fused, cos, sin) for layer in self.blocks]

    def markov_factors(
        self, batch: Batch, anchors: Anchors, hidden_BAKD: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Teacher-forced low-rank bias of every row: (z (B, A, K, r), basis (r, Vd)), or None without a Markov head."""
        if self.markov is None:
            return None
        z = self.markov(hidden_BAKD, self._previous(batch, anchors), self._embed)
        return z, self.markov.basis

    def confidence_logits(self, batch: Batch, anchors: Anchors, hidden_BAKD: Tensor) -> Tensor | None:
        """Teacher-forced confidence of every row, (B, A, K), or None without that head. Its gradient stays there."""
        if self.confidence is None:
            return None
        before = self.before_confidence(self._previous(batch, anchors))
        return self.confidence(hidden_BAKD.detach(), before.to(hidden_BAKD.dtype)).float()

    def before_confidence(self, previous: Tensor) -> Tensor:
        """What the confidence head reads of the tokens before, (…) → (…, w), constants."""
        kind = self.config.confidence_input
        if kind == "markov":
            assert isinstance(self.markov, VanillaHead)
            return self.markov.table(previous).detach()
        embedded = self._embed(previous)
        return embedded[..., :0] if kind == "hidden" else embedded

    def _embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings, (…) → (…, D), constants."""
        return self.target.embed(tokens).detach()

    def _previous(self, batch: Batch, anchors: Anchors) -> Tensor:
        """The tokens before those that the rows predict, (B, A, K)."""
        rows = torch.arange(anchors.index_BA.shape[0], device=batch.tokens_BL.device)[:, None, None]
        return batch.tokens_BL[rows, anchors.places_BAK(batch.tokens_BL.shape[1])]

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits before any Markov bias, fp32, (…, D) → (…, Vd). Without gradients."""
        head = Matrix(self.head_weight_VdD.to(hidden.dtype)) if self._rounded is None else self._rounded.head
        return few_rows(hidden.contiguous(), *head).float()

    @torch.no_grad()
    def prepare_for_drafting(self) -> None:
        """Prepare for drafting on a CPU, irreversibly: linear layers that are fastest for few rows, rounded to int8 where that
        reads a quarter. The rounding may change drafts, never the distribution of the output."""
        target = self.target
        dtype = self.norm.weight.dtype
        kept = torch.int8 if fast_linear(dtype, target.device) is RowsLinear else dtype
        head, basis = rounded(self.head_weight_VdD, kept), None
        if self.markov is not None:  # one product less per token: basis ∘ out
            basis = rounded(self.markov.basis_Vr(folded=True), kept)
        if not speed_up_linears(self, dtype, target.device, torch.int8):
            return
        if kept == torch.int8:  # else the head may be the target's own
            head, *rest = settled(*(m for m in (head, basis) if m is not None))
            basis = rest[0] if rest else None
        self._rounded = _RoundedWeights(head, basis)
        self.stack, self.tree = draft_stack(self), tree_head(self, head, basis)
