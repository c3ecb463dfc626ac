"""A drafter trained here in llama.cpp: the same text as its plain decoding, and as many drafts accepted as by the decoder here.

    python -m tests.llama_check --llama build/bin/llama-speculative-simple --target-gguf target.gguf --drafter runs/smollm2_taps/drafter

llama.cpp is built by its own CMake (`cmake --build build --target llama-speculative-simple`); the target's file is what its
`convert_hf_to_gguf.py --outtype f32` writes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import torch

from align.common.errors import UserError, cli
from align.common.text import say
from align.models.checkpoints.block import load_drafter
from align.target.loading import load_target
from align.target.names import DEFAULT_TARGET
from decode.drafters.block import BlockProposer
from decode.engine.decoder import Decoder
from decode.exporting.compare import encode_prompts
from decode.exporting.gguf import FILE, spec_type
from decode.exporting.registry import FORMATS
from decode.suites.registry import prompts_of


@cli
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--llama", type=Path, required=True, help="llama.cpp's llama-speculative-simple")
    add("--target-gguf", type=Path, required=True)
    add("--drafter", default="runs/smollm2_taps/drafter")
    add("--target", default=DEFAULT_TARGET)
    add("--suite", default="mtbench")
    add("--limit", type=int, default=8)
    add("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()
    if not options.llama.is_file():
        raise UserError(f"--llama={options.llama}: no such file")
    target = load_target(options.target, "float32")
    drafter = load_drafter(options.drafter, target)
    decoder, size = Decoder(target, BlockProposer(drafter, tree_nodes=0)), drafter.config.block_size
    ours, theirs, drafted, same = list[list[int]](), 0, 0, 0
    suites, _ = prompts_of(options.suite, limit=options.limit)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "export"
        FORMATS["gguf"].write(drafter, out, torch.bfloat16, "", options.target_gguf)
        for prompt in encode_prompts(target, suites[0].prompts):
            text = target.tokenizer.decode(prompt).rstrip("\n")  # llama.cpp drops a file's last line break
            tokens = target.tokenizer(text, add_special_tokens=False)["input_ids"]
            found = decoder.generate(tokens, max_new_tokens=options.max_new_tokens + 1)
            kind = spec_type(drafter.config)
            said = _run(options, out / FILE, kind, text, size, Path(folder) / "prompt.txt")
            drafts, right = (
                int(re.search(rf"{name}\s*=\s*(\d+)", said)[1]) for name in ("n_drafted", "n_accept")
            )  # type: ignore[index]
            same += found.text.strip()[:80] in said
            ours.append(found.accepted)
            theirs, drafted = theirs + right, drafted + drafts
            say(
                f"ours {sum(found.accepted)} of {len(found.accepted)} calls, llama.cpp {right} of {drafts} drafts",
            )
    accepted, rounds = sum(map(sum, ours)), sum(map(len, ours))
    say(f"ours: {accepted} accepted in {rounds} rounds, τ {1 + accepted / rounds:.3f}")
    say(f"llama.cpp: {drafted} drafts, {theirs} accepted; {same} of {len(ours)} texts begin alike")


def _run(options: argparse.Namespace, drafter: Path, kind: str, text: str, size: int, file: Path) -> str:
    file.write_text(text)
    words = [
        str(options.llama.absolute()), "-m", str(options.target_gguf), "-md", str(drafter), "--spec-type", kind,
        "--spec-draft-n-max", str(size), "-n", str(options.max_new_tokens), "--temp", "0", "-t", str(torch.get_num_threads()),
        "-c", "2048", "-f", str(file),
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True)
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    if done.returncode or "n_accept" not in said:
        raise UserError(f"{options.llama}: exit code {done.returncode}: {said[-300:]}")
    return said


if __name__ == "__main__":
    main()
