"""Checks 2, 4 and 5 of recorded rounds: drafts, randomness, commit and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.speculation.drafts import Drafts
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import Sampling, make_generator
from decode.speculation.verifiers import VERIFIERS
from decode.verification.recording import RandomCall, RecordedRound, Recorder
from decode.verification.reference import (
    end_of,
    interval,
    noise,
)
from decode.verification.verdict import Tally
from specalign.lm.model import Target

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


# ---- 4. randomness ----


def check_randomness(recorder: Recorder, asked: Sequence[Asked], tally: Tally) -> None:
    """Whose numbers are used, and how often."""
    tally.place = {}
    for what in recorder.foreign:
        tally.find(what)
    own = {id(generator): number for number, generator in recorder.generators.items()}
    rounds = recorder.rounds
    coupled = any(one.verifier == "gumbel" and not one.sampling.greedy for one in rounds)
    seeds = Counter(one.sampling.seed for one in asked)
    given: Counter[float] = Counter()
    for call in recorder.calls:
        number = own.get(id(call.generator))
        if number is None:
            if not coupled:
                tally.find(f"{call.name} took numbers from a generator that is no request's")
            continue
        tally.place = {"request": number}
        if call.drafting not in (None, number):
            tally.find(f"request {call.drafting} drafted with the numbers of request {number}")
        tally.counts["random numbers"] += call.values.numel()
        values = call.values.flatten().tolist()
        given.update(values)
        fresh = max((given[value] for value in values), default=1) == 1
        own_seed = seeds[asked[number].sampling.seed] == 1
        if call.values.dtype == torch.float64 and own_seed and not fresh:
            tally.find(f"request {number} used one random number twice")
    for number, generator in recorder.generators.items():
        tally.place = {"request": number}
        own_calls = [call for call in recorder.calls if call.generator is generator]
        seed = asked[number].sampling.fixed_seed
        right = _repeats(own_calls, seed, generator)
        what = f"request {number}: its numbers are not those of its seed, in their order"
        tally.expect("streams of requests", right, what)
    tally.place = {}
    used = Counter(value for numbers in recorder.used for value in numbers.flatten().tolist())
    tally.counts["numbers at which tokens were drawn"] += sum(used.values())
    if wrong := sum((used - given).values()):
        why = "that had served another draw, or that no request's generator gave"
        tally.find(f"{wrong} tokens were drawn at a number {why}")


def _repeats(calls: Sequence[RandomCall], seed: int, generator: torch.Generator) -> bool:
    """Whether a fresh generator gives the same numbers, and nothing else has moved the
    request's."""
    fresh = make_generator(seed, generator.device)
    right = all(torch.equal(call.again(fresh), call.values) for call in calls)
    return right and torch.equal(fresh.get_state(), generator.get_state())


def check_decisions(recorder: Recorder, asked: Sequence[Asked], tally: Tally) -> None:
    """The outcome of each round is what its distributions and its random numbers decide."""
    for number, request in enumerate(asked):
        for i, one in enumerate(recorder.rounds_of(number)):
            tally.place = {"request": number, "round": i}
            if VERIFIERS[one.verifier].lossy:
                continue
            u_N = torch.cat([x.flatten() for x in one.verifying]) if one.verifying else None
            count = 0 if u_N is None else len(u_N)
            if one.by_rule:
                _check_rule_decision(one, u_N, count, tally)
            else:
                _check_own_decision(one, u_N, count, request.sampling.fixed_seed, tally)


def _check_rule_decision(one: RecordedRound, u_N: Tensor | None, count: int, tally: Tally) -> None:
    if u_N is None or count != 2 or len(one.received) != len(one.proposal) + 1:
        tally.find(f"a round by rule took {count} random numbers, not 2")
        return
    rule = VERIFIERS[one.verifier].rule
    assert rule is not None
    p_1MV = torch.stack([one.received[m] for m in range(len(one.received))])[None]
    out = rule(p_1MV.clone(), Drafts.of([one.proposal], p_1MV.shape[2]))
    node = one.end.rows[-1]
    rest_V = out.rest_BMV[0, node]
    rest_V = rest_V if float(rest_V.sum()) > 0 else p_1MV[0, node]
    bounds = interval(out.stop_BM[0], node), interval(rest_V, one.end.following)
    right = all(_inside(*pair) for pair in zip(bounds, u_N, strict=True))
    tally.expect("outcomes of rounds", right, "the outcome is not what rule and numbers give")


