"""The decoding loop: draft → forward → verify → commit. Plain decoding is the same loop without a
drafter.

The cache holds every committed token but the last. A round runs the target over [last token,
drafts]; the verifier accepts n drafts and adds one token; the cache is rolled back to the committed
tokens. Of a tree of drafts (decode/speculation/tree.py) the accepted path is first made contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from decode.engine.detokenizer import TextStream, special_tokens_in
from decode.engine.output import Generation, RoundTrace, Tree
from decode.proposers.base import DraftSession, Proposer, Request
from decode.speculation.history import History
from decode.speculation.proposal import NO_DRAFTS, Proposal
from decode.speculation.rounds import Round, verify_rounds
from decode.speculation.sampling import make_generator, position_noise
from decode.speculation.settings import MOST_NODES, Sampling
from decode.speculation.tree import ancestors
from decode.speculation.verifiers import Outcome
from specalign.lm.model import Target, TargetOutput

PREFILL_CHUNK = 2048


@torch.no_grad()
def run_batch(runners: Sequence[RequestRunner], most: int = 1) -> None:
    """Run requests of one target and drafter to their ends, at most `most` at a time in one target
    forward; as one ends the next begins."""
    for _ in run_rounds(runners, most):
        pass


def run_rounds(runners: Sequence[RequestRunner], most: int = 1) -> Generator[None, None, None]:
    """`run_batch` as an iterator that pauses after every prefill and round. Closing it ends the
    drafters' sessions."""
    waiting = list(reversed(runners))
    running: list[RequestRunner] = []
    try:
        while waiting or running:
            while waiting and len(running) < most:
                fresh = [waiting.pop() for _ in range(min(most - len(running), len(waiting)))]
                prefill_batch(fresh)
                running += [runner for runner in fresh if not runner.out.finish]
                yield
            if not running:
                continue
            drafts = [runner.draft() for runner in running]
            outputs = forward_batch(running, drafts)
            rounds = [runner.make_round(out) for runner, out in zip(running, outputs, strict=True)]
            outcomes = verify_rounds(rounds)
            for runner, output, outcome in zip(running, outputs, outcomes, strict=True):
                runner.commit_round(output, outcome)
                if runner.out.finish and len(runners) > 1:  # room for the next ones
                    runner.free()
            running = [runner for runner in running if not runner.out.finish]
            yield
    finally:
        for runner in runners:
            runner.close()


@torch.no_grad()
def prefill_batch(runners: Sequence[RequestRunner]) -> None:
    """Prefill each request's prompt and choose its first token."""
    rounds = [runner.prefill() for runner in runners]
    for runner, outcome in zip(runners, verify_rounds(rounds), strict=True):
        runner.commit_prefill(outcome)


class ForwardInput(NamedTuple):
    """The target's input in a round: the last token and the drafts; for a tree also their attention
    mask (bool)."""

    tokens_1L: Tensor
    see_LL: Tensor | None


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


def list_rejected(proposal: Proposal, path: Sequence[int]) -> tuple[int, ...]:
    """The drafts after the accepted path, each time the first that was drafted there."""
    last = path[-1] if path else -1
    rejected = []
    for node in range(len(proposal)):
        if proposal.tree[node] == last:
            rejected.append(int(proposal.tokens_K[node]))
            last = node
    return tuple(rejected)


