"""Measures the costs of decoding: forward passes, drafting and acceptance.

A round takes one forward pass over all requests and, per request, drafting and the host's work. It
commits τ tokens per request. Plain decoding is the same with one row and nothing drafted.

    seconds of a forward pass = short(batch, rows) + batch · slope(rows) · max(0, context − SHORT):

the weights are read once for all requests, each request's keys and values separately.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from decode.engine.prompts import Prompt
from decode.speculation.sampling import Sampling
from decode.systems.construction import assemble, open_drafters
from decode.systems.drafter_folders import NO_FOLDERS, check_there, kind_of, shipped_for
from decode.systems.parsing import read_method
from specalign.common.errors import UserError
from specalign.common.text import say
from specalign.lm.cache import KVCache
from specalign.lm.model import Target

BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
SHORT = 64
"""The context at which batches are timed."""
REPEATS = 5
OBSERVED_BATCH = 4
"""Requests of the batch in which rounds are timed."""
TREE_TEMPERATURES = 0.7
"""Trees are chosen, not drawn: they are tried up to this temperature (`decode.proposers.block`)."""


@dataclass(frozen=True)
class DraftSize:
    """Drafts per round: a chain of `tokens`, or a tree of `nodes` in all (0 = a chain)."""

    tokens: int
    nodes: int = 0

    @property
    def rows(self) -> int:
        """Rows of the target's forward pass: the last token and the drafts."""
        return 1 + (self.nodes or self.tokens)

    @property
    def label(self) -> str:
        chain = f"γ = {self.tokens}" if self.tokens else "plain decoding"
        return f"a tree of {self.nodes}" if self.nodes else chain


PLAIN = DraftSize(0)


@dataclass(frozen=True)
class MeasuredRounds:
    """Decoding with one draft size at one temperature: tokens committed per round, seconds of
    drafting per round, seconds of a round of one request besides the forward pass (drafting
    included), and seconds that another request adds to these."""

    tau: float
    draft: float
    overhead: float
    further: float


@dataclass(frozen=True)
class MeasurementOptions:
    """What to measure. chain: the longest chain. trees: tree sizes. context, batch: the largest."""

    prompts: Sequence[Prompt]
    temperatures: Sequence[float]
    max_new_tokens: int
    chain: int
    trees: Sequence[int]
    context: int
    batch: int
    seed: int = 0


@dataclass
class DecodingCosts:
    """short: (batch, rows) → seconds of a forward pass at `SHORT` tokens of context. slope: rows →
    seconds per request and token of context. rounds: by draft size and temperature, plain decoding
    included."""

    short: dict[tuple[int, int], float]
    slope: dict[int, float] = field(default_factory=dict)
    rounds: dict[tuple[DraftSize, float], MeasuredRounds] = field(default_factory=dict)

    def forward(self, batch: float, rows: float, context: float) -> float:
        """Seconds of a forward pass, linear between what was measured."""
        batches = sorted({b for b, _ in self.short})
        widths = sorted({n for _, n in self.short})
        at_batch = [np.interp(rows, widths, [self.short[b, n] for n in widths]) for b in batches]
        slope = np.interp(rows, widths, [self.slope.get(n, 0.0) for n in widths])
        further = batch * slope * max(0.0, context - SHORT)
        return float(np.interp(batch, batches, at_batch) + further)

    def speed(self, size: DraftSize, batch: int, context: float, temperature: float) -> float:
        """Tokens per second of all requests together."""
        found = self.rounds[size, temperature]
        overhead = found.overhead + (batch - 1) * found.further
        return batch * found.tau / (self.forward(batch, size.rows, context) + overhead)


def open_decoders(
    target: Target, name: str, drafter: str | None, longest: int | None
) -> tuple[Callable[[DraftSize], Decoder], int, bool]:
    """A function that makes the decoder of a draft size, the longest chain, and whether the drafter
    can draft trees. `name`: the target's. `drafter`: a folder or `lookup`; None = the shipped one.
    Raises UserError: no drafter, or one that can't be loaded."""
    drafter = drafter or shipped_for(name)
    if drafter is None or drafter == "none":
        raise UserError(
            f"no drafter is shipped for {name}: give --drafter FOLDER, or --drafter lookup"
        )
    folders = {}
    if drafter not in NO_FOLDERS:
        check_there(drafter)
        folders = {kind_of(drafter): drafter}
    method = read_method("drafter" if folders else "lookup")
    parts = open_drafters([method], folders, target)

    def make_decoder(size: DraftSize) -> Decoder:
        if size == PLAIN:
            return Decoder(target)
        sized = method.with_options(tree_nodes=size.nodes) if folders else method
        return assemble(sized, parts, size.tokens)

    first = assemble(method, parts, longest).drafter
    assert first is not None
    most = min(longest or first.draft_tokens, first.draft_tokens)
    return make_decoder, most, "block" in folders and not target.chains_only


