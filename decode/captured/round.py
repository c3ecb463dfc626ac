"""One captured round: draft → forward → verify → commit, for all requests at once."""

import torch
from torch import Tensor

from decode.captured.acceptance import Path, verify
from decode.captured.drafting import Draft, Drafting, Observation
from decode.captured.state import RowState
from decode.engine.output import RoundResult


def run_round(state: RowState, drafting: Drafting, verifier: str, end: int) -> None:
    """Run a round of every row. No row is longer than `end` cache entries, the drafts included.
    Changes the state in place; the round's results are in `state.result_BX`."""
    target = state.target
    draft = drafting.draft(state, end)
    see_BMM = draft.see_BMM()
    tokens_BM = torch.cat((state.counter("last")[:, None], draft.tokens_BN), 1)
    root_B1 = torch.zeros_like(tokens_BM[:, :1])
    depth_BM = torch.cat((root_B1, draft.depth_BN), 1)
    if drafting.chains:  # also of drafts that do not count
        depth_BM = torch.arange(tokens_BM.shape[1], device=tokens_BM.device).expand_as(tokens_BM)
    positions_BM, behind_BS = state.place(depth_BM, end, tree=not drafting.chains)
    output = target.forward(
        tokens_BM,
        cache=state.cache,
        positions_BL=positions_BM,
        mask=_mask(see_BMM, behind_BS, drafting.chains),
        taps=drafting.taps,
    )
    assert output.logits_BLV is not None
    path = verify(state, verifier, draft, output.logits_BLV, see_BMM)
    path_BM = _sort_path(see_BMM, path.end_B, drafting.chains)
    if not drafting.chains:
        length_B1 = state.counter("length")[:, None]
        at_M = torch.arange(tokens_BM.shape[1], device=tokens_BM.device)
        state.cache.move_rows(length_B1 + path_BM, length_B1 + at_M)
    seen = Observation(output.hidden_BLD, output.taps_BLFD, path_BM, path.end_B)
    drafting.observe(state, seen)
    _commit(state, draft, tokens_BM, see_BMM, path, path_BM)


def _mask(see_BMM: Tensor, behind_BS: Tensor, chains: bool) -> Tensor:
    """What each new token sees of the cache, bool (B, 1, M, S)."""
    nodes = see_BMM.shape[1]
    if chains:
        at_M1 = torch.arange(nodes, device=behind_BS.device)[:, None]
        return (behind_BS[:, None] <= at_M1)[:, None]
    inside_BS = (behind_BS >= 0) & (behind_BS < nodes)
    index_BMS = behind_BS.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1)
    own_BMS = see_BMM.gather(2, index_BMS) & inside_BS[:, None]
    return (own_BMS | (behind_BS < 0)[:, None])[:, None]


def _sort_path(see_BMM: Tensor, end_B: Tensor, chains: bool) -> Tensor:
    """(B, M): the rows of the path, the root first, and then the others."""
    at_M = torch.arange(see_BMM.shape[1], device=end_B.device)
    if chains:
        return at_M.expand(len(end_B), -1)
    on_BM = see_BMM[torch.arange(len(end_B), device=end_B.device), end_B]
    return torch.where(on_BM, at_M, at_M + len(at_M)).argsort(1)


def _commit(
    state: RowState, draft: Draft, tokens_BM: Tensor, see_BMM: Tensor, path: Path, path_BM: Tensor
) -> None:
    """Append the accepted drafts and the next token, up to the end of the output."""
    rows_B = state.rows_B1[:, 0]
    accepted_B = see_BMM[rows_B, path.end_B].sum(1) - 1
    at_M = torch.arange(tokens_BM.shape[1], device=tokens_BM.device)
    drafts_BM = tokens_BM.gather(1, path_BM).roll(-1, dims=1)
    new_BM = torch.where(at_M == accepted_B[:, None], path.next_B[:, None], drafts_BM)
    ends_BM = state.eos_V[new_BM] & (at_M <= accepted_B[:, None])
    first_end_B = torch.where(ends_BM, at_M, len(at_M)).amin(1)
    count_B = torch.minimum(accepted_B, first_end_B) + 1
    active_B = state.counter("active")
    count_B = count_B * active_B
    last_B = new_BM.gather(1, (count_B - 1).clamp(min=0)[:, None])[:, 0]
    state.append(new_BM, count_B)
    numbers_B2 = torch.stack((count_B, accepted_B * active_B), 1)
    result = (numbers_B2, new_BM, path_BM, draft.tokens_BN, draft.above_BN, draft.depth_BN)
    numbers_BX = torch.cat(result, 1)  # as `read_result` takes it apart
    state.result_BX[:, : numbers_BX.shape[1]].copy_(numbers_BX)
    state.counter("length").add_(count_B)
    state.counter("written").add_(count_B)
    state.counter("cursor").add_(path.used_B * active_B)
    state.counter("last").copy_(torch.where(active_B > 0, last_B, state.counter("last")))
    finished_B = ends_BM.any(1) | (state.counter("written") >= state.counter("limit"))
    active_B.mul_(~finished_B)


def read_result(numbers: list[int], nodes: int) -> RoundResult:
    """The result of a row from its numbers."""
    (count, accepted), rest = numbers[:2], numbers[2:]
    tokens, path, rest = rest[: nodes + 1], rest[nodes + 1 : 2 * nodes + 2], rest[2 * nodes + 2 :]
    drafts, above, depths = rest[:nodes], rest[nodes : 2 * nodes], rest[2 * nodes : 3 * nodes]
    live = [i for i in range(nodes) if depths[i]]
    place = {0: -1, **{i + 1: at for at, i in enumerate(live)}}  # of each row
    return RoundResult(
        tokens[:count],
        accepted,
        max(depths, default=0),
        path=[place[row] for row in path[1 : accepted + 1]],
        drafts=[drafts[i] for i in live],
        parents=tuple(place[above[i]] for i in live),
    )
