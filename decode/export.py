"""`python -m decode.export --drafter DIR --format dflash --out DIR`: export a drafter for other
engines and check the export."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from decode.cli import Parser, parse_whole, path
from decode.exporting import EXPORTS
from decode.systems.drafter_folders import BLOCKS, check_there, kind_of, target_for
from specalign.common.commands import command
from specalign.common.errors import UserError, cli, nearest
from specalign.common.text import say

if TYPE_CHECKING:
    from decode.exporting.compare import ExportVerdict

TYPES = ("bfloat16", "float16", "float32")
_NO_BLOCK = (
    "engines load an autoregressive drafter's folder as it is, and no diffusion drafter; block "
    "drafters are exported: train with drafter.kind=block and drafter.context=taps"
)
_EPILOG = """example: python -m decode.export --drafter runs/mine/drafter --format dflash,transformers
--out exported"""


def parser() -> Parser:
    """The command's options."""
    what = "Export a drafter to the formats of other engines, and check the exports against it."
    p = Parser(prog="python -m decode.export", description=what, epilog=_EPILOG)
    out = "output folder; with several formats, each gets a subfolder"
    dtypes = f"type of the weights: {', '.join(TYPES)} (default bfloat16)"
    vocabulary = "the target as a GGUF file; --format gguf copies its vocabulary"
    prompts = "number of built-in prompts used in the check (default 4)"
    length = "tokens per prompt (default 48)"
    check = argparse.BooleanOptionalAction
    add = p.add_argument
    add("--drafter", required=True, help="the drafter's folder or hub id")
    add("--format", required=True, metavar="NAMES", help=f"comma-separated: {', '.join(EXPORTS)}")
    add("--out", required=True, type=path, metavar="DIR", help=out)
    p.add_target_options(dtype=False)
    add("--dtype", default="bfloat16", help=dtypes)
    add("--target-gguf", type=path, metavar="FILE", help=vocabulary)
    add("--check", action=check, default=True, help="check the exports (default: on)")
    add("--limit", type=parse_whole(1), default=4, metavar="N", help=prompts)
    add("--max-new-tokens", type=parse_whole(2), default=48, metavar="N", help=length)
    return p


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exit codes: 1 an export is not this drafter, 3 they are right and an engine here
    drafts differently."""
    options = parser().parse_args(arguments)
    names = read_names(options.format)
    if options.dtype not in TYPES:
        raise UserError(f"--dtype={options.dtype!r} is unknown{nearest(options.dtype, TYPES)}")
    check_there(options.drafter)
    if kind_of(options.drafter) not in BLOCKS:
        raise UserError(f"--drafter={options.drafter}: {_NO_BLOCK}")
    folders = {name: options.out if len(names) == 1 else options.out / name for name in names}

    from decode.exporting.exports import export_drafter
    from specalign.lm.loading import load_target
    from specalign.suites.registry import prompts_of

    suites, _ = prompts_of("builtin", limit=options.limit)
    prompts = [prompt for suite in suites for prompt in suite.prompts] if options.check else []
    name, trust = target_for(options.target, options.drafter), options.trust_remote_code
    target = load_target(name, "float32", options.device, trust_remote_code=trust)
    length, vocabulary = options.max_new_tokens, options.target_gguf
    given = (folders, options.dtype, prompts, length, vocabulary)
    verdicts = export_drafter(options.drafter, target, *given)
    for verdict in verdicts:
        _print_verdict(verdict, options)
    codes = [verdict.exit_code for verdict in verdicts if verdict.exit_code]
    if codes:
        raise SystemExit(min(codes))


def read_names(text: str) -> list[str]:
    """A comma list of formats. Raises UserError for an unknown one, or none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names or [""]:
        if name not in EXPORTS:
            raise UserError(f"--format: unknown format {name!r}{nearest(name, EXPORTS)}")
    return list(dict.fromkeys(names))


def _print_verdict(verdict: ExportVerdict, options: argparse.Namespace) -> None:
    """The comparison, then the lines that serve the export."""
    say(f"{verdict.folder}: {verdict.format}")
    for line in (*verdict.lines, *([verdict.conclusion] if verdict.lines else [])):
        say(f"  {line}")
    say()
    for snippet in verdict.serve:
        for line in snippet.as_text():
            say(line)
    if any(snippet.language == "bash" for snippet in verdict.serve):
        engine = "http://127.0.0.1:8080" if verdict.format == "gguf" else "vllm"
        words = ["--drafter", options.drafter, "--engine", engine, "--export", str(verdict.folder)]
        words += [] if options.target is None else ["--target", options.target]
        parity = command("decode.parity", *words)
        say(f"  compare the running server with the drafter:\n\n      {parity}\n")


if __name__ == "__main__":
    main()