def measure_costs(
    target: Target, make_decoder: Callable[[DraftSize], Decoder], options: MeasurementOptions
) -> DecodingCosts:
    """Time the target's forward pass, then decode with every draft size at every temperature."""
    longest = options.chain
    chains = sorted({longest, *(2**i for i in range(longest.bit_length()))})
    trees = [DraftSize(longest, nodes) for nodes in options.trees]
    sizes = [PLAIN, *map(DraftSize, chains), *trees]
    say("timing the target's forward pass …", error=True)
    batches = [b for b in BATCHES if b <= options.batch]
    rows = sorted({size.rows for size in sizes})
    costs = measure_forward_costs(target, batches, rows, options.context)
    for size in sizes:
        for temperature in options.temperatures:
            if not size.nodes or temperature <= TREE_TEMPERATURES:
                say(f"{size.label} at temperature {temperature:g} …", error=True)
                found = time_rounds(make_decoder(size), size, temperature, costs, options)
                costs.rounds[size, temperature] = found
    return costs


def measure_forward_costs(
    target: Target, batches: Sequence[int], rows: Sequence[int], long: int
) -> DecodingCosts:
    """Time every batch and number of rows at a short context, and single requests at `long` tokens
    of context."""
    limit = target.context_limit - max(rows)
    short = min(SHORT, max(1, limit))
    long = max(short, min(long, limit))
    costs = DecodingCosts(_time_shapes(target, [(b, n) for b in batches for n in rows], short))
    if long > short:
        for (_, count), seconds in _time_shapes(target, [(1, n) for n in rows], long).items():
            costs.slope[count] = max(0.0, seconds - costs.short[1, count]) / (long - short)
    return costs


def _time_shapes(
    target: Target, shapes: Sequence[tuple[int, int]], context: int
) -> dict[tuple[int, int], float]:
    """Median seconds of each (batch, rows). They take turns, so that a machine that slows down
    slows all of them."""
    room = max(rows for _, rows in shapes)
    caches = [_fill_cache(target, context, room) for _ in range(max(batch for batch, _ in shapes))]
    seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for _ in range(REPEATS):
        for batch, rows in shapes:
            _time_forward(target, caches[:batch], rows)  # warms the processor's caches
            seconds[batch, rows].append(_time_forward(target, caches[:batch], rows))
    return {shape: statistics.median(times) for shape, times in seconds.items()}


def _fill_cache(target: Target, context: int, room: int) -> KVCache:
    """A cache of `context` random tokens, on which the time does not depend, with room for more."""
    cache = target.new_cache(1, context + room)
    if target.anatomy.recurrent:
        tokens = torch.zeros(1, context, dtype=torch.int64, device=target.device)
        target.forward(tokens, cache=cache, logits=False)
        return cache
    for slab in cache.slabs:
        slab.keys.normal_()
        slab.values.normal_()
    cache.advance(context)
    return cache


@torch.no_grad()
def _time_forward(target: Target, caches: Sequence[KVCache], rows: int) -> float:
    """Seconds of a forward pass over `rows` tokens after each cache; the caches are rolled back."""
    tokens = torch.randint(0, target.vocab_size, (1, rows), device=target.device)
    lengths = [cache.length for cache in caches]
    start = time.perf_counter()
    if len(caches) == 1:
        target.forward(tokens, cache=caches[0])
    else:
        target.forward_batch([tokens] * len(caches), caches, [None] * len(caches))
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    for cache, length in zip(caches, lengths, strict=True):
        cache.length = length
    return seconds


def time_rounds(
    decoder: Decoder,
    size: DraftSize,
    temperature: float,
    costs: DecodingCosts,
    options: MeasurementOptions,
) -> MeasuredRounds:
    """Decode the prompts one by one, then a batch of them; the forward passes are subtracted.
    Raises UserError: every output has a single token."""
    prompts, limit = options.prompts, options.max_new_tokens
    sampling = Sampling(temperature, seed=options.seed)
    decoder.generate(prompts[0], min(8, limit), sampling=sampling)  # warm-up
    outputs = [decoder.generate(prompt, limit, sampling=sampling) for prompt in prompts]
    calls = sum(out.calls for out in outputs)
    if not calls:
        raise UserError("every output ended at its first token: use other prompts (--prompts)")
    context = sum(_mean_context(out) * out.calls for out in outputs) / calls
    draft = sum(out.draft_seconds for out in outputs) / calls
    per_round = sum(out.seconds for out in outputs) / calls
    overhead = max(draft, per_round - costs.forward(1, size.rows, context))
    further = overhead
    batch = min(OBSERVED_BATCH, options.batch)
    if batch > 1:
        group = [prompts[i % len(prompts)] for i in range(batch)]
        together = decoder.generate_batch(group, limit, batch_size=batch, sampling=sampling)
        # until the shortest request ends, every round has all requests
        first = min(together, key=lambda out: out.calls)
        if first.calls:
            forward = costs.forward(batch, size.rows, _mean_context(first))
            besides = first.seconds / first.calls - forward
            further = max(0.0, besides - overhead) / (batch - 1)
    tau = sum(len(out.tokens) - 1 for out in outputs) / calls
    return MeasuredRounds(tau, draft, overhead, further)


def _mean_context(output: Generation) -> float:
    return output.prompt_tokens + len(output.tokens) / 2
