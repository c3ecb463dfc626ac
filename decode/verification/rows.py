"""Check 1, rows: recorded logits against a cache-less forward pass, processed by transformers."""

import torch
from torch import Tensor

from decode.speculation.settings import Sampling
from decode.verification.recorded import RecordedRound
from decode.verification.recording import Recorder
from decode.verification.reference import Reference, dtype_limit, law, scores
from decode.verification.verdict import Tally

EDGE = 1e-5  # a token may be on either side of a truncation's edge that is nearer than this
ROUNDS, PATHS = 3, 2  # per batch, rounds whose rejected drafts are compared; per round, paths


def check_rows(recorder: Recorder, reference: Reference, tally: Tally) -> None:
    """The logits of every node against a cache-less forward pass, and what the rule received
    against transformers' processors. Nodes that were not accepted are compared in `ROUNDS` rounds,
    the text itself in all."""
    rejecting = [one for one in recorder.rounds if len(one.end.accepted) < len(one.proposal)]
    # trees and long rejected paths first
    rejecting.sort(
        key=lambda one: (
            2.0 * one.proposal.branches + (one.proposal.depth - len(one.end.accepted)) / 16
        ),
        reverse=True,
    )
    paths = {one: _rejected_paths(one) for one in rejecting[:ROUNDS]}
    texts = {}
    for one in recorder.rounds:
        texts[one.request] = [*one.text, *one.end.accepted]
    first = {request: len(request.asked.prompt) - 1 for request in texts}
    wanted = [(text, len(text) - first[request]) for request, text in texts.items()]
    for one, rejected in paths.items():
        wanted += [(one.text_at(nodes[-1]), len(nodes)) for nodes in rejected]
    reference.load(wanted)
    for request, text in texts.items():
        whole_LV = reference.logits(text, len(text) - first[request])
        for one in request.rounds:
            tally.place = one.place
            fresh_LV = whole_LV[len(one.text) - 1 - first[request] :]
            rows = dict(zip(one.end.rows, fresh_LV, strict=False))
            for nodes in paths.get(one, ()):
                found_LV = reference.logits(one.text_at(nodes[-1]), len(nodes))
                rows.update(zip(nodes, found_LV, strict=True))
            for node, wanted_V in rows.items():
                _check_logits(one, node, wanted_V, reference, tally)
            for node in {*one.received, *one.chosen}:
                _check_processed(one, node, tally)


def _rejected_paths(one: RecordedRound) -> list[list[int]]:
    """The nodes of the longest paths that were not accepted as a whole."""
    tree = one.proposal.tree
    leaves = {*range(1, len(tree) + 1)} - {parent + 1 for parent in tree}
    paths = [[i + 1 for i in one.path(leaf)] for leaf in leaves]
    left = [nodes for nodes in paths if not {*one.end.rows}.issuperset(nodes)]
    return sorted(left, key=lambda nodes: (-len(nodes), -nodes[-1]))[:PATHS]


def _check_logits(
    one: RecordedRound, node: int, wanted_V: Tensor, reference: Reference, tally: Tally
) -> None:
    a_V, b_V = one.logits_MV[node].double(), wanted_V.double()
    gap_V = torch.where(a_V == b_V, 0.0, (a_V - b_V).abs())
    gap = 2 * float(gap_V.nan_to_num(nan=torch.inf).max())  # inf: a token that one has not
    limit = reference.rounding_limit(one.text_at(node), wanted_V, gap)
    amplified = gap > dtype_limit(reference.target.dtype, wanted_V)
    tally.counts["nodes after a text that amplifies rounding"] += amplified
    what = f"the logits of node {node} differ from those of a fresh forward pass"
    tally.measure("logits of a node", gap, limit, what)


def _check_processed(one: RecordedRound, node: int, tally: Tally) -> None:
    """Compare the distribution that the rule received at a node with transformers' processors
    applied to the node's prefix."""
    request, row_V = one.request, one.logits_MV[node]
    count, sampling = len(request.asked.prompt), request.asked.sampling
    z_V = scores(
        row_V, one.text[:count], one.text_at(node)[count:], sampling, sorted(request.runner.eos)
    )
    if node not in one.received:  # temperature 0: the choice alone
        best = float(z_V.max())
        below, bound = best - float(z_V[one.chosen[node]]), 1e-6 * max(1.0, abs(best))
        what = f"node {node}: token {one.chosen[node]} is not the most probable one"
        tally.measure("greedy choice below the largest logit", below, bound, what)
        return
    wanted_V, got_V = law(z_V, sampling), one.received[node].double()
    largest = float(row_V.double().masked_fill(~row_V.isfinite(), 0).abs().max())
    bound = 1e-6 + 8 * torch.finfo(torch.float32).eps * largest / sampling.temperature
    distance = float((wanted_V - got_V).abs().sum()) / 2
    if distance > bound and _on_an_edge(z_V, wanted_V, got_V, sampling):
        tally.counts["truncated at a rounding tie"] += 1
        kept_V = law(z_V, Sampling(sampling.temperature)) * (got_V > 0)
        distance = float((kept_V / kept_V.sum() - got_V).abs().sum()) / 2
    what = f"the distribution at node {node} is not that of the processed logits"
    tally.measure("distribution at a node, total variation", distance, bound, what)


def _on_an_edge(z_V: Tensor, wanted_V: Tensor, got_V: Tensor, sampling: Sampling) -> bool:
    """Whether the supports differ only by tokens that a change of `EDGE` in top-p or min-p moves,
    or by tokens of equal logits: in bf16 many are equal, and rounding of the penalties orders
    them."""
    near = torch.zeros_like(wanted_V, dtype=torch.bool)
    for change in (EDGE, -EDGE):
        top_p = min(1.0, sampling.top_p * (1 + change)) if sampling.top_p < 1 else 1.0
        min_p = min(1.0, sampling.min_p * (1 - change))
        moved = Sampling(sampling.temperature, top_p, sampling.top_k, min_p=min_p)
        near |= (law(z_V, moved) > 0) != (wanted_V > 0)
    missing = z_V[(wanted_V > 0) & (got_V == 0) & ~near].sort().values
    extra = z_V[(wanted_V == 0) & (got_V > 0) & ~near].sort().values
    return len(missing) == len(extra) and torch.allclose(missing, extra, rtol=1e-6, atol=1e-6)
