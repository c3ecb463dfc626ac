"""Checks 1, 4 and 5, of recorded rounds: rows, randomness, commit and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from decode.speculation.drafts import Drafts
from decode.speculation.sampling import Sampling
from decode.speculation.verifiers import VERIFIERS
from decode.verification.recording import RecordedRound, Recorder
from decode.verification.reference import (
    Reference,
    end_of,
    interval,
    is_inside,
    law,
    noise,
    scores,
)
from decode.verification.verdict import Tally
from specalign.lm.model import Target

EDGE = 1e-5  # a token may be on either side of a truncation's edge that is nearer than this
ROUNDS, PATHS = 4, 2  # per batch, rounds whose rejected drafts are compared; per round, paths


# ---- 1. rows: a fresh, cache-less forward pass, processed by transformers ----


def check_rows(recorder: Recorder, reference: Reference, tally: Tally) -> None:
    """The logits of every node against a cache-less forward pass, and what the rule received
    against transformers' processors. Nodes that were not accepted are compared in `ROUNDS` rounds,
    the text itself in all."""
    rejecting = [one for one in recorder.rounds if len(one.end.accepted) < len(one.proposal)]
    # trees and long rejected paths first
    rejecting.sort(key=lambda x: (not x.proposal.branches, len(x.end.accepted) - x.proposal.depth))
    paths = [(one, nodes) for one in rejecting[:ROUNDS] for nodes in _rejected_paths(one)]
    texts = {one.request: [*one.text, *one.end.accepted] for one in recorder.rounds}
    wanted = [(text, len(text) + 1 - len(one.asked.prompt)) for one, text in texts.items()]
    wanted += [(one.text_at(nodes[-1]), len(nodes)) for one, nodes in paths]
    found = reference.logits(wanted)
    whole = dict(zip(texts, found, strict=False))
    starts = [(one, len(one.text) - len(one.request.asked.prompt)) for one in recorder.rounds]
    fresh = [(one, one.end.rows, whole[one.request][start:]) for one, start in starts]
    fresh += [(*path, rows_LV) for path, rows_LV in zip(paths, found[len(texts) :], strict=True)]
    for one, nodes, rows_LV in fresh:
        tally.place = one.place
        for node, fresh_V in zip(nodes, rows_LV, strict=False):
            _check_logits(one, node, fresh_V, reference, tally)
    for one in recorder.rounds:
        tally.place = one.place
        for node in one.received:
            _check_processed(one, node, tally)


def _rejected_paths(one: RecordedRound) -> list[list[int]]:
    """The nodes of the longest paths that were not accepted as a whole."""
    tree = one.proposal.tree
    leaves = {*range(1, len(tree) + 1)} - {parent + 1 for parent in tree}
    paths = [[i + 1 for i in one.path(leaf)] for leaf in leaves]
    left = [nodes for nodes in paths if not {*one.end.rows}.issuperset(nodes)]
    return sorted(left, key=lambda nodes: (-len(nodes), -nodes[-1]))[:PATHS]


def _check_logits(
    one: RecordedRound, node: int, fresh_V: Tensor, reference: Reference, tally: Tally
) -> None:
    a_V, b_V = one.logits_MV[node].double(), fresh_V.double()
    gap_V = torch.where(a_V == b_V, 0.0, (a_V - b_V).abs())
    gap = 2 * float(gap_V.nan_to_num(nan=torch.inf).max())  # inf: a token that one has not
    limit = reference.rounding_limit(one.text_at(node), fresh_V, gap)
    what = f"the logits of node {node} differ from those of a fresh forward pass"
    tally.measure("logits of a node", gap, limit, what)


def _check_processed(one: RecordedRound, node: int, tally: Tally) -> None:
    """Compare what the rule received at a node with transformers' processors applied to the
    node's prefix."""
    request, row_V, got_V = one.request, one.logits_MV[node], one.received[node]
    prompt, sampling = request.asked.prompt, request.asked.sampling
    written, eos = one.text_at(node)[len(prompt) :], sorted(request.runner.eos)
    z_V = scores(row_V, prompt, written, sampling, eos)
    if sampling.greedy:  # the choice alone
        best, token = float(z_V.max()), int(got_V)
        what = f"node {node}: token {token} is not the most probable one"
        bound = 1e-6 * max(1.0, abs(best))
        tally.measure(
            "greedy choice below the largest logit", best - float(z_V[token]), bound, what
        )
        return
    wanted_V, got_V = law(z_V, sampling), got_V.double()
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


# ---- 4. randomness: whose numbers are used, how often, and what they decide ----


def check_randomness(recorder: Recorder, tally: Tally) -> None:
    """Every number comes from the request's own generator, in the order of its seed, and draws
    once."""
    tally.place = {}
    for what in recorder.strange:
        tally.find(what)
    for request in recorder.requests:
        tally.place = {"request": request.number}
        own = request.generator
        right = own is None or torch.equal(own.get_state(), request.seeded.get_state())
        what = f"request {request.number}: something else has moved its generator"
        tally.expect("streams of requests", right, what)
    tally.place = {}
    tally.counts["random numbers used to draw tokens"] += len(recorder.used)
    if wrong := sum((Counter(recorder.used) - Counter(recorder.given)).values()):
        why = "that was already used, or that no request's generator produced"
        tally.find(f"{wrong} tokens were drawn with a random number {why}")


