"""`python -m decode.verify`: is this pair lossless here, on this machine, with these weights? A verdict on one page.

    greedy        fp32 outputs with drafts against plain decoding's, token by token
    coupled       the same at temperature 1: noise that belongs to positions makes sampled outputs comparable token by token
    frequencies   the joint distribution of the first two and three sampled tokens against the target's own, computed exactly
    half          outputs in bf16: every difference a rounding tie, or a bug

A difference is a rounding tie only where decode/losslessness/divergence.py can explain it by rounding. Exit code 1 when a bug is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from align.common.errors import UserError, cli
from decode.cli import Parser, whole
from decode.losslessness.checks import run
from decode.losslessness.config import VerifyConfig
from decode.losslessness.verdict import write_verdict


def parser() -> Parser:
    """The command's options."""
    p = Parser(
        prog="python -m decode.verify",
        description="Is speculative decoding with this pair lossless, here? Exit code 1 when it is not.",
    )
    add = p.add_argument
    add("--target", help="hub id, folder, file.gguf or debug (default SmolLM2-135M-Instruct)")
    add("--drafter", help="a drafter's folder, or lookup (default: the shipped one, for the default target)")
    add(
        "--methods",
        help="systems by their names, as decode.eval has them, or all, instead of one drafter's options; --drafter may then "
        "name several: KIND=FOLDER,…",
    )
    add("--drafter-tokenizer", help="of a standalone drafter whose vocabulary is not the target's")
    add("--suite", help="the prompts (default mtbench)")
    add("--prompts", type=Path, metavar="FILE", help="your own: .jsonl .json .csv .parquet .txt")
    add("--data-dir", type=Path, metavar="DIR", help="local copies of the benchmarks, in the hub's layout")
    add(
        "--limit",
        type=whole(1),
        default=16,
        metavar="N",
        help="prompts of each suite, evenly spread (default 16)",
    )
    add("--max-new-tokens", type=whole(4), default=64, metavar="M", help="default 64")
    add(
        "--samples",
        type=whole(50),
        default=400,
        metavar="R",
        help="sampled texts per method (default 400, at least 50)",
    )
    add("--seed", type=whole(0), default=0, help="of everything sampled")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("runs/verify"),
        help="verdict.md and verdict.json go there (default runs/verify)",
    )
    return p


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    config = VerifyConfig(**vars(parser().parse_args(arguments)))
    if config.out.exists() and not config.out.is_dir():
        raise UserError(f"--out={str(config.out)!r} is a file, not a folder")
    console = Console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    checks, pair = run(config, say, lambda checks, pair: write_verdict(config.out, checks, pair, False))
    say("\n" + write_verdict(config.out, checks, pair, True))
    console.print(f"Verdict: {config.out / 'verdict.md'}", markup=False, highlight=False)
    if not all(check.passed for check in checks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
