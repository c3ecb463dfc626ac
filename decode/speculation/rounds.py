"""The verification of one round of several requests: logits and proposals in, accepted drafts and
the next token out.

What can share a computation shares it, and everything that a round needs on the host comes from the
device in one transfer. A request's outcome does not depend on the others: what is drawn for it is
drawn by its own generator.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from decode.speculation.drafts import stack_rows
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import ProcessorState, best, couple, draw_at, probs
from decode.speculation.settings import Sampling
from decode.speculation.tree import depths, path_to, walk
from decode.speculation.verifiers import Outcome, check_proposal, find, run_verifier, verify_greedy

SEEN_AT_ONCE = frozenset({"cpu"})
"""Devices whose values can be read without waiting."""


class Round(NamedTuple):
    """A round of one request.

    logits_MV: the target's, after the last committed token and after each of the N = M − 1 drafts;
    overwritten. verifier: at temperature 0 every one that is not lossy acts as `greedy`. before:
    what each of the M prefixes holds. numbers_T: decide the target's own tokens at the next T
    positions. noise: under the verifier `gumbel` the noise (V,) of an absolute position; then
    nothing is drawn. position: of the next token, for `noise`.
    """

    logits_MV: Tensor
    proposal: Proposal
    verifier: str
    sampling: Sampling
    before: ProcessorState
    generator: torch.Generator
    numbers_T: Tensor | None = None
    noise: Callable[[int], Tensor] | None = None
    position: int = 0

    @property
    def by_rule(self) -> bool:
        """Whether a rule looks at p at all nodes; otherwise the target chooses its own tokens."""
        return len(self.proposal) > 0 and not find(self.verifier).compares(self.sampling.greedy)


PendingOutcome = tuple[Tensor, Callable[[list[int]], Outcome]]
"""What a round needs on the host, int64 (n,), and the function from that to its outcome."""


@torch.no_grad()
def verify_rounds(rounds: Sequence[Round]) -> list[Outcome]:
    """Accept a path of each proposal and choose the token after it. Raises UserError where a
    verifier is not exact for its drafts."""
    groups: dict[Hashable, list[int]] = {}
    for i, one in enumerate(rounds):
        if len(one.proposal):
            check_proposal(one.proposal, one.verifier, one.sampling.temperature)
        groups.setdefault(_group_key(one), []).append(i)
    pending: dict[int, PendingOutcome] = {}
    for places in groups.values():
        group = [rounds[i] for i in places]
        pending.update(zip(places, _verify_group(group), strict=True))
    return _finish_outcomes([pending[i] for i in range(len(rounds))])


def outcome_of(proposal: Proposal, end_1: Tensor, following_1: Tensor) -> Outcome:
    """The outcome of a path that ends at a node of the proposal, 0 = the root."""
    return _finish_outcomes([_path_outcome(proposal, end_1, following_1)])[0]


def _finish_outcomes(pending: Sequence[PendingOutcome]) -> list[Outcome]:
    values = torch.cat([values for values, _ in pending]).tolist()
    outcomes, start = [], 0
    for own, outcome in pending:
        outcomes.append(outcome(values[start : start + len(own)]))
        start += len(own)
    return outcomes


def _group_key(one: Round) -> Hashable:
    """Rounds with equal keys are computed together."""
    if one.sampling.greedy and not one.by_rule:
        return "greedy"
    form = (one.noise is None, replace(one.sampling, seed=None, banned=(), min_new_tokens=0))
    if not one.by_rule:
        return form
    proposal = one.proposal
    q = None if proposal.q is None else proposal.q.probs.dtype
    # chains have their own formulas, which round otherwise than those of trees
    kind = (one.verifier, proposal.law, proposal.siblings, proposal.branches)
    return (form, kind, one.logits_MV.dtype, q)


def _verify_group(group: Sequence[Round]) -> list[PendingOutcome]:
    if group[0].by_rule:
        return _apply_rule(group)
    return _choose_greedily(group) if group[0].sampling.greedy else _sample_target(group)


def _apply_rule(group: Sequence[Round]) -> list[PendingOutcome]:
    sampling, verifier = group[0].sampling, group[0].verifier
    proposals, heights = [one.proposal for one in group], [len(one.logits_MV) for one in group]
    logits_RV, before = _rows([one.logits_MV for one in group], [one.before for one in group])
    # a one-hot p would leave nothing to relax: at temperature 0 a lossy rule sees p at temperature
    # 1
    target_tokens_R = best(logits_RV, sampling, before) if sampling.greedy else None
    warm = replace(sampling, temperature=sampling.temperature or 1.0)
    p_BMV = _pad_rows(probs(logits_RV, warm, before, overwrite=True), heights)
    end_B, next_B = run_verifier(verifier, proposals, p_BMV, [one.generator for one in group])
    if target_tokens_R is not None:
        next_B = _pad_rows(target_tokens_R, heights).gather(1, end_B[:, None])[:, 0]
    return [_path_outcome(x, end_B[b : b + 1], next_B[b : b + 1]) for b, x in enumerate(proposals)]


def _rows(
    logits: Sequence[Tensor], before: Sequence[ProcessorState]
) -> tuple[Tensor, ProcessorState]:
    """Rows of several requests, one after the other."""
    if len(logits) == 1:
        return logits[0], before[0]
    return torch.cat(list(logits)), ProcessorState.joined(before, [len(rows) for rows in logits])


def _pad_rows(rows_R: Tensor, heights: list[int]) -> Tensor:
    """Rows (R, …) → (B, M, …), zeros below those of a request that has fewer."""
    if len(set(heights)) == 1:  # without a copy
        return rows_R.unflatten(0, (len(heights), -1))
    return stack_rows(rows_R.split(heights))


def _path_outcome(proposal: Proposal, end_1: Tensor, following_1: Tensor) -> PendingOutcome:
    def outcome(values: list[int]) -> Outcome:
        end, following, *tokens = values
        path = path_to(proposal.tree, end)
        return Outcome([tokens[i] for i in path], following, path)

    return torch.cat((end_1, following_1, proposal.tokens_K.to(end_1.device))), outcome


def _choose_greedily(group: Sequence[Round]) -> list[PendingOutcome]:
    return [
        _known_outcome(one.proposal, best(one.logits_MV, one.sampling, one.before, overwrite=True))
        for one in group
    ]


def _known_outcome(proposal: Proposal, target_tokens_M: Tensor) -> PendingOutcome:
    """Of the target's own token at every node, known on the device."""
    rows = len(target_tokens_M)

    def outcome(values: list[int]) -> Outcome:
        return verify_greedy(values[rows:], proposal.tree, values[:rows])

    return torch.cat((target_tokens_M, proposal.tokens_K.to(target_tokens_M.device))), outcome


