"""What drafting does on prompts: how far drafts are accepted, and what a round costs beside the target's call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode.advising.rounds import Rounds, timed_rounds
from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from decode.engine.prompts import Prompt
from decode.speculation.sampling import Sampling


@dataclass(frozen=True)
class Setting:
    """How much is drafted for a call: a chain of `tokens`, or a tree of `nodes` in all, 0 = a chain."""

    tokens: int
    nodes: int = 0

    @property
    def rows(self) -> int:
        """Rows of the target's call: the last token and the drafts."""
        return 1 + (self.nodes or self.tokens)

    @property
    def words(self) -> str:
        """As people read it."""
        return f"a tree of {self.nodes}" if self.nodes else f"γ = {self.tokens}"

    @property
    def options(self) -> str:
        """As commands take it."""
        return f"--tree-nodes {self.nodes}" if self.nodes else f"--draft-tokens {self.tokens} --tree-nodes 0"


PLAIN = Setting(0)


@dataclass(frozen=True)
class Observed:
    """Decoding with one setting at one temperature.

    reach: share of the calls in which at least 1, 2, … drafts were accepted. draft: seconds of drafting a call; host: those that a
    round of one request takes besides; further: of both, what another request in a round adds. context: tokens before a call, in the
    mean. tokens, calls: of all prompts.
    """

    setting: Setting
    temperature: float
    reach: tuple[float, ...]
    draft: float
    host: float
    further: float
    context: float
    tokens: int
    calls: int

    @property
    def tau(self) -> float:
        """Tokens that a call commits."""
        return self.tokens / self.calls

    def tau_of(self, tokens: int) -> float:
        """Of shorter chains: their drafts are the first ones of these."""
        lost = 1 + sum(self.reach) - self.tau  # cut at ends of text and limits
        return max(1.0, 1 + sum(self.reach[:tokens]) - max(0.0, lost))


def observe(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    setting: Setting,
    sampling: Sampling,
    max_new_tokens: int,
    batch: int = 1,
) -> Observed:
    """Decode the prompts one by one, the first one twice, to warm up; then some of them in a batch of so many requests."""
    decoder.generate(prompts[0], max_new_tokens=min(8, max_new_tokens), sampling=sampling)
    with timed_rounds(decoder.target) as rounds:
        outputs = [decoder.generate(p, max_new_tokens=max_new_tokens, sampling=sampling) for p in prompts]
        if batch > 1:
            group = [prompts[i % len(prompts)] for i in range(batch)]
            decoder.generate_batch(group, batch_size=batch, max_new_tokens=max_new_tokens, sampling=sampling)
    return summary(outputs, setting, sampling.temperature, rounds, batch)


def summary(
    outputs: Sequence[Generation], setting: Setting, temperature: float, rounds: Rounds, batch: int = 1
) -> Observed:
    """Of finished requests that ran alone, and of the times between calls, of a batch of so many requests among them."""
    calls = sum(out.calls for out in outputs)
    accepted = [n for out in outputs for n in out.accepted]
    context = sum((out.prompt_tokens + len(out.tokens) / 2) * out.calls for out in outputs) / max(1, calls)
    draft = sum(out.draft_seconds for out in outputs) / max(1, calls)
    alone, together = rounds.beside(1) or draft, rounds.beside(batch)
    further = alone if batch == 1 or together is None else max(0.0, together - alone) / (batch - 1)
    return Observed(
        setting,
        temperature,
        tuple(sum(n >= m for n in accepted) / max(1, calls) for m in range(1, setting.tokens + 1)),
        draft,
        max(0.0, alone - draft),
        further,
        context,
        sum(len(out.tokens) - 1 for out in outputs),
        calls,
    )
