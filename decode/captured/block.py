"""Block drafters in a captured round: chains, trees of the most probable paths, and drawn trees."""

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.captured.drafting import Draft, Drafting, Observation, fixed_shape, room_of
from decode.captured.state import RowState
from decode.proposers.block import BlockProposer
from decode.speculation.proposal import Siblings
from decode.speculation.sampling import apply_penalties, best, draw_at, probs
from decode.speculation.tree import chain, depths
from decode.speculation.tree_drafts import Beam, drawn_tree_parents, extend_beam
from specalign.lm.cache import KVCache, Slots
from specalign.lm.model import TargetOutput


class BlockDrafting(Drafting):
    """Base of what drafts with a block drafter.

    before_BD: the target's last hidden state before each block. own: for `taps` the network's keys
    and values of each text; None = it reads the target's.
    """

    chains = False
    before_BD: Tensor
    own: KVCache | None

    def __init__(self, proposer: BlockProposer, nodes: int) -> None:
        self.nodes, self.depth = nodes, proposer.draft_tokens
        self.network, self.ids = proposer.network, proposer.network.draft_vocab
        config, self.layers = self.network.config, self.network.blocks
        self.taps = tuple(config.target_layer_ids) if config.context == "taps" else ()

    def allocate(self, state: RowState) -> None:
        network, shape = self.network, state.shape
        size, weight = network.config.hidden_size, network.norm.weight
        self.before_BD = weight.new_zeros(shape.rows, size)
        self.own = network.new_context_cache(shape.rows, shape.capacity)
        # not the C kernels' own matrices: their products are invisible to a graph
        self._head_VdD = network.head_weight_VdD.to(weight.dtype)
        self._basis_Vr = None if network.markov is None else network.markov.basis_Vr()
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

    def _hidden_BKD(self, state: RowState, end: int) -> Tensor:
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

    def _tokens(self, columns: Tensor) -> Tensor:
        return columns if self.ids is None else self.ids[columns]

    def _logits(self, state: RowState, end: int) -> tuple[Tensor, Tensor | None]:
        """Logits (B, K, Vd) before any bias, and what the bias reads of each position."""
        hidden_BKD = self._hidden_BKD(state, end)[:, : self.depth]
        logits_BKV = F.linear(hidden_BKD, self._head_VdD).float()
        markov = self.network.markov
        return logits_BKV, None if markov is None else markov.inputs(hidden_BKD)

    def _biased(
        self, logits_BKV: Tensor, inputs_BKr: Tensor | None, k: int, above_BP: Tensor
    ) -> Tensor:
        """Logits of position k after each of P tokens, (B, P, Vd), with the Markov bias."""
        logits_B1V, markov = logits_BKV[:, k : k + 1], self.network.markov
        if inputs_BKr is None:
            return logits_B1V.expand(-1, above_BP.shape[1], -1)
        assert markov is not None and self._basis_Vr is not None
        inputs_BPr = inputs_BKr[:, k : k + 1].expand(-1, above_BP.shape[1], -1)
        z_BPr = markov.finish(markov.mix(inputs_BPr, above_BP, self.network.target.embed))
        return logits_B1V + F.linear(z_BPr, self._basis_Vr).float()

    def _dense(self, state: RowState, q_BNV: Tensor) -> Tensor:
        """q over the whole vocabulary."""
        if self.ids is None:
            return q_BNV
        size = state.target.vocab_size
        return q_BNV.new_zeros(*q_BNV.shape[:2], size).index_copy_(2, self.ids, q_BNV)


