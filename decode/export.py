"""`python -m decode.export --drafter DIR --format dflash --out DIR`: export a drafter for other
engines and check the export."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from decode.cli import Parser, path
from decode.exporting import EXPORTS
from decode.systems.drafter_folders import BLOCKS, check_there, kind_of, target_for
from specalign.common.errors import UserError, cli, nearest
from specalign.common.text import say

if TYPE_CHECKING:
    from decode.exporting.exports import ExportVerdict

TYPES = ("bfloat16", "float16", "float32")
_NO_BLOCK = (
    "only block drafters can be exported (drafter.kind=block); engines load autoregressive "
    "drafters directly"
)
_EPILOG = """example: python -m decode.export --drafter runs/mine/drafter --format dflash --out
exported"""


def parser() -> Parser:
    """The command's options."""
    what = "Export a drafter to the formats of other engines, and check the exports against it."
    p = Parser(prog="python -m decode.export", description=what, epilog=_EPILOG)
    out = "output folder; with several formats, each gets a subfolder"
    check = argparse.BooleanOptionalAction
    add = p.add_argument
    add("--drafter", required=True, help="the drafter's folder or hub id")
    add("--format", required=True, metavar="NAMES", help=f"comma-separated: {', '.join(EXPORTS)}")
    add("--out", required=True, type=path, metavar="DIR", help=out)
    p.add_target_options(dtype=False)
    add("--dtype", choices=TYPES, default=TYPES[0], help="type of the weights (default bfloat16)")
    add("--check", action=check, default=True, help="check the exports (default: on)")
    return p


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exit codes: 1 an export is not this drafter, 3 they are right and an engine here
    drafts differently."""
    options = parser().parse_args(arguments)
    names = read_names(options.format)
    check_there(options.drafter)
    if kind_of(options.drafter) not in BLOCKS:
        raise UserError(f"--drafter={options.drafter}: {_NO_BLOCK}")
    folders = {name: options.out if len(names) == 1 else options.out / name for name in names}

    from decode.exporting.exports import export_drafter
    from specalign.lm.loading import load_target
    from specalign.suites.registry import prompts_of

    (suite,), _ = prompts_of("builtin", limit=4)
    prompts = suite.prompts if options.check else []
    name, trust = target_for(options.target, options.drafter), options.trust_remote_code
    target = load_target(name, "float32", options.device, trust_remote_code=trust)
    verdicts = export_drafter(options.drafter, target, folders, options.dtype, prompts)
    for verdict in verdicts:
        _print_verdict(verdict)
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


def _print_verdict(verdict: ExportVerdict) -> None:
    """The comparison, then the lines that serve the export."""
    say(f"{verdict.folder}: {verdict.format}")
    for line in (*verdict.lines, *([verdict.conclusion] if verdict.lines else [])):
        say(f"  {line}")
    say()
    for snippet in verdict.serve:
        for line in snippet.as_text():
            say(line)


if __name__ == "__main__":
    main()
