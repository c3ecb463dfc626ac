"""The decoding loop: propose → forward → verify → commit. Plain decoding is the same loop without a drafter.

The cache holds every committed token but the last. A round runs the target over [last token, drafts], which
writes their keys and values; the verifier keeps n drafts and adds one token; the cache's length goes back to
what is committed. What a round needs from the device comes in one transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from align.target import Target, TargetOutput
from decode.drafters.base import Drafter, Request
from decode.proposal import Proposal
from decode.sampling import Sampling, best, draw, penalised, probs, seen_rows, seen_tokens
from decode.text import TextStream
from decode.verify import match, verify

PREFILL_CHUNK = 2048


@dataclass
class Generation:
    """One request's output and what it took.

    A *call* is a target forward that verifies; the prefill, which gives the first token, is not one.
    """

    tokens: list[int]
    """The output, EOS included when it was reached. After a stop string: up to the token that completed
    it."""
    text: str
    """The output as text, special tokens left out, cut before a stop string."""
    prompt_tokens: int
    finish: str
    """eos, length (max_new_tokens), stop (a stop string) or context (the target's context is full)."""
    calls: int = 0
    drafted: list[int] = field(default_factory=list)
    """Drafted tokens per call."""
    accepted: list[int] = field(default_factory=list)
    """Drafted tokens committed per call: never one after an EOS or a stop string, never one beyond a
    limit."""
    seconds: float = 0.0
    """Decoding, without the prefill."""
    prefill_seconds: float = 0.0
    """Cache, prompt and first token."""
    draft_seconds: float = 0.0
    """Part of `seconds` spent drafting. On a GPU, work still queued is counted where it is waited for."""
    verify_seconds: float = 0.0
    """Part of `seconds` spent in target calls and verification."""
    top2_gaps: list[float] | None = None
    """Per token, the gap between the two largest logits it was chosen from (before temperature), on
    request."""

    @property
    def tau(self) -> float:
        """τ: tokens committed per call, the prefill's token excluded; 0 without a call."""
        return (len(self.tokens) - 1) / self.calls if self.calls else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, the prefill's token and time excluded; 0 without a call."""
        return (len(self.tokens) - 1) / self.seconds if self.calls and self.seconds > 0 else 0.0


class Engine:
    """Runs one request, batch of one. Build one per request; it holds nothing that another would need.

    Args:
        prompt: at least one token, fewer than the target's context.
        max_new_tokens: at least 1.
        drafter: None = plain decoding.
        verifier: a name in `VERIFIERS` that is exact for the drafter's law at this temperature.
        stop: strings that end the output, none empty.
        stream: called with pieces of text as they are settled.
        record_gaps: fill `Generation.top2_gaps`.
    """

    def __init__(
        self,
        target: Target,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        drafter: Drafter | None = None,
        verifier: str = "greedy",
        stop: Sequence[str] = (),
        stream: Callable[[str], object] | None = None,
        record_gaps: bool = False,
    ) -> None:
        self.target, self.prompt, self.sampling, self.verifier = target, prompt, sampling, verifier
        self.drafter = drafter
        self.limit = min(max_new_tokens, target.context_limit - len(prompt))
        self.full = "length" if self.limit == max_new_tokens else "context"
        self.eos = frozenset(target.eos_ids)
        self.text = TextStream(target.decode, stop, stream) if stop or stream is not None else None
        self.out = Generation([], "", len(prompt), finish="", top2_gaps=[] if record_gaps else None)

    @torch.no_grad()
    def run(self) -> Generation:
        started = perf_counter()
        logits_1V = self._prefill()
        self._commit(self._judge(logits_1V, None))
        prefilled = perf_counter()
        while not self.out.finish:
            self._round()
        out = self.out
        out.prefill_seconds, out.seconds = prefilled - started, perf_counter() - prefilled
        out.text = self.text.finish() if self.text is not None else self.target.decode(out.tokens)
        return out

    def _prefill(self) -> Tensor:
        """Run the prompt through the target; logits (1, V) of the first new token."""
        target, prompt = self.target, self.prompt
        needs_seen = self.sampling.repetition_penalty != 1.0
        self.request = Request(
            target,
            list(prompt),
            target.new_cache(1, len(prompt) + self.limit),
            self.sampling,
            torch.Generator(target.device).manual_seed(self.sampling.seed),
            seen_tokens(prompt, target.vocab_size, target.device) if needs_seen else None,
        )
        self.session = (
            self.drafter.start(self.request) if self.drafter is not None and self.limit > 2 else None
        )
        for start in range(0, len(prompt), PREFILL_CHUNK):
            chunk = torch.tensor([prompt[start : start + PREFILL_CHUNK]], device=target.device)
            output = self._forward(chunk, logits=False)
            if self.session is not None:
                self.session.observe(output, chunk.shape[1])
        return target.head(output.hidden_BLD[:, -1:])[0]

    def _forward(self, tokens_1L: Tensor, logits: bool = True) -> TargetOutput:
        taps = self.session.taps if self.session is not None else ()
        return self.target.forward(tokens_1L, cache=self.request.cache, taps=taps, logits=logits)

    def _round(self) -> None:
        started = perf_counter()
        proposal = self._propose()
        drafted = perf_counter()
        cache = self.request.cache
        before = cache.length
        output = self._forward(self._inputs(proposal))
        assert output.logits_BLV is not None
        verdict = self._judge(output.logits_BLV[0], proposal)
        kept = verdict[0] + 1  # the last token of the round before, and the drafts accepted after it
        cache.length = before + kept
        self.out.calls += 1
        self.out.drafted.append(len(verdict) - 2)
        self.out.accepted.append(self._commit(verdict))
        verified = perf_counter()
        if self.session is not None and not self.out.finish:
            self.session.observe(output, kept)
        self.out.verify_seconds += verified - drafted
        self.out.draft_seconds += drafted - started + perf_counter() - verified

    def _propose(self) -> Proposal | None:
        """A round commits its drafts and one more: as many drafts as still fit, known before anything is
        drawn."""
        if self.session is None or self.drafter is None:
            return None
        room = min(self.drafter.draft_tokens, self.limit - len(self.out.tokens) - 1)
        proposal = self.session.propose(room) if room > 0 else None
        return proposal.cut(room) if proposal is not None and len(proposal) else None

    def _inputs(self, proposal: Proposal | None) -> Tensor:
        last = torch.tensor([self.request.tokens[-1]], device=self.target.device)
        return (last if proposal is None else torch.cat((last, proposal.tokens_K)))[None]

    def _judge(self, logits_NV: Tensor, proposal: Proposal | None) -> list[int]:
        """[accepted, next token, drafted tokens …] on the host: the round's one synchronisation."""
        sampling, seen = self.sampling, self.request.seen_V
        if seen is not None and proposal is not None:
            seen = seen_rows(seen, proposal.tokens_K)
        if self.out.top2_gaps is not None:
            top2 = penalised(logits_NV, sampling, seen).topk(2, dim=-1).values
            self.gaps = (top2[:, 0] - top2[:, 1]).tolist()
        if proposal is None:
            if sampling.greedy:
                return [0, int(best(logits_NV, sampling, seen, overwrite=True))]
            return [0, int(draw(probs(logits_NV, sampling, seen, overwrite=True), self.request.generator))]
        if self.verifier == "greedy":
            verdict = match(proposal.tokens_K, best(logits_NV, sampling, seen, overwrite=True))
        else:
            verdict = verify(
                self.verifier,
                proposal,
                probs(logits_NV, sampling, seen, overwrite=True),
                self.request.generator,
            )
        return torch.cat((torch.stack(verdict), proposal.tokens_K)).tolist()

    def _commit(self, verdict: list[int]) -> int:
        """Add accepted drafts and the next token up to an end; sets `finish`. How many of them were
        drafts."""
        accepted, following, *drafts = verdict
        out, request = self.out, self.request
        first = len(out.tokens)
        for token in (*drafts[:accepted], following):
            out.tokens.append(token)
            stopped = self.text is not None and self.text.push(token)
            if stopped or token in self.eos or len(out.tokens) == self.limit:
                out.finish = "stop" if stopped else "eos" if token in self.eos else self.full
                break
        fresh = out.tokens[first:]
        request.tokens.extend(fresh)
        if request.seen_V is not None:
            request.seen_V[torch.tensor(fresh, device=request.seen_V.device)] = True
        if out.top2_gaps is not None:
            out.top2_gaps.extend(self.gaps[: len(fresh)])
        return min(accepted, len(fresh))