def _check_own_decision(
    one: RecordedRound, u_N: Tensor | None, count: int, seed: int, tally: Tally
) -> None:
    """Where the target chooses its own tokens, and drafts are accepted that equal them."""
    drawn = not one.sampling.greedy and one.verifier != "gumbel"
    drafted = len(one.proposal)
    if drawn and count != drafted + 1:
        tally.find(f"a round over {drafted} drafts took {count} random numbers, not {drafted + 1}")
        return
    tokens = [*one.end.accepted, one.end.following]
    for depth, (node, token) in enumerate(zip(one.end.rows, tokens, strict=True)):
        if one.sampling.greedy:
            right = one.chosen.get(node) == token
        elif drawn:
            assert u_N is not None
            right = node in one.received
            right = right and _inside(interval(one.received[node], token), u_N[node])
        else:
            p_V = one.received[node].double().cpu()
            values_V = p_V.log() + noise(seed, len(one.text) + depth, len(p_V))
            right = one.logits_MV.device.type != "cpu" or int(values_V.argmax()) == token
        what = f"token {token} at node {node} is not what its distribution and its number give"
        tally.expect("outcomes of rounds", right, what)
    last = one.end.rows[-1]
    children = [i for i, parent in enumerate(one.proposal.tree) if parent == last - 1]
    if any(int(one.proposal.tokens_K[i]) == one.end.following for i in children):
        tally.find("a draft that is the target's own token was not accepted")


def _inside(bounds: tuple[float, float], u: Tensor | float) -> bool:
    return bounds[0] - NEAR <= float(u) <= bounds[1] + NEAR and bounds[1] > bounds[0]


# ---- 2. proposals ----


def check_drafts(recorder: Recorder, tally: Tally) -> None:
    """Every drafted token is the one that the q reported with it and a random number of its own
    give, whatever the options."""
    for number, engine in enumerate(recorder.engines):
        if drafts(engine.drafter, "in_rounds"):
            continue
        for i, one in enumerate(recorder.rounds_of(number)):
            tally.place = {"request": number, "round": i}
            if one.proposal.q is not None:
                _check_drawn(one.proposal, one.drafting, tally)


def _check_drawn(proposal: Proposal, numbers: Sequence[Tensor], tally: Tally) -> None:
    assert proposal.q is not None
    u_K = [u for x in numbers if x.is_floating_point() for u in x.flatten().tolist()]
    if not u_K and bool((proposal.q.probs.amax(1) == 1).all()):  # copies
        return
    if len(u_K) != len(proposal):
        what = "each draft takes one, and a draft that was drawn is proposed"
        tally.find(f"{len(proposal)} drafts took {len(u_K)} random numbers: {what}")
        return
    bounds = _intervals(proposal)
    if proposal.parents is not None or proposal.law == "unmasked":
        u_K = _match(bounds, u_K)  # drawn in another order than they stand
    for k, u in enumerate(u_K):
        what = f"draft {k + 1} is not the token that its q and its random number give"
        tally.expect("drafted tokens of their q and number", _inside(bounds[k], u), what)


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


def _match(bounds: Sequence[tuple[float, float]], numbers: Sequence[float]) -> list[float]:
    """The numbers in the order of the intervals that they lie in, each in one; -1 where none is
    left for an interval."""
    free, found = sorted(numbers), [-1.0] * len(bounds)
    for k in sorted(range(len(bounds)), key=lambda k: bounds[k][1]):
        at = next((u for u in free if bounds[k][0] - NEAR <= u <= bounds[k][1] + NEAR), None)
        if at is not None:
            free.remove(at)
            found[k] = at
    return found


# ---- 5. commit and end ----


def check_commit(recorder: Recorder, asked: Sequence[Asked], target: Target, tally: Tally) -> None:
    """The text of each request, rebuilt from its rounds, and decoded as a whole."""
    for number, request in enumerate(asked):
        out, rounds = recorder.engines[number].out, recorder.rounds_of(number)
        tokens: list[int] = []
        for i, one in enumerate(rounds):
            tally.place = {"request": number, "round": i}
            if one.text != [*request.prompt, *tokens]:
                tally.find(f"round {i} began after another text than was committed")
            path = one.path(one.end.rows[-1])
            if one.end.path != path or one.end.accepted != one.proposal.tokens_K[path].tolist():
                tally.find(f"round {i} accepted what is no path of its drafts")
            tokens += [*one.end.accepted, one.end.following]
        tally.place = {"request": number}
        context = target.context_limit if request.context is None else request.context
        room = context - len(request.prompt)
        limit, full = (request.new, "length") if request.new <= room else (room, "context")
        eos = target.eos_ids if request.eos is None else request.eos
        count, finish, text = end_of(target, tokens, limit, full, eos, request.stop)
        tally.counts[f"ended by {finish or 'nothing'}"] += 1
        what = f"the text has {len(out.tokens)} tokens; its rounds give {count}"
        right = tally.expect("texts", out.tokens == tokens[:count], what)
        if right and (out.finish, out.text) != (finish, text):
            what = f"it has to end by {finish!r} as {text[-40:]!r}"
            tally.find(f"the text ends by {out.finish!r} as {out.text[-40:]!r}; {what}")
        pieces = recorder.streamed[number]
        if pieces is not None and "".join(pieces) != text:
            what = f"the text with {text[-40:]!r}"
            tally.find(f"the streamed pieces end with {''.join(pieces)[-40:]!r}, {what}")
        if rounds and len(tokens) - count >= len(rounds[-1].end.accepted) + 1:
            tally.find("a round ran after the end of the text")
