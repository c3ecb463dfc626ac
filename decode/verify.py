"""Which drafted tokens the target keeps, and what it says next. Tensors in, tensors out: no model, no host
synchronisation.

A verifier of chains is two pure functions of (p, proposal):

    survival_K   the probability that at least i tokens are accepted, i = 1..K (falls with i)
    emission_V   the law (unnormalised) of the token emitted after exactly n accepted ones

Everything random is on top of them and shared: n = number of survivals above one uniform u, next token ~
emission(n). So enumerating the two functions over all drafts enumerates the output law exactly;
tests/decode/test_laws.py does it.

p_NV holds N = K + 1 rows: row i is the target's distribution, every processor applied, after the first i
drafted tokens. Rules and sources: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from align.errors import UserError, nearest
from decode.proposal import LAWS, DenseQ, Proposal, SparseQ
from decode.sampling import draw, uniform


class Verdict(NamedTuple):
    """`accepted`: how many drafted tokens are kept; `next_token`: the one that follows them. Both
    0-dimensional int64."""

    accepted: Tensor
    next_token: Tensor


@dataclass(frozen=True)
class Verifier:
    """A rule and the laws of proposals under which its output has exactly the target's law."""

    name: str
    laws: frozenset[str]
    survival: Callable[[Tensor, Proposal], Tensor]
    emission: Callable[[Tensor, Proposal, Tensor], Tensor]
    greedy_only: bool = False
    """Exact at temperature 0 alone."""

    def fits(self, law: str, temperature: float) -> bool:
        return law in self.laws and (temperature == 0 or not self.greedy_only)


def count_survivals(survival_K: Tensor, u: Tensor) -> Tensor:
    """How many tokens survive a uniform u in [0, 1). Strictly u < survival: u may be 0, and p = 0 is never
    accepted."""
    return (u < survival_K).sum()


def verify(name: str, proposal: Proposal, p_NV: Tensor, generator: torch.Generator) -> Verdict:
    """Accept a prefix of the proposal and draw the next token.

    Args:
        name: key of `VERIFIERS`.
        p_NV: (K+1, V) target probabilities in fp32 or fp64, see the module's head.

    Raises:
        UserError: unknown verifier, or one that is not exact for the proposal's law.
        ValueError: p of half precision or of a wrong number of rows.
    """
    verifier = find(name)
    if proposal.law not in verifier.laws:
        raise UserError(_refusal(proposal.law, verifier, 0.0))
    if p_NV.dtype not in (torch.float32, torch.float64) or p_NV.shape[0] != len(proposal) + 1:
        raise ValueError(
            f"p must be fp32 or fp64 with {len(proposal) + 1} rows, not {p_NV.dtype} {tuple(p_NV.shape)}"
        )
    accepted = count_survivals(verifier.survival(p_NV, proposal), uniform(1, generator))
    return Verdict(accepted, draw(verifier.emission(p_NV, proposal, accepted), generator))


def match(tokens_K: Tensor, best_N: Tensor) -> Verdict:
    """The greedy rule on the argmax of each row of p: what `greedy` does, without the one-hot rows."""
    accepted = (tokens_K == best_N[:-1]).cumprod(0).sum()
    return Verdict(accepted, best_N.index_select(0, accepted.reshape(1))[0])


def _survival_greedy(p_NV: Tensor, proposal: Proposal) -> Tensor:
    return (proposal.tokens_K == p_NV[:-1].argmax(1)).double().cumprod(0)


def _emission_greedy(p_NV: Tensor, proposal: Proposal, n: Tensor) -> Tensor:
    return _p_row(p_NV, n)


def _survival_point(p_NV: Tensor, proposal: Proposal) -> Tensor:
    """Accept x with probability p(x): the draw y ~ p, going on while y = x."""
    return _at(p_NV, proposal.tokens_K).double().cumprod(0)


def _emission_point(p_NV: Tensor, proposal: Proposal, n: Tensor) -> Tensor:
    """p without the rejected token; p itself after a full block."""
    p_V = _p_row(p_NV, n)
    if not len(proposal):
        return p_V
    rejected = proposal.tokens_K.index_select(0, n.clamp(max=len(proposal) - 1).reshape(1))
    return _or_p(torch.where(n < len(proposal), p_V.index_fill(0, rejected, 0.0), p_V), p_V)


