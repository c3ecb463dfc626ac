"""What a round costs at any τ: eager, captured and compiled engines on models with random weights.

    python -m tools.gpu.rounds --out rounds.json                                # a GPU
    python -m tools.gpu.rounds --shape 1b --batches 1 --engines captured,compiled
    python -m tools.gpu.rounds --device cpu --shape debug --batches 1,2

The drafter runs in full, and then its tokens are replaced by the target's own text, each one spoilt
with the chance that gives the τ asked for: outputs stay the same. Throughputs are of all requests
together, prefills excluded; repeats are interleaved. Every layer is compiled for every batch and kind
of round, which takes seconds each; on a CPU each kind of round as a whole.
"""

from collections import defaultdict
from time import perf_counter
from typing import NamedTuple

import torch

from align.config.drafter import DrafterConfig
from decode.captured.graph import Backend
from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from specalign.common.schema import JsonObject
from specalign.common.text import markdown_table, say
from tools.gpu.common import (
    add_names,
    device_name,
    make_drafter,
    make_parser,
    make_target,
    save_report,
    split_numbers,
    spread,
    synchronize,
)
from tools.gpu.forced import ForcedEngine, ForcedProposer, KnownTexts

ENGINES = ("eager", "captured", "compiled")
PROMPT = 32


class Case(NamedTuple):
    """nodes: of a draft tree, 0 = a chain, None = plain decoding (then tau is 1)."""

    engine: str
    nodes: int | None = None
    tau: float = 1.0


class Bench:
    """One target, its drafter, and decoders of every engine."""

    def __init__(self, shape: str, device: torch.device, new_tokens: int) -> None:
        self.device, self.new_tokens = device, new_tokens
        self.target = make_target(shape, device)
        hidden = self.target.hidden_size
        options = DrafterConfig(layers=min(4, self.target.num_layers), markov_rank=min(192, hidden))
        self.network = make_drafter(self.target, options).to(self.target.dtype)
        self.decoders: dict[tuple[str, int | None], Decoder] = {}
        self.texts = KnownTexts(self.target.vocab_size)

    def learn_texts(self, count: int) -> list[list[int]]:
        """Prompts, whose greedy continuations are now known."""
        size = self.target.vocab_size
        prompts = [[(97 * i + j * j) % size for j in range(PROMPT)] for i in range(count)]
        _, outputs = self.run(Case("eager"), prompts)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.texts.outputs[tuple(prompt)] = output.tokens
        return prompts

    def _decoder(self, engine: str, nodes: int | None) -> Decoder:
        if (engine, nodes) not in self.decoders:
            proposer = None
            if nodes is not None:
                proposer = ForcedProposer(self.network, nodes, self.texts)
            backend: Backend | None = "compiled" if engine == "compiled" else None
            captured = None if engine == "eager" else ForcedEngine(self.target, proposer, backend)
            self.decoders[engine, nodes] = Decoder(self.target, proposer, engine=captured)
        return self.decoders[engine, nodes]

    @torch.no_grad()
    def run(self, case: Case, prompts: list[list[int]]) -> tuple[float, list[Generation]]:
        """Tokens per second of these requests side by side, and their outputs."""
        decoder = self._decoder(case.engine, case.nodes)
        if case.nodes is not None:
            self.texts.spoil(case.tau, self.network.config.block_size, self.device)
        stance = "default" if case.engine == "compiled" else "force_eager"
        with torch.compiler.set_stance(stance):
            runners = decoder._make_runners(prompts, self.new_tokens, None, {})
            rounds = decoder.run_rounds(runners, len(prompts))
            while not all(runner.out.tokens for runner in runners):  # the prefills
                next(rounds)
            first = sum(len(runner.out.tokens) for runner in runners)
            synchronize(self.device)
            started = perf_counter()
            for _ in rounds:
                pass
            synchronize(self.device)
            seconds = perf_counter() - started
        outputs = [runner.out for runner in runners]
        return (sum(len(out.tokens) for out in outputs) - first) / seconds, outputs

    def measure(
        self, cases: list[Case], prompts: list[list[int]], repeats: int
    ) -> list[JsonObject]:
        """A row for each case."""
        found = {case: self.run(case, prompts)[1] for case in cases}  # captures and compiles
        speeds: dict[Case, list[float]] = defaultdict(list)
        for _ in range(repeats):
            for case in cases:
                speeds[case].append(self.run(case, prompts)[0])
        return [self._row(case, found[case], prompts, speeds) for case in cases]

    def _row(
        self,
        case: Case,
        outputs: list[Generation],
        prompts: list[list[int]],
        speeds: dict[Case, list[float]],
    ) -> JsonObject:
        """Throughput, ratios to plain decoding of the same repeat, and τ as measured."""
        texts = [self.texts.outputs[tuple(prompt)] for prompt in prompts]
        committed = sum(len(out.tokens) - 1 for out in outputs)
        row: JsonObject = {
            **case._asdict(),
            "batch": len(prompts),
            "measured_tau": committed / sum(out.calls for out in outputs),
            "same_texts": sum(a.tokens == b for a, b in zip(outputs, texts, strict=True)),
            "tokens_per_second": spread(speeds[case]),
        }
        for name, base in (("own", Case(case.engine)), ("captured", Case("captured"))):
            if base in speeds:
                ratios = zip(speeds[case], speeds[base], strict=True)
                row[f"to_{name}_plain"] = spread([a / b for a, b in ratios])
        return row


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("tools.gpu.rounds", __doc__ or "", "135m,1b,8b")
    add_names(parser, "--engines", ENGINES, "eager,captured")
    parser.add_argument("--batches", type=split_numbers, default=[1, 4, 8, 16, 32])
    parser.add_argument("--tau", type=split_numbers, default=[1, 2.4, 4])
    parser.add_argument(
        "--nodes", type=split_numbers, default=[5], help="of draft trees, 0 = a chain"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(argv)
    cases = [Case(engine) for engine in given.engines]
    cases += [Case(e, int(n), t) for e in given.engines for n in given.nodes for t in given.tau]
    say(device_name(given.device))
    figures: dict[str, list[JsonObject]] = {}
    for shape in given.shape:
        bench = Bench(shape, given.device, given.new_tokens)
        prompts = bench.learn_texts(int(max(given.batches)))
        figures[shape] = []
        for batch in map(int, given.batches):
            figures[shape] += bench.measure(cases, prompts[:batch], given.repeats)
            save_report(given.out, given.device, {"rounds": figures})
        print_rows(shape, figures[shape])


def print_rows(shape: str, rows: list[JsonObject]) -> None:
    header = [shape, "batch", "τ asked", "τ", "tokens/s", "range", "to own plain"]
    cells = []
    for row in rows:
        speed, nodes = row["tokens_per_second"], row["nodes"]
        drafts = {None: "plain", 0: "chain"}.get(nodes, f"tree of {nodes}")
        line = [f"{row['engine']}, {drafts}", str(row["batch"]), f"{row['tau']:g}"]
        line += [f"{row['measured_tau']:.2f}", f"{speed['median']:.0f}"]
        line.append(f"{speed['min']:.0f}…{speed['max']:.0f}")
        for base in ("own", "captured"):
            ratio = row.get(f"to_{base}_plain")
            line.append("–" if ratio is None else f"{ratio['median']:.2f}")
        line.append(f"{row['same_texts']}/{row['batch']}")
        cells.append(line)
    say(markdown_table([*header, "to captured plain", "same text"], cells))


if __name__ == "__main__":
    main()
