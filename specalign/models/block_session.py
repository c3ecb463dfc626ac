"""One request's state of a block drafter: drafts after the cached context."""

from functools import cache

import torch
from torch import Tensor

from specalign.kernels.layers import Rows
from specalign.kernels.linear import MOST_ROWS, Matrix, few_rows
from specalign.kernels.repeated import RepeatedCall
from specalign.lm.cache import KVCache
from specalign.lm.fused import memory_of
from specalign.models.block import BlockDrafter


class BlockSession:
    """One request's drafting state: the context that the drafter reads, in step with the target's
    cache. Batch of one.

    Call `observe` after every target forward whose first `kept` tokens are committed and in the
    cache; then `draft_hidden` drafts after the cache's `length` positions.
    """

    def __init__(self, drafter: BlockDrafter, cache: KVCache, capacity: int) -> None:
        self.drafter, self.cache = drafter, cache
        config, markov = drafter.config, drafter.markov
        self.before: Tensor | None = None
        self.last_1: Tensor  # the token before the drafts, where no C kernel drafts
        # rows are vocabulary entries: the fastest layout for a product with one row
        self.basis = drafter.basis_matrix
        if markov is not None and self.basis is None:
            self.basis = Matrix(markov.basis_Vr())
        self._block_1RD: Tensor | None = None  # embedded, its first token to be filled in
        self._repeated: RepeatedCall | None = None
        self._layers = tuple(config.target_layer_ids)
        self.own = drafter.new_context_cache(1, capacity)  # the drafter's keys and values
        # layers whose outputs `observe` needs
        self.taps: tuple[int, ...] = () if self.own is None else self._layers

    @torch.no_grad()
    def observe(self, hidden_BLD: Tensor, taps_BLFD: Tensor | None, kept: int) -> None:
        """Take in the first `kept` ≥ 1 positions of a target forward that are now committed."""
        dtype = self.drafter.norm.weight.dtype
        self.before = hidden_BLD[:, kept - 1].to(dtype)
        if self.own is not None:
            assert taps_BLFD is not None
            start = self.own.length
            positions = torch.arange(start, start + kept, device=hidden_BLD.device)[None]
            self.drafter.write_context(self.own, taps_BLFD[:, :kept], positions)
            self.own.advance(kept)

    @torch.no_grad()
    def draft_hidden(self, last_token: int) -> Tensor:
        """Hidden states (K, D) of the drafts after `last_token`, which is not in the cache yet."""
        drafter, device = self.drafter, self.drafter.target.device
        if self._block_1RD is None:
            tokens = torch.zeros(1, drafter.config.rows, dtype=torch.int64, device=device)
            self._block_1RD = drafter.target.embed(drafter.mask_blocks(tokens))
        found = self._draft_in_one_call(last_token, self._block_1RD)
        if found is not None:
            return found
        self.last_1 = torch.tensor([last_token], device=device)
        last_11D = drafter.target.embed(self.last_1[None])
        return self._draft(torch.cat((last_11D, self._block_1RD[:, 1:]), dim=1))[0]

    def _draft_in_one_call(self, last_token: int, block_1RD: Tensor) -> Tensor | None:
        """`draft_hidden` by a prepared call of the C kernel, for `shared_kv`; else None."""
        drafter, cache, call = self.drafter, self.cache, self._repeated
        fused, stack, size = drafter.target.fused, drafter.stack, drafter.config.rows
        special = drafter.places is not None or drafter.config.rotaries or cache.rows != 1
        if fused is None or stack is None or stack.state is None or special or size > MOST_ROWS:
            return None
        tables_2Sw = fused.tables(cache.length + size)
        if tables_2Sw is None:
            return None
        if call is None or cache.views.get(self._layers) is not call.memory:
            see_RR, embedding = _see_own_block(1, size, block_1RD.device), fused.body.embed_tokens
            memory = memory_of(cache, self._layers)
            call = RepeatedCall(stack, memory, see_RR, block_1RD[0], embedding.weight)
            self._repeated = call
        assert self.before is not None
        return drafter.select_drafts(call(last_token, self.before, tables_2Sw, cache.length))

    @torch.no_grad()
    def draft_hidden_of_blocks(self, tokens_NR: Tensor) -> Tensor:
        """Hidden states (N, K, D) of the drafts of N blocks `tokens_NR`
        (`BlockDrafter.mask_blocks`) that all follow the cached context and do not see each other,
        in one pass."""
        return self._draft(self.drafter.target.embed(tokens_NR))

    def _draft(self, embedded_NRD: Tensor) -> Tensor:
        """Embedded blocks → hidden states of their drafts, (N, K, D), by the C kernel if
        possible."""
        drafter, stack = self.drafter, self.drafter.stack
        assert self.before is not None
        cache, layers = (self.cache, self._layers) if self.own is None else (self.own, None)
        count, size = embedded_NRD.shape[:2]
        x_NRD = drafter.add_places(embedded_NRD)
        start = cache.length
        positions_1R = torch.arange(start, start + size, device=x_NRD.device)[None]
        cos_1Rw, sin_1Rw = drafter.rotary_tables(x_NRD[:1], positions_1R, start + size)
        if stack is None or count * size > MOST_ROWS or cache.rows != 1:
            x_NRD = drafter.add_state(x_NRD, self.before)
            ids = range(len(drafter.blocks)) if layers is None else layers
            contexts = [(cache.k(i), cache.v(i)) for i in ids]
            tables = cos_1Rw[None], sin_1Rw[None]
            hidden_NRD = drafter.run_layers(x_NRD[None], *tables, contexts, None)[0]
            return drafter.select_drafts(hidden_NRD)
        state_D = None
        if stack.state is not None:
            state_D = self.before[0]  # projected and added by the kernel
        else:
            x_NRD = drafter.add_state(x_NRD, self.before)
        cos_Rw, sin_Rw = cos_1Rw[0], sin_1Rw[0]
        if count > 1:
            cos_Rw, sin_Rw = cos_Rw.repeat(count, 1), sin_Rw.repeat(count, 1)
        see_RR = _see_own_block(count, size, x_NRD.device)
        rows = Rows(memory_of(cache, layers), cache.length, count * size, see_RR, apart=True)
        hidden_RD, _ = stack(x_NRD.flatten(0, 1), cos_Rw, sin_Rw, [rows], state_D=state_D)
        return drafter.select_drafts(hidden_RD.view(x_NRD.shape))

    @torch.no_grad()
    def bias_inputs(self, hidden_KD: Tensor) -> Tensor | None:
        """What `bias` reads of hidden states, one line each, or None without a Markov head."""
        markov = self.drafter.markov
        return None if markov is None else markov.inputs(hidden_KD)

    @torch.no_grad()
    def bias(self, input_r: Tensor, previous: Tensor) -> Tensor:
        """The Markov bias on one row's logits after each of the tokens `previous` (…): (…, Vd).
        `input_r`: the row's line of `bias_inputs`, or one line for each token."""
        markov = self.drafter.markov
        assert markov is not None and self.basis is not None
        z = markov.mix(input_r, previous, self.drafter.target.embed)
        if self.drafter.basis_matrix is None:  # else the last layer is multiplied in
            z = markov.finish(z)
        return few_rows(z, *self.basis).float()

    @torch.no_grad()
    def confidence(self, hidden_D: Tensor, previous: Tensor) -> float:
        """Probability that one row's draft after `previous` (1,) is accepted if those before
        are."""
        head = self.drafter.confidence
        assert head is not None
        inputs = self.drafter.confidence_inputs(previous).to(hidden_D.dtype)
        return float(head(hidden_D[None], inputs).sigmoid())


@cache
def _see_own_block(count: int, size: int, device: torch.device) -> Tensor:
    """Which rows each row of `count` blocks sees: those of its block, bool (R, R)."""
    block = torch.arange(count, device=device).repeat_interleave(size)
    return block[:, None] == block
