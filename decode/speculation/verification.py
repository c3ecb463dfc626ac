"""The verification of one round of one request: the target's logits and a proposal in, the accepted drafts and the token
after them out. Tensors alone: no model, no request.

Everything that a round needs on the host comes from the device in one transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from decode.speculation.proposal import Proposal
from decode.speculation.sampling import ProcessorState, Sampling, best, couple, draw_at, probs, uniform
from decode.speculation.tree import depths, follow, path_to, walk
from decode.speculation.verifiers import check_proposal, find, run_verifier


class Outcome(NamedTuple):
    """A round's outcome on the host: the accepted drafts, the target's token after them, and where in the proposal those
    drafts stand (ascending)."""

    accepted: list[int]
    following: int
    path: list[int]

    @property
    def rows(self) -> list[int]:
        """The rows of the target call along the path: the last committed token's, then the accepted drafts'."""
        return [0, *(i + 1 for i in self.path)]


def verify_proposal(
    logits_MV: Tensor,
    proposal: Proposal,
    verifier: str,
    sampling: Sampling,
    before: ProcessorState,
    generator: torch.Generator,
    noise: Callable[[int], Tensor] | None = None,
    position: int = 0,
) -> Outcome:
    """Accept a path of the proposal and choose the token after it.

    Args:
        logits_MV: the target's, after the last committed token and after each of the N = M − 1 drafts. Overwritten.
        verifier: a key of `VERIFIERS`. At temperature 0 every one that is not lossy does the same as `greedy`.
        before: what each of the M prefixes holds, for the processors.
        generator: what is drawn is drawn with it.
        noise: under the verifier `gumbel` the noise (V,) of an absolute position; then nothing is drawn.
        position: of the token that follows the last committed one; `noise` alone looks at it.

    Raises:
        UserError: the verifier is not exact for these drafts.
    """
    drafted = len(proposal) > 0
    if drafted:
        check_proposal(proposal, verifier, sampling.temperature)
    tokens_N, parents = proposal.tokens_K.to(logits_MV.device), proposal.tree
    if drafted and find(verifier).lossy:
        # a one-hot p would leave nothing to relax: at temperature 0 the rule sees p at temperature 1
        said_M = best(logits_MV, sampling, before) if sampling.greedy else None
        p_MV = probs(logits_MV, replace(sampling, temperature=sampling.temperature or 1.0), before)
        end, following = run_verifier(verifier, [proposal], p_MV[None], [generator])
        following = following if said_M is None else said_M[end]
    elif sampling.greedy:
        said_M = best(logits_MV, sampling, before, overwrite=True)
        end, following = follow(tokens_N[None], (parents,), said_M[None])
    elif drafted and verifier not in ("point_mass", "gumbel"):
        p_MV = probs(logits_MV, sampling, before, overwrite=True)
        end, following = run_verifier(verifier, [proposal], p_MV[None], [generator])
    else:
        sample = sample_target(logits_MV, sampling, before, parents, generator, noise, position)
        if logits_MV.device.type == "cpu":
            tokens = tokens_N.tolist()
            path, token = walk(tokens, parents, lambda row: int(sample(slice(row, row + 1))))
            return Outcome([tokens[i] for i in path], token, path)
        end, following = follow(tokens_N[None], (parents,), sample(slice(None))[None])
    return outcome_of(proposal, end, following)


def outcome_of(proposal: Proposal, end_1: Tensor, following_1: Tensor) -> Outcome:
    """The outcome of a path that ends at a node of the proposal (0 = nothing accepted), fetched in one transfer.

    Raises:
        ValueError: the proposal's values contradict what it says of them (`Proposal.faults`).
    """
    tokens_N, faults_1 = proposal.tokens_K.to(end_1.device), proposal.faults()
    if faults_1 is None:
        faults_1 = torch.zeros_like(end_1)
    end, following, fault, *tokens = torch.cat((end_1, following_1, faults_1, tokens_N)).tolist()
    if fault:
        raise ValueError(proposal.fault_in(fault))
    path = path_to(proposal.tree, end)
    return Outcome([tokens[i] for i in path], following, path)


def sample_target(
    logits_MV: Tensor,
    sampling: Sampling,
    before: ProcessorState,
    parents: tuple[int, ...],
    generator: torch.Generator,
    noise: Callable[[int], Tensor] | None,
    position: int,
) -> Callable[[slice], Tensor]:
    """The target's own tokens at some rows of a call, each drawn from p there (with `noise`: coupled to its position).

    Returns a function of the rows, so that on a CPU p is computed only at the nodes on the path: p and its running sum at every
    node of a wide call cost milliseconds. The token of a row does not depend on which other rows are asked for.
    """

    def p(rows: slice) -> Tensor:
        return probs(logits_MV[rows], sampling, before.rows(rows), overwrite=True)

    if noise is not None:
        depth = [0, *depths(parents)]
        return lambda rows: couple(p(rows), noise, [position + d for d in depth[rows]])
    u_M = uniform(len(logits_MV), generator)
    return lambda rows: draw_at(p(rows), u_M[rows])
