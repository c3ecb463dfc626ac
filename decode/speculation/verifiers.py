"""Verifiers by name: which drafted tokens are accepted and which token follows them, and the drafts
for which the output has exactly the target's distribution. The rules: decode/speculation/rules.py.

    greedy, point_mass   accept while the target's own token is the drafted one; exact however the
        drafts were chosen (`verify_greedy`)
    self_selection       point_mass on the one path that p expects most of: SpecDiff-2, arXiv
        2511.00606
    token                min(1, p/q), residual (p − q)₊: Leviathan et al., arXiv 2211.17192; Chen et
        al., 2302.01318
    block                joint over the chain: Sun et al., arXiv 2403.10444
    recursive            token over siblings in turn, of one q or several: SpecInfer, arXiv
        2305.09781; without replacement: 2402.14160
    k_seq                i.i.d. siblings under one inflated ratio: SpecTr, arXiv 2310.15141
    traversal            leaves first, over the whole tree; a chain gives `block`: arXiv 2505.12398
    hybrid               drafts unmasked out of order: ratio where the order allows it, else point
        mass
    gumbel               the target's noise fixed by position: arXiv 2408.07978
    lossy_typical        Medusa's threshold, arXiv 2401.10774: NOT the target's distribution
    lossy_top_beta       the target's best few, after SpecDec, arXiv 2203.16487: NOT the target's
        distribution
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decode.speculation import rules
from decode.speculation.drafts import Drafts, pick_tokens, rows_at
from decode.speculation.proposal import LAWS, SIBLINGS, Proposal
from decode.speculation.rules import Outcomes, Rule
from decode.speculation.sampling import draw_at, uniform
from decode.speculation.tree import chain, walk
from specalign.common.errors import UserError, nearest
from specalign.kernels import choice

TYPICAL_EPSILON, TYPICAL_DELTA = 0.09, 0.3
"""Medusa's own setting."""
TOP_BETA = 3


OWN_TOKENS = frozenset({"greedy", "point_mass", "gumbel"})
"""Verifiers that compare drafts with the target's own tokens. The text does not depend on the
drafts."""


class Outcome(NamedTuple):
    """A round's outcome on the host: the accepted drafts, the token after them, and the places of
    those drafts in the proposal (ascending)."""

    accepted: list[int]
    following: int
    path: list[int]

    @property
    def rows(self) -> list[int]:
        """The rows of the forward pass along the path."""
        return [0, *(i + 1 for i in self.path)]

    @property
    def straight(self) -> bool:
        """Whether these are the first rows of the forward pass."""
        return self.path == list(range(len(self.path)))


class Verdict(NamedTuple):
    """`end_B`: the node where the accepted path ends (0 = nothing accepted); `next_B`: the next
    token."""

    end_B: Tensor
    next_B: Tensor


@dataclass(frozen=True)
class Verifier:
    """A rule, and the drafts for which it is exact."""

    name: str
    rule: Rule | None  # None: the verifier does not draw from outcomes (`gumbel`)
    laws: frozenset[str]
    siblings: frozenset[str] = frozenset()  # empty: chains only; point drafts may branch anyhow
    greedy_only: bool = False  # exact only at temperature 0
    state_only: bool = False  # among unmasked drafts, exact only for state-only orders
    lossy: bool = False  # the output does not have the target's distribution

    def compares(self, greedy: bool) -> bool:
        """Whether it compares drafts with the target's own tokens, so that they do not decide the
        text."""
        return not self.lossy and (greedy or self.name in OWN_TOKENS)

    def is_exact_for(self, law: str, temperature: float) -> bool:
        """Whether it is exact for chains of that law at that temperature."""
        return law in self.laws and (temperature == 0 or not self.greedy_only)

    def is_exact_for_proposal(self, proposal: Proposal, temperature: float) -> bool:
        """Whether it is exact for this proposal."""
        if not self.is_exact_for(proposal.law, temperature):
            return False
        if proposal.law == "unmasked" and self.state_only and not proposal.state_only:
            return False
        return not proposal.branches or (
            bool(self.siblings) if proposal.siblings is None else proposal.siblings in self.siblings
        )


