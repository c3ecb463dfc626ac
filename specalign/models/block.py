"""The block drafter: one network that drafts K tokens in one pass over a block [last token, MASK ×
…].

It is conditioned on the target in one of two ways:

- `shared_kv`: layer i starts from a target layer and attends to that layer's own keys and values
  for the context; the target's last hidden state before the block is projected and added to every
  position's input.
- `taps` (DFlash, arXiv 2602.06036): hidden states after chosen target layers are fused, `H_ctx =
  RMSNorm(fc[h_1; …; h_F])`, and every layer computes context keys and values from them. Parameter
  names are the published ones.

The block attends to itself in both directions. Embedding and head are the target's, frozen and not
stored. A block has R rows, of which K draft (`block_layout`, specalign/models/block_config.py):
hidden states that leave this module are those of the K rows.

A variable-prefix drafter (D²SD, arXiv 2606.04446) is the same network also trained over [last
token, x_1..x_j, MASK …]: given the first j drafts it predicts those after them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specalign.common.batch import Anchors, Batch
from specalign.kernels.layers import LayerStack
from specalign.kernels.linear import (
    Matrix,
    RowsLinear,
    copy_together,
    fast_linear,
    few_rows,
    round_weight,
)
from specalign.kernels.replacing import speed_up_linears
from specalign.kernels.tree import DraftHead
from specalign.lm.cache import KVCache
from specalign.lm.model import Target
from specalign.lm.slabs import LayerShape
from specalign.models.block_config import BlockConfig
from specalign.models.block_layers import BlockLayer, ConfidenceHead, RMSNorm
from specalign.models.block_mask import (
    KeysValues,
    Sight,
    can_attend_sparsely,
    make_sparse_mask,
    see_context,
)
from specalign.models.block_stack import draft_head, draft_stack
from specalign.models.markov import MarkovHead
from specalign.models.target_features import TargetFeatures


class BlockDrafter(nn.Module):
    """The network q. Its parameters are the trainable ones; the target is referenced, not owned.

    head_VdD: the head's rows for the draft vocabulary, if they are not the target's.
    `prepare_for_drafting` sets, where it can: `stack` and `tree`, all layers and trees of drafts in
    one call of a C kernel each; `head_matrix`, `basis_matrix`: the head's rows (Vd, D), and the
    Markov basis times its last layer (Vd, r), rounded.
    """

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
        width = config.hidden_size
        self.blocks = [BlockLayer(config, i) for i in range(len(config.init_layer_ids))]
        self.layers = nn.ModuleList(self.blocks)  # under their published names
        self.norm = RMSNorm(width, config.rms_norm_eps)
        sources = len(config.target_layer_ids) if config.context == "taps" else 1
        self.fc = nn.Linear(width * sources, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.register_buffer("draft_vocab", draft_vocab, persistent=draft_vocab is not None)
        if config.own_head != (head_VdD is not None):
            raise ValueError("own_head and the head's rows go together")
        self.register_buffer("head", head_VdD, persistent=head_VdD is not None)
        self.markov: MarkovHead | None = None
        if config.markov_rank:
            sizes = (width, config.markov_rank, self.draft_size, config.vocab_size)
            self.markov = MarkovHead(config.markov_kind, *sizes, config.markov_bias)
        self.confidence = ConfidenceHead(config) if config.confidence_head else None
        self.places = nn.Parameter(torch.zeros(config.rows, width)) if config.places else None
        self._head: Tensor | None = None
        self.stack: LayerStack | None = None
        self.draft_head: DraftHead | None = None
        self.head_matrix: Matrix | None = None
        self.basis_matrix: Matrix | None = None

    @property
    def target(self) -> Target:
        return self._target[0]

    @property
    def draft_size(self) -> int:
        """Vd: how many tokens the drafter can propose."""
        return self.config.draft_vocab_size or self.config.vocab_size

    @property
    def head_weight_VdD(self) -> Tensor:
        """The frozen head's rows for the draft vocabulary."""
        if self.head is not None:
            return self.head
        weight = self.target.head_weight_VD.detach()
        # a sharded target moves after the drafter is made
        if self._head is None or self._head.device != weight.device:
            whole = self.draft_vocab is None
            self._head = weight if whole else weight[self.draft_vocab].contiguous()
        return self._head

    def mask_blocks(self, tokens: Tensor, clean: Tensor | int = 0) -> Tensor:
        """Blocks (…, R) with MASK in place of all but the anchor and `clean` (…) tokens after
        it."""
        steps = torch.arange(tokens.shape[-1], device=tokens.device)
        kept = steps <= (clean[..., None] if isinstance(clean, Tensor) else clean)
        return torch.where(kept, tokens, self.config.mask_token_id)

    def add_places(self, embedded: Tensor) -> Tensor:
        """Embedded blocks (…, R, D) plus the vectors of their places, if the drafter has them."""
        return embedded if self.places is None else embedded + self.places[: embedded.shape[-2]]

    def add_state(self, x: Tensor, hidden_before: Tensor) -> Tensor:
        """Rows (…, R, D) plus the projected target state before each block (…, D); not for
        `taps`."""
        if self.config.context == "taps":
            return x
        return x + self.fc(self.hidden_norm(hidden_before))[..., None, :]

    def select_drafts(self, hidden: Tensor) -> Tensor:
        """The rows that draft, (…, R, D) → (…, K, D)."""
        return hidden[..., 1:, :] if self.config.fill_in else hidden

    def rotary_tables(self, x: Tensor, positions: Tensor, end: int = 0) -> tuple[Tensor, Tensor]:
        """cos and sin at (rows, L) positions, of all layers side by side, (rows, L, w). end: of one
        row, all positions are below it; then the target's cached tables are used if possible."""
        if self.config.rotaries:
            width = self.config.head_dim
            tables = [rotary.tables(positions, width) for rotary in self.config.rotaries]
            cos, sin = (torch.cat(parts, dim=-1).to(x.dtype) for parts in zip(*tables, strict=True))
        elif end and self.target.fused is not None:
            cos, sin = self.target.fused.rotary(x[0], positions[0], end)
            return cos[None], sin[None]
        else:
            cos, sin = self.target.body.rotary_emb(x, positions)
        return cos, sin

    # ---- training ----

    def forward(
        self,
        batch: Batch,
        features: TargetFeatures,
        anchors: Anchors,
        clean_BA: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of all blocks' drafts, (B, A, K, D). `clean_BA`: how many tokens after its
        anchor each block shows; None = none."""
        index, size, length = anchors.index_BA, self.config.rows, batch.tokens_BL.shape[1]
        rows = torch.arange(index.shape[0], device=index.device)[:, None]
        before = features.hidden_BLD[rows, (index - 1).clamp_min(0)]
        tokens = batch.tokens_BL[rows[..., None], anchors.places(length, size)]
        embedded = self._embed(self.mask_blocks(tokens, 0 if clean_BA is None else clean_BA))
        x = self.add_state(self.add_places(embedded), before)
        steps = torch.arange(size, device=index.device)
        positions = batch.positions_BL[rows, index][..., None] + steps
        tables = self.rotary_tables(x, positions.flatten(0, 1))
        cos, sin = (t.unflatten(0, index.shape) for t in tables)
        if self.config.context == "shared_kv":
            contexts = list(zip(features.keys, features.values, strict=True))
        else:
            assert features.taps_BLFD is not None
            contexts = self.context_keys_values(features.taps_BLFD, batch.positions_BL)
        see = self._see_rows(batch, index, contexts[0])
        return self.select_drafts(self.run_layers(x, cos, sin, contexts, see))

    def _see_rows(self, batch: Batch, index_BA: Tensor, context: KeysValues) -> Sight:
        """What the blocks see of packed rows: sparse where flex_attention runs, else dense."""
        c, (keys, values) = self.config, context
        device, dtype, widths = keys.device, keys.dtype, (keys.shape[-1], values.shape[-1])
        if can_attend_sparsely(
            device, dtype, c.num_attention_heads, c.num_key_value_heads, *widths
        ):
            return make_sparse_mask(batch.document_BL, index_BA, c.rows)
        return see_context(batch.document_BL, index_BA)

    def run_layers(
        self, x: Tensor, cos: Tensor, sin: Tensor, contexts: Sequence[KeysValues], see: Sight
    ) -> Tensor:
        """Input rows of blocks (B, A, R, D) → normalised hidden states; `contexts`: each layer's
        keys and values, (B, Hkv, L, d); `see`: what each block sees of them."""
        for layer, context in zip(self.blocks, contexts, strict=True):
            x = layer(x, cos, sin, context, see)
        return self.norm(x)

    def context_keys_values(self, taps_BLFD: Tensor, positions_BL: Tensor) -> list[KeysValues]:
        """`taps` context: each layer's keys and values of the fused features, (B, Hkv, L, d)."""
        fused = self.hidden_norm(self.fc(taps_BLFD.flatten(2)))
        cos, sin = self.rotary_tables(fused, positions_BL)
        return [layer.keys_values(fused, cos, sin) for layer in self.blocks]

    def new_context_cache(self, rows: int, capacity: int) -> KVCache | None:
        """Memory of a `taps` context's keys and values; None for `shared_kv`."""
        c, weight = self.config, self.norm.weight
        if c.context != "taps":
            return None
        shape = LayerShape(c.num_key_value_heads, c.head_dim, c.value_dim or c.head_dim)
        return KVCache([shape] * len(self.blocks), rows, capacity, weight.dtype, weight.device)

    def write_context(self, cache: KVCache, taps_BLFD: Tensor | None, positions_BL: Tensor) -> None:
        """Write a `taps` context's keys and values; the cache's length does not change."""
        assert taps_BLFD is not None
        taps_BLFD = taps_BLFD.to(self.norm.weight.dtype)
        pairs = self.context_keys_values(taps_BLFD, positions_BL)
        for layer, (k, v) in zip(cache.slabs, pairs, strict=True):
            layer.update(k, v)

    def markov_factors(
        self, batch: Batch, anchors: Anchors, hidden_BAKD: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Teacher-forced bias: (z (B, A, K, r), basis (r, Vd)), or None without a Markov head."""
        if self.markov is None:
            return None
        z = self.markov(hidden_BAKD, self._previous_tokens(batch, anchors), self._embed)
        return z, self.markov.basis

    def confidence_logits(
        self, batch: Batch, anchors: Anchors, hidden_BAKD: Tensor
    ) -> Tensor | None:
        """Teacher-forced confidence, (B, A, K), or None; its gradient stays in the head."""
        if self.confidence is None:
            return None
        inputs = self.confidence_inputs(self._previous_tokens(batch, anchors))
        return self.confidence(hidden_BAKD.detach(), inputs.to(hidden_BAKD.dtype)).float()

    def confidence_inputs(self, previous: Tensor) -> Tensor:
        """The confidence head's inputs from the previous tokens, (…) → (…, w), constants."""
        if self.config.confidence_input == "markov":
            assert self.markov is not None and self.markov.table is not None
            return self.markov.table(previous).detach()
        embedded = self._embed(previous)
        return embedded[..., :0] if self.config.confidence_input == "hidden" else embedded

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens).detach()

    def _previous_tokens(self, batch: Batch, anchors: Anchors) -> Tensor:
        """The tokens before those that the rows predict, (B, A, K)."""
        rows = torch.arange(anchors.index_BA.shape[0], device=batch.tokens_BL.device)[:, None, None]
        return batch.tokens_BL[rows, anchors.places_BAK(batch.tokens_BL.shape[1])]

    # ---- drafting ----

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits before any Markov bias, fp32, (…, D) → (…, Vd). Without gradients."""
        head = self.head_matrix or Matrix(self.head_weight_VdD.to(hidden.dtype))
        return few_rows(hidden.contiguous(), *head).float()

    @torch.no_grad()
    def prepare_for_drafting(self) -> None:
        """Replace the linear layers by those that are fastest for few rows on this CPU, in int8. It
        may change drafts, never the distribution of the output."""
        device, dtype = self.target.device, self.norm.weight.dtype
        kept = torch.int8 if fast_linear(dtype, device) is RowsLinear else dtype
        head, basis = round_weight(self.head_weight_VdD, kept), None
        if self.markov is not None:  # one product less per token: basis ∘ out
            basis = round_weight(self.markov.basis_Vr(folded=True), kept)
        if not speed_up_linears(self, dtype, device, torch.int8):
            return
        if kept == torch.int8:  # else the head may be the target's own
            head, *rest = copy_together(*(m for m in (head, basis) if m is not None))
            basis = rest[0] if rest else None
        self.head_matrix, self.basis_matrix = head, basis
        self.stack = draft_stack(self)
        self.draft_head = draft_head(self, head, basis)
