"""What a decoding round costs on a GPU, counted without one: launches, host syncs, blocking uploads.

    python -m tools.round_budget                # a table: debug target of four layers, block drafter
    python -m tools.round_budget --json         # the same as JSON, as tests/golden/round_budget.json
    python -m tools.round_budget "tree" 4       # one mode at one batch size, and the lines that wait

The eager engine's counts are those of its most expensive round; the captured engine's include the
read of the results, which does not wait for the round.
"""

import json
import sys
from itertools import chain
from typing import NamedTuple

from align.config.drafter import DrafterConfig
from align.makers.block import from_target
from align.makers.standalone import make_standalone
from decode.captured.engine import CapturedEngine
from decode.engine.decoder import Decoder
from decode.proposers.autoregressive import AutoregressiveProposer
from decode.proposers.base import Proposer
from decode.proposers.block import BlockProposer
from decode.proposers.diffusion import DiffusionProposer
from decode.proposers.lookup import CopyingProposer, LookupProposer
from decode.speculation.proposal import Siblings
from decode.speculation.settings import Sampling
from specalign.common.text import say
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.standalone import DiffusionDrafter
from tests import elsewhere
from tools.launches import OperatorCounter


class Mode(NamedTuple):
    """drafts: plain, chain, tree, drawn tree, lookup, autoregressive or diffusion; with `copy`,
    copies as well."""

    drafts: str
    sampling: Sampling = Sampling()


SAMPLED, NUCLEUS = Sampling(temperature=1.0, seed=1), Sampling(temperature=0.6, top_p=0.9, seed=1)
PENALISED = Sampling(repetition_penalty=1.2)
MODES = {
    "plain": Mode("plain"),
    "chain": Mode("chain"),
    "chain, sampled": Mode("chain", SAMPLED),
    "tree": Mode("tree"),
    "tree, penalised": Mode("tree", PENALISED),
    "tree and copies": Mode("tree copy"),
    "plain, top-p": Mode("plain", NUCLEUS),
    "tree, top-p": Mode("tree", NUCLEUS),
    "chain, top-p": Mode("chain", NUCLEUS),
    "drawn tree": Mode("drawn tree", SAMPLED),
    "lookup": Mode("lookup"),
    "autoregressive": Mode("autoregressive"),
    "diffusion, sampled": Mode("diffusion", SAMPLED),
}
BATCHES = {"eager": (1, 4), "captured": (1, 32)}
"""The eager engine's counts grow with the batch; the captured engine's must not."""
NEW_TOKENS = 12


class Counts(NamedTuple):
    launches: int
    syncs: int
    uploads: int


class Drafters(NamedTuple):
    """The networks that draft; the autoregressive one has the target's shape."""

    block: BlockDrafter
    smaller: Target
    diffusion: DiffusionDrafter

    def propose(self, drafts: str) -> Proposer | None:
        """What proposes in a mode."""
        if drafts == "plain":
            return None
        if drafts == "lookup":
            return LookupProposer(4)
        if drafts == "autoregressive":
            return AutoregressiveProposer(self.smaller, 4)
        if drafts == "diffusion":
            return DiffusionProposer(self.diffusion, 4, 2)
        siblings: Siblings | None = "iid" if drafts.startswith("drawn") else None
        proposer = BlockProposer(self.block, 4, 5 if "tree" in drafts else 0, siblings)
        return CopyingProposer(proposer) if drafts.endswith("copy") else proposer


def count_rounds(
    target: Target, drafters: Drafters, mode: Mode, batch: int, captured: bool
) -> OperatorCounter:
    """The most expensive round of `batch` requests side by side."""
    proposer = drafters.propose(mode.drafts)
    engine = CapturedEngine(target, proposer) if captured else None
    decoder = Decoder(target, proposer, engine=engine)
    prompts = [[4 + i, 90, 17, 9, 4 + i, 90] for i in range(batch)]
    options = {"sampling": mode.sampling}
    runners = decoder._make_runners(prompts, NEW_TOKENS, None, options)  # type: ignore[arg-type]
    counters: list[OperatorCounter] = []
    rounds = decoder.run_rounds(runners, batch)
    next(rounds)  # the capture and the prefills
    for _ in range(3):
        counter = OperatorCounter()
        with counter:
            next(rounds, None)
        counters.append(counter)
    return max(counters, key=lambda counter: (counter.syncs + counter.uploads, counter.launches))


def count_all(target: Target, drafters: Drafters) -> dict[str, dict[str, Counts]]:
    """By mode and batch, and by engine."""
    found: dict[str, dict[str, Counts]] = {}
    for name, mode in MODES.items():
        for batch in sorted({*chain(*BATCHES.values())}):
            row = found[f"{name}, batch {batch}"] = {}
            for engine in [engine for engine, batches in BATCHES.items() if batch in batches]:
                one = count_rounds(target, drafters, mode, batch, engine == "captured")
                row[engine] = Counts(one.launches, one.syncs, one.uploads)
    return found


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--json"]
    with elsewhere.pretend():
        target = load_target("debug", dtype="float32", device="auto", fast=False)
        target.eos_ids = ()
        options = DrafterConfig(context="shared_kv", taps=2, markov_rank=8)
        smaller = load_target("debug", dtype="float32", device="auto", fast=False)
        standalone = DrafterConfig(kind="standalone", block_size=4)
        diffusion = make_standalone(target, standalone).eval()
        drafters = Drafters(from_target(target, options, None).eval(), smaller, diffusion)
        if words:
            for captured in (False, True):
                say(str(count_rounds(target, drafters, MODES[words[0]], int(words[1]), captured)))
            return
        found = count_all(target, drafters)
    if "--json" in sys.argv:
        say(json.dumps(found))
        return
    say("| mode | eager: launches, syncs, uploads | captured |\n|---|---|---|")
    for name, row in found.items():
        cells = [" / ".join(map(str, row.get(engine, "–"))) for engine in BATCHES]
        say(f"| {name} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