class RequestRunner:
    """Runs one request that `Decoder` has checked; without a drafter, plain decoding."""

    def __init__(
        self,
        target: Target,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        drafter: Proposer | None = None,
        verifier: str = "greedy",
        stop: Sequence[str] = (),
        stream: Callable[[str], object] | None = None,
    ) -> None:
        self.target, self.prompt, self.sampling, self.verifier = target, prompt, sampling, verifier
        self.drafter = drafter
        self.limit = min(max_new_tokens, target.context_limit - len(prompt))
        self.full = "length" if self.limit == max_new_tokens else "context"
        self.eos = frozenset(target.eos_ids)
        self.text: TextStream | None = None
        if stop or stream is not None:
            special = special_tokens_in(stop, target.tokenizer)
            self.text = TextStream(target.detokenize, stop, stream, special)
        self.session: DraftSession | None = None
        self.tracing = False
        self.out = Generation([], "", len(prompt), finish="")
        self.out.seed = None if sampling.greedy else sampling.fixed_seed

    def run(self) -> Generation:
        run_batch([self])
        return self.out

    def prefill(self) -> Round:
        """Run the target over the prompt; returns the round that chooses the first token."""
        self.started = perf_counter()
        target, prompt, sampling, drafter = self.target, self.prompt, self.sampling, self.drafter
        # room for tree nodes that are rejected; a chain always fits into what may still be written
        spare = 0 if drafter is None else min(drafter.draft_nodes, MOST_NODES)
        self.request = Request(
            target,
            list(prompt),
            target.new_cache(1, len(prompt) + self.limit + spare),
            sampling,
            make_generator(sampling.fixed_seed, target.device),
            History(sampling, prompt, target.vocab_size, target.eos_ids, target.device),
            self._noise() if self.verifier == "gumbel" and not sampling.greedy else None,
        )
        # the prefill and a round without drafts give one token each: up to two, no draft fits
        if drafter is not None and self.limit > 2:
            self.session = drafter.start(self.request)
        taps = self.session.taps if self.session is not None else ()
        for start in range(0, len(prompt), PREFILL_CHUNK):
            chunk = torch.tensor([prompt[start : start + PREFILL_CHUNK]], device=target.device)
            output = target.forward(chunk, cache=self.request.cache, taps=taps, logits=False)
            if self.session is not None:
                self.session.observe(output, chunk.shape[1])
        return self._round(target.head(output.hidden_BLD[:, -1:])[0], NO_DRAFTS)

    def commit_prefill(self, outcome: Outcome) -> None:
        self._append(outcome)
        self.prefilled = perf_counter()
        self._record_end()

    def close(self) -> None:
        """End the drafter's session."""
        if self.session is not None:
            self.session.close()

    def free(self) -> None:
        """Free the memory of an ended request for the next ones."""
        self.close()
        self.session = None
        del self.request

    def cancel(self) -> None:
        """End an output that is not complete; what was committed stays."""
        if not self.out.finish:
            self.out.finish = "closed"
            if self.out.tokens:
                self._record_end()

    def _record_end(self) -> None:
        """Record the text and the times of an output that has ended."""
        out, text = self.out, self.text
        if out.finish:
            out.prefill_seconds = self.prefilled - self.started
            out.seconds = perf_counter() - self.prefilled
            out.text = self.target.detokenize(out.tokens) if text is None else text.finish()

    def _noise(self) -> Callable[[int], Tensor]:
        """Position → its noise, cached because drafter and target both ask for it."""
        seed, size, device = self.sampling.fixed_seed, self.target.vocab_size, self.target.device
        return lru_cache(maxsize=64)(lambda position: position_noise(seed, position, size, device))

    def draft(self) -> ForwardInput:
        """Begin a round: draft, and return what the target has to run over."""
        started, device = perf_counter(), self.target.device
        self.proposal = self._propose()
        parents = self.proposal.parents
        see_LL = None if parents is None else ancestors(parents).to(device)
        self.drafted = perf_counter()
        self.out.draft_seconds += self.drafted - started
        last = torch.tensor([self.request.tokens[-1]], device=device)
        tokens_L = torch.cat((last, self.proposal.tokens_K)) if len(self.proposal) else last
        return ForwardInput(tokens_L[None], see_LL)

    def make_round(self, output: TargetOutput) -> Round:
        assert output.logits_BLV is not None
        return self._round(output.logits_BLV[0], self.proposal)

    def commit_round(self, output: TargetOutput, outcome: Outcome) -> None:
        out, proposal, cache, rows = self.out, self.proposal, self.request.cache, outcome.rows
        cache.keep(cache.length - len(proposal) - 1, rows)
        before = len(out.tokens)
        out.calls += 1
        out.drafted.append(proposal.depth)
        tree = None if proposal.parents is None else Tree(proposal.parents, outcome.path)
        out.trees.append(tree)
        out.accepted.append(self._append(outcome))
        verified = perf_counter()
        if self.session is not None and not out.finish:
            self.session.observe(output if outcome.straight else output.at(rows), len(rows))
        if self.tracing:
            rejected = list_rejected(proposal, outcome.path)
            trace = RoundTrace(
                verified - self.prefilled, len(out.tokens) - before, out.accepted[-1], rejected
            )
            out.trace.append(trace)
        out.verify_seconds += verified - self.drafted
        out.draft_seconds += perf_counter() - verified
        self._record_end()

    def _propose(self) -> Proposal:
        """Propose no more drafts than still fit; this limit is known before anything is drawn."""
        if self.session is None or self.drafter is None:
            return NO_DRAFTS
        room = min(self.drafter.draft_tokens, self.limit - len(self.out.tokens) - 1)
        proposal = self.session.propose(room) if room > 0 else None
        if proposal is not None and self.target.chains_only and proposal.branches:
            raise self.target.branch_error()
        return NO_DRAFTS if proposal is None else proposal.cut(room)

    def _round(self, logits_MV: Tensor, proposal: Proposal) -> Round:
        request, sampling, place = self.request, self.sampling, len(self.request.tokens)
        before = request.history.rows(proposal.tokens_K, proposal.tree)
        draws = (request.generator, request.noise, place)
        return Round(logits_MV, proposal, self.verifier, sampling, before, *draws)

    def _append(self, outcome: Outcome) -> int:
        """Append the accepted drafts and the next token, up to the end of the output, and set
        `finish` there. Returns how many of the appended tokens were drafts."""
        out, request = self.out, self.request
        first = len(out.tokens)
        for token in (*outcome.accepted, outcome.following):
            out.tokens.append(token)
            if self.text is not None and self.text.push(token):
                out.finish = "stop"
            elif token in self.eos:
                out.finish = "eos"
            elif len(out.tokens) == self.limit:
                out.finish = self.full
            if out.finish:
                break
        fresh = out.tokens[first:]
        request.tokens.extend(fresh)
        request.history.extend(fresh)
        return min(len(outcome.accepted), len(fresh))
