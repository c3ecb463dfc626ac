"""Training data that vLLM writes on this machine's processor, beside what this process writes: the same greedy answers, and how fast.

    python -m tests.writer_check --vllm .venv-vllm                                  # part of make serve-check
    python -m tests.writer_check --vllm .venv-vllm --samples 320 --kill-after 200,400

Greedily both answer the same prompts in fp32, and every sample must be the same. Then each writes prompts and answers of its own. With
--kill-after the server writes twice instead, once undisturbed and once killed (SIGKILL) so many seconds after each start, and the samples
must be the same. Exit code 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from align.common.errors import UserError, cli
from align.common.text import say
from align.data import shards as data
from align.data.index import read_samples
from align.target.loading import resolve_folder
from decode.suites.registry import prompts_of
from tests.serve_check import interpreter, serving, vllm_parser

Sample = tuple[tuple[int, ...], int, float]


@cli
def main() -> None:
    parser = vllm_parser(__doc__, "runs/writer_check")
    add = parser.add_argument
    add("--prompts", type=int, default=16, help="prompts of MT-Bench that both answer greedily")
    add("--samples", type=int, default=48, help="samples that each writes on its own")
    add("--max-answer-tokens", type=int, default=64)
    add("--batch-size", type=int, default=64)
    add("--concurrency", type=int, default=64)
    add("--kill-after", default="", help="seconds after which a second run is killed, for each of its starts")
    found = run(parser.parse_args())
    if not found["same"]:
        raise SystemExit(1)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The comparison; `same`: nothing differs."""
    program = interpreter(options)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("served", "killed", "own", "greedy_served", "greedy_own"):
        shutil.rmtree(options.out / name, ignore_errors=True)
    words = [
        "recipe=smollm2_block", f"target.name={options.target}", "target.dtype=float32", f"data.batch_size={options.batch_size}",
        f"data.max_answer_tokens={options.max_answer_tokens}",
    ]  # fmt: skip
    name = options.target.rpartition("/")[2]
    # on a processor vLLM 0.32 ends where a prompt with a seed is split over two steps
    more = [
        "--served-model-name",
        name,
        "--max-num-seqs",
        str(options.concurrency),
        "--no-enable-chunked-prefill",
    ]
    with serving(program, str(resolve_folder(options.target)), more, options.out / "server.log") as server:
        served = [f"data.writer=openai:{server.url}", f"data.concurrency={options.concurrency}"]
        own = [*words, f"data.samples={options.samples}"]
        if options.kill_after:
            report = soaked([*own, *served], options)
        else:
            report = compared(words, own, served, options)
    report["threads"] = torch.get_num_threads()
    (options.out / "writer_check.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def compared(
    words: list[str], own: list[str], served: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """The same greedy answers, and how fast samples of their own are written, the server first."""
    suites, _ = prompts_of("mtbench", limit=options.prompts)
    texts = [prompt.content for prompt in suites[0].prompts]
    given = options.out / "prompts.jsonl"
    given.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    greedy = [*words, f"data.prompts={given}", f"data.samples={len(texts)}", "data.answer_temperatures=[0.0]"]
    write([*greedy, *served], options.out / "greedy_served")
    write(greedy, options.out / "greedy_own")
    rates = {
        "vLLM": write([*own, *served], options.out / "served"),
        "in this process": write(own, options.out / "own"),
    }
    differ = differing(options.out / "greedy_own", options.out / "greedy_served")
    say("| writer | kept tokens/s |\n|---|---|")
    for name, rate in rates.items():
        say(f"| {name} | {rate:.0f} |")
    say(f"greedy answers that differ: {differ} of {len(texts)}")
    return {"tokens_per_s": rates, "prompts": len(texts), "greedy_that_differ": differ, "same": not differ}


def soaked(words: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """One undisturbed run, and one that is killed."""
    started = time.monotonic()
    rate = write(words, options.out / "served")
    seconds = time.monotonic() - started
    limits = [float(text) for text in options.kill_after.split(",")]
    at_kills = killed(words, options.out / "killed", limits)
    differ = differing(options.out / "killed", options.out / "served")
    count = len(samples_of(options.out / "killed"))
    say(f"undisturbed: {seconds:.0f} s, {rate:.0f} kept tokens/s; on disk at the kills: {at_kills}")
    say(f"samples that differ: {differ} of {count}")
    return {
        "tokens_per_s": rate, "seconds": seconds, "at_kills": at_kills, "samples": count, "samples_that_differ": differ, "same": not differ,
    }  # fmt: skip


def command_of(words: list[str], folder: Path) -> list[str]:
    return [sys.executable, "-m", "align.synthesize", *words, f"output={folder}"]


def write(words: list[str], folder: Path) -> float:
    """Kept tokens a second, as the command says it."""
    done = subprocess.run(command_of(words, folder), text=True, capture_output=True)
    if done.returncode:
        raise UserError(
            f"align.synthesize ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}"
        )
    rate = re.search(r"\((\d+) kept tokens/s", done.stdout)
    return float(rate[1]) if rate else 0.0


def killed(words: list[str], folder: Path, seconds: list[float]) -> list[dict[str, int]]:
    """A run that is killed so many seconds after each start, then ends; what was on disk at each kill."""
    found = []
    for limit in seconds:
        process = subprocess.Popen(command_of(words, folder), stdout=subprocess.DEVNULL)
        try:
            process.wait(limit)
            break  # it was done before
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        place = folder / "data"
        lines = sum(path.read_bytes().count(b"\n") for path in place.glob(".answers-*"))
        shards = data.read_manifest(place)["shards"] if (place / "manifest.json").is_file() else 0
        found.append({"shards": shards, "rows_beside_them": lines})
    write(words, folder)
    return found


def samples_of(folder: Path) -> list[Sample]:
    found = read_samples(folder / "data")
    return [
        (tuple(found[i].tolist()), int(found.answer_start[i]), float(found.temperature[i]))
        for i in range(len(found))
    ]


def differing(a: Path, b: Path) -> int:
    """How many samples of one folder are not in the other."""
    ours, theirs = set(samples_of(a)), set(samples_of(b))
    return max(len(ours - theirs), len(theirs - ours))


if __name__ == "__main__":
    main()
