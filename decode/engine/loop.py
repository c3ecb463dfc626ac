"""The decoding loop: draft → forward → verify → commit. Plain decoding is the same loop without a
drafter.

The cache holds every committed token but the last. A round runs the target over [last token,
drafts]; the verifier accepts n drafts and adds one token; the cache is rolled back to the committed
tokens. Of a tree of drafts (decode/speculation/tree.py) the accepted path is first made contiguous.
"""

from collections.abc import Generator, Sequence
from time import perf_counter

from decode.engine import request
from decode.engine.pace import DraftPace
from decode.engine.request import ForwardInput, Prefill, RequestRunner, T
from decode.speculation.rounds import Round, verify_rounds
from specalign.lm.model import TargetOutput


class EagerEngine:
    """The loop. paced: requests draft as many tokens as pay off, down to none (`can_pace`);
    otherwise all."""

    def __init__(self, paced: bool = False) -> None:
        self.pace = DraftPace() if paced else None

    def run_rounds(
        self, runners: Sequence[RequestRunner], most: int = 1
    ) -> Generator[None, None, None]:
        """Run requests of one target and drafter to their ends, at most `most` at a time in one
        target forward; as one ends the next begins. Pauses after chunks of prompts and after every
        round. Closing it ends the drafters' sessions."""
        waiting = list(reversed(runners))
        joining: dict[RequestRunner, Prefill[Round]] = {}
        running: list[RequestRunner] = []
        try:
            while waiting or joining or running:
                while waiting and len(joining) + len(running) < most:
                    runner = waiting.pop()
                    joining[runner] = runner.prefill()
                if joining:
                    running = free_finished(running + prefill_batch(joining), among=len(runners))
                    yield
                if not running:
                    continue
                if self.pace is None or not can_pace(running):
                    run_round(running)
                else:
                    longest = max(runner.length for runner in running)
                    trials, started = self.pace.of(len(running), longest), perf_counter()
                    draining = len(running) > 1 and not (waiting or joining)
                    size, before = trials.choose(draining), sum(x.length for x in running)
                    run_round(running, size)
                    tokens = sum(runner.length for runner in running) - before
                    trials.observe(size, tokens, perf_counter() - started)
                running = free_finished(running, among=len(runners))
                yield
        finally:
            for runner in runners:
                runner.close()


def can_pace(running: Sequence[RequestRunner]) -> bool:
    """Whether these requests may draft what is fastest."""
    return all(runner.adapts for runner in running)


def run_round(running: Sequence[RequestRunner], size: int | None = None) -> None:
    """Draft → forward → verify → commit. size: the most drafts of a request; None = all."""
    drafts = [runner.draft(size) for runner in running]
    outputs = forward_batch(running, drafts)
    rounds = [runner.make_round(out) for runner, out in zip(running, outputs, strict=True)]
    outcomes = verify_rounds(rounds)
    for runner, output, outcome in zip(running, outputs, outcomes, strict=True):
        runner.commit_round(output, outcome)


def free_finished(running: Sequence[RequestRunner], among: int) -> list[RequestRunner]:
    """Those that have not finished. Frees the memory of the others for the next of `among`."""
    for runner in running:
        if runner.out.finish and among > 1:
            runner.free()
    return [runner for runner in running if not runner.out.finish]


def prefill_batch(joining: dict[RequestRunner, Prefill[Round]]) -> list[RequestRunner]:
    """Read more of the joining prompts. Chooses the first token of those that are complete, and
    returns them."""
    rounds = read_chunks(joining)
    outcomes = verify_rounds(list(rounds.values())) if rounds else []
    for runner, outcome in zip(rounds, outcomes, strict=True):
        runner.commit_prefill(outcome)
    return list(rounds)


def read_chunks(joining: dict[RequestRunner, Prefill[T]]) -> dict[RequestRunner, T]:
    """Read at most PREFILL_CHUNK tokens of the joining prompts, in their order. Removes complete
    ones and returns their results.

    This bounds how long running requests wait for their next round, like vLLM's chunked prefill.
    Here each chunk is a separate forward pass and is never cut to fill the budget, so a request
    computes the same alone and in a batch.
    """
    budget, complete = request.PREFILL_CHUNK, {}
    for runner, prefill in list(joining.items()):
        budget -= min(runner.unread, request.PREFILL_CHUNK)
        if budget < 0:
            break
        try:
            next(prefill)
        except StopIteration as end:
            complete[runner] = end.value
            del joining[runner]
    return complete


def forward_batch(
    running: Sequence[RequestRunner], drafts: Sequence[ForwardInput]
) -> list[TargetOutput]:
    """One forward pass of the target over the drafts of all requests."""
    target, caches = running[0].target, [runner.request.cache for runner in running]
    taps = next((runner.session.taps for runner in running if runner.session is not None), ())
    if len(running) == 1:
        [cache], [(tokens_1L, see_LL)] = caches, drafts
        return [target.forward(tokens_1L, cache=cache, see_LL=see_LL, taps=taps)]
    tokens, see = [one.tokens_1L for one in drafts], [one.see_LL for one in drafts]
    return target.forward_batch(tokens, caches, see, taps)
