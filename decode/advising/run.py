"""Measuring what advice is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode.advising.advice import DecodingCosts
from decode.advising.costs import measure_forward_costs
from decode.advising.observation import BATCH, PLAIN, DraftSize, Observation, observe
from decode.engine.decoder import Decoder
from decode.engine.prompts import Prompt, prompt_tokens
from decode.speculation.sampling import Sampling
from specalign.common.text import say
from specalign.lm.model import Target

TIMED_BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
TREE_TEMPERATURES = 0.7
"""Trees are chosen, not drawn: they are tried up to this temperature (`decode.proposers.block`)."""


@dataclass(frozen=True)
class MeasurementOptions:
    """What is tried: prompts, temperatures, tokens per output, the longest chain, tree sizes, the
    longest context, the largest batch."""

    prompts: Sequence[Prompt]
    temperatures: Sequence[float]
    max_new_tokens: int
    chain: int
    trees: Sequence[int]
    long: int
    batch: int
    seed: int = 0


def measure_costs(
    target: Target, make_decoder: Callable[[DraftSize], Decoder], options: MeasurementOptions
) -> DecodingCosts:
    """Time the target's forward pass, then decode with every draft size at every temperature."""
    chains = [DraftSize(tokens) for tokens in list_chains(options.chain)]
    sizes = [PLAIN, *chains, *(DraftSize(options.chain, nodes) for nodes in options.trees)]
    say("timing the target's forward pass …", error=True)
    batches = [b for b in TIMED_BATCHES if b <= options.batch]
    rows = sorted({size.rows for size in sizes})
    costs = DecodingCosts(measure_forward_costs(target, batches, rows, options.long))

    def run(
        size: DraftSize,
        temperature: float,
        prompts: Sequence[Prompt] = options.prompts,
        batch: int = 1,
    ) -> Observation:
        sampling = Sampling(temperature, seed=options.seed)
        decoder = make_decoder(size)
        return observe(
            decoder, prompts, size, sampling, options.max_new_tokens, costs.forward, batch
        )

    for size in sizes:
        for temperature in options.temperatures:
            if not size.nodes or temperature <= TREE_TEMPERATURES:
                say(f"{size.label} at temperature {temperature:g} …", error=True)
                found = run(size, temperature, batch=min(BATCH, options.batch))
                costs.observed[size, temperature] = found

    chain, lowest = chains[-1], options.temperatures[0]
    base = costs.observed[chain, lowest]
    length = min(options.long, 2048, target.context_limit - options.max_new_tokens - chain.rows)
    if length > 2 * base.context:
        tokens = prompt_tokens(target, options.prompts[0])
        repeated = (tokens * (length // len(tokens) + 1))[:length]
        long = run(chain, lowest, [repeated])
        costs.draft_slope = max(0.0, (long.draft - base.draft) / (long.context - base.context))
    return costs


def list_chains(longest: int) -> list[int]:
    """Chain lengths to try: 1, 2, 4, … and the longest."""
    return sorted({longest, *(2**i for i in range(longest.bit_length()))})
