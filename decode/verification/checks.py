"""Checks 1, 4 and 5, of recorded rounds: rows, randomness, commit and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from decode.speculation.drafts import Drafts
from decode.speculation.sampling import Sampling, make_generator
from decode.speculation.verifiers import VERIFIERS
from decode.verification.recording import RecordedRequest, RecordedRound, Recorder
from decode.verification.reference import (
    Reference,
    dtype_limit,
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


# ---- 4. randomness ----


def check_randomness(recorder: Recorder, tally: Tally) -> None:
    """Whose numbers are used, and how often."""
    tally.place = {}
    for what in recorder.foreign:
        tally.find(what)
    own = {request.generator: request for request in recorder.requests}
    coupled = any(one.verifier == "gumbel" and not one.sampling.greedy for one in recorder.rounds)
    seeds = Counter(one.sampling.seed for one in recorder.asked)
    given: Counter[float] = Counter()
    for call in recorder.calls:
        request = own.get(call.generator)
        if request is None:
            if not coupled:
                tally.find(f"{call.name} used a generator that belongs to no request")
            continue
        tally.place = {"request": request.number}
        if call.drafting is not None and call.drafting is not request:
            tally.find(
                f"request {call.drafting.number} drafted with another request's random numbers"
            )
        tally.counts["random numbers"] += call.values.numel()
        values = call.values.flatten().tolist()
        given.update(values)
        fresh = max((given[value] for value in values), default=1) == 1
        own_seed = seeds[request.asked.sampling.seed] == 1
        if call.values.dtype == torch.float64 and own_seed and not fresh:
            tally.find(f"request {request.number} used a random number twice")
    for request in recorder.requests:
        tally.place = {"request": request.number}
        what = f"request {request.number}: its random numbers are not those of its seed, in order"
        tally.expect("streams of requests", _repeats(recorder, request), what)
    tally.place = {}
    used = Counter(value for numbers in recorder.used for value in numbers.flatten().tolist())
    tally.counts["random numbers used to draw tokens"] += sum(used.values())
    if wrong := sum((used - given).values()):
        why = "that was already used, or that no request's generator produced"
        tally.find(f"{wrong} tokens were drawn with a random number {why}")


def _repeats(recorder: Recorder, request: RecordedRequest) -> bool:
    """Whether a fresh generator gives the same numbers, and nothing else has moved the
    request's."""
    generator = request.generator
    if generator is None:
        return True
    fresh = make_generator(request.asked.sampling.fixed_seed, generator.device)
    calls = [call for call in recorder.calls if call.generator is generator]
    right = all(torch.equal(call.again(fresh), call.values) for call in calls)
    return right and torch.equal(fresh.get_state(), generator.get_state())


def check_decisions(recorder: Recorder, tally: Tally) -> None:
    """The outcome of each round is what its distributions and its random numbers decide."""
    for one in recorder.rounds:
        tally.place = one.place
        if VERIFIERS[one.verifier].lossy:
            continue
        u_N = [u for x in one.verifying for u in x.flatten().tolist()]
        drawn = not one.sampling.greedy and one.verifier != "gumbel"
        nodes = len(one.proposal) + 1
        count = 2 if one.by_rule else nodes
        if (one.by_rule or drawn) and len(u_N) != count:
            tally.find(
                f"a round over {nodes - 1} drafts took {len(u_N)} random numbers, not {count}"
            )
        elif one.by_rule and len(one.received) != nodes:
            tally.find(f"a rule received {len(one.received)} distributions, not {nodes}")
        elif one.by_rule:
            _check_rule_decision(one, u_N, tally)
        else:
            _check_own_decision(one, u_N, tally)


def _check_rule_decision(one: RecordedRound, u_2: Sequence[float], tally: Tally) -> None:
    rule = VERIFIERS[one.verifier].rule
    assert rule is not None
    p_1MV = torch.stack([one.received[m] for m in range(len(one.proposal) + 1)])[None]
    out = rule(p_1MV.clone(), Drafts.of([one.proposal], p_1MV.shape[2]))
    node = one.end.rows[-1]
    rest_V = out.rest_BMV[0, node]
    rest_V = rest_V if float(rest_V.sum()) > 0 else p_1MV[0, node]
    bounds = interval(out.stop_BM[0], node), interval(rest_V, one.end.following)
    right = all(is_inside(*pair) for pair in zip(bounds, u_2, strict=True))
    tally.expect(
        "outcomes of rounds",
        right,
        "the outcome does not follow from the rule and its random numbers",
    )


def _check_own_decision(one: RecordedRound, u_M: Sequence[float], tally: Tally) -> None:
    """Check rounds in which the target chooses its own tokens and accepts drafts that equal
    them."""
    tokens = [*one.end.accepted, one.end.following]
    for depth, (node, token) in enumerate(zip(one.end.rows, tokens, strict=True)):
        if one.sampling.greedy:
            right = one.chosen.get(node) == token
        elif one.verifier != "gumbel":
            right = node in one.received
            right = right and is_inside(interval(one.received[node], token), u_M[node])
        else:
            p_V = one.received[node].double().cpu()
            seed = one.request.asked.sampling.fixed_seed
            values_V = p_V.log() + noise(seed, len(one.text) + depth, len(p_V))
            right = one.logits_MV.device.type != "cpu" or int(values_V.argmax()) == token
        what = (
            f"token {token} at node {node} does not follow from its distribution and random number"
        )
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
        what = f"the text has {len(out.tokens)} tokens, but its rounds produced {count}"
        right = tally.expect("texts", out.tokens == tokens[:count], what)
        if right and (out.finish, out.text) != (finish, text):
            what = f"it should end by {finish!r} with {text[-40:]!r}"
            tally.find(f"the text ends by {out.finish!r} with {out.text[-40:]!r}; {what}")
        if request.pieces is not None and "".join(request.pieces) != text:
            what = f"the text with {text[-40:]!r}"
            tally.find(f"the streamed pieces end with {''.join(request.pieces)[-40:]!r}, {what}")
        if rounds and len(tokens) - count >= len(rounds[-1].end.accepted) + 1:
            tally.find("a round ran after the end of the text")
