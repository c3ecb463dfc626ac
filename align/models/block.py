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
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from align.common.batch import Anchors, Batch
from align.kernels.layers import LayerStack
from align.kernels.linear import RowsLinear, fast_linear, few_rows, speed_up_linears
from align.kernels.tree import TreeHead
from align.models.block_config import BlockConfig
from align.models.block_layers import BlockLayer, ConfidenceHead, RMSNorm
from align.models.block_stack import draft_stack, drafted, tree_head
from align.models.markov import MarkovHead, VanillaHead, markov_head
from align.target.attention import block_mask
from align.target.cache import KVCache, LayerShape
from align.target.model import Target


@dataclass
class TargetFeatures:
    """What the drafter reads of the target over packed rows, without gradients.

    hidden_BLD: last hidden state; keys, values: per shared layer (B, Hkv, L, d), rotary positions applied; taps_BLFD.
    """

    hidden_BLD: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    taps_BLFD: Tensor | None


@torch.no_grad()
def target_features(target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
    """One frozen forward of the target over packed rows; without a config only the last hidden state."""
    shared = config is not None and config.context == "shared_kv"
    if target.anatomy.recurrent and not _one_document(batch):
        return _each_document(target, batch, config)
    rows, length = batch.tokens_BL.shape
    cache = target.new_cache(rows, length) if shared else None
    output = target.forward(
        batch.tokens_BL,
        cache=cache,
        positions_BL=batch.positions_BL,
        mask=batch.attention_mask(),
        taps=() if shared or config is None else config.target_layer_ids,
        logits=False,
    )
    shared_ids = config.target_layer_ids if config is not None and shared else []
    keys = [cache.k(i) for i in shared_ids] if cache is not None else []
    values = [cache.v(i) for i in shared_ids] if cache is not None else []
    return TargetFeatures(output.hidden_BLD, keys, values, output.taps_BLFD)


def _one_document(batch: Batch) -> bool:
    return len(batch.document_BL) == 1 and bool((batch.document_BL == batch.document_BL[0, 0]).all())


def _each_document(target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
    """`target_features` of a target whose states no mask keeps apart: each document alone; padding gets zeros."""
    whole: TargetFeatures | None = None
    for row, documents in enumerate(batch.document_BL):
        for document in documents.unique().tolist():
            places = (documents == document).nonzero()[:, 0]
            if document < 0:
                continue
            alone = Batch(*(t[row : row + 1, places] for t in vars(batch).values()))
            found = target_features(target, alone, config)
            whole = whole or _zeros(found, batch)
            whole.hidden_BLD[row, places] = found.hidden_BLD[0]
            if whole.taps_BLFD is not None and found.taps_BLFD is not None:
                whole.taps_BLFD[row, places] = found.taps_BLFD[0]
            for mine, its in zip((*whole.keys, *whole.values), (*found.keys, *found.values), strict=True):
                mine[row][:, places] = its[0]
    assert whole is not None
    return whole


def _zeros(one: TargetFeatures, batch: Batch) -> TargetFeatures:
    """Room for a batch's features, of the shapes of one document's."""
    rows, length = batch.tokens_BL.shape

    def room(t: Tensor, place: int = 1) -> Tensor:
        return t.new_zeros(rows, *(length if i == place else n for i, n in enumerate(t.shape) if i))

    taps = None if one.taps_BLFD is None else room(one.taps_BLFD)
    return TargetFeatures(
        room(one.hidden_BLD), [room(k, 2) for k in one.keys], [room(v, 2) for v in one.values], taps
    )


@dataclass
class _RoundedWeights:
    """The weights that `BlockDrafter.prepare_for_drafting` rounds: the head's rows (Vd, D), and the Markov basis with its last linear
    layer multiplied in (Vd, r)."""

    head_VdD: Tensor
    basis_Vr: Tensor | None


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
        """Low-rank updates in training (`align.models.block_checkpoint.with_low_rank`), until they are merged."""
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
        if self._head is None:
            weight = self.target.head_weight_VD.detach()
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
        if self.places is not None:
            embedded = embedded + self.places[: embedded.shape[-2]]
        if self.config.context == "taps":
            return embedded
        return embedded + self.fc(self.hidden_norm(hidden_before))[..., None, :]

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
        weight = self.head_weight_VdD.to(hidden.dtype) if self._rounded is None else self._rounded.head_VdD
        return few_rows(hidden.contiguous(), weight).float()

    @torch.no_grad()
    def prepare_for_drafting(self) -> None:
        """Prepare for drafting on a CPU, irreversibly: linear layers that are fastest for few rows, rounded to bf16 where that
        halves what is read. The rounding may change drafts, never the distribution of the output."""
        target = self.target
        dtype = self.norm.weight.dtype
        if not speed_up_linears(self, dtype, target.device, round_to_bf16=True):
            return
        kept = torch.bfloat16 if fast_linear(dtype, target.device) is RowsLinear else dtype
        basis = None
        if self.markov is not None:  # one product less per token: basis ∘ out
            basis = self.markov.basis_Vr(folded=True).to(kept)
        self._rounded = _RoundedWeights(self.head_weight_VdD.to(kept), basis)
        self.stack = draft_stack(self)
        self.tree = tree_head(self, self._rounded.head_VdD, basis)


class BlockSession:
    """One request's drafting state: the context that the drafter reads, in step with the target's cache.

    Call `observe` after every target forward whose first `kept` tokens are committed and in the cache; then `hidden`
    drafts after the cache's `length` positions. Batch of one.
    """

    def __init__(self, drafter: BlockDrafter, cache: KVCache, capacity: int) -> None:
        self.drafter, self.cache = drafter, cache
        self.before: Tensor | None = None
        config = drafter.config
        self.passes = 2 if config.self_conditioning else 1
        """Over a block: every one after the first sees the estimates of the one before."""
        # rows are vocabulary entries: the fastest layout for a product with one row
        self.basis_Vr: Tensor | None = None
        if drafter.markov is not None:
            rounded = drafter._rounded
            self.basis_Vr = drafter.markov.basis_Vr() if rounded is None else rounded.basis_Vr
        self._masks: Tensor | None = None  # the embedded block after its first token, (1, R − 1, D)
        self.own: KVCache | None = None
        if config.context == "taps":
            shape = LayerShape(
                config.num_key_value_heads, config.head_dim, config.value_dim or config.head_dim
            )
            weight = drafter.norm.weight
            self.own = KVCache([shape] * len(drafter.layers), 1, capacity, weight.dtype, weight.device)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs `observe` needs."""
        return tuple(self.drafter.config.target_layer_ids) if self.own is not None else ()

    @torch.no_grad()
    def observe(self, hidden_BLD: Tensor, taps_BLFD: Tensor | None, kept: int) -> None:
        """Take in the first `kept` ≥ 1 positions of a target forward that are now committed."""
        dtype = self.drafter.norm.weight.dtype
        self.before = hidden_BLD[:, kept - 1].to(dtype)
        if self.own is not None:
            assert taps_BLFD is not None
            start = self.own.length
            positions = torch.arange(start, start + kept, device=hidden_BLD.device)[None]
            pairs = self.drafter.context_keys_values(taps_BLFD[:, :kept].to(dtype), positions)
            for layer, (k, v) in zip(self.own.slabs, pairs, strict=True):
                layer.update(k, v)
            self.own.advance(kept)

    @torch.no_grad()
    def hidden(self, last_token: int) -> Tensor:
        """Hidden states of the drafts of the block that starts at `last_token`, which follows the cached context: (K, D)."""
        drafter = self.drafter
        assert self.before is not None
        if self._masks is None:
            tokens = torch.zeros(1, drafter.config.rows, dtype=torch.int64, device=self.before.device)
            self._masks = drafter.target.embed(drafter.masked(tokens)[:, 1:])
        last = drafter.target.embed(torch.tensor([[last_token]], device=self.before.device))
        x = drafter.conditioned(torch.cat((last, self._masks), dim=1), self.before)
        return self._hidden_of_rows(x[0], 1)[0]

    @torch.no_grad()
    def hidden_of_blocks(self, tokens_NR: Tensor) -> Tensor:
        """Hidden states of the drafts of N blocks that all follow the cached context, in one pass: (N, K, D).

        The blocks do not attend to each other and share the context's keys. `tokens_NR`: from `BlockDrafter.masked`.
        """
        assert self.before is not None
        return self._hidden_of_rows(self.drafter.inputs(tokens_NR, self.before).flatten(0, 1), len(tokens_NR))

    def _hidden_of_rows(self, x_RD: Tensor, count: int) -> Tensor:
        """Input rows of `count` blocks → hidden states of their drafts, (N, K, D)."""
        drafter, x, size = self.drafter, x_RD[None], len(x_RD) // count
        start = self.cache.length if self.own is None else self.own.length
        steps, see_RR = _apart(count, size, x.device)
        cos, sin = drafter.rotary(x, start + steps, start + size)
        hidden = self._through(x, cos, sin, see_RR, count).view(count, size, -1)
        for _ in range(1, self.passes):
            again = x + drafter.estimated(hidden).view_as(x)
            hidden = self._through(again, cos, sin, see_RR, count).view(count, size, -1)
        return drafter.drafting(hidden)

    def _through(self, x: Tensor, cos: Tensor, sin: Tensor, see_RR: Tensor, count: int) -> Tensor:
        """One pass over the input rows of `count` blocks, (1, R, D) → hidden states; `see_RR`: who attends to whom."""
        config, cache = self.drafter.config, self.own
        ids = tuple(config.target_layer_ids)
        if (stack := self.drafter.stack) is not None:
            read, layers = (self.cache, ids) if cache is None else (cache, None)
            if (found := drafted(stack, x[0], cos[0], sin[0], read, layers, see_RR)) is not None:
                return found[None]
        mask = None
        if count > 1:
            start = self.cache.length if cache is None else cache.length
            groups = config.num_attention_heads // config.num_key_value_heads
            mask = block_mask(see_RR, len(see_RR), start, groups, self.drafter.norm.weight.dtype, x.device)
        for i, layer in enumerate(self.drafter.blocks):
            ctx_k, ctx_v = (
                (self.cache.k(ids[i]), self.cache.v(ids[i])) if cache is None else (cache.k(i), cache.v(i))
            )
            x = layer.draft(x, cos, sin, ctx_k, ctx_v, mask)
        return self.drafter.norm(x)

    @torch.no_grad()
    def bias_inputs(self, hidden_KD: Tensor) -> Tensor | None:
        """The inputs of `bias` for all rows at once, a line each (the head's own width), or None without a Markov head."""
        markov = self.drafter.markov
        return None if markov is None else markov.inputs(hidden_KD)

    @torch.no_grad()
    def bias(self, input_r: Tensor, previous: Tensor) -> Tensor:
        """The Markov bias on one row's logits after each of the tokens `previous` (…): (…, Vd). `input_r`: the row's
        line of `bias_inputs`, or one line for each token."""
        markov = self.drafter.markov
        assert markov is not None and self.basis_Vr is not None
        z = markov.mixed(input_r, previous, self.drafter.target.embed)
        # the rounded basis has the last layer multiplied in
        return few_rows(z if self.drafter._rounded is not None else markov.finish(z), self.basis_Vr).float()

    @torch.no_grad()
    def confidence(self, hidden_D: Tensor, previous: Tensor) -> float:
        """Predicted probability, 0..1, that the draft of one row (D,) after the token `previous` (1,) is accepted if those before
        it are."""
        head = self.drafter.confidence
        assert head is not None
        before = self.drafter.before_confidence(previous).to(hidden_D.dtype)
        return float(head(hidden_D[None], before).sigmoid())


@cache
def _apart(count: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The steps of `count` blocks' rows from their beginning, (1, R), and which rows each one sees: those of its block, (R, R)."""
    block = torch.arange(count, device=device).repeat_interleave(size)
    return torch.arange(size, device=device).repeat(count)[None], block[:, None] == block
