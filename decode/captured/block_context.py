"""What a block drafter reads in captured rounds, of all requests at once."""

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.captured.drafting import Observation
from decode.captured.state import RowState
from specalign.lm.cache import KVCache, Slots
from specalign.lm.model import TargetOutput
from specalign.models.block import BlockDrafter


class BlockContext:
    """What a block drafter reads of all requests: the target's last hidden state before each block,
    and for `taps` its own keys and values of the text."""

    def __init__(self, network: BlockDrafter, state: RowState) -> None:
        config, weight = network.config, network.norm.weight
        rows, device = state.shape.rows, weight.device
        self.network = network
        self.before_BD = torch.zeros(rows, config.hidden_size, dtype=weight.dtype, device=device)
        self.own = network.new_context_cache(rows, state.shape.capacity)
        # not the C kernels' own matrices: their products are invisible to a graph
        self.head_VdD = network.head_weight_VdD.to(weight.dtype)
        self.basis_Vr = None if network.markov is None else network.markov.basis_Vr()
        self._reading: dict[int, KVCache] = {}

    def read_prompt(self, row: int, output: TargetOutput) -> None:
        self.before_BD[row] = output.hidden_BLD[0, -1].to(self.before_BD.dtype)
        if self.own is not None:
            if row not in self._reading:
                self._reading[row] = self.own.row(row)
            view, count = self._reading[row], output.hidden_BLD.shape[1]
            positions = torch.arange(view.length, view.length + count, device=self.before_BD.device)
            self.network.write_context(view, output.taps_BLFD, positions[None])
            view.advance(count)

    def clear(self, row: int) -> None:
        self._reading.pop(row, None)

    def observe(self, state: RowState, seen: Observation) -> None:
        rows_B1 = state.rows_B1
        before_BD = seen.hidden_BMD[rows_B1[:, 0], seen.end_B].to(self.before_BD.dtype)
        self.before_BD.copy_(torch.where(state.active_B1, before_BD, self.before_BD))
        if self.own is not None:
            assert seen.taps_BMFD is not None
            at_M = torch.arange(seen.path_BM.shape[1], device=seen.end_B.device)
            positions_BM = state.counter("length")[:, None] + at_M
            self.own.slots = Slots(rows_B1, positions_BM, state.shape.capacity)
            self.network.write_context(
                self.own, seen.taps_BMFD[rows_B1, seen.path_BM], positions_BM
            )

    def hidden_BKD(self, state: RowState, end: int) -> Tensor:
        """Hidden states of the drafts of all rows, (B, K, D)."""
        network, length_B1 = self.network, state.counter("length")[:, None]
        size = network.config.rows
        masks_BR = torch.full_like(length_B1, network.config.mask_token_id).expand(-1, size - 1)
        tokens_BR = torch.cat((state.counter("last")[:, None], masks_BR), 1)
        x_BRD = network.add_places(network.target.embed(tokens_BR))
        x_BRD = network.add_state(x_BRD, self.before_BD)
        positions_BR = length_B1 + torch.arange(size, device=length_B1.device)
        cos, sin = (t[:, None] for t in network.rotary_tables(x_BRD, positions_BR))
        see_B1S = (torch.arange(end, device=length_B1.device) < length_B1)[:, None]
        cache = state.cache if self.own is None else self.own
        layers = range(len(network.blocks))
        ids = network.config.target_layer_ids if self.own is None else layers
        contexts = [
            (cache.slabs[i].keys[:, :, :end], cache.slabs[i].values[:, :, :end]) for i in ids
        ]
        hidden_BARD = network.run_layers(x_BRD[:, None], cos, sin, contexts, see_B1S)
        return network.select_drafts(hidden_BARD[:, 0])

    def bias_inputs(self, hidden_BKD: Tensor) -> Tensor | None:
        markov = self.network.markov
        return None if markov is None else markov.inputs(hidden_BKD)

    def bias(self, inputs: Tensor, previous: Tensor) -> Tensor:
        """The Markov bias after the tokens `previous` (…), (…, Vd)."""
        markov = self.network.markov
        assert markov is not None and self.basis_Vr is not None
        z = markov.finish(markov.mix(inputs, previous, self.network.target.embed))
        return F.linear(z, self.basis_Vr).float()
