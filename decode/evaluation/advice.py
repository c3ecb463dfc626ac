"""Finds the fastest draft size by batch size, context and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode.evaluation.decoding_costs import BATCHES, PLAIN, DecodingCosts, DraftSize
from specalign.common.text import markdown_table

CONTEXTS = (256, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Advice:
    """gains: batch → (fastest draft size, its speed over plain decoding), for every batch."""

    context: int
    temperature: float
    gains: dict[int, tuple[DraftSize, float]]

    @property
    def pays_up_to(self) -> int:
        """The largest batch up to which drafting gains; 0 = none."""
        losing = [batch for batch, (_, gain) in self.gains.items() if gain <= 1]
        return min(losing) - 1 if losing else max(self.gains)


def advise(costs: DecodingCosts, contexts: Sequence[int], batch: int) -> list[Advice]:
    """Advice for every context and measured temperature, for all batch sizes up to `batch`."""

    def find_best(b: int, context: int, temperature: float) -> tuple[DraftSize, float]:
        plain = costs.speed(PLAIN, b, context, temperature)
        sizes = [size for size, t in costs.rounds if t == temperature and size != PLAIN]
        gains = [(size, costs.speed(size, b, context, temperature) / plain) for size in sizes]
        return max(gains, key=lambda pair: pair[1])

    return [
        Advice(context, t, {b: find_best(b, context, t) for b in range(1, batch + 1)})
        for context in contexts
        for t in sorted({t for _, t in costs.rounds})
    ]


def summarize(advice: Sequence[Advice]) -> str:
    """One sentence: the draft size that is most often fastest where drafting pays off, and up to
    which batch size."""
    limits = sorted({a.pays_up_to for a in advice})
    best = [a.gains[1][0] for a in advice if a.pays_up_to]
    if not best:
        return "Do not use drafting: it is never faster than plain decoding here"
    size = max(best, key=best.count)
    off = f"switch it off above batch {limits[0]}"
    if len(limits) > 1:
        off += f" to {limits[-1]}, depending on context and temperature"
    elif limits == [max(advice[0].gains)]:
        off = f"it pays off up to batch {limits[0]} in every measured case"
    chain = "" if size.nodes else f"--draft-tokens {size.tokens} "
    return f"Use {size.label} ({chain}--tree-nodes {size.nodes}); {off}"


def render(costs: DecodingCosts, advice: Sequence[Advice]) -> str:
    """Markdown: what was measured, what is fastest where, and one sentence."""
    widths = sorted({n for _, n in costs.short})
    measured = sorted({b for b, _ in costs.short})
    passes = [[str(b), *(f"{1e3 * costs.short[b, n]:.1f}" for n in widths)] for b in measured]
    slopes = ", ".join(f"{1e6 * s:.2f} µs ({n} rows)" for n, s in sorted(costs.slope.items()))
    rounds = []
    for (size, temperature), found in costs.rounds.items():
        times = [f"{1e3 * s:.1f}" for s in (found.draft, found.overhead, found.further)]
        rounds.append([size.label, f"{temperature:g}", f"{found.tau:.2f}", *times])
    largest = max(advice[0].gains)
    batches = [b for b in BATCHES if b <= largest]
    gains = []
    for a in advice:
        cells = [f"{size.label} {gain:.2f}×" for size, gain in (a.gains[b] for b in batches)]
        limit = "the largest measured" if a.pays_up_to == largest else str(a.pays_up_to or "never")
        gains.append([str(a.context), f"{a.temperature:g}", *cells, limit])
    times = ["drafting, ms", "round without the forward pass, ms", "each further request, ms"]
    columns = ["context", "temperature", *(f"batch {b}" for b in batches), "pays off up to batch"]
    blocks = [
        "## Forward pass of the target, ms",
        markdown_table(["batch", *(f"{n} rows" for n in widths)], passes),
        f"Each token of context adds, per request: {slopes or 'unknown'}.",
        "## Drafting",
        markdown_table(["drafts", "temperature", "τ", *times], rounds),
        "## Fastest draft size",
        markdown_table(columns, gains),
        f"**{summarize(advice)}.**",
    ]
    return "\n\n".join(blocks)