def verify_greedy(
    draft_tokens: Sequence[int], parents: tuple[int, ...], target_tokens: Sequence[int]
) -> Outcome:
    """Accept the drafts that equal the target's own choices: `target_tokens` (N + 1), after the
    root and after each of the N drafts."""

    def choose(nodes: list[tuple[int, int]]) -> list[int]:
        return [target_tokens[node] for _, node in nodes]

    [(path, following)] = walk([draft_tokens], [parents], choose)
    return Outcome([draft_tokens[i] for i in path], following, path)


def run_verifier(
    name: str, proposals: Sequence[Proposal], p_BMV: Tensor, generators: Sequence[torch.Generator]
) -> Verdict:
    """Accept a path of each proposal and draw the token after it.

    Args:
        name: key of `VERIFIERS`, except `gumbel`, whose noise belongs to positions.
        p_BMV: target probabilities in fp32 or fp64; M = 1 + the longest proposal's tokens.
        generators: one per request, each asked for two uniforms.

    Raises:
        UserError: unknown verifier, or one that is not exact for these proposals.
    """
    verifier = find(name)
    for proposal in proposals:
        check_proposal(proposal, name, 0.0 if verifier.greedy_only else 1.0)
    rows = 1 + max(len(x) for x in proposals)
    if p_BMV.dtype.itemsize < 4 or p_BMV.shape[:2] != (len(proposals), rows):
        raise ValueError(
            f"p must be fp32 or fp64 with {len(proposals)} x {rows} rows, not {p_BMV.dtype} "
            f"{tuple(p_BMV.shape)}"
        )
    assert verifier.rule is not None, "gumbel takes its noise from positions"
    u_B2 = torch.stack([uniform(2, g) for g in generators])
    if verifier.rule is rules.block:  # `block` and `traversal`, which are the same on chains
        verdict = _chains_in_c(proposals, p_BMV, u_B2)
        if verdict is not None:
            return verdict
    drafts = Drafts.of(proposals, p_BMV.shape[2])
    return resolve(verifier.rule(p_BMV, drafts), p_BMV, u_B2.to(p_BMV.device))


def _chains_in_c(proposals: Sequence[Proposal], p_BMV: Tensor, u_B2: Tensor) -> Verdict | None:
    """`rules.block` on chains and `resolve` by a C kernel, seven times faster; None where it does
    not apply."""
    if not all(len(x) and x.q is not None and x.tree == chain(len(x)) for x in proposals):
        return None
    qs = [x.q for x in proposals if x.q is not None]
    if not choice.takes(p_BMV, *(q.probs for q in qs)):
        return None
    ends = [
        choice.verified_chain(p_MV[: len(x) + 1], q.probs, q.ids, x.tokens_K, u_2)
        for x, q, p_MV, u_2 in zip(proposals, qs, p_BMV, u_B2, strict=True)
    ]
    return Verdict(
        torch.tensor([end.accepted for end in ends]), torch.tensor([end.following for end in ends])
    )


def resolve(outcomes: Outcomes, p_BMV: Tensor, u_B2: Tensor) -> Verdict:
    """Draw one of the outcomes with two uniforms per request, u_B2 (B, 2)."""
    end_B = draw_at(outcomes.stop_BM, u_B2[:, 0])
    rest_BV = rules.fall_back_to_p(rows_at(outcomes.rest_BMV, end_B), rows_at(p_BMV, end_B))
    return Verdict(end_B, draw_at(rest_BV, u_B2[:, 1]))


