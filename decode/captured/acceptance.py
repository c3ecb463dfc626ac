"""The verification of a captured round: all requests at once, nothing read on the host."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.captured.drafting import Draft
from decode.captured.state import RowState
from decode.speculation.sampling import best, draw_at, probs
from decode.speculation.verifiers import OWN_TOKENS, Verdict, find, resolve

BY_TARGET = OWN_TOKENS - {"gumbel"}
"""Verifiers by the target's own tokens that this engine runs."""
BY_RULE = frozenset({"token", "block", "recursive", "k_seq", "traversal", "hybrid"})


class Path(NamedTuple):
    """end_B: the node where the accepted path ends, 0 = the root. next_B: the token after it.
    used_B: how many uniform numbers the round used."""

    end_B: Tensor
    next_B: Tensor
    used_B: Tensor


def verify(
    state: RowState, verifier: str, draft: Draft, logits_BMV: Tensor, see_BMM: Tensor
) -> Path:
    """Accept a path of each request's drafts, and choose the token after it."""
    root_B1 = torch.zeros_like(state.rows_B1)
    depth_BM = torch.cat((root_B1, draft.depth_BN), 1)
    before = state.before(see_BMM[..., 1:], draft.tokens_BN, depth_BM)
    sampling = state.sampling
    if sampling.greedy:
        chosen_BM = best(logits_BMV, sampling, before, overwrite=True, fixed=True)
        return accept_own_tokens(draft, see_BMM, depth_BM, chosen_BM)
    p_BMV = probs(logits_BMV, sampling, before, overwrite=True, fixed=True)
    if draft.q_BNV is None or verifier in BY_TARGET:
        counts_BM = torch.cat((root_B1 == 0, draft.live_BN), 1)
        chosen_BM = draw_at(p_BMV, state.own_numbers(depth_BM, counts_BM))
        path = accept_own_tokens(draft, see_BMM, depth_BM, chosen_BM)
        return path if draft.drawn_B is None else path._replace(used_B=draft.drawn_B)
    return _accept_by_rule(state, verifier, draft, p_BMV)


def accept_own_tokens(draft: Draft, see_BMM: Tensor, depth_BM: Tensor, chosen_BM: Tensor) -> Path:
    """The deepest node whose path holds the target's own tokens, `chosen_BM` after each node. No two
    siblings are equal, so there is one."""
    same_BN = (draft.tokens_BN == chosen_BM.gather(1, draft.above_BN)) & draft.live_BN
    whole_BM = (same_BN[:, None] | ~see_BMM[..., 1:]).all(-1)
    end_B = torch.where(whole_BM, depth_BM, -1).argmax(1)
    next_B = chosen_BM.gather(1, end_B[:, None])[:, 0]
    return Path(end_B, next_B, torch.zeros_like(end_B))


def _accept_by_rule(state: RowState, verifier: str, draft: Draft, p_BMV: Tensor) -> Path:
    rule = find(verifier).rule
    assert rule is not None and draft.drawn_B is not None
    # without a draft that counts, the token after the text is the target's own
    some_B1 = draft.live_BN.any(1, keepdim=True)
    at_B2 = torch.stack((draft.drawn_B, draft.drawn_B + 1), 1)
    own_B1 = state.own_numbers(torch.zeros_like(some_B1, dtype=torch.int64), ~some_B1)
    u_B2 = torch.maximum(state.uniform(at_B2, some_B1), F.pad(own_B1, (1, 0), value=-1.0))
    verdict: Verdict = resolve(rule(p_BMV, draft.as_drafts()), p_BMV, u_B2)
    return Path(*verdict, draft.drawn_B + 2 * some_B1[:, 0])
