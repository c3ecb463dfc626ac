"""Check 4, randomness: a request uses its own random numbers, once, and they decide its rounds."""

from collections import Counter
from collections.abc import Sequence

import torch

from decode.speculation.drafts import Drafts
from decode.speculation.sampling import make_generator
from decode.speculation.verifiers import VERIFIERS
from decode.verification.cases import drafts_so
from decode.verification.recorded import RecordedRequest, RecordedRound
from decode.verification.recording import Recorder
from decode.verification.reference import interval, is_inside, noise, own_numbers
from decode.verification.verdict import Tally


def check_randomness(recorder: Recorder, tally: Tally) -> None:
    """Whose numbers are used, and how often."""
    tally.place = {}
    for what in recorder.foreign:
        tally.find(what)
    own = {request.generator: request for request in recorder.requests}
    coupled = any(one.verifier == "gumbel" and not one.sampling.greedy for one in recorder.rounds)
    asked = Counter(one.sampling.seed for one in recorder.asked)
    given: Counter[float] = Counter()
    for call in recorder.calls:
        request, drafting = own.get(call.generator), call.drafting
        if request is None and call.generator is not None and drafting is not None:
            # what drafts ahead of its round has a second one
            ahead = drafts_so(drafting.runner.drafter, "in_background")
            request = drafting if ahead else None
        if request is None:
            if not coupled:
                tally.find(f"{call.name} used a generator that belongs to no request")
            continue
        tally.place = {"request": request.number}
        if drafting is not None and drafting is not request:
            tally.find(f"request {drafting.number} drafted with another request's random numbers")
        tally.counts["random numbers"] += call.values.numel()
        values = call.values.flatten().tolist()
        given.update(values)
        fresh = max((given[value] for value in values), default=1) == 1
        own_seed = asked[request.asked.sampling.seed] < 2  # those without a seed get their own
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
        nodes = len(one.proposal) + 1
        count = 2 if one.by_rule else 0
        if len(u_N) != count and one.verifier != "gumbel":
            tally.find(
                f"a round over {nodes - 1} drafts took {len(u_N)} random numbers, not {count}"
            )
        elif one.by_rule and len(one.received) != nodes:
            tally.find(f"a rule received {len(one.received)} distributions, not {nodes}")
        elif one.by_rule:
            _check_rule_decision(one, u_N, tally)
        else:
            _check_own_decision(one, tally)


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


def _check_own_decision(one: RecordedRound, tally: Tally) -> None:
    """Check rounds in which the target chooses its own tokens and accepts drafts that equal
    them."""
    asked, first = one.request.asked, len(one.text) - len(one.request.asked.prompt)
    seed, device = asked.sampling.fixed_seed, one.logits_MV.device
    u_T = own_numbers(seed, first + one.proposal.depth + 1, device)[first:]
    tokens = [*one.end.accepted, one.end.following]
    for depth, (node, token) in enumerate(zip(one.end.rows, tokens, strict=True)):
        if one.sampling.greedy:
            right = one.chosen.get(node) == token
        elif one.verifier != "gumbel":
            right = node in one.received
            right = right and is_inside(interval(one.received[node], token), u_T[depth])
        else:
            p_V = one.received[node].double().cpu()
            values_V = p_V.log() + noise(seed, len(one.text) + depth, len(p_V))
            right = one.logits_MV.device.type != "cpu" or int(values_V.argmax()) == token
        what = (
            f"token {token} at node {node} does not follow from its distribution and random number"
        )
        tally.expect("outcomes of rounds", right, what)
    children = [i for i, parent in enumerate(one.proposal.tree) if parent == one.end.rows[-1] - 1]
    if any(int(one.proposal.tokens_K[i]) == one.end.following for i in children):
        tally.find("a draft that is the target's own token was not accepted")
