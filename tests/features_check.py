"""The target's outputs as vLLM computes them on this machine's CPU equal those of this process within rounding.

    python -m tests.features_check --vllm .venv-vllm [--recipe smollm2_block]       # part of make serve-check

Both store the rows of the same text in fp32. vLLM's connector for hidden states needs CUDA; tests/vllm_states.py does without.
Exit code 1 if the outputs differ.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from align.config.parser import load_recipe
from align.outputs.served import serve_words
from align.outputs.stand_ins import layers_asked
from align.training.build import conditioning
from specalign.common.errors import UserError, cli
from specalign.common.text import say
from specalign.lm.loading import load_target, resolve_folder
from tests.serve_check import find_python, serve, vllm_parser

LARGEST = 1e-2
"""The largest distance of a row's outputs, as a share of their norm."""


@cli
def main() -> None:
    parser = vllm_parser(__doc__, "runs/features_check")
    parser.add_argument("--recipe", default="smollm2_taps")
    parser.add_argument(
        "--samples", type=int, default=48, help="texts that the target writes first"
    )
    options = parser.parse_args()
    program = find_python(options)
    out, states = options.out, options.out / "states"
    for name in ("own", "served", "states"):
        shutil.rmtree(out / name, ignore_errors=True)
    states.mkdir(parents=True)
    words = [
        f"recipe={options.recipe}", f"target.name={options.target}", "target.dtype=float32", f"output={out}",
        f"data.path={out / 'data'}", f"data.samples={options.samples}", "trainer.features_gb=4",
        "trainer.features_dtype=fp32", "drafter.draft_vocab=0", "trainer.max_steps=100000",
    ]  # fmt: skip
    run(["align.synthesize", *words])
    target = load_target(options.target, "float32")
    layers = layers_asked(target, conditioning(load_recipe(words), target))
    more = serve_words(layers, states.resolve(), "tests.vllm_states", "OnProcessor")
    more += ["--served-model-name", options.target.rpartition("/")[2]]
    run(["align.features", *words, f"trainer.features_path={out / 'own'}"])
    model = str(resolve_folder(options.target))
    with serve(program, model, more, out / "server.log") as url:
        writer = [f"trainer.features_writer=vllm:{url}", f"trainer.features_path={out / 'served'}"]
        run(["align.features", *words, *writer])
    left = len(list(states.iterdir()))
    distance = largest_distance(out / "own", out / "served")
    say(f"the largest distance is {distance:.1e}; {left} files left")
    if distance >= LARGEST or left:
        raise SystemExit(1)


def run(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *words], text=True, capture_output=True)
    if done.returncode:
        raise UserError(f"{words[0]}: exit code {done.returncode}: {done.stderr.strip()[-300:]}")


def largest_distance(own: Path, served: Path) -> float:
    """Over all rows and outputs, padding excluded."""
    largest = 0.0
    for mine, theirs in zip(
        sorted(own.glob("*.safetensors")), sorted(served.glob("*.safetensors")), strict=True
    ):
        ours, found = load_file(mine), load_file(theirs)
        for name, value in ours.items():
            row, _, kind = name.partition(".")
            if kind == "best":
                continue  # ties may be broken in another way
            real = found[f"{row}.hidden"][0].any(-1)  # padding is zero
            axis = value.dim() - 2 if kind.startswith(("key", "value")) else min(1, value.dim() - 1)
            ours_T, served_T = value.movedim(axis, 0)[real], found[name].movedim(axis, 0)[real]
            largest = max(largest, float((ours_T - served_T).norm() / ours_T.norm()))
    return largest


if __name__ == "__main__":
    main()
