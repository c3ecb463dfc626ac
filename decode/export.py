"""`python -m decode.export --drafter DIR --format dflash --out DIR`: a drafter as other engines
load it, checked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from decode.cli import Parser, parse_whole, path
from decode.exporting import EXPORTS
from decode.systems.drafter_folders import check_there, kind_of, target_for
from specalign.common.commands import command
from specalign.common.errors import UserError, cli, nearest
from specalign.common.text import say

if TYPE_CHECKING:
    from decode.exporting.compare import ExportVerdict

TYPES = ("bfloat16", "float16", "float32")


def parser() -> Parser:
    """The command's options."""
    p = Parser(
        prog="python -m decode.export",
        description="Write a drafter in the formats of other engines, and compare what they compute with it.",
        epilog="example: python -m decode.export --drafter runs/mine/drafter --format dflash,transformers --out exported",
    )
    add = p.add_argument
    add("--drafter", required=True, help="the drafter's folder or hub id")
    add("--format", required=True, metavar="NAMES", help=f"a comma list of {', '.join(EXPORTS)}")
    add(
        "--out",
        required=True,
        type=path,
        metavar="DIR",
        help="folder; of several formats each gets one in it",
    )
    p.add_target_options(dtype=False)
    add(
        "--dtype", default="bfloat16", help=f"of the weights: {', '.join(TYPES)} (default bfloat16)"
    )
    add(
        "--target-gguf",
        type=path,
        metavar="FILE",
        help="the target as GGUF, whose vocabulary --format gguf takes",
    )
    add(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compare (default: on)"
    )
    add(
        "--limit",
        type=parse_whole(1),
        default=4,
        metavar="N",
        help="built-in prompts that are compared over (default 4)",
    )
    add(
        "--max-new-tokens",
        type=parse_whole(2),
        default=48,
        metavar="N",
        help="of each (default 48)",
    )
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
    folders = {name: options.out if len(names) == 1 else options.out / name for name in names}

    from decode.exporting.exports import DrafterPair, ExportOptions, export_drafter
    from decode.exporting.formats import UnfitFormat

    target = target_for(options.target, options.drafter)
    role = kind_of(options.drafter)
    pair = DrafterPair(options.drafter, role, target, options.device, options.trust_remote_code)
    limit = options.limit if options.check else 0
    how = ExportOptions(options.dtype, limit, options.max_new_tokens, options.target_gguf)
    try:
        verdicts = export_drafter(pair, folders, how)
    except UnfitFormat as error:
        words = sys.argv[1:] if arguments is None else arguments
        gguf = target.endswith(".gguf")
        commands = [command("decode.export", *_with_format(words, n, gguf)) for n in error.fitting]
        _print_refusal(error, commands or _other_commands(options, target))
        raise SystemExit(2) from None
    for verdict in verdicts:
        _print_verdict(verdict, options)
    codes = [verdict.exit_code for verdict in verdicts if verdict.exit_code]
    if codes:
        raise SystemExit(min(codes))


def read_names(text: str) -> list[str]:
    """A comma list of formats. Raises UserError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in EXPORTS:
            raise UserError(f"--format: unknown format {name!r}{nearest(name, EXPORTS)}")
    if not names:
        raise UserError(f"--format: name one of {', '.join(EXPORTS)}")
    return list(dict.fromkeys(names))


def _with_format(arguments: Sequence[str], name: str, gguf: bool) -> list[str]:
    """The command's arguments with another format. gguf: whether the target is a GGUF file."""
    words = [word for word in arguments if not word.startswith("--format=")]
    if "--format" in words:
        place = words.index("--format")
        del words[place : place + 2]
    named = gguf or any(word.startswith("--target-gguf") for word in words)
    if name == "gguf" and not named:
        words += ["--target-gguf", "TARGET.gguf"]
    return [*words, "--format", name]


def _other_commands(options: argparse.Namespace, target: str) -> list[str]:
    """To use a drafter that no format holds, and to train one that a format does."""
    words = [] if options.target is None else ["--target", target]
    generate = command("decode.generate", "--drafter", options.drafter, *words, "your prompt")
    return [generate, command("align.train", "recipe=taps", f"target.name={target}")]


def _print_refusal(error: UserError, commands: Sequence[str]) -> None:
    say(f"error: {error}\n", error=True)
    for line in commands:
        say(f"      {line}", error=True)


def _print_verdict(verdict: ExportVerdict, options: argparse.Namespace) -> None:
    """The comparison, then the lines that serve the export."""
    say(f"{verdict.folder}: {verdict.format}")
    for note in verdict.notes:
        say(f"  note: {note}")
    for line in verdict.lines:
        say(f"  {line}")
    if options.check and verdict.lines:
        say(f"  {verdict.conclusion}")
    say()
    for snippet in verdict.serve:
        for line in snippet.as_text():
            say(line)
    if any(snippet.language == "bash" for snippet in verdict.serve):
        words = ["--drafter", options.drafter, "--engine", "vllm", "--export", str(verdict.folder)]
        words += [] if options.target is None else ["--target", options.target]
        if verdict.format == "gguf":
            words[3] = "http://127.0.0.1:8080"
        say(
            "  compare the running server with the drafter:\n\n      "
            f"{command('decode.parity', *words)}\n"
        )


if __name__ == "__main__":
    main()
