"""The target's outputs as vLLM computes them on this machine's processor, beside those of this process: the same within rounding, and how fast.

    python -m tests.features_check --vllm .venv-vllm                   # part of make serve-check
    python -m tests.features_check --vllm .venv-vllm --recipe smollm2_block

Both store the rows of the same text in fp32. vLLM's connector for hidden states asks for CUDA; tests/vllm_states.py does it without.
Exit code 1 where the outputs differ.
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
from safetensors.torch import load_file

from align.common.errors import UserError, cli
from align.common.text import say
from align.config.parser import load_recipe
from align.outputs.served import serve_words
from align.outputs.stand_ins import layers_asked
from align.target.loading import load_target, resolve_folder
from align.training.build import conditioning
from tests.serve_check import interpreter, serving, vllm_parser

LARGEST = 1e-2
"""Of the distance of a row's outputs, as a share of their length."""


@cli
def main() -> None:
    parser = vllm_parser(__doc__, "runs/features_check")
    add = parser.add_argument
    add("--recipe", default="smollm2_taps")
    add("--samples", type=int, default=48, help="texts that the target writes first")
    found = run(parser.parse_args())
    if not found["same"]:
        raise SystemExit(1)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The comparison; `same`: every row is within `LARGEST`."""
    program, out = interpreter(options), options.out
    for name in ("own", "served", "states"):
        shutil.rmtree(out / name, ignore_errors=True)
    (out / "states").mkdir(parents=True)
    words = [
        f"recipe={options.recipe}", f"target.name={options.target}", "target.dtype=float32", f"output={out}", f"data.path={out / 'data'}",
        f"data.samples={options.samples}", "trainer.features_gb=4", "trainer.features_dtype=fp32", "drafter.draft_vocab=0",
        "trainer.max_steps=100000",
    ]  # fmt: skip
    ran(["align.synthesize", *words])
    target = load_target(options.target, "float32")
    layers = layers_asked(target, conditioning(load_recipe(words), target))
    more = serve_words(layers, (out / "states").resolve(), "tests.vllm_states", "OnProcessor")
    more += ["--served-model-name", options.target.rpartition("/")[2]]
    seconds = {"in this process": stored(words, out / "own")}
    with serving(program, str(resolve_folder(options.target)), more, out / "server.log") as server:
        seconds["vLLM"] = stored([*words, f"trainer.features_writer=vllm:{server.url}"], out / "served")
    left = len(list((out / "states").iterdir()))
    rows, tokens, distance = compared(out / "own", out / "served")
    say("| who runs the target | tokens/s, loading included |\n|---|---|")
    for name, each in seconds.items():
        say(f"| {name} | {tokens / each:.0f} |")
    say(f"{rows} rows, {tokens} tokens; the largest distance is {distance:.1e}; {left} files left")
    report = {
        "seconds": seconds, "rows": rows, "tokens": tokens, "layers": layers, "distance": distance, "files_left": left,
        "threads": torch.get_num_threads(), "same": distance < LARGEST and not left,
    }  # fmt: skip
    (out / "features_check.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def stored(words: list[str], folder: Path) -> float:
    """Seconds in which `align.features` stores the rows in `folder`."""
    started = time.monotonic()
    say(ran(["align.features", *words, f"trainer.features_path={folder}"]))
    return time.monotonic() - started


def ran(words: list[str]) -> str:
    """What a command says last."""
    done = subprocess.run([sys.executable, "-m", *words], text=True, capture_output=True)
    if done.returncode:
        raise UserError(f"{words[0]} ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return re.sub(r".*\n", "", done.stdout.strip())


def compared(own: Path, served: Path) -> tuple[int, int, float]:
    """Rows, their tokens, and the largest distance of one's outputs, padding aside."""
    rows, tokens, largest = 0, 0, 0.0
    for mine, theirs in zip(
        sorted(own.glob("*.safetensors")), sorted(served.glob("*.safetensors")), strict=True
    ):
        ours, found = load_file(mine), load_file(theirs)
        for name, value in ours.items():
            row, _, what = name.partition(".")
            real = found[f"{row}.hidden"][0].any(-1)  # padding has zeros
            if what == "best":
                continue  # a tie decides otherwise
            at = value.dim() - 2 if what.startswith(("key", "value")) else min(1, value.dim() - 1)
            a, b = value.movedim(at, 0)[real], found[name].movedim(at, 0)[real]
            largest = max(largest, float((a - b).norm() / a.norm()))
            if what == "hidden":
                rows, tokens = rows + 1, tokens + int(real.sum())
    return rows, tokens, largest


if __name__ == "__main__":
    main()
