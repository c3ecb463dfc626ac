"""Measuring what advice needs, and checking the advice on points that were not measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from align.target.model import Target
from decode.advising.advice import Costs, applies, with_shorter_chains
from decode.advising.costs import SHORT, pace, verify_costs
from decode.advising.observed import PLAIN, Setting, observe
from decode.engine.decoder import Decoder
from decode.engine.prompts import Prompt, prompt_tokens
from decode.speculation.sampling import Sampling

BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
TOGETHER = 4
"""Requests of the batch in which drafting is timed."""
TREE_TEMPERATURES = 0.7
"""Trees are chosen, not drawn: up to here they are tried (`decode.drafters.block`)."""


@dataclass(frozen=True)
class Trial:
    """What is tried: prompts, temperatures, tokens of each output, drafts and tree sizes, the longest context."""

    prompts: Sequence[Prompt]
    temperatures: Sequence[float]
    max_new_tokens: int
    chain: int
    trees: Sequence[int]
    long: int
    batches: Sequence[int] = BATCHES
    seed: int = 0


def measure(
    target: Target, decoder: Callable[[Setting], Decoder], trial: Trial, say: Callable[[str], object]
) -> Costs:
    """All costs. `decoder`: of a setting; of `PLAIN` plain decoding."""
    settings = [Setting(trial.chain), *(Setting(trial.chain, n) for n in trial.trees)]
    rows = sorted({1, 2, *(s.rows for s in settings)})
    say(
        f"calls of {len(trial.batches)} batches and {len(rows)} numbers of rows, contexts {SHORT} and {trial.long} …"
    )
    paces = [pace(target)]
    costs = Costs(verify_costs(target, trial.batches, rows, trial.long))
    together = min(TOGETHER, max(trial.batches))
    for setting in (PLAIN, *settings):
        for temperature in trial.temperatures:
            if setting.nodes and temperature > TREE_TEMPERATURES:
                continue
            say(f"{'plain decoding' if setting == PLAIN else setting.words} at temperature {temperature:g} …")
            sampling = Sampling(temperature, seed=trial.seed)
            costs.observed[setting, temperature] = observe(
                decoder(setting), trial.prompts, setting, sampling, trial.max_new_tokens, together
            )
            paces.append(pace(target))
    costs.draft_slope = _draft_slope(target, decoder, costs, settings[0], trial)
    with_shorter_chains(costs, settings[0], _shortest(decoder, costs, settings[0], trial))
    costs.pace = statistics.median(paces)
    return costs


def _shortest(decoder: Callable[[Setting], Decoder], costs: Costs, chain: Setting, trial: Trial) -> float:
    """What drafting one token costs, as a share of the longest chain's cost."""
    one, heat = Setting(1), trial.temperatures[0]
    if chain == one:
        return 1.0
    found = observe(decoder(one), trial.prompts, one, Sampling(heat, seed=trial.seed), trial.max_new_tokens)
    return min(1.0, found.draft / max(costs.observed[chain, heat].draft, 1e-9))


def _draft_slope(
    target: Target, decoder: Callable[[Setting], Decoder], costs: Costs, chain: Setting, trial: Trial
) -> float:
    """Seconds that a token of context adds to drafting: by one long prompt, a prompt's tokens again and again."""
    length = min(trial.long, 2048, target.context_limit - 40)
    base = costs.observed[chain, trial.temperatures[0]]
    if length < 2 * base.context:
        return 0.0
    tokens = prompt_tokens(target, trial.prompts[0])
    prompt = (tokens * (length // len(tokens) + 1))[:length]
    sampling = Sampling(trial.temperatures[0], seed=trial.seed)
    found = observe(decoder(chain), [prompt], chain, sampling, 24)
    return max(0.0, (found.draft - base.draft) / max(1.0, found.context - base.context))


@dataclass(frozen=True)
class Point:
    """A batch, a setting and a temperature that were not tried together, with tokens per second as foretold and as measured."""

    setting: Setting
    batch: int
    temperature: float
    foretold: float
    measured: float

    @property
    def off(self) -> float:
        return self.foretold / self.measured - 1


def held_out(costs: Costs, trial: Trial) -> list[tuple[Setting, int, float]]:
    """Five points: batches between those that were timed, a shorter chain, a tree, a temperature between two."""
    chain, heat = Setting(trial.chain), list(trial.temperatures)
    tree = next((s for s in costs.settings() if s.nodes), chain)
    between = (heat[0] + heat[1]) / 2 if len(heat) > 1 else heat[0]
    shorter = Setting(max(1, trial.chain // 2))
    points = [
        (chain, 3, heat[0]),
        (shorter, 1, heat[-1]),
        (tree, 6, heat[0]),
        (chain, 5, between),
        (PLAIN, 3, heat[-1]),
    ]
    largest = max(trial.batches)
    points = [(s, b, t) if b <= largest else (s, largest, between) for s, b, t in points]
    return [point for point in points if applies(costs, point[0], point[2])]


def check(
    costs: Costs, decoder: Callable[[Setting], Decoder], trial: Trial, say: Callable[[str], object]
) -> list[Point]:
    """Decode at the held-out points: a batch begins together, and until its first request ends its rounds are those of a full batch.

    What is foretold is for the pace that the machine has at the moment: a short call is timed in between."""
    found = []
    for setting, batch, temperature in held_out(costs, trial):
        say(
            f"check: {setting.words if setting != PLAIN else 'plain'}, batch {batch}, temperature {temperature:g} …"
        )
        rounds, taus, contexts = [], [], []
        own = decoder(setting)
        paces = [pace(own.target)]
        for start in range(0, len(trial.prompts), batch):
            group = [trial.prompts[(start + i) % len(trial.prompts)] for i in range(batch)]
            sampling = Sampling(temperature, seed=trial.seed + 1 + start)
            outputs = own.generate_batch(
                group, batch_size=batch, max_new_tokens=trial.max_new_tokens, sampling=sampling
            )
            first = min(outputs, key=lambda out: out.calls)
            if first.calls:
                rounds += [first.seconds / first.calls]
            taus += [(len(out.tokens) - 1, out.calls) for out in outputs]
            paces.append(pace(own.target))
            contexts += [out.prompt_tokens + len(out.tokens) / 2 for out in outputs]
        tau = sum(t for t, _ in taus) / max(1, sum(c for _, c in taus))
        measured = batch * tau / statistics.median(rounds)
        now = costs.pace / statistics.median(paces)
        foretold = now * costs.speed(setting, batch, statistics.mean(contexts), temperature)
        found.append(Point(setting, batch, temperature, foretold, measured))
    return found
