"""What drafting does on prompts: how far drafts are accepted, and what a round costs beside the target's call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode.advising.costs import VerifyCosts
from decode.engine.decoder import Decoder, Prompt
from decode.engine.output import Generation
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

    reach: share of the calls in which at least 1, 2, … drafts were accepted. draft: seconds of drafting a call; host: those of a call
    beside the target's. context: tokens before a call, in the mean. tokens, calls: of all prompts.
    """

    setting: Setting
    temperature: float
    reach: tuple[float, ...]
    draft: float
    host: float
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
    costs: VerifyCosts,
) -> Observed:
    """Decode the prompts one by one; the first one twice, to warm up."""
    decoder.generate(prompts[0], max_new_tokens=min(8, max_new_tokens), sampling=sampling)
    outputs = [decoder.generate(p, max_new_tokens=max_new_tokens, sampling=sampling) for p in prompts]
    return summary(outputs, setting, sampling.temperature, costs)


def summary(
    outputs: Sequence[Generation], setting: Setting, temperature: float, costs: VerifyCosts
) -> Observed:
    """Of finished requests that ran alone."""
    calls = sum(out.calls for out in outputs)
    accepted = [n for out in outputs for n in out.accepted]
    context = sum((out.prompt_tokens + len(out.tokens) / 2) * out.calls for out in outputs) / max(1, calls)
    rows = 1 + sum(sum(out.nodes) for out in outputs) / max(1, calls)
    verified = sum(out.verify_seconds for out in outputs) / max(1, calls)
    return Observed(
        setting,
        temperature,
        tuple(sum(n >= m for n in accepted) / max(1, calls) for m in range(1, setting.tokens + 1)),
        sum(out.draft_seconds for out in outputs) / max(1, calls),
        max(0.0, verified - costs.at(1, rows, context)),
        context,
        sum(len(out.tokens) - 1 for out in outputs),
        calls,
    )
