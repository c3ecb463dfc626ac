"""Checks of recorded rounds: rows, randomness, commit and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.speculation.drafts import Drafts
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import Sampling, make_generator
from decode.speculation.tree import path_to
from decode.speculation.verifiers import VERIFIERS
from decode.verification.divergence import dtype_limit
from decode.verification.recording import RecordedRound, Recorder
from decode.verification.reference import Reference, end_of, interval, law, noise, scores
from decode.verification.tally import Tally
from specalign.lm.model import Target

EDGE = 1e-5
"""A token may be on either side of a truncation's edge that is nearer than this."""
NEAR = 1e-6
"""A draw at a number so near to the border of two tokens may be either."""


@dataclass(frozen=True)
class Asked:
    """A request: what `Decoder.generate` is asked for. eos, context: in place of the target's
    own."""

    prompt: tuple[int, ...]
    sampling: Sampling
    new: int
    stop: tuple[str, ...] = ()
    eos: tuple[int, ...] | None = None
    context: int | None = None


def drafts(drafter: Any, how: str) -> bool:
    """Whether a drafter, or one that it wraps, drafts in this way
    (`decode.proposers.base.Drafter`)."""
    while drafter is not None:
        if getattr(drafter, how, False):
            return True
        drafter = getattr(drafter, "inner", None)
    return False


def node_path(one: RecordedRound, node: int) -> list[int]:
    """The drafted tokens on the path to a node (0 = the root)."""
    tokens = one.proposal.tokens_K.tolist()
    return [tokens[i] for i in path_to(one.proposal.tree, node)]


# ---- 1. rows ----


def check_rows(
    recorder: Recorder, asked: Sequence[Asked], reference: Reference, tally: Tally, paths: int
) -> None:
    """The logits of every node against a cache-less forward pass, and what the rule received
    against transformers' processors.

    Args:
        paths: how many rounds have the nodes compared that were not accepted, along two paths of
            each. The rows of the text itself are compared in every round.
    """
    left = [one for one in recorder.rounds if len(one.end.accepted) < len(one.proposal)]
    chosen = {id(one) for one in sorted(left, key=lambda one: -_interest(one))[:paths]}
    for number, request in enumerate(asked):
        rounds = recorder.rounds_of(number)
        if not rounds:
            continue
        text = [*rounds[-1].text, *rounds[-1].end.accepted, rounds[-1].end.following]
        first = len(request.prompt) - 1
        whole_LV = reference.logits(text[:-1], len(text) - 1 - first)
        for i, one in enumerate(rounds):
            place = {"request": number, "round": i}
            for node, ref_V in _reference_rows(
                one, whole_LV, first, reference, id(one) in chosen
            ).items():
                gap = _gap(one.logits_MV[node], ref_V)
                limit = reference.rounding_limit([*one.text, *node_path(one, node)], ref_V, 2 * gap)
                tally.counts["nodes after a text that amplifies rounding"] += 2 * gap > dtype_limit(
                    reference.target.dtype, ref_V
                )
                if not tally.measure("logits of a node", 2 * gap, limit):
                    what = (
                        f"the logits of node {node} differ from a fresh forward pass by {gap:.3g}"
                    )
                    tally.find(what, **place)
            for node in {*one.received, *one.chosen}:
                _check_processed(one, node, request, recorder, tally, place)


def _interest(one: RecordedRound) -> float:
    """Trees and long rejected paths first."""
    return 2.0 * one.proposal.branches + (one.proposal.depth - len(one.end.accepted)) / 16


def _gap(a_V: Tensor, b_V: Tensor) -> float:
    """The largest difference of two rows; infinite where one has a token that the other has not."""
    a_V, b_V = a_V.double(), b_V.double()
    gap_V = torch.where(a_V == b_V, 0.0, (a_V - b_V).abs())
    return float(torch.nan_to_num(gap_V, nan=torch.inf).max())


def _reference_rows(
    one: RecordedRound, whole_LV: Tensor, first: int, reference: Reference, rejected: bool
) -> dict[int, Tensor]:
    """Node → its logits. Of the nodes that are not in the text, only if `rejected`: one forward
    pass for each path."""
    start = len(one.text) - 1 - first
    rows = {
        node: whole_LV[start + i]
        for i, node in enumerate(one.end.rows)
        if start + i < len(whole_LV)
    }
    if not rejected:
        return rows
    tree, compared = one.proposal.tree, 0
    leaves = {*range(1, len(tree) + 1)} - {parent + 1 for parent in tree}
    for leaf in sorted(leaves, key=lambda leaf: (-len(path_to(tree, leaf)), -leaf)):
        nodes = [i + 1 for i in path_to(tree, leaf)]
        if compared == 2 or all(node in rows for node in nodes):
            continue
        compared += 1
        found = reference.logits([*one.text, *node_path(one, leaf)], len(nodes))
        rows.update(zip(nodes, found, strict=True))
    return rows