def typical(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Lossy: accept x if p(x) > min(ε, δ·exp(−entropy of p)) (Medusa, eq. 1)."""
    entropy_BM = -torch.special.xlogy(p_BMV.double(), p_BMV.double()).sum(-1)
    least_BM = (TYPICAL_DELTA * (-entropy_BM).exp()).clamp(max=TYPICAL_EPSILON)
    batch = torch.arange(len(p_BMV), device=p_BMV.device)

    def test(i: int, r_BV: Tensor, above_BN: Tensor) -> tuple[Tensor, Tensor]:
        p_B = pick_tokens(r_BV, drafts.tokens_BN[:, i])
        return (p_B > least_BM[batch, above_BN[:, i]]).double(), r_BV

    return rules.verify_in_draw_order(p_BMV, drafts, test)


def top_beta(p_BMV: Tensor, drafts: Drafts) -> Outcomes:
    """Lossy: accept any of p's `TOP_BETA` most probable tokens (SpecDec, without its score
    bound)."""

    def test(i: int, r_BV: Tensor, above_BN: Tensor) -> tuple[Tensor, Tensor]:
        own_B1 = r_BV.gather(1, drafts.tokens_BN[:, i : i + 1])
        return ((r_BV > own_B1).sum(1) < TOP_BETA).double() * (own_B1[:, 0] > 0), r_BV

    return rules.verify_in_draw_order(p_BMV, drafts, test)


_ANY, _DRAWN = frozenset(LAWS), frozenset({"independent", "causal"})
_SIBLINGS = frozenset(SIBLINGS)

VERIFIERS: dict[str, Verifier] = {
    v.name: v
    for v in (
        # in decoding these two compare tokens (`Round.by_rule`); `rules.point` states their law
        Verifier("greedy", rules.point, _ANY, _SIBLINGS, greedy_only=True),
        Verifier("point_mass", rules.point, _ANY, _SIBLINGS),
        Verifier("self_selection", rules.select_path, _ANY, _SIBLINGS),
        # `rules.token` and `rules.block`: chains at once, trees by `recursive` and `traversal`
        Verifier("token", rules.token, _DRAWN),
        Verifier("block", rules.block, _DRAWN),
        Verifier("hybrid", rules.hybrid, _DRAWN | {"unmasked"}, state_only=True),
        Verifier("recursive", rules.token, _DRAWN, _SIBLINGS),
        Verifier("k_seq", rules.k_seq, _DRAWN, frozenset({"iid"})),
        Verifier("traversal", rules.block, _DRAWN, _SIBLINGS),
        Verifier("gumbel", None, _ANY, _SIBLINGS),
        Verifier("lossy_typical", typical, _ANY, _SIBLINGS, lossy=True),
        Verifier("lossy_top_beta", top_beta, _ANY, _SIBLINGS, lossy=True),
    )
}


def find(name: str) -> Verifier:
    """The verifier of that name. Raises UserError for an unknown one."""
    if name not in VERIFIERS:
        raise UserError(f"unknown verifier {name!r}{nearest(name, [*VERIFIERS, 'auto'])}")
    return VERIFIERS[name]


def check_pair(law: str, name: str, temperature: float) -> Verifier:
    """The verifier, if it is exact for chains of this law at this temperature, or lossy. Raises
    UserError with those that are exact."""
    return _check(name, f"{law!r} drafts", temperature, lambda v: v.is_exact_for(law, temperature))


def check_proposal(proposal: Proposal, name: str, temperature: float) -> Verifier:
    """`check_pair` for a proposal."""
    drafts = f"{proposal.law!r} drafts"
    if proposal.branches:
        drafts += f" that branch (siblings drawn: {proposal.siblings})"
    elif proposal.law == "unmasked" and not proposal.state_only:
        drafts += " whose order looked at drawn values"

    def is_exact(verifier: Verifier) -> bool:
        return verifier.is_exact_for_proposal(proposal, temperature)

    return _check(name, drafts, temperature, is_exact)


def _check(
    name: str, drafts: str, temperature: float, is_exact: Callable[[Verifier], bool]
) -> Verifier:
    verifier = find(name)
    if is_exact(verifier):
        return verifier
    exact = ", ".join(v.name for v in VERIFIERS.values() if is_exact(v) and not v.lossy)
    raise UserError(
        f"verifier {name!r} would change the output's distribution with {drafts} at temperature "
        f"{temperature:g}; exact verifiers: {exact}"
    )


def choose(law: str, temperature: float) -> str:
    """The verifier that `auto` stands for."""
    if temperature == 0:
        return "greedy"
    if law == "unmasked":
        return "hybrid"
    return "traversal" if VERIFIERS["traversal"].is_exact_for(law, temperature) else "point_mass"
