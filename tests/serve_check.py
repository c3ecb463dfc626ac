"""A drafter trained here, served by vLLM on this machine's CPU: the same tokens as without it, and how many drafts it accepts.

    make serve-check                                   # sets up .venv-vllm, trains a drafter where there is none, runs this
    python -m tests.serve_check --vllm .venv-vllm --drafter runs/smollm2_taps/drafter

Two servers run at once, one plain and one with the export. Prompt by prompt, in turns, both answer greedily through the OpenAI
protocol, and so does this project's decoder, plainly and with chains of the same drafter. Then the line that decode.export prints
starts a server as it is printed, and decode.parity judges that one. Exit code 1 if outputs or acceptance differ, the line does not
start, or the export is judged wrong. A fault of vLLM's build for processors is mended in the server that drafts
(tests/vllm_processor.py) but not in the printed line's; `--as-it-is` leaves it in both.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from align.common.errors import UserError, cli
from align.common.text import say
from align.models.checkpoints.block import load_drafter
from align.target.loading import load_target, resolve_folder
from align.target.names import DEFAULT_TARGET
from decode.drafters.block import BlockProposer
from decode.engine.decoder import Decoder
from decode.exporting.compare import encode_prompts
from decode.exporting.exports import DrafterPair
from decode.exporting.registry import FORMATS
from decode.exporting.server import SERVED, Counts, Server, check_server
from decode.exporting.serving import fit_machine
from decode.reporting.statistics import paired_ratio, tau
from decode.suites.registry import prompts_of

MENDED = Path(__file__).with_name("vllm_processor.py").resolve()
START = 600.0
"""Seconds that a server may take to start."""


def vllm_parser(text: str | None, out: str) -> argparse.ArgumentParser:
    """The options that every check of vLLM has."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--vllm", type=Path, required=True, help="the virtual environment that vLLM is installed in")
    add("--target", default=DEFAULT_TARGET)
    add("--out", type=Path, default=Path(out))
    return parser


def interpreter(options: argparse.Namespace) -> Path:
    """Python of that environment. Raises UserError where it has none."""
    program: Path = options.vllm / "bin" / "python"
    if not program.is_file():
        raise UserError(f"--vllm={options.vllm}: has no bin/python; type: make serve-check")
    return program


@cli
def main() -> None:
    parser = vllm_parser(__doc__, "runs/serve_check")
    add = parser.add_argument
    add("--drafter", default="runs/smollm2_taps/drafter")
    add("--suite", default="mtbench")
    add("--limit", type=int, default=20)
    add("--max-new-tokens", type=int, default=64)
    add("--as-it-is", action="store_true", help="leave vLLM's fault in")
    found = run(parser.parse_args())
    if not found["same"]:
        raise SystemExit(1)