def _survival_token(p_NV: Tensor, proposal: Proposal) -> Tensor:
    """Accept x with probability min(1, p/q)."""
    return accept_probability(_at(p_NV, proposal.tokens_K), _q(proposal).at(proposal.tokens_K)).cumprod(0)


def _emission_token(p_NV: Tensor, proposal: Proposal, n: Tensor) -> Tensor:
    """(p − q)₊; p itself after a full block (its row of q is zeros)."""
    p_V = _p_row(p_NV, n)
    return residual(p_V, _q(proposal).row(n, p_NV.shape[1])) if len(proposal) else p_V


def accept_probability(p_K: Tensor, q_K: Tensor) -> Tensor:
    """min(1, p/q) of each token in fp64; 0 where p = 0, whatever q is. A q that is no number accepts nothing, and the
    residual is then p: so a drafter that has gone wrong costs speed and not the law."""
    p_K, q_K = p_K.double(), q_K.double()
    return torch.where(p_K < q_K, p_K / q_K, ((p_K > 0) & (q_K >= 0)).double())


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """(p − q)₊, unnormalised; p where that is zero everywhere (p = q to rounding)."""
    return _or_p((p_V - q_V).clamp_(min=0), p_V)


def _or_p(weights_V: Tensor, p_V: Tensor) -> Tensor:
    return torch.where(weights_V.sum() > 0, weights_V, p_V)


def _p_row(p_NV: Tensor, n: Tensor) -> Tensor:
    return p_NV.index_select(0, n.reshape(1))[0]


def _at(p_NV: Tensor, tokens_K: Tensor) -> Tensor:
    return p_NV[:-1].gather(1, tokens_K[:, None])[:, 0]


def _q(proposal: Proposal) -> DenseQ | SparseQ:
    assert proposal.q is not None, "a proposal of this law carries its q"
    return proposal.q


_ALL = frozenset(LAWS)

VERIFIERS: dict[str, Verifier] = {
    "greedy": Verifier("greedy", _ALL, _survival_greedy, _emission_greedy, greedy_only=True),
    "point_mass": Verifier("point_mass", _ALL, _survival_point, _emission_point),
    "token": Verifier("token", frozenset({"independent", "causal"}), _survival_token, _emission_token),
}


def find(name: str) -> Verifier:
    """The verifier of that name. Raises UserError with the nearest one."""
    if name not in VERIFIERS:
        raise UserError(f"unknown verifier {name!r}{nearest(name, [*VERIFIERS, 'auto'])}")
    return VERIFIERS[name]


def check_pair(law: str, name: str, temperature: float) -> Verifier:
    """The verifier, if its output under this law and temperature has exactly the target's law.

    Raises:
        UserError: it has not: why, and which verifiers fit.
    """
    verifier = find(name)
    if not verifier.fits(law, temperature):
        raise UserError(_refusal(law, verifier, temperature))
    return verifier


def choose(law: str, temperature: float) -> str:
    """`auto`: greedy at temperature 0, token where the law has a q that it can test, else point mass."""
    if temperature == 0:
        return "greedy"
    return "token" if VERIFIERS["token"].fits(law, temperature) else "point_mass"


_WHY = {
    "point": "these drafts were not drawn from any q (an argmax, a lookup, a choice): p/q has no meaning",
    "unmasked": "these drafts were unmasked out of order: q is not a law given those left of them",
}


def _refusal(law: str, verifier: Verifier, temperature: float) -> str:
    fitting = ", ".join(v.name for v in VERIFIERS.values() if v.fits(law, temperature))
    if law in verifier.laws:
        why = f"it compares with the argmax and is exact at temperature 0 only, not at {temperature:g}"
    else:
        why = _WHY.get(law, f"it is exact for the laws {', '.join(sorted(verifier.laws))}")
    what = f"verifier {verifier.name!r} would change the output of drafts of law {law!r}"
    return f"{what}: {why}; these fit: {fitting}"
