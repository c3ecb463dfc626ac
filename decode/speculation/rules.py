"""The rules of verification: deterministic functions of (p, drafts), batched, without host
synchronisation.

    stop_BM    the probability that the accepted path ends at node m (0 = the root: nothing
        accepted)
    rest_BMV   the distribution (unnormalised) of the token after a path that ends there; all zeros
        stand for p

`resolve` (decode/speculation/verifiers.py) draws a node from stop, then the next token from that
node's rest. So the output's distribution can be enumerated exactly: tests/contract/test_laws.py.

p_BMV holds M = N + 1 rows per request: row m is the target's distribution, every processor applied,
after the drafted tokens on the path to node m. Sources: decode/speculation/verifiers.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from decode.speculation.drafts import Drafts, normalise, pick_tokens, put_rows, rows_at
from decode.speculation.tree import path_masks, visit_together


class Outcomes(NamedTuple):
    """`stop_BM` (fp64) and `rest_BMV`, see above."""

    stop_BM: Tensor
    rest_BMV: Tensor


Rule = Callable[[Tensor, Drafts], Outcomes]


def accept_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q) in fp64; 0 where p = 0, whatever q is, and where q is NaN."""
    p, q = p.double(), q.double()
    return torch.where(p < q, p / q, ((p > 0) & (q >= 0)).double())


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """(p − q)₊, unnormalised; p where that is zero everywhere (p = q to rounding)."""
    return fall_back_to_p((p_BV - q_BV).clamp_(min=0), p_BV)


def fall_back_to_p(weights_BV: Tensor, p_BV: Tensor) -> Tensor:
    """The weights; p where they are zero everywhere."""
    return torch.where(weights_BV.sum(-1, keepdim=True) > 0, weights_BV, p_BV)