def _sample_target(group: Sequence[Round]) -> list[PendingOutcome]:
    """The target's own tokens, drawn from p. On a CPU only at the nodes on the path, because p at
    every node of a wide forward costs milliseconds; a node's token does not depend on the
    others."""
    proposals = [one.proposal for one in group]
    sample = _sampler(group)
    if group[0].logits_MV.device.type not in SEEN_AT_ONCE:
        heights = [len(one.logits_MV) for one in group]
        nodes = [(b, node) for b, rows in enumerate(heights) for node in range(rows)]
        return list(map(_known_outcome, proposals, sample(nodes).split(heights)))
    tokens = [x.tokens_K.tolist() for x in proposals]
    ends = walk(tokens, [x.tree for x in proposals], lambda asked: sample(asked).tolist())
    nothing = torch.zeros(0, dtype=torch.int64)
    pending: list[PendingOutcome] = []
    for own, (path, following) in zip(tokens, ends, strict=True):
        outcome = Outcome([own[i] for i in path], following, path)
        pending.append((nothing, lambda _, outcome=outcome: outcome))  # type: ignore[misc]
    return pending


def _sampler(group: Sequence[Round]) -> Callable[[list[tuple[int, int]]], Tensor]:
    """A function of nodes, (request of the group, row of its forward pass), to the target's tokens
    there."""
    sampling = group[0].sampling
    # a node takes the number of its position, so nodes of one depth share it
    levels = [(0, *depths(one.proposal.tree)) for one in group]
    start = [0, *accumulate(max(own) + 1 for own in levels)]
    coupled = group[0].noise is not None
    u_R = (
        None
        if coupled
        else torch.cat([_numbers(x, own) for x, own in zip(group, levels, strict=True)])
    )

    def sample(asked: list[tuple[int, int]]) -> Tensor:
        at = [(group[b], slice(node, node + 1)) for b, node in asked]
        logits_RV, before = _rows(
            [x.logits_MV[row] for x, row in at], [x.before.rows(row) for x, row in at]
        )
        p_RV = probs(logits_RV, sampling, before, overwrite=True)
        if u_R is not None:
            return draw_at(p_RV, u_R[[start[b] + levels[b][node] for b, node in asked]])
        tokens = []
        for p_1V, (b, node) in zip(p_RV.split(1), asked, strict=True):
            noise, position = group[b].noise, group[b].position + levels[b][node]
            assert noise is not None
            tokens.append(couple(p_1V, noise, [position]))
        return torch.cat(tokens)

    return sample


def _numbers(one: Round, levels: Sequence[int]) -> Tensor:
    assert one.numbers_T is not None
    return one.numbers_T[: max(levels) + 1]