def check_decisions(recorder: Recorder, tally: Tally) -> None:
    """The outcome of each round is what its distributions and its random numbers decide."""
    for one in recorder.rounds:
        tally.place = one.place
        u_N = [u for x in one.verifying for u in x.flatten().tolist()]
        nodes = len(one.proposal) + 1
        count = 2 if one.by_rule else nodes
        if one.sampling.greedy or one.verifier == "gumbel":
            count = len(u_N)
        if len(u_N) != count or (one.by_rule and len(one.received) != nodes):
            what = f"a round over {nodes - 1} drafts took {len(u_N)} random numbers, not {count}"
            tally.find(f"{what}, and its rule received {len(one.received)} distributions")
        elif one.by_rule:
            _check_rule_decision(one, u_N, tally)
        else:
            _check_own_decision(one, u_N, tally)


def _check_rule_decision(one: RecordedRound, u_2: Sequence[float], tally: Tally) -> None:
    rule, nodes = VERIFIERS[one.verifier].rule, range(len(one.proposal) + 1)
    assert rule is not None
    p_1MV = torch.stack([one.received[node] for node in nodes])[None]
    out = rule(p_1MV.clone(), Drafts.of([one.proposal], p_1MV.shape[2]))
    node = one.end.rows[-1]
    rest_V = out.rest_BMV[0, node]
    rest_V = rest_V if float(rest_V.sum()) > 0 else p_1MV[0, node]
    bounds = interval(out.stop_BM[0], node), interval(rest_V, one.end.following)
    right = all(is_inside(*pair) for pair in zip(bounds, u_2, strict=True))
    what = "the outcome does not follow from the rule and its random numbers"
    tally.expect("outcomes of rounds", right, what)


def _check_own_decision(one: RecordedRound, u_M: Sequence[float], tally: Tally) -> None:
    """Check rounds in which the target chooses its own tokens and accepts drafts that equal
    them."""
    tokens = [*one.end.accepted, one.end.following]
    for depth, (node, token) in enumerate(zip(one.end.rows, tokens, strict=True)):
        got_V = one.received.get(node)
        if got_V is None:
            right = False
        elif one.sampling.greedy:
            right = int(got_V) == token
        elif one.verifier != "gumbel":
            right = is_inside(interval(got_V, token), u_M[node])
        else:
            seed = one.request.asked.sampling.fixed_seed
            values_V = got_V.double().cpu().log() + noise(seed, len(one.text) + depth, len(got_V))
            right = got_V.device.type != "cpu" or int(values_V.argmax()) == token
        what = f"token {token} at node {node} does not follow from what was received there"
        tally.expect("outcomes of rounds", right, what)
    children = [i for i, parent in enumerate(one.proposal.tree) if parent == one.end.rows[-1] - 1]
    if any(int(one.proposal.tokens_K[i]) == one.end.following for i in children):
        tally.find("a draft that is the target's own token was not accepted")


# ---- 5. commit and end ----


def check_commit(recorder: Recorder, target: Target, tally: Tally) -> None:
    """The text of each request, rebuilt from its rounds, and decoded as a whole."""
    for request in recorder.requests:
        asked, out, rounds = request.asked, request.runner.out, request.rounds
        tokens: list[int] = []
        for one in rounds:
            tally.place = one.place
            if one.text != [*asked.prompt, *tokens]:
                tally.find("a round did not start from the committed text")
            path = one.path(one.end.rows[-1])
            if one.end.path != path or one.end.accepted != one.proposal.tokens_K[path].tolist():
                tally.find("a round accepted tokens that are not a path of its drafts")
            tokens += [*one.end.accepted, one.end.following]
        tally.place = {"request": request.number}
        context = target.context_limit if asked.context is None else asked.context
        room = context - len(asked.prompt)
        limit, full = (asked.new, "length") if asked.new <= room else (room, "context")
        eos = target.eos_ids if asked.eos is None else asked.eos
        count, finish, text = end_of(target, tokens, limit, full, eos, asked.stop)
        tally.counts[f"ended by {finish or 'nothing'}"] += 1
        wanted, found = (tokens[:count], finish, text), (out.tokens, out.finish, out.text)
        what = f"the text ends with {found[0][-4:]}, by {found[1]!r}, {found[2][-40:]!r}"
        what += f"; its rounds give {wanted[0][-4:]}, {wanted[1]!r}, {wanted[2][-40:]!r}"
        tally.expect("texts", found == wanted, what)
        if request.pieces is not None and "".join(request.pieces) != text:
            tally.find(f"the streamed pieces are not the text that ends with {text[-40:]!r}")
        if rounds and len(tokens) - count >= len(rounds[-1].end.accepted) + 1:
            tally.find("a round ran after the end of the text")
