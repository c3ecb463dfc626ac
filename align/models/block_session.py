"""One request's state of a block drafter: drafts after the cached context."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from align.kernels.gradients import without_gradients
from align.kernels.layers import RepeatedCall
from align.kernels.linear import MOST_ROWS, Matrix, few_rows
from align.models.block import BlockDrafter
from align.models.block_stack import drafted
from align.target.attention import block_mask
from align.target.cache import KVCache
from align.target.fused import memory_of
from align.target.slabs import LayerShape


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
        self.basis: Matrix | None = None
        if drafter.markov is not None:
            rounded = drafter._rounded
            self.basis = Matrix(drafter.markov.basis_Vr()) if rounded is None else rounded.basis
        self._block: Tensor | None = None  # the embedded block, its first token to be filled in, (1, R, D)
        self._repeated: RepeatedCall | None = None
        self._fused, self._layers = drafter.target.fused, tuple(config.target_layer_ids)
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

    @without_gradients
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

    @without_gradients
    def hidden(self, last_token: int) -> Tensor:
        """Hidden states of the drafts of the block that starts at `last_token`, which follows the cached context: (K, D)."""
        drafter = self.drafter
        assert self.before is not None
        if self._block is None:
            tokens = torch.zeros(1, drafter.config.rows, dtype=torch.int64, device=self.before.device)
            self._block = drafter.target.embed(drafter.masked(tokens))
        if (found := self._in_one_call(last_token)) is not None:
            return found
        last = drafter.target.embed(torch.tensor([[last_token]], device=self.before.device))
        embedded = torch.cat((last, self._block[:, 1:]), dim=1)
        if self.passes == 1 and drafter.stack is not None and drafter.stack.state is not None:
            return self._hidden_of_rows(drafter.placed(embedded)[0], 1, self.before[0])[0]
        return self._hidden_of_rows(drafter.conditioned(embedded, self.before)[0], 1)[0]

    def _in_one_call(self, last_token: int) -> Tensor | None:
        """`hidden` with nothing made anew but the input rows; None where a pass is not one call of the drafter's layers after the
        target's own keys, at positions that the target keeps a table of."""
        call, fused, start = self._repeated, self._fused, self.cache.length
        if self.passes > 1 or fused is None:
            return None
        if call is None or self.cache.views.get(self._layers) is not call.memory:
            call = self._repeated = self._laid_out()
        if call is None or (tables_2Sw := fused.tables(start + call.rows)) is None:
            return None
        assert self.before is not None
        return self.drafter.drafting(call(last_token, self.before, tables_2Sw, start))

    def _laid_out(self) -> RepeatedCall | None:
        """The call of `_in_one_call`; None where a pass is not one."""
        drafter, cache, fused = self.drafter, self.cache, self._fused
        stack, plain = drafter.stack, self.own is None and drafter.places is None and cache.rows == 1
        if not plain or fused is None or stack is None or stack.state is None or drafter.config.rotaries:
            return None
        assert self._block is not None
        block_RD = self._block[0]
        if (rows := len(block_RD)) > MOST_ROWS:
            return None
        memory, see_RR = memory_of(cache, self._layers), _apart(1, rows, block_RD.device)[1]
        return RepeatedCall(stack, memory, see_RR, block_RD, fused.body.embed_tokens.weight)

    @without_gradients
    def hidden_of_blocks(self, tokens_NR: Tensor) -> Tensor:
        """Hidden states of the drafts of N blocks that all follow the cached context, in one pass: (N, K, D).

        The blocks do not attend to each other and share the context's keys. `tokens_NR`: from `BlockDrafter.masked`.
        """
        assert self.before is not None
        return self._hidden_of_rows(self.drafter.inputs(tokens_NR, self.before).flatten(0, 1), len(tokens_NR))

    def _hidden_of_rows(self, x_RD: Tensor, count: int, state_D: Tensor | None = None) -> Tensor:
        """Input rows of `count` blocks → hidden states of their drafts, (N, K, D). `state_D`: the target's before them, where the rows
        do not hold what it gives them."""
        drafter, x, size = self.drafter, x_RD[None], len(x_RD) // count
        start = self.cache.length if self.own is None else self.own.length
        steps, see_RR = _apart(count, size, x.device)
        cos, sin = drafter.rotary(x, start + steps, start + size)
        hidden = self._through(x, cos, sin, see_RR, count, state_D).view(count, size, -1)
        for _ in range(1, self.passes):
            again = x + drafter.estimated(hidden).view_as(x)
            hidden = self._through(again, cos, sin, see_RR, count).view(count, size, -1)
        return drafter.drafting(hidden)

    def _through(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        see_RR: Tensor,
        count: int,
        state_D: Tensor | None = None,
    ) -> Tensor:
        """One pass over the input rows of `count` blocks, (1, R, D) → hidden states; `see_RR`: who attends to whom."""
        config, cache = self.drafter.config, self.own
        ids = tuple(config.target_layer_ids)
        if (stack := self.drafter.stack) is not None:
            read, layers = (self.cache, ids) if cache is None else (cache, None)
            if (found := drafted(stack, x[0], cos[0], sin[0], read, layers, see_RR, state_D)) is not None:
                return found[None]
        if state_D is not None:
            x = x + self.drafter.given(state_D)
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

    @without_gradients
    def bias_inputs(self, hidden_KD: Tensor) -> Tensor | None:
        """The inputs of `bias` for all rows at once, a line each (the head's own width), or None without a Markov head."""
        markov = self.drafter.markov
        return None if markov is None else markov.inputs(hidden_KD)

    @without_gradients
    def bias(self, input_r: Tensor, previous: Tensor) -> Tensor:
        """The Markov bias on one row's logits after each of the tokens `previous` (…): (…, Vd). `input_r`: the row's
        line of `bias_inputs`, or one line for each token."""
        markov = self.drafter.markov
        assert markov is not None and self.basis is not None
        z = markov.mixed(input_r, previous, self.drafter.target.embed)
        # the rounded basis has the last layer multiplied in
        return few_rows(z if self.drafter._rounded is not None else markov.finish(z), *self.basis).float()

    @without_gradients
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