def run(options: argparse.Namespace) -> dict[str, Any]:
    program = interpreter(options)
    target = load_target(options.target, "float32")
    drafter = load_drafter(options.drafter, target)
    folder = options.out / "dflash"
    FORMATS["dflash"].write(drafter, folder, torch.bfloat16, "")
    suites, _ = prompts_of(options.suite, limit=options.limit)
    prompts = encode_prompts(target, suites[0].prompts)
    words = {
        "method": "dflash",
        "model": str(folder.resolve()),
        "num_speculative_tokens": drafter.config.block_size,
    }
    (printed, *_) = FORMATS["dflash"].snippets(
        drafter, fit_machine(options.target, "cpu", drafter.config), str(folder.absolute())
    )
    accepted: list[list[int]] = []
    model = str(resolve_folder(options.target))
    more = ["--speculative-config", json.dumps(words)]
    with (
        serving(program, model, [], options.out / "plain.log") as plain,
        serving(program, model, more, options.out / "drafted.log", mended=not options.as_it_is) as drafted,
    ):
        ways = {
            "vLLM": plain.greedy,
            "vLLM with the drafter": drafted.greedy,
            "ours": _decode(Decoder(target), []),
            "ours with the drafter": _decode(Decoder(target, BlockProposer(drafter, tree_nodes=0)), accepted),
        }
        for name, way in ways.items():
            rested(name, way, prompts[0], 8)  # warm
        accepted.clear()
        before = drafted.counts()
        outputs, speeds = measured(ways, prompts, options.max_new_tokens)
        counts = drafted.counts().since(before)
    with as_printed(program, printed.lines[0], options.out / "printed.log") as server:
        say(f"started as printed: {printed.lines[0]}")
        pair = DrafterPair(options.drafter, "block", options.target)
        judged = check_server(pair, server.url, suites[0].prompts[:JUDGED], options.max_new_tokens, folder)
    for line in (*judged.lines, judged.conclusion):
        say(line)
    rounds = sum(map(len, accepted))
    ours = Counts(rounds, rounds * drafter.config.block_size, sum(map(sum, accepted)))
    same = {name: sum(a == b for a, b in zip(outputs["vLLM"], outputs[name], strict=True)) for name in ways}
    report = {
        "prompts": len(prompts), "max_new_tokens": options.max_new_tokens, "threads": torch.get_num_threads(),
        "identical_to_vllm_plain": same, "tokens_per_s": speeds,
        "tau": {"vLLM": counts.tau, "ours": ours.tau}, "tau_95": interval(accepted), "rounds": {"vLLM": counts.rounds, "ours": ours.rounds},
        "accepted": {"vLLM": counts.accepted, "ours": ours.accepted},
        "printed_line": judged.conclusion,
        "same": same["vLLM with the drafter"] == len(prompts)
        and abs(counts.tau - ours.tau) < SERVED * ours.tau
        and judged.files_same is True,
    }  # fmt: skip
    (options.out / "serve_check.json").write_text(json.dumps(report, indent=2) + "\n")
    tell(report)
    return report


JUDGED = 4
"""Prompts over which the printed line's server is judged."""


def interval(accepted: list[list[int]]) -> tuple[float, float] | None:
    """Of τ, over prompts; None where there is one."""
    counted = {("", str(i)): (sum(one) + len(one), len(one)) for i, one in enumerate(accepted) if one}
    estimate = tau(counted)
    return (
        None if estimate is None or estimate.lo is None or estimate.hi is None else (estimate.lo, estimate.hi)
    )


def plain_of(name: str) -> str:
    """The plain way of its kind: `vLLM with the drafter` → `vLLM`."""
    return name.partition(" with ")[0]


def _decode(decoder: Decoder, accepted: list[list[int]]) -> Any:
    """Outputs of a decoder; accepted drafts of each call are added to `accepted`."""

    def decode(prompt: list[int], count: int) -> list[int]:
        out = decoder.generate(prompt, max_new_tokens=count)
        accepted.append(out.accepted)
        return out.tokens

    return decode


SETTLING = 3.0
"""Seconds."""


def rested(name: str, way: Any, prompt: list[int], count: int) -> tuple[list[int], float]:
    """A way's output and its seconds. After a server's it waits: its threads go on for a while after its answer."""
    started = time.perf_counter()
    tokens = way(prompt, count)
    took = time.perf_counter() - started
    if name.startswith("vLLM"):
        time.sleep(SETTLING)
    return tokens, took


