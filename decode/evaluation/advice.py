"""Measures which draft size decodes fastest, by batch size and temperature."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil

from decode.engine.decoder import Decoder
from decode.engine.prompts import Prompt
from decode.speculation.settings import Sampling
from decode.systems.construction import assemble
from decode.systems.drafter_folders import NO_FOLDERS, check_there, kind_of, shipped_for
from decode.systems.opening import open_drafters
from decode.systems.parsing import read_method
from specalign.common.errors import UserError
from specalign.common.text import markdown_table, say
from specalign.lm.model import Target

TREES = (5, 8)  # tree sizes to try with block drafters
TREE_TEMPERATURES = 0.7
"""Trees are chosen, not drawn: they are tried up to this temperature (`decode.proposers.block`)."""


@dataclass(frozen=True)
class DraftSize:
    """Drafts per round: a chain of `tokens`, or a tree of `nodes` in all (0 = a chain)."""

    tokens: int
    nodes: int = 0

    @property
    def label(self) -> str:
        chain = f"γ = {self.tokens}" if self.tokens else "plain decoding"
        return f"a tree of {self.nodes}" if self.nodes else chain


PLAIN = DraftSize(0)


@dataclass(frozen=True)
class MeasuredSpeed:
    """tau: tokens committed per target forward pass. speed: tokens per second of all requests."""

    size: DraftSize
    temperature: float
    batch: int
    tau: float
    speed: float


def open_decoders(
    target: Target, name: str, drafter: str | None, longest: int | None, engine: str = "eager"
) -> tuple[list[DraftSize], Callable[[DraftSize], Decoder]]:
    """The draft sizes to try, plain decoding first, and a function that makes the decoder of one.
    `name`: the target's. `drafter`: a folder or `lookup`; None = the shipped one. Raises UserError:
    no drafter, or one that can't be loaded."""
    drafter = drafter or shipped_for(name)
    if drafter is None or drafter == "none":
        hint = "give --drafter FOLDER, or --drafter lookup"
        raise UserError(f"no drafter is shipped for {name}: {hint}")
    folders = {}
    if drafter not in NO_FOLDERS:
        check_there(drafter)
        folders = {kind_of(drafter): drafter}
    method = read_method("drafter" if folders else "lookup")
    parts = open_drafters([method], folders, target)
    parts.engine = engine

    def make_decoder(size: DraftSize) -> Decoder:
        if size == PLAIN:
            return assemble(read_method("plain"), parts)
        sized = method.with_options(tree_nodes=size.nodes) if folders else method
        return assemble(sized, parts, size.tokens)

    first = assemble(method, parts, longest).drafter
    assert first is not None
    most = min(longest or first.draft_tokens, first.draft_tokens)
    sizes = [PLAIN, *map(DraftSize, sorted({most, *(2**i for i in range(most.bit_length()))}))]
    if "block" in folders and not target.chains_only:
        sizes += [DraftSize(most, nodes) for nodes in TREES]
    return sizes, make_decoder


def measure_speeds(
    sizes: Sequence[DraftSize],
    make_decoder: Callable[[DraftSize], Decoder],
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    batches: Sequence[int],
    max_new_tokens: int,
) -> list[MeasuredSpeed]:
    """Decode the prompts with every draft size, temperature and batch size."""
    found: list[MeasuredSpeed] = []
    for size in sizes:
        decoder = make_decoder(size)
        for temperature, batch in product(temperatures, batches):
            if size.nodes and temperature > TREE_TEMPERATURES:
                continue
            say(f"{size.label} at temperature {temperature:g}, batch {batch} …", error=True)
            sampling = Sampling(temperature, seed=0)
            tau, speed = time_batches(decoder, prompts, batch, max_new_tokens, sampling)
            found.append(MeasuredSpeed(size, temperature, batch, tau, speed))
    return found


def time_batches(
    decoder: Decoder, prompts: Sequence[Prompt], batch: int, limit: int, sampling: Sampling
) -> tuple[float, float]:
    """τ, and tokens per second of `batch` requests, without prefills, after a short warm-up. The
    prompts are repeated until batches are full. Raises UserError: every output has a single token.
    """
    count = batch * ceil(len(prompts) / batch)
    requests = [prompts[i % len(prompts)] for i in range(count)]
    decoder.generate_batch(requests[:batch], min(8, limit), batch_size=batch, sampling=sampling)
    outputs = decoder.generate_batch(requests, limit, batch_size=batch, sampling=sampling)
    calls = sum(out.calls for out in outputs)
    if not calls:
        raise UserError("every output ended at its first token: use other prompts (--prompts)")
    committed = sum(len(out.tokens) - 1 for out in outputs)
    return committed / calls, batch * committed / sum(out.seconds for out in outputs)


def render_advice(measured: Sequence[MeasuredSpeed]) -> str:
    """Markdown: tokens per second and the gain over plain decoding of every size, and a sentence:
    the size that is most often fastest, and where drafting does not pay off."""
    speeds = {(m.size, m.temperature, m.batch): m.speed for m in measured}
    plain = {(t, batch): speed for (size, t, batch), speed in speeds.items() if size == PLAIN}
    best: dict[tuple[float, int], DraftSize] = {}
    for point in plain:
        drafting = [size for size, *at in speeds if size != PLAIN and tuple(at) == point]
        best[point] = max(drafting, key=lambda size: speeds[size, *point])
    batches = sorted({batch for _, batch in plain})
    rows = []
    for m in measured:
        if m.batch == batches[0]:
            cells = [
                f"{speeds[m.size, *point]:.1f} ({speeds[m.size, *point] / plain[point]:.2f}×)"
                for point in [(m.temperature, batch) for batch in batches]
            ]
            rows.append([m.size.label, f"{m.temperature:g}", f"{m.tau:.2f}", *cells])
    header = ["drafts", "temperature", "τ", *(f"batch {batch}, tokens/s" for batch in batches)]
    paying = [size for point, size in best.items() if speeds[size, *point] > plain[point]]
    losing = [
        f"batch {point[1]} at temperature {point[0]:g}"
        for point, size in best.items()
        if speeds[size, *point] <= plain[point]
    ]
    advice = "Do not use drafting: it is never faster than plain decoding here"
    if paying:
        size = max(paying, key=paying.count)
        chain = "" if size.nodes else f"--draft-tokens {size.tokens} "
        advice = f"Use {size.label} ({chain}--tree-nodes {size.nodes})"
        advice += f", but no drafting for {', '.join(losing)}" if losing else ""
    return f"{markdown_table(header, rows)}\n\n**{advice}.**"
