"""One request's state of a block drafter: drafts after the cached context."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from specalign.kernels.gradients import without_gradients
from specalign.kernels.layers import RepeatedCall, Rows
from specalign.kernels.linear import MOST_ROWS, Matrix, few_rows
from specalign.lm.cache import KVCache
from specalign.lm.fused import memory_of
from specalign.lm.slabs import LayerShape
from specalign.models.block import BlockDrafter, KeysValues


class BlockSession:
    """One request's drafting state: the context that the drafter reads, in step with the target's
    cache.

    Call `observe` after every target forward whose first `kept` tokens are committed and in the
    cache; then `hidden` drafts after the cache's `length` positions. Batch of one.
    """

    def __init__(self, drafter: BlockDrafter, cache: KVCache, capacity: int) -> None:
        self.drafter, self.cache = drafter, cache
        self.before: Tensor | None = None
        config = drafter.config
        self.passes = 2 if config.self_conditioning else 1
        """Over a block: each after the first reads the estimates of the previous one."""
        # rows are vocabulary entries: the fastest layout for a product with one row
        self.basis: Matrix | None = None
        if drafter.markov is not None:
            rounded = drafter._rounded
            self.basis = Matrix(drafter.markov.basis_Vr()) if rounded is None else rounded.basis
        self._block: Tensor | None = (
            None  # the embedded block, its first token to be filled in, (1, R, D)
        )
        self._repeated: RepeatedCall | None = None
        self._fused, self._layers = drafter.target.fused, tuple(config.target_layer_ids)
        self.own: KVCache | None = None  # taps: the drafter's keys and values of the context
        if config.context == "taps":
            value = config.value_dim or config.head_dim
            shape = LayerShape(config.num_key_value_heads, config.head_dim, value)
            weight = drafter.norm.weight
            self.own = KVCache(
                [shape] * len(drafter.layers), 1, capacity, weight.dtype, weight.device
            )

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs `observe` needs."""
        return () if self.own is None else self._layers

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
        """Hidden states (K, D) of the drafts after `last_token`, which follows the cached
        context."""
        drafter = self.drafter
        assert self.before is not None
        if self._block is None:
            tokens = torch.zeros(
                1, drafter.config.rows, dtype=torch.int64, device=self.before.device
            )
            self._block = drafter.target.embed(drafter.masked(tokens))
        if (found := self._in_one_call(last_token)) is not None:
            return found
        last = drafter.target.embed(torch.tensor([[last_token]], device=self.before.device))
        return self._draft(torch.cat((last, self._block[:, 1:]), dim=1))[0]

    def _in_one_call(self, last_token: int) -> Tensor | None:
        """`hidden` by a prepared call of the C kernel, for `shared_kv` and one pass; else None."""
        call, fused, start = self._repeated, self._fused, self.cache.length
        if self.passes > 1 or fused is None:
            return None
        if call is None or self.cache.views.get(self._layers) is not call.memory:
            call = self._repeated = self._prepare_call()
        if call is None or (tables_2Sw := fused.tables(start + call.rows)) is None:
            return None
        assert self.before is not None
        return self.drafter.select_drafts(call(last_token, self.before, tables_2Sw, start))

    def _prepare_call(self) -> RepeatedCall | None:
        drafter, cache, fused, stack = self.drafter, self.cache, self._fused, self.drafter.stack
        plain = (
            self.own is None
            and drafter.places is None
            and cache.rows == 1
            and not drafter.config.rotaries
        )
        if not plain or fused is None or stack is None or stack.state is None:
            return None
        assert self._block is not None
        block_RD = self._block[0]
        if len(block_RD) > MOST_ROWS:
            return None
        see_RR = _see_own_block(1, len(block_RD), block_RD.device)
        memory = memory_of(cache, self._layers)
        return RepeatedCall(stack, memory, see_RR, block_RD, fused.body.embed_tokens.weight)

    @without_gradients
    def hidden_of_blocks(self, tokens_NR: Tensor) -> Tensor:
        """Hidden states of the drafts of N blocks that all follow the cached context, in one pass:
        (N, K, D).

        The blocks do not see each other. `tokens_NR`: from `BlockDrafter.masked`.
        """
        return self._draft(self.drafter.target.embed(tokens_NR))

    def _draft(self, embedded_NRD: Tensor) -> Tensor:
        """Embedded blocks → hidden states of their drafts, (N, K, D)."""
        drafter, size = self.drafter, embedded_NRD.shape[1]
        assert self.before is not None
        x_NRD = drafter.add_places(embedded_NRD)
        start = (self.cache if self.own is None else self.own).length
        positions_1R = torch.arange(start, start + size, device=x_NRD.device)[None]
        cos_1Rw, sin_1Rw = drafter.cached_tables(x_NRD[:1], positions_1R, start + size)
        state_D = None
        if self.passes == 1 and drafter.stack is not None and drafter.stack.state is not None:
            state_D = self.before[0]  # projected and added by the kernel
        else:
            x_NRD = drafter.add_state(x_NRD, self.before)
        hidden_NRD = self._run_layers(x_NRD, cos_1Rw, sin_1Rw, state_D)
        for _ in range(1, self.passes):
            again_NRD = x_NRD + drafter.estimate_inputs(hidden_NRD)
            hidden_NRD = self._run_layers(again_NRD, cos_1Rw, sin_1Rw)
        return drafter.select_drafts(hidden_NRD)

    def _run_layers(
        self, x_NRD: Tensor, cos_1Rw: Tensor, sin_1Rw: Tensor, state_D: Tensor | None = None
    ) -> Tensor:
        """One pass over the rows of N blocks → normalised hidden states, by the C kernel if it
        takes them. `state_D`: the target's state before them, if the rows do not contain it yet."""
        drafter = self.drafter
        count, size = x_NRD.shape[:2]
        cache, layers = (self.cache, self._layers) if self.own is None else (self.own, None)
        if drafter.stack is not None and count * size <= MOST_ROWS and cache.rows == 1:
            cos_Rw, sin_Rw = cos_1Rw[0], sin_1Rw[0]
            if count > 1:
                cos_Rw, sin_Rw = cos_Rw.repeat(count, 1), sin_Rw.repeat(count, 1)
            see_RR = _see_own_block(count, size, x_NRD.device)
            rows = Rows(memory_of(cache, layers), cache.length, count * size, see_RR, apart=True)
            x_RD = x_NRD.flatten(0, 1)
            return drafter.stack(x_RD, cos_Rw, sin_Rw, [rows], state_D=state_D)[0].view(x_NRD.shape)
        if state_D is not None:
            x_NRD = drafter.add_state(x_NRD, state_D)
        return drafter.run_layers(
            x_NRD[None], cos_1Rw[None], sin_1Rw[None], self._contexts(), None
        )[0]

    def _contexts(self) -> list[KeysValues]:
        """Each layer's keys and values of the context."""
        if self.own is None:
            return [(self.cache.k(i), self.cache.v(i)) for i in self._layers]
        return [(self.own.k(i), self.own.v(i)) for i in range(len(self.drafter.blocks))]

    @without_gradients
    def bias_inputs(self, hidden_KD: Tensor) -> Tensor | None:
        """The inputs of `bias` for all rows at once, one line each, or None without a Markov
        head."""
        markov = self.drafter.markov
        return None if markov is None else markov.inputs(hidden_KD)

    @without_gradients
    def bias(self, input_r: Tensor, previous: Tensor) -> Tensor:
        """The Markov bias on one row's logits after each of the tokens `previous` (…): (…, Vd).
        `input_r`: the row's line of `bias_inputs`, or one line for each token."""
        markov = self.drafter.markov
        assert markov is not None and self.basis is not None
        z = markov.mix(input_r, previous, self.drafter.target.embed)
        # the rounded basis has the last layer multiplied in
        return few_rows(
            z if self.drafter._rounded is not None else markov.finish(z), *self.basis
        ).float()

    @without_gradients
    def confidence(self, hidden_D: Tensor, previous: Tensor) -> float:
        """Predicted probability that one row's draft after `previous` (1,) is accepted if those
        before are."""
        head = self.drafter.confidence
        assert head is not None
        inputs = self.drafter.confidence_inputs(previous).to(hidden_D.dtype)
        return float(head(hidden_D[None], inputs).sigmoid())


@cache
def _see_own_block(count: int, size: int, device: torch.device) -> Tensor:
    """Which rows each row of `count` blocks sees: those of its block, bool (R, R)."""
    block = torch.arange(count, device=device).repeat_interleave(size)
    return block[:, None] == block
