"""How far drafts of a size are accepted on prompts, and what a round costs besides the target's
forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode.advising.costs import ForwardCosts
from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from decode.engine.prompts import Prompt
from decode.speculation.sampling import Sampling
from decode.systems.construction import assemble, open_drafters
from decode.systems.drafter_folders import NO_FOLDERS, check_there, kind_of, shipped_for
from decode.systems.parsing import read_method
from specalign.common.errors import UserError
from specalign.lm.model import Target


@dataclass(frozen=True)
class DraftSize:
    """How much is drafted per round: a chain of `tokens`, or a tree of `nodes` in all (0 = a
    chain)."""

    tokens: int
    nodes: int = 0

    @property
    def rows(self) -> int:
        """Rows of the target's forward pass: the last token and the drafts."""
        return 1 + (self.nodes or self.tokens)

    @property
    def label(self) -> str:
        if not self.tokens:
            return "plain decoding"
        return f"a tree of {self.nodes}" if self.nodes else f"γ = {self.tokens}"

    @property
    def options(self) -> str:
        return (
            f"--tree-nodes {self.nodes}"
            if self.nodes
            else f"--draft-tokens {self.tokens} --tree-nodes 0"
        )


PLAIN = DraftSize(0)
BATCH = 4
"""Requests of the batch in which rounds are timed."""


@dataclass(frozen=True)
class Observation:
    """Decoding with one draft size at one temperature.

    reach: share of rounds in which at least 1, 2, … drafts were accepted. tau: tokens committed per
    round. draft: seconds of drafting per round. overhead: seconds of a round of one request besides
    the forward pass, drafting included. further: seconds that another request adds to the overhead.
    context: tokens before a round, on average.
    """

    reach: tuple[float, ...]
    tau: float
    draft: float
    overhead: float
    further: float
    context: float


def observe(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    size: DraftSize,
    sampling: Sampling,
    max_new_tokens: int,
    costs: ForwardCosts,
    batch: int = 1,
) -> Observation:
    """Decode the prompts one by one, then a batch of them; `costs` are subtracted from their
    rounds.

    Raises:
        UserError: no prompt has more than one token of output.
    """
    decoder.generate(
        prompts[0], max_new_tokens=min(8, max_new_tokens), sampling=sampling
    )  # warm-up
    outputs = [
        decoder.generate(p, max_new_tokens=max_new_tokens, sampling=sampling) for p in prompts
    ]
    calls = sum(out.calls for out in outputs)
    if not calls:
        raise UserError("every output ended at its first token: give other prompts (--prompts)")
    context = sum(_mean_context(out) * out.calls for out in outputs) / calls
    draft = sum(out.draft_seconds for out in outputs) / calls
    round_seconds = sum(out.seconds for out in outputs) / calls
    overhead = max(draft, round_seconds - costs.at(1, size.rows, context))
    further = overhead
    if batch > 1:
        group = [prompts[i % len(prompts)] for i in range(batch)]
        together = decoder.generate_batch(
            group, batch_size=batch, max_new_tokens=max_new_tokens, sampling=sampling
        )
        first = min(
            together, key=lambda out: out.calls
        )  # until it ends, every round has all requests
        if first.calls:
            besides = first.seconds / first.calls - costs.at(batch, size.rows, _mean_context(first))
            further = max(0.0, besides - overhead) / (batch - 1)
    accepted = [n for out in outputs for n in out.accepted]
    return Observation(
        reach=tuple(sum(n >= m for n in accepted) / calls for m in range(1, size.tokens + 1)),
        tau=sum(len(out.tokens) - 1 for out in outputs) / calls,
        draft=draft,
        overhead=overhead,
        further=further,
        context=context,
    )


def _mean_context(output: Generation) -> float:
    return output.prompt_tokens + len(output.tokens) / 2


def open_decoders(
    target: Target, name: str, drafter: str | None, longest: int | None
) -> tuple[Callable[[DraftSize], Decoder], int, bool]:
    """A function that makes the decoder of a draft size, the drafts of the longest chain, and
    whether it can draft trees.

    Args:
        name: the target's. drafter: a folder or `lookup`; None = the shipped one. longest: at most
            this many drafts.

    Raises:
        UserError: no drafter, or one that can't be loaded.
    """
    drafter = drafter or shipped_for(name)
    if drafter is None or drafter == "none":
        raise UserError(
            f"no drafter is shipped for {name}: give --drafter FOLDER, or --drafter lookup"
        )
    role, folders = "", {}
    if drafter not in NO_FOLDERS:
        check_there(drafter)
        role = kind_of(drafter)
        folders = {role: drafter}
    method = read_method("drafter" if folders else "lookup")
    parts = open_drafters([method], folders, target)

    def make_decoder(size: DraftSize) -> Decoder:
        if size == PLAIN:
            return Decoder(target)
        sized = method.with_options(tree_nodes=size.nodes) if folders else method
        return assemble(sized, parts, size.tokens)

    first = assemble(method, parts, longest)
    assert first.drafter is not None
    most = min(longest or first.drafter.draft_tokens, first.drafter.draft_tokens)
    return make_decoder, most, role == "block" and not target.chains_only