def _check_processed(
    one: RecordedRound,
    node: int,
    request: Asked,
    recorder: Recorder,
    tally: Tally,
    place: dict[str, int],
) -> None:
    """What the rule received at a node, against transformers' processors over the node's own
    prefix."""
    count = len(request.prompt)
    written = [*one.text[count:], *node_path(one, node)]
    eos = recorder.engines[one.request].eos
    z_V = scores(one.logits_MV[node], one.text[:count], written, request.sampling, sorted(eos))
    if node not in one.received:  # temperature 0: the choice alone
        best = float(z_V.max())
        if not tally.measure(
            "greedy choice below the largest logit",
            best - float(z_V[one.chosen[node]]),
            1e-6 * max(1.0, abs(best)),
        ):
            tally.find(
                f"node {node}: token {one.chosen[node]} was chosen, token {int(z_V.argmax())} is "
                "the most probable",
                **place,
            )
        return
    wanted_V, got_V = law(z_V, request.sampling), one.received[node].double()
    scale = (
        float(
            one.logits_MV[node].double().masked_fill(~one.logits_MV[node].isfinite(), 0).abs().max()
        )
        / request.sampling.temperature
    )
    bound = 1e-6 + 8 * torch.finfo(torch.float32).eps * scale
    distance = float((wanted_V - got_V).abs().sum()) / 2
    if distance > bound and _on_an_edge(z_V, wanted_V, got_V, request.sampling):
        tally.counts["truncated at a rounding tie"] += 1
        kept_V = law(z_V, Sampling(request.sampling.temperature)) * (got_V > 0)
        distance = float((kept_V / kept_V.sum() - got_V).abs().sum()) / 2
    if not tally.measure("distribution at a node, total variation", distance, bound):
        tally.find(
            f"the distribution at node {node} is {distance:.3g} from the processed logits (total "
            "variation)",
            **place,
        )


def _on_an_edge(z_V: Tensor, wanted_V: Tensor, got_V: Tensor, sampling: Sampling) -> bool:
    """Whether the supports differ only by tokens that a change of `EDGE` in top-p or min-p moves,
    or by tokens of equal logits: in bf16 many are equal, and rounding of the penalties orders
    them."""
    near = torch.zeros_like(wanted_V, dtype=torch.bool)
    for sign in (1, -1):
        top_p = min(1.0, sampling.top_p * (1 + sign * EDGE)) if sampling.top_p < 1 else 1.0
        min_p = min(1.0, sampling.min_p * (1 - sign * EDGE))
        moved = Sampling(sampling.temperature, top_p, sampling.top_k, min_p=min_p)
        near |= (law(z_V, moved) > 0) != (wanted_V > 0)
    missing = z_V[(wanted_V > 0) & (got_V == 0) & ~near].sort().values
    extra = z_V[(wanted_V == 0) & (got_V > 0) & ~near].sort().values
    return len(missing) == len(extra) and torch.allclose(missing, extra, rtol=1e-6, atol=1e-6)


# ---- 4. randomness ----


def check_decisions(recorder: Recorder, asked: Sequence[Asked], tally: Tally) -> None:
    """Each round's outcome is what its distributions and its random numbers decide."""
    for number in range(len(asked)):
        for i, one in enumerate(recorder.rounds_of(number)):
            _check_decision(one, asked[number], tally, {"request": number, "round": i})


def check_randomness(recorder: Recorder, asked: Sequence[Asked], tally: Tally) -> None:
    """Whose numbers are used, and how often."""
    for what in recorder.foreign:
        tally.find(what)
    own = {id(generator): number for number, generator in recorder.generators.items()}
    coupled = {
        one.request
        for one in recorder.rounds
        if one.verifier == "gumbel" and not one.sampling.greedy
    }
    seen: dict[tuple[str, float], int] = {}
    for i, call in enumerate(recorder.calls):
        number = None if call.generator is None else own.get(id(call.generator))
        if number is None:
            if not coupled:
                whose = (
                    "torch's shared generator"
                    if call.generator is None
                    else "a generator that is no request's"
                )
                tally.find(f"{call.name} took {call.values.numel()} numbers from {whose}")
            continue
        if call.drafting is not None and call.drafting != number:
            tally.find(f"request {call.drafting} drafted with the numbers of request {number}")
        tally.counts["random numbers"] += call.values.numel()
        if call.values.dtype == torch.float64 and _has_own_seed(asked, number):
            for value in call.values.flatten().tolist():
                if seen.setdefault((call.name, value), i) != i:
                    tally.find(f"request {number} used one random number twice", request=number)
    for number, generator in recorder.generators.items():
        fresh = make_generator(asked[number].sampling.fixed_seed, generator.device)
        for call in recorder.calls:
            if call.generator is generator and not torch.equal(call.again(fresh), call.values):
                tally.find(
                    f"request {number}: its numbers are not those of its seed, in their order",
                    request=number,
                )
                break
        else:
            if not torch.equal(fresh.get_state(), generator.get_state()):
                tally.find(
                    f"request {number}: its generator was moved without a number being taken",
                    request=number,
                )
        tally.counts["streams of requests"] += 1
    _check_use(recorder, own, tally)