def verify_in_draw_order(
    p_BMV: Tensor, drafts: Drafts, test: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Outcomes:
    """The outcomes of a rule that tests the children of a node one by one, in draw order.

    `test`: (i, r_BV, above_BN) → the probability (B,) that token i is accepted when it is reached,
    r being what is left of p at its parent, and what is left of it when it is rejected.
    """
    rest_BMV = p_BMV.clone(memory_format=torch.contiguous_format)
    above_BN, live_BN = drafts.above(), drafts.live()
    stop_BM = torch.zeros(p_BMV.shape[:2], dtype=torch.float64, device=p_BMV.device)
    stop_BM[:, 0] = 1.0
    batch = torch.arange(len(p_BMV), device=p_BMV.device)
    for i in range(drafts.size):
        above_B, live_B = above_BN[:, i], live_BN[:, i]
        r_BV = rows_at(rest_BMV, above_B)
        accept_B, left_BV = test(i, r_BV, above_BN)
        accept_B = accept_B * live_B
        reached_B = stop_BM[batch, above_B]
        stop_BM[:, i + 1] = reached_B * accept_B
        stop_BM[batch, above_B] = reached_B * (1 - accept_B)
        if not drafts.whole:
            left_BV = torch.where(live_B[:, None], left_BV, r_BV)
        put_rows(rest_BMV, above_B, left_BV)
    return Outcomes(stop_BM, rest_BMV)


def point(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Point mass: accept x with its probability under what is left of p; rejected, remove it from
    p."""

    def test(i: int, r_BV: Tensor, above_BN: Tensor) -> tuple[Tensor, Tensor]:
        return _try_point(r_BV, drafts.tokens_BN[:, i])

    return verify_in_draw_order(p_BMV, drafts, test)


def _try_point(r_BV: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens' probability under r, normalised (0 where r is zero everywhere); r without
    them."""
    mass_B = r_BV.sum(1, dtype=torch.float64)
    share_B = pick_tokens(r_BV, tokens_B).double() / mass_B
    accept_B = torch.where(mass_B > 0, share_B, 0.0).clamp(max=1.0)
    return accept_B, r_BV.scatter(1, tokens_B[:, None], 0.0)


def select_path(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """SpecDiff-2's self-selection: `point` on the path with the most expected accepted tokens, Σ_m
    Π_(j≤m) p(x_j)."""
    path_BN = _most_expected(p_BMV, drafts)

    def test(i: int, r_BV: Tensor, above_BN: Tensor) -> tuple[Tensor, Tensor]:
        accept_B, left_BV = _try_point(r_BV, drafts.tokens_BN[:, i])
        on_B = path_BN[:, i]
        return accept_B * on_B, torch.where(on_B[:, None], left_BV, r_BV)

    return verify_in_draw_order(p_BMV, drafts, test)


def _most_expected(p_BMV: Tensor, drafts: Drafts) -> Tensor:
    """Bool (B, N): the nodes of that path; among equal paths the one drafted first."""
    above_BN, live_BN = drafts.above(), drafts.live()
    batch = torch.arange(len(p_BMV), device=p_BMV.device)
    joint_BM = torch.ones(p_BMV.shape[:2], dtype=torch.float64, device=p_BMV.device)
    expected_BM = torch.zeros_like(joint_BM)
    for i in range(drafts.size):
        above_B = above_BN[:, i]
        p_B = pick_tokens(rows_at(p_BMV, above_B), drafts.tokens_BN[:, i]).double() * live_BN[:, i]
        joint_BM[:, i + 1] = joint_BM[batch, above_B] * p_B
        expected_BM[:, i + 1] = expected_BM[batch, above_B] + joint_BM[:, i + 1]
    masks_BMN = path_masks(drafts.parents, drafts.size, p_BMV.device)
    return masks_BMN[batch, expected_BM.argmax(1)]


def recursive(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Accept x with min(1, r/q), r = p at first; rejected: r ← (r − q)₊, normalised."""

    def test(i: int, r_BV: Tensor, above_BN: Tensor) -> tuple[Tensor, Tensor]:
        accept_B, left_BV = try_ratio(r_BV, drafts.q_BV(i, above_BN), drafts.tokens_BN[:, i])
        return accept_B, normalise(left_BV)

    return verify_in_draw_order(p_BMV, drafts, test)


def try_ratio(r_BV: Tensor, q_BV: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
    """min(1, r/q) of the tokens, and (r − q)₊. A q with NaN or infinity accepts and removes
    nothing."""
    sound_B = q_BV.sum(1).isfinite()
    accept_B = accept_probability(pick_tokens(r_BV, tokens_B), pick_tokens(q_BV, tokens_B))
    return accept_B * sound_B, torch.where(sound_B[:, None], residual(r_BV, q_BV), r_BV)


def token(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Token verification: chains all positions at once, trees by `recursive`."""
    if not drafts.chains:
        return recursive(p_BMV, drafts)
    tested_BN, sound_BNV, p_BN, q_BN = _on_chains(p_BMV, drafts)
    accept_BN = accept_probability(p_BN, q_BN) * tested_BN
    one_B1 = torch.ones(len(p_BMV), 1, dtype=torch.float64, device=p_BMV.device)
    stop_BM = torch.cat((one_B1, accept_BN.cumprod(1)), 1) * torch.cat((1 - accept_BN, one_B1), 1)
    rest_BMV = p_BMV.clone()
    rest_BMV[:, :-1].sub_(sound_BNV).clamp_(min=0)  # zeros: `resolve` takes p
    return Outcomes(stop_BM, rest_BMV)


def block(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Block verification: trees by `traversal`, chains all positions at once: P_i = min(1,
    P_(i−1)·p/q), S_i = Σ (P_i·p − q)₊ of the next position, h_i = S_i / (S_i + 1 − P_i), at the
    last one P itself; the path ends at the last i whose own test h_i holds."""
    if not drafts.chains:
        return traversal(p_BMV, drafts)
    tested_BN, sound_BNV, p_BN, q_BN = _on_chains(p_BMV, drafts)
    joint = [torch.ones(len(p_BMV), dtype=torch.float64, device=p_BMV.device)]
    for i in range(drafts.size):
        joint.append(accept_probability(joint[-1] * p_BN[:, i], q_BN[:, i]) * tested_BN[:, i])
    joint_BM = torch.stack(joint, 1)
    rest_BMV = p_BMV.clone()
    left_BNV = rest_BMV[:, :-1]
    # after a token that is not tested all of p is left, whatever P is; where zeros are left
    # `resolve` takes p
    scale_BN1 = torch.where(tested_BN, joint_BM[:, :-1], 1.0)[..., None].to(p_BMV.dtype)
    left_BNV.mul_(scale_BN1).sub_(sound_BNV).clamp_(min=0)
    mass_BN = left_BNV.sum(-1, dtype=torch.float64)
    below_BN = mass_BN + (1 - joint_BM[:, :-1])  # so: + 1 first would lose a small mass
    # 0/0 only where the rest is accepted for certain: this node is never reached
    test_BN = torch.where(below_BN > 0, mass_BN / below_BN, 1.0)
    hold_BM = torch.cat((torch.where(tested_BN, test_BN, joint_BM[:, :-1]), joint_BM[:, -1:]), 1)
    hold_BM[:, 0] = 1.0
    open_BM = torch.cat(
        ((1 - hold_BM[:, 1:]).flip(1).cumprod(1).flip(1), torch.ones_like(hold_BM[:, :1])), 1
    )
    return Outcomes(hold_BM * open_BM, rest_BMV)


def _on_chains(p_BMV: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which tokens are real and have a finite q, bool (B, N); q, zero for others; p and q of each
    token, fp64 (B, N)."""
    tokens_BN1, q_BNV = drafts.tokens_BN[..., None], drafts.q()
    p_BN = p_BMV[:, :-1].gather(2, tokens_BN1)[..., 0].double()
    q_BN = q_BNV.gather(2, tokens_BN1)[..., 0].double()
    tested_BN = drafts.live() & q_BNV.sum(-1).isfinite()
    return tested_BN, torch.where(tested_BN[..., None], q_BNV, 0.0), p_BN, q_BN


def k_seq(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """SpecTr's K-SEQ over S i.i.d. siblings: accept min(1, p/(ρq)), ρ from 1 − (1 − β)^S = ρβ with
    β = Σ min(q, p/ρ); after all of them p − min(q, p/ρ)·(1 − (1 − β)^S)/β."""
    above_BN, live_BN = drafts.above(), drafts.live()
    count_BM = torch.zeros(p_BMV.shape[:2], device=p_BMV.device, dtype=torch.float64)
    count_BM.scatter_add_(1, above_BN, live_BN.double())
    siblings_BN = count_BM.gather(1, above_BN).clamp(min=1)
    p_BNV = rows_at(p_BMV, above_BN).double()
    q_BNV = drafts.q().double()
    rho_BN, beta_BN = _inflation(p_BNV, q_BNV, siblings_BN)
    share_BN = torch.where(beta_BN > 0, (1 - (1 - beta_BN) ** siblings_BN) / beta_BN, 0.0)

    def test(i: int, r_BV: Tensor, above_BN: Tensor) -> tuple[Tensor, Tensor]:
        p_BV, q_BV, rho_B, tokens_B = p_BNV[:, i], q_BNV[:, i], rho_BN[:, i], drafts.tokens_BN[:, i]
        accept_B = accept_probability(
            pick_tokens(p_BV, tokens_B), pick_tokens(q_BV, tokens_B) * rho_B
        )
        taken_BV = torch.minimum(q_BV, p_BV / rho_B[:, None]) * share_BN[:, i : i + 1]
        sound_B = q_BV.sum(1).isfinite()
        left_BV = torch.where(sound_B[:, None], residual(p_BV, taken_BV), p_BV)
        return accept_B * sound_B, left_BV.to(r_BV.dtype)

    return verify_in_draw_order(p_BMV, drafts, test)


def _inflation(p_BNV: Tensor, q_BNV: Tensor, siblings_BN: Tensor) -> tuple[Tensor, Tensor]:
    """ρ in [1, S] and its β by bisection, the upper end."""
    low_BN, high_BN = torch.ones_like(siblings_BN), siblings_BN.clone()

    def beta(rho_BN: Tensor) -> Tensor:
        return torch.minimum(q_BNV, p_BNV / rho_BN[..., None]).sum(-1)

    for _ in range(60):
        middle_BN = (low_BN + high_BN) / 2
        beta_BN = beta(middle_BN)
        over_BN = 1 - (1 - beta_BN) ** siblings_BN > middle_BN * beta_BN
        low_BN = torch.where(over_BN, middle_BN, low_BN)
        high_BN = torch.where(over_BN, high_BN, middle_BN)
    return high_BN, beta(high_BN)


def traversal(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Down each branch a(c) = min(1, a(parent)·p/q), from 1 at the root; the first leaf is tested
    with its a. Rejected, it is removed: at its parent S = Σ (a·p − q)₊, p ← (a·p − q)₊ normalised,
    a ← S / (S + 1 − a), and so on with the leaf that is now the first. On a chain this is block
    verification."""
    rest_BMV = p_BMV.clone(memory_format=torch.contiguous_format)
    above_BN = drafts.above()
    B, M = p_BMV.shape[:2]
    batch = torch.arange(B, device=p_BMV.device)
    stop_BM = torch.zeros(B, M, dtype=torch.float64, device=p_BMV.device)
    a_BM = torch.ones_like(stop_BM)
    open_B = torch.ones_like(stop_BM[:, 0])
    # one visit per request: its node is reached from above, or tested as a leaf, or it is done
    for i_B, reached_B, tested_B, any_reached, any_tested in visit_together(
        drafts.parents, p_BMV.device
    ):
        tokens_B, above_B = drafts.tokens_BN[batch, i_B], above_BN[batch, i_B]
        q_BV = drafts.q_BV(i_B, above_BN)
        sound_B = q_BV.sum(1).isfinite()
        a_above_B, a_B = a_BM[batch, above_B], a_BM[batch, i_B + 1]
        if any_reached:
            p_B = rest_BMV[batch, above_B, tokens_B].double()
            ratio_B = accept_probability(a_above_B * p_B, pick_tokens(q_BV, tokens_B))
            a_BM[batch, i_B + 1] = torch.where(reached_B, ratio_B * sound_B, a_B)
        if any_tested:
            stop_BM[batch, i_B + 1] = torch.where(tested_B, open_B * a_B, stop_BM[batch, i_B + 1])
            open_B = torch.where(tested_B, open_B * (1 - a_B), open_B)
            p_BV = rows_at(rest_BMV, above_B)
            left_BV = (p_BV * a_above_B[:, None].to(p_BV.dtype)).sub_(q_BV).clamp_(min=0)
            mass_B = left_BV.sum(1, dtype=torch.float64)
            rejected_B = tested_B & sound_B
            some_B = rejected_B & (mass_B > 0)
            left_BV.div_(mass_B[:, None].to(p_BV.dtype))
            put_rows(rest_BMV, above_B, torch.where(some_B[:, None], left_BV, p_BV))
            denominator_B = mass_B + (1 - a_above_B)
            # 0/0 only where the leaf is accepted for certain: this is never reached
            new_a_B = torch.where(denominator_B > 0, mass_B / denominator_B, 1.0)
            a_BM[batch, above_B] = torch.where(rejected_B, new_a_B, a_above_B)
    stop_BM[:, 0] = open_B
    return Outcomes(stop_BM, rest_BMV)


def hybrid(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Left to right: a token unmasked no earlier than all before it is tested by ratio, any other
    as a point mass, because its q may have looked at tokens right of it."""
    steps_BN = drafts.steps_BN
    if steps_BN is None:
        steps_BN = torch.zeros_like(drafts.tokens_BN)
    by_ratio_BN = steps_BN >= (steps_BN.cummax(1).values if drafts.size else steps_BN)

    def test(i: int, r_BV: Tensor, above_BN: Tensor) -> tuple[Tensor, Tensor]:
        q_BV, tokens_B = drafts.q_BV(i, above_BN), drafts.tokens_BN[:, i]
        one_BV = torch.zeros_like(q_BV).scatter_(1, tokens_B[:, None], 1.0)
        # a q with NaN stays: nothing of it is accepted
        q_BV = torch.where(by_ratio_BN[:, i : i + 1] | ~q_BV.isfinite(), q_BV, one_BV)
        return try_ratio(r_BV, q_BV, tokens_B)

    return verify_in_draw_order(p_BMV, drafts, test)
