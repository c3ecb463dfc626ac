"""One request as the loop runs it: prompt, prefill, rounds, and the output with its counts."""

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from time import perf_counter
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from decode.engine.detokenizer import TextStream, special_tokens_in
from decode.engine.output import Generation, RoundResult, RoundTrace, Tree, list_rejected
from decode.proposers.base import DraftSession, Proposer, Request
from decode.speculation.history import History
from decode.speculation.proposal import NO_DRAFTS, Proposal
from decode.speculation.rounds import Round
from decode.speculation.sampling import make_generator, position_noise, token_numbers
from decode.speculation.settings import MOST_NODES, Sampling
from decode.speculation.tree import ancestors
from decode.speculation.verifiers import Outcome, find
from specalign.lm.cache import KVCache
from specalign.lm.model import Target, TargetOutput

PREFILL_CHUNK = 2048
"""Most tokens of a prompt in one forward pass, and of all prompts between two rounds."""
T = TypeVar("T")
Prefill = Generator[None, None, T]
"""Reads a prompt; pauses between chunks."""
Observe = Callable[[TargetOutput, int], None]
"""Of a drafter: a forward pass of the target, and how many of its tokens count."""


class ForwardInput(NamedTuple):
    """The target's input in a round: the last token and the drafts; for a tree also their attention
    mask (bool)."""

    tokens_1L: Tensor
    see_LL: Tensor | None


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
        self.unread = len(prompt)  # tokens of the prompt
        self.tracing = False
        self.adapt: bool | None = None  # None: where its text does not depend on what is drafted
        self.out = Generation([], "", len(prompt), finish="")
        self.out.seed = None if sampling.greedy else sampling.fixed_seed

    def prefill(self) -> Prefill[Round]:
        """Run the target over the prompt, with pauses between chunks; returns the round that
        chooses the first token."""
        target, drafter = self.target, self.drafter
        self.started = perf_counter()
        # room for tree nodes that are rejected; a chain always fits into what may still be written
        spare = 0 if drafter is None else min(drafter.draft_nodes, MOST_NODES)
        self._open(target.new_cache(1, len(self.prompt) + self.limit + spare))
        # the prefill and a round without drafts give one token each: up to two, no draft fits
        if drafter is None or self.limit <= 2:
            return (yield from self._read_prompt((), None))
        self.session = drafter.start(self.request)
        return (yield from self._read_prompt(self.session.taps, self.session.observe))

    def prefill_into(self, cache: KVCache, taps: Sequence[int], observe: Observe) -> Prefill[Round]:
        """`prefill` into a given cache, for a drafter that reads what `observe` gets."""
        self.started = perf_counter()
        self._open(cache)
        return (yield from self._read_prompt(taps, observe))

    def _open(self, cache: KVCache) -> None:
        target, prompt, sampling = self.target, self.prompt, self.sampling
        self.request = Request(
            target,
            list(prompt),
            cache,
            sampling,
            make_generator(sampling.fixed_seed, target.device),
            History(sampling, prompt, target.vocab_size, target.eos_ids, target.device),
            token_numbers(sampling.fixed_seed, self.limit, target.device),
            self._noise() if self.verifier == "gumbel" and not sampling.greedy else None,
        )

    def _read_prompt(self, taps: Sequence[int], observe: Observe | None) -> Prefill[Round]:
        target, prompt = self.target, self.prompt
        for start in range(0, len(prompt), PREFILL_CHUNK):
            chunk = torch.tensor([prompt[start : start + PREFILL_CHUNK]], device=target.device)
            output = target.forward(chunk, cache=self.request.cache, taps=taps, logits=False)
            if observe is not None:
                observe(output, chunk.shape[1])
            self.unread -= chunk.shape[1]
            if self.unread:
                yield
        return self._round(target.head(output.hidden_BLD[:, -1:])[0], NO_DRAFTS)

    def commit_prefill(self, outcome: Outcome) -> None:
        self._extend(self._append([*outcome.accepted, outcome.following]))
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

    @property
    def adapts(self) -> bool:
        """Whether the clock may decide how much it drafts."""
        if self.drafter is None or find(self.verifier).lossy:
            return False
        return self._compares if self.adapt is None else self.adapt

    @property
    def _compares(self) -> bool:
        return find(self.verifier).compares(self.sampling.greedy)

    def draft(self, size: int | None = None) -> ForwardInput:
        """Begin a round: draft, and return what the target has to run over. size: the most drafts,
        or levels of drafts where a rule decides."""
        started, device = perf_counter(), self.target.device
        self.proposal = self._propose(size)
        self.drafted = perf_counter()
        self.out.draft_seconds += self.drafted - started
        last_1, see_LL = _place(self.request.tokens[-1], self.proposal.parents, device)
        drafts_K = self.proposal.tokens_K
        tokens_L = torch.cat((last_1, drafts_K)) if len(drafts_K) else last_1
        return ForwardInput(tokens_L[None], see_LL)

    def make_round(self, output: TargetOutput) -> Round:
        assert output.logits_BLV is not None
        return self._round(output.logits_BLV[0], self.proposal)

    def commit_round(self, output: TargetOutput, outcome: Outcome) -> None:
        out, proposal, cache, rows = self.out, self.proposal, self.request.cache, outcome.rows
        cache.keep(cache.length - len(proposal) - 1, rows)
        before = len(out.tokens)
        tree = None if proposal.parents is None else Tree(proposal.parents, outcome.path)
        self._extend(self._append([*outcome.accepted, outcome.following]))
        self._record_round(proposal.depth, tree, len(outcome.accepted), before)
        verified = perf_counter()
        if self.session is not None and not out.finish:
            self.session.observe(output if outcome.straight else output.at(rows), len(rows))
        if self.tracing:
            self._trace(verified, proposal.tokens_K.tolist(), proposal.tree, outcome.path, before)
        out.verify_seconds += verified - self.drafted
        out.draft_seconds += perf_counter() - verified
        self._record_end()

    def commit_result(self, result: RoundResult, chains: bool) -> None:
        """Commit a round of the captured engine."""
        before = len(self.out.tokens)
        tree = None if chains or not result.drafts else Tree(result.parents, result.path)
        self._append(result.tokens)
        self._record_round(result.depth, tree, result.accepted, before)
        if self.tracing:
            self._trace(perf_counter(), result.drafts, result.parents, result.path, before)
        self._record_end()

    def _trace(
        self,
        at: float,
        drafts: Sequence[int],
        parents: Sequence[int],
        path: Sequence[int],
        before: int,
    ) -> None:
        out, rejected = self.out, list_rejected(drafts, parents, path)
        seconds, committed = at - self.prefilled, len(out.tokens) - before
        out.trace.append(RoundTrace(seconds, committed, out.accepted[-1], rejected))

    def _record_round(self, depth: int, tree: Tree | None, accepted: int, before: int) -> None:
        out = self.out
        out.calls += 1
        out.drafted.append(depth)
        out.trees.append(tree)
        out.accepted.append(min(accepted, len(out.tokens) - before))

    @property
    def length(self) -> int:
        """The tokens of the text so far."""
        return len(self.prompt) + len(self.out.tokens)

    def _propose(self, size: int | None) -> Proposal:
        """Propose no more drafts than still fit; this limit is known before anything is drawn."""
        if self.session is None or self.drafter is None:
            return NO_DRAFTS
        room = min(self.drafter.draft_tokens, self.limit - len(self.out.tokens) - 1)
        room = room if size is None else min(room, size)
        proposal = self.session.propose(room) if room > 0 else None
        if proposal is not None and self.target.chains_only and proposal.branches:
            raise self.target.branch_error()
        if proposal is None:
            return NO_DRAFTS
        return proposal.cut(room).first(size if self._compares else None)

    def _round(self, logits_MV: Tensor, proposal: Proposal) -> Round:
        request, sampling, place = self.request, self.sampling, len(self.request.tokens)
        before = request.history.rows(proposal.tokens_K, proposal.tree)
        assert request.numbers_T is not None
        numbers_T = request.numbers_T[len(self.out.tokens) :]
        draws = (request.generator, numbers_T, request.noise, place)
        return Round(logits_MV, proposal, self.verifier, sampling, before, *draws)

    def _append(self, tokens: Sequence[int]) -> list[int]:
        """Append the tokens of a round, up to the end of the output, and set `finish` there.
        Returns those appended."""
        out = self.out
        first = len(out.tokens)
        for token in tokens:
            out.tokens.append(token)
            if self.text is not None and self.text.push(token):
                out.finish = "stop"
            elif token in self.eos:
                out.finish = "eos"
            elif len(out.tokens) == self.limit:
                out.finish = self.full
            if out.finish:
                break
        return out.tokens[first:]

    def _extend(self, tokens: Sequence[int]) -> None:
        """Tell the drafter and the processors; the captured engine keeps its own state."""
        self.request.tokens.extend(tokens)
        self.request.history.extend(tokens)


def _place(
    last: int, parents: tuple[int, ...] | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The last token (1,), and of a tree its mask, in one upload."""
    if parents is None:
        return torch.tensor([last], device=device), None
    see_MM = ancestors(parents)
    numbers = torch.cat((torch.tensor([last]), see_MM.flatten())).to(device)
    return numbers[:1], numbers[1:].view(see_MM.shape).bool()


class Engine(Protocol):
    """What runs requests; by default the eager loop (decode/engine/loop.py)."""

    def run_rounds(
        self, runners: Sequence[RequestRunner], most: int = 1
    ) -> Generator[None, None, None]: ...