def _check_use(recorder: Recorder, own: Collection[int], tally: Tally) -> None:
    """Every number at which a token was drawn came out of a request's generator, and served one
    draw."""
    given: Counter[float] = Counter()
    for call in recorder.calls:
        if id(call.generator) in own:
            given.update(call.values.flatten().tolist())
    used = Counter(value for numbers in recorder.used for value in numbers.flatten().tolist())
    tally.counts["numbers at which tokens were drawn"] += sum(used.values())
    if wrong := sum((used - given).values()):
        tally.find(
            f"{wrong} tokens were drawn at a number that had served another draw, or that no "
            "request's generator gave"
        )


def _has_own_seed(asked: Sequence[Asked], number: int) -> bool:
    """Whether no other request has the same seed."""
    return sum(other.sampling.seed == asked[number].sampling.seed for other in asked) == 1


def _check_decision(
    one: RecordedRound, request: Asked, tally: Tally, place: dict[str, int]
) -> None:
    """The outcome of a round is what its distributions and its random numbers decide."""
    if VERIFIERS[one.verifier].lossy:
        return
    end = one.end
    if one.by_rule:
        numbers = (
            torch.cat([x.flatten() for x in one.verifying]) if one.verifying else torch.empty(0)
        )
        if len(numbers) != 2 or len(one.received) != len(one.proposal) + 1:
            tally.find(f"a round by rule took {len(numbers)} random numbers, not 2", **place)
            return
        rule = VERIFIERS[one.verifier].rule
        assert rule is not None
        p_1MV = torch.stack([one.received[m] for m in range(len(one.received))])[None]
        out = rule(p_1MV.clone(), Drafts.of([one.proposal], p_1MV.shape[2]))
        node = end.path[-1] + 1 if end.path else 0
        rest_V = out.rest_BMV[0, node]
        rest_V = rest_V if float(rest_V.sum()) > 0 else p_1MV[0, node]
        right = _inside(interval(out.stop_BM[0], node), numbers[0]) and _inside(
            interval(rest_V, end.following), numbers[1]
        )
        tally.counts["outcomes of rounds"] += 1
        if not right:
            tally.find(
                "the outcome is not what the rule gives for the numbers drawn in this round",
                **place,
            )
        return
    nodes = [0, *(i + 1 for i in end.path)]
    tokens = [*end.accepted, end.following]
    drawn = not one.sampling.greedy and one.verifier != "gumbel"
    u_M = torch.cat([x.flatten() for x in one.verifying]) if one.verifying else torch.empty(0)
    if drawn and len(u_M) != len(one.proposal) + 1:
        tally.find(
            f"a round over {len(one.proposal)} drafts took {len(u_M)} random numbers, not "
            f"{len(one.proposal) + 1}",
            **place,
        )
        return
    for depth, (node, token) in enumerate(zip(nodes, tokens, strict=True)):
        tally.counts["outcomes of rounds"] += 1
        if drawn:
            right = node in one.received and _inside(interval(one.received[node], token), u_M[node])
        elif one.sampling.greedy:
            right = one.chosen.get(node) == token
        else:
            p_V = one.received[node].double().cpu()
            values = p_V.log() + noise(request.sampling.fixed_seed, len(one.text) + depth, len(p_V))
            right = one.logits_MV.device.type != "cpu" or int(values.argmax()) == token
        if not right:
            tally.find(
                f"token {token} at node {node} is not the one that its distribution and its number "
                "give",
                **place,
            )
    last = nodes[-1]
    children = [i for i, parent in enumerate(one.proposal.tree) if parent == last - 1]
    if any(int(one.proposal.tokens_K[i]) == end.following for i in children):
        tally.find("a draft that is the target's own token was not accepted", **place)


def _inside(bounds: tuple[float, float], u: Tensor) -> bool:
    return bounds[0] - NEAR <= float(u) <= bounds[1] + NEAR and bounds[1] > bounds[0]


# ---- 2. proposals ----


def check_drafts(recorder: Recorder, asked: Sequence[Asked], tally: Tally) -> None:
    """Every drafted token is the one that the q reported with it and a random number of its own
    give, whatever the options."""
    for number in range(len(asked)):
        if not drafts(recorder.engines[number].drafter, "in_rounds"):
            for i, one in enumerate(recorder.rounds_of(number)):
                _check_drawn(one, tally, {"request": number, "round": i})


