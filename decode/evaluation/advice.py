"""Which draft size is fastest at a batch size, context and temperature.

A round takes one forward pass over all requests and, per request, drafting and the host's work. It
commits τ tokens per request. Plain decoding is the same with one row and nothing drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from decode.engine.prompts import Prompt
from decode.evaluation.forward_costs import ForwardCosts, measure_forward_costs
from decode.speculation.sampling import Sampling
from decode.systems.construction import assemble, open_drafters
from decode.systems.drafter_folders import NO_FOLDERS, check_there, kind_of, shipped_for
from decode.systems.parsing import read_method
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.common.text import markdown_table, say
from specalign.lm.model import Target

BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
CONTEXTS = (256, 1024, 2048, 4096, 8192)
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
        return f"a tree of {self.nodes}" if self.nodes else f"γ = {self.tokens}"

    @property
    def options(self) -> str:
        if self.nodes:
            return f"--tree-nodes {self.nodes}"
        return f"--draft-tokens {self.tokens} --tree-nodes 0"


PLAIN = DraftSize(0)


@dataclass(frozen=True)
class MeasuredRounds:
    """Decoding with one draft size at one temperature.

    tau: tokens committed per round. draft: seconds of drafting per round. overhead: seconds of a
    round of one request besides the forward pass, drafting included. further: seconds that another
    request adds to the overhead.
    """

    tau: float
    draft: float
    overhead: float
    further: float


@dataclass(frozen=True)
class MeasurementOptions:
    """What is tried. chain: the longest chain. trees: tree sizes. context, batch: the largest."""

    prompts: Sequence[Prompt]
    temperatures: Sequence[float]
    max_new_tokens: int
    chain: int
    trees: Sequence[int]
    context: int
    batch: int
    seed: int = 0


@dataclass(frozen=True)
class DecodingCosts:
    """Everything measured. rounds: by draft size and temperature, plain decoding included."""

    forward: ForwardCosts
    rounds: dict[tuple[DraftSize, float], MeasuredRounds]

    def speed(self, size: DraftSize, batch: int, context: float, temperature: float) -> float:
        """Tokens per second of all requests together."""
        found = self.rounds[size, temperature]
        forward = self.forward.at(batch, size.rows, context)
        seconds = forward + found.overhead + (batch - 1) * found.further
        return batch * found.tau / seconds


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
    """For every context and measured temperature, at all batches up to `batch`."""

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
    costs = DecodingCosts(measure_forward_costs(target, batches, rows, options.context), {})
    for size in sizes:
        for temperature in options.temperatures:
            if not size.nodes or temperature <= TREE_TEMPERATURES:
                name = "plain decoding" if size == PLAIN else size.label
                say(f"{name} at temperature {temperature:g} …", error=True)
                decoder = make_decoder(size)
                costs.rounds[size, temperature] = time_rounds(
                    decoder, size, temperature, costs.forward, options
                )
    return costs


def time_rounds(
    decoder: Decoder,
    size: DraftSize,
    temperature: float,
    costs: ForwardCosts,
    options: MeasurementOptions,
) -> MeasuredRounds:
    """Decode the prompts one by one, then a batch of them; `costs` are subtracted.

    Raises:
        UserError: every output has a single token.
    """
    prompts, sampling = options.prompts, Sampling(temperature, seed=options.seed)
    limit = options.max_new_tokens
    decoder.generate(prompts[0], max_new_tokens=min(8, limit), sampling=sampling)  # warm-up
    outputs = [decoder.generate(p, max_new_tokens=limit, sampling=sampling) for p in prompts]
    calls = sum(out.calls for out in outputs)
    if not calls:
        raise UserError("every output ended at its first token: give other prompts (--prompts)")
    context = sum(_mean_context(out) * out.calls for out in outputs) / calls
    draft = sum(out.draft_seconds for out in outputs) / calls
    per_round = sum(out.seconds for out in outputs) / calls
    overhead = max(draft, per_round - costs.at(1, size.rows, context))
    further = overhead
    batch = min(OBSERVED_BATCH, options.batch)
    if batch > 1:
        group = [prompts[i % len(prompts)] for i in range(batch)]
        together = decoder.generate_batch(
            group, batch_size=batch, max_new_tokens=limit, sampling=sampling
        )
        # until the shortest request ends, every round has all requests
        first = min(together, key=lambda out: out.calls)
        if first.calls:
            besides = first.seconds / first.calls - costs.at(batch, size.rows, _mean_context(first))
            further = max(0.0, besides - overhead) / (batch - 1)
    tau = sum(len(out.tokens) - 1 for out in outputs) / calls
    return MeasuredRounds(tau, draft, overhead, further)


def _mean_context(output: Generation) -> float:
    return output.prompt_tokens + len(output.tokens) / 2


def open_decoders(
    target: Target, name: str, drafter: str | None, longest: int | None
) -> tuple[Callable[[DraftSize], Decoder], int, bool]:
    """A function that makes the decoder of a draft size, the longest chain, and whether the drafter
    can draft trees.

    Args:
        name: the target's. drafter: a folder or `lookup`; None = the shipped one.

    Raises:
        UserError: no drafter, or one that can't be loaded.
    """
    drafter = drafter or shipped_for(name)
    if drafter is None or drafter == "none":
        raise UserError(
            f"no drafter is shipped for {name}: give --drafter FOLDER, or --drafter lookup"
        )
    kind, folders = "", {}
    if drafter not in NO_FOLDERS:
        check_there(drafter)
        kind = kind_of(drafter)
        folders = {kind: drafter}
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
    return make_decoder, most, kind == "block" and not target.chains_only


def summarize(advice: Sequence[Advice]) -> str:
    """One sentence: the draft size that is fastest most often where drafting pays, and up to which
    batch."""
    limits = [a.pays_up_to for a in advice]
    largest = max(advice[0].gains)
    best = [a.gains[1][0] for a in advice if a.pays_up_to]
    if not best:
        return "Leave drafting off: it is nowhere faster than plain decoding"
    size = max(best, key=best.count)
    if min(limits) == largest:
        off = f"it pays up to batch {largest} everywhere that was measured"
    elif min(limits) == max(limits):
        off = f"switch it off above batch {limits[0]}"
    else:
        off = f"switch it off above batch {min(limits)} to {max(limits)}, depending on context and temperature"
    return f"Use {size.label} ({size.options}); {off}"


def render(costs: DecodingCosts, advice: Sequence[Advice]) -> str:
    """Markdown: what was measured, what is fastest where, and one sentence."""
    forward = costs.forward
    widths = sorted({n for _, n in forward.short})
    measured = sorted({b for b, _ in forward.short})
    passes = [[str(b), *(f"{1e3 * forward.short[b, n]:.1f}" for n in widths)] for b in measured]
    slopes = ", ".join(f"{1e6 * s:.2f} µs ({n} rows)" for n, s in sorted(forward.slope.items()))
    rounds = [
        [
            size.label if size != PLAIN else "plain decoding",
            *(f"{temperature:g}", f"{found.tau:.2f}"),
            *(f"{1e3 * seconds:.1f}" for seconds in (found.draft, found.overhead, found.further)),
        ]
        for (size, temperature), found in costs.rounds.items()
    ]
    largest = max(advice[0].gains)
    batches = [b for b in BATCHES if b <= largest]
    gains = []
    for a in advice:
        cells = [f"{size.label} {gain:.2f}×" for size, gain in (a.gains[b] for b in batches)]
        limit = "the largest measured" if a.pays_up_to == largest else str(a.pays_up_to or "never")
        gains.append([str(a.context), f"{a.temperature:g}", *cells, limit])
    columns = ["context", "temperature", *(f"batch {b}" for b in batches), "pays up to batch"]
    return "\n\n".join(
        [
            "## Forward pass of the target, ms",
            markdown_table(["batch", *(f"{n} rows" for n in widths)], passes),
            f"A token of context adds per request: {slopes or 'unknown'}.",
            "## Drafting",
            markdown_table(
                ["drafts", "temperature", "τ", "drafting, ms", "round without the forward pass, ms", "each further request, ms"],
                rounds,
            ),
            "## Fastest draft size",
            markdown_table(columns, gains),
            f"**{summarize(advice)}.**",
        ]
    )  # fmt: skip


def to_dict(costs: DecodingCosts, advice: Sequence[Advice]) -> JsonObject:
    """Plain values, for advice.json."""
    passes = [{"batch": b, "rows": n, "seconds": s} for (b, n), s in costs.forward.short.items()]
    return {
        "forward_passes": passes,
        "seconds_per_token_of_context": costs.forward.slope,
        "rounds": [
            {**asdict(size), "temperature": temperature, **asdict(found)}
            for (size, temperature), found in costs.rounds.items()
        ],
        "advice": [
            {
                "context": a.context,
                "temperature": a.temperature,
                "pays_up_to_batch": a.pays_up_to,
                "gains": {b: {"options": s.options, "speed_up": g} for b, (s, g) in a.gains.items()},
            }
            for a in advice
        ],
        "summary": summarize(advice),
    }  # fmt: skip