def measured(
    ways: dict[str, Any], prompts: list[list[int]], count: int
) -> tuple[dict[str, list[list[int]]], dict[str, Any]]:
    """Outputs of every way, and tokens/s, prefill included, with the speed-up over the plain way of its kind."""
    outputs: dict[str, list[list[int]]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number, prompt in enumerate(prompts):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            tokens, took = rested(name, ways[name], prompt, count)
            outputs[name].append(tokens)
            seconds[name].append(took)
        say(f"{number + 1}/{len(prompts)} prompts", error=True)
    speeds: dict[str, Any] = {}
    for name in ways:
        base = plain_of(name)
        each, basis = (
            {
                ("prompts", str(i)): s / max(len(o), 1)
                for i, (s, o) in enumerate(zip(seconds[n], outputs[n], strict=True))
            }
            for n in (name, base)
        )
        up = paired_ratio(basis, each)
        speeds[name] = {
            "tokens_per_s": sum(map(len, outputs[name])) / sum(seconds[name]),
            "speed_up": None if up is None or up.lo is None else [up.value, up.lo, up.hi],
            "seconds": [
                round(s, 3) for s in seconds[name]
            ],  # of each prompt: one that was disturbed stands out
        }
    return outputs, speeds


@contextmanager
def serving(program: Path, model: str, more: list[str], log: Path, mended: bool = False) -> Iterator[Server]:
    """A server of vLLM's on a free port, in fp32. `mended`: without the fault that tests/vllm_processor.py describes."""
    port = free_port()
    words = [
        str(program.absolute()), *(["-P", str(MENDED)] if mended else ["-m", "vllm.entrypoints.openai.api_server"]), "--model", model, "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "2048", "--max-num-seqs", "1", "--generation-config", "vllm", "--no-enable-prefix-caching", *more,
    ]  # fmt: skip
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    with _running(words, settings, port, log) as server:
        yield server


@contextmanager
def as_printed(program: Path, line: str, log: Path) -> Iterator[Server]:
    """The server that a printed line starts, word for word, but for its port, which may be taken."""
    port = free_port()
    settings = {"PATH": f"{program.absolute().parent}{os.pathsep}{os.environ['PATH']}"}
    with _running(["bash", "-c", f"exec {line} --port {port}"], settings, port, log) as server:
        yield server


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def _running(words: list[str], settings: dict[str, str], port: int, log: Path) -> Iterator[Server]:
    """A server that sends no figures about its use anywhere. Ends it and its workers."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            words,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | quiet | settings,
            start_new_session=True,
        )
        try:
            yield _awaited(process, port, log)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The server and its workers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        os.killpg(process.pid, signal.SIGKILL)


def _awaited(process: subprocess.Popen[bytes], port: int, log: Path) -> Server:
    started = time.monotonic()
    while time.monotonic() - started < START:
        if process.poll() is not None:
            raise UserError(f"vllm serve ended with exit code {process.returncode}; {log} says why")
        try:
            return Server(f"http://127.0.0.1:{port}")
        except UserError:
            time.sleep(2)
    raise UserError(f"vllm serve did not answer within {START:.0f} s; {log} says why")


def tell(report: dict[str, Any]) -> None:
    say(
        "| | tokens/s | speed-up [95%] | τ | accepted drafts | outputs as vLLM's plain ones |\n|---|---|---|---|---|---|"
    )
    for name, speed in report["tokens_per_s"].items():
        drafts, engine = name.endswith("drafter"), "vLLM" if name.startswith("vLLM") else "ours"
        up = speed["speed_up"]
        shown = f"{report['tau'][engine]:.3f}" if drafts else "1"
        if drafts and engine == "ours" and report["tau_95"]:
            shown += " [{:.3f}, {:.3f}]".format(*report["tau_95"])
        at = f"{report['accepted'][engine]:.0f}" if drafts else ""
        said = "1" if not drafts else f"{up[0]:.2f}× [{up[1]:.2f}, {up[2]:.2f}]" if up else "one prompt: none"
        same = report["identical_to_vllm_plain"][name]
        say(
            f"| {name} | {speed['tokens_per_s']:.1f} | {said} | {shown} | {at} | {same}/{report['prompts']} |"
        )
    for name, speed in report["tokens_per_s"].items():
        engine, up = ("vLLM" if name.startswith("vLLM") else "ours"), speed["speed_up"]
        if name.endswith("drafter") and up and up[1] > report["tau"][engine]:
            say(
                f"note: {name}: {up[0]:.2f}× is above τ, which drafting alone can't give: its baseline is slow here"
            )


if __name__ == "__main__":
    cli(main)()