def _check_drawn(one: RecordedRound, tally: Tally, place: dict[str, int]) -> None:
    proposal = one.proposal
    if proposal.q is None:
        return
    numbers = [x.flatten().double() for x in one.drafting if x.is_floating_point()]
    u_K = torch.cat(numbers) if numbers else torch.empty(0)
    certain_K = proposal.q.probs.amax(1) == 1  # copies
    if not len(u_K) and bool(certain_K.all()):
        return
    if len(u_K) != len(proposal):
        what = f"{len(proposal)} drafts took {len(u_K)} random numbers"
        tally.find(f"{what}: each draft takes one, and a draft that was drawn is proposed", **place)
        return
    bounds = _intervals(proposal)
    if (
        proposal.parents is not None or proposal.law == "unmasked"
    ):  # drawn in another order than they stand
        u_K = _matched(bounds, u_K)
    for k in range(len(proposal)):
        tally.counts["drafted tokens of their q and number"] += 1
        if not _inside(bounds[k], u_K[k]):
            tally.find(
                f"draft {k + 1} is not the token that its q and its random number give", **place
            )


def _intervals(proposal: Proposal) -> list[tuple[float, float]]:
    """Of each draft the numbers that draw it from its q: all numbers where nothing is left of
    that."""
    assert proposal.q is not None
    columns_K, ids, found = proposal.tokens_K, proposal.q.ids, list[tuple[float, float]]()
    if ids is not None:
        columns_K = (ids == columns_K[:, None]).long().argmax(1)
    for k, parent in enumerate(proposal.tree):
        left_S = proposal.q.probs[k].clone()
        if proposal.siblings == "without_replacement":
            left_S[columns_K[[j for j in range(k) if proposal.tree[j] == parent]]] = 0
        found.append(interval(left_S, int(columns_K[k])) if float(left_S.sum()) > 0 else (0.0, 1.0))
    return found


def _matched(bounds: Sequence[tuple[float, float]], u_K: Tensor) -> Tensor:
    """The numbers in the order of the intervals that they lie in, each in one; -1 where none is
    left for an interval."""
    free, found_K = u_K.sort().values.tolist(), torch.full_like(u_K, -1)
    for k in sorted(range(len(bounds)), key=lambda k: bounds[k][1]):
        at = next((u for u in free if bounds[k][0] - NEAR <= u <= bounds[k][1] + NEAR), None)
        if at is not None:
            free.remove(at)
            found_K[k] = at
    return found_K


# ---- 5. commit and end ----


def check_commit(recorder: Recorder, asked: Sequence[Asked], target: Target, tally: Tally) -> None:
    """The text of each request, rebuilt from its rounds."""
    for number, request in enumerate(asked):
        out, place = recorder.engines[number].out, {"request": number}
        rounds = recorder.rounds_of(number)
        tokens: list[int] = []
        for i, one in enumerate(rounds):
            if one.text != [*request.prompt, *tokens]:
                tally.find(
                    f"round {i} began after another text than was committed",
                    request=number,
                    round=i,
                )
            path = path_to(one.proposal.tree, one.end.path[-1] + 1 if one.end.path else 0)
            if one.end.path != path or one.end.accepted != [
                int(one.proposal.tokens_K[j]) for j in path
            ]:
                tally.find(
                    f"round {i} accepted what is no path of its drafts", request=number, round=i
                )
            tokens += [*one.end.accepted, one.end.following]
        context = target.context_limit if request.context is None else request.context
        room = context - len(request.prompt)
        limit, full = (request.new, "length") if request.new <= room else (room, "context")
        eos = target.eos_ids if request.eos is None else request.eos
        count, finish, text = end_of(target, tokens, limit, full, eos, request.stop)
        tally.counts["texts"] += 1
        tally.counts[f"ended by {finish or 'nothing'}"] += 1
        if out.tokens != tokens[:count]:
            tally.find(f"the text has {len(out.tokens)} tokens; its rounds give {count}", **place)
        elif (out.finish, out.text) != (finish, text):
            tally.find(
                f"the text ends by {out.finish!r} as {out.text[-40:]!r}; it has to end by "
                f"{finish!r} as {text[-40:]!r}",
                **place,
            )
        pieces = recorder.streamed[number]
        if pieces is not None and "".join(pieces) != out.text:
            tally.find(
                f"the pieces of the text end with {''.join(pieces)[-40:]!r}, the text with "
                f"{out.text[-40:]!r}",
                **place,
            )
        last = rounds[-1] if rounds else None
        if last is not None and len(tokens) - count >= len(last.end.accepted) + 1:
            tally.find("a round ran after the end of the text", **place)
