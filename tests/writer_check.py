"""vLLM as the writer of training data, on this machine's CPU: the same greedy answers as this process, and the speed of both.

    python -m tests.writer_check --vllm .venv-vllm       # part of make serve-check

Exit code 1 if a greedy sample differs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from align.data.index import read_samples
from specalign.common.errors import UserError, cli
from specalign.common.text import say
from specalign.lm.loading import resolve_folder
from specalign.suites.registry import prompts_of
from tests.serve_check import find_python, serve, vllm_parser


@cli
def main() -> None:
    parser = vllm_parser(__doc__, "runs/writer_check")
    add = parser.add_argument
    add("--prompts", type=int, default=16, help="MT-Bench prompts that both answer greedily")
    add("--samples", type=int, default=48, help="samples that each writes for the speed")
    add("--max-answer-tokens", type=int, default=64)
    add("--concurrency", type=int, default=64)
    if check(parser.parse_args()):
        raise SystemExit(1)


def check(options: argparse.Namespace) -> int:
    """How many greedy answers differ."""
    program = find_python(options)
    out: Path = options.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    suites, _ = prompts_of("mtbench", limit=options.prompts)
    prompts = [json.dumps({"prompt": prompt.content}) + "\n" for prompt in suites[0].prompts]
    (out / "prompts.jsonl").write_text("".join(prompts))
    words = [
        "recipe=smollm2_block", f"target.name={options.target}", "target.dtype=float32", "data.batch_size=64",
        f"data.max_answer_tokens={options.max_answer_tokens}",
    ]  # fmt: skip
    greedy = [
        *words, f"data.prompts={out / 'prompts.jsonl'}", f"data.samples={len(prompts)}", "data.answer_temperatures=[0.0]",
    ]  # fmt: skip
    # vLLM 0.32 on a CPU fails where a prompt with a seed is split over two steps
    more = ["--served-model-name", options.target.rpartition("/")[2], "--no-enable-chunked-prefill"]
    more += ["--max-num-seqs", str(options.concurrency)]
    model = str(resolve_folder(options.target))
    with serve(program, model, more, out / "server.log") as url:
        served = [f"data.writer=openai:{url}", f"data.concurrency={options.concurrency}"]
        for name, writer in ("vLLM", served), ("in this process", []):
            write([*greedy, *writer], out / "greedy" / name)
            rate = write([*words, f"data.samples={options.samples}", *writer], out / "own" / name)
            say(f"{name}: {rate:.0f} tokens/s")
    ours, theirs = (read(out / "greedy" / name) for name in ("in this process", "vLLM"))
    say(f"greedy answers that differ: {len(ours - theirs)} of {len(prompts)}")
    return len(ours ^ theirs)


def write(words: list[str], folder: Path) -> float:
    """Kept tokens per second, as the command reports them."""
    command = [sys.executable, "-m", "align.synthesize", *words, f"output={folder}"]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode:
        raise UserError(
            f"align.synthesize: exit code {done.returncode}: {done.stderr.strip()[-300:]}"
        )
    rate = re.search(r"\((\d+) kept tokens/s", done.stdout)
    return float(rate[1]) if rate else 0.0


def read(folder: Path) -> set[tuple[int, ...]]:
    found = read_samples(folder / "data")
    return {tuple(found[i].tolist()) for i in range(len(found))}


if __name__ == "__main__":
    main()