class BlockChain(BlockDrafting):
    """K tokens in a row: chosen at temperature 0, else drawn from q."""

    chains = True

    def draft(self, state: RowState, end: int) -> Draft:
        logits_BKV, inputs_BKr = self._logits(state, end)
        room_B = room_of(state, self.nodes)
        above_BN, depth_BN = fixed_shape(chain(self.nodes), room_B)
        token_B1, tokens, rows = state.counter("last")[:, None], [], []
        for k in range(self.nodes):
            logits_B1V = self._biased(logits_BKV, inputs_BKr, k, token_B1)
            ahead = torch.full_like(token_B1, k)
            before = state.before(None, token_B1, ahead).columns(self.ids)
            if state.sampling.greedy:
                columns_B1 = best(logits_B1V, state.sampling, before, fixed=True)
            else:
                q_B1V = probs(logits_B1V, state.sampling, before, fixed=True)
                columns_B1 = draw_at(q_B1V, state.uniform(ahead, depth_BN[:, k : k + 1] > 0))
                rows.append(q_B1V)
            token_B1 = self._tokens(columns_B1)
            tokens.append(token_B1)
        q_BNV = self._dense(state, torch.cat(rows, 1)) if rows else None
        return Draft(torch.cat(tokens, 1), above_BN, depth_BN, q_BNV, room_B, chain(self.nodes))


class DrawnTree(BlockDrafting):
    """A tree of fixed shape, every token drawn from q."""

    def __init__(self, proposer: BlockProposer, nodes: int, siblings: Siblings) -> None:
        super().__init__(proposer, nodes)
        self.siblings: Siblings = siblings
        self.parents = drawn_tree_parents(nodes, self.depth)

    def draft(self, state: RowState, end: int) -> Draft:
        logits_BKV, inputs_BKr = self._logits(state, end)
        room_B = room_of(state, self.depth)
        above_BN, depth_BN = fixed_shape(self.parents, room_B)
        level, apart = depths(self.parents), self.siblings == "without_replacement"
        tokens: dict[int, Tensor] = {-1: state.counter("last")[:, None]}
        q: dict[int, Tensor] = {}
        left: dict[int, Tensor] = {}
        order = sorted(range(self.nodes), key=lambda i: (level[i], self.parents[i]))
        for drawn, node in enumerate(order):
            parent = self.parents[node]
            if parent not in q:
                k, ahead = level[node] - 1, torch.full_like(tokens[-1], level[node] - 1)
                logits_B1V = self._biased(logits_BKV, inputs_BKr, k, tokens[parent])
                before = state.before(None, tokens[-1], ahead).columns(self.ids)
                left[parent] = q[parent] = probs(logits_B1V, state.sampling, before, fixed=True)
            at_B1 = torch.full_like(tokens[-1], drawn)
            counts_B1 = depth_BN[:, node : node + 1] > 0
            columns_B1 = draw_at(left[parent], state.uniform(at_B1, counts_B1))
            if apart:
                left[parent] = left[parent].scatter(2, columns_B1[..., None], 0.0)
            tokens[node] = self._tokens(columns_B1)
        tokens_BN = torch.cat([tokens[i] for i in range(self.nodes)], 1)
        q_BNV = self._dense(state, torch.cat([q[parent] for parent in self.parents], 1))
        drawn_B = (depth_BN > 0).sum(1)
        return Draft(tokens_BN, above_BN, depth_BN, q_BNV, drawn_B, self.parents, apart)


class BestPaths(BlockDrafting):
    """The tree of the most probable paths under q, best first: `tree_drafts.best_first` without the
    host."""

    def draft(self, state: RowState, end: int) -> Draft:
        logits_BKV, inputs_BKr = self._logits(state, end)
        room_B1 = room_of(state, self.depth)[:, None]
        scale = state.sampling.temperature or 1.0
        last_B1 = state.counter("last")[:, None]
        beam: Beam | None = None
        for k in range(min(self.depth, self.nodes)):
            above_BP = last_B1 if beam is None else beam.token
            logits_BPV = self._biased(logits_BKV, inputs_BKr, k, above_BP)
            before = state.before(None, last_B1, torch.full_like(last_B1, k)).columns(self.ids)
            logits_BPV = apply_penalties(logits_BPV, state.sampling, before, fixed=True)
            width = min(self.nodes, logits_BPV.shape[-1])
            top = (logits_BPV / scale).log_softmax(-1).topk(width, dim=-1)
            tokens_BPW = self._tokens(top.indices)
            beam = extend_beam(beam, k, top.values, tokens_BPW, self.nodes, room_B1)
        assert beam is not None
        live_BN = beam.log_q > -torch.inf
        return Draft(beam.token, beam.above * live_BN, beam.level * live_BN)
