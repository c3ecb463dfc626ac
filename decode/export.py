"""`python -m decode.export --drafter DIR --format dflash --out DIR`: a drafter as other engines load it, and proof that it is the same one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from align.common.errors import UserError, cli, in_one_line, nearest
from align.common.hub import is_repository
from align.common.text import plural, say
from decode.cli import Parser, path, whole
from decode.method_names import EXPORTS
from decode.methods.drafter_spec import check_there, role_of, target_for

if TYPE_CHECKING:
    from decode.exporting.verdict import Verdict

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
    add("--dtype", default="bfloat16", help=f"of the weights: {', '.join(TYPES)} (default bfloat16)")
    add(
        "--target-gguf",
        type=path,
        metavar="FILE",
        help="the target as GGUF, whose vocabulary --format gguf takes",
    )
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="compare (default: on)")
    add(
        "--limit",
        type=whole(1),
        default=4,
        metavar="N",
        help="built-in prompts that are compared over (default 4)",
    )
    add("--max-new-tokens", type=whole(2), default=48, metavar="N", help="of each (default 48)")
    add(
        "--push",
        metavar="REPO",
        help="upload to this hub repository, after the comparison (default: nothing is sent)",
    )
    return p


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exit code 1 where a comparison found a difference."""
    options = parser().parse_args(arguments)
    names = read_names(options.format)
    if options.dtype not in TYPES:
        raise UserError(f"--dtype={options.dtype!r} is unknown{nearest(options.dtype, TYPES)}")
    if options.push is not None and (not is_repository(options.push) or len(names) > 1):
        raise UserError(f"--push={options.push!r}: name one repository, OWNER/NAME, for one format")
    check_there(options.drafter)
    folders = {name: options.out if len(names) == 1 else options.out / name for name in names}

    from decode.exporting.parity import exported

    target = target_for(options.target, options.drafter)
    verdicts = exported(
        options.drafter,
        role_of(options.drafter),
        target,
        folders,
        dtype=options.dtype,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
        limit=options.limit if options.check else 0,
        max_new_tokens=options.max_new_tokens,
        vocabulary=options.target_gguf,
    )
    for verdict in verdicts:
        _tell(verdict, options.check)
    if any(not v.same for v in verdicts):
        raise SystemExit(1)
    if options.push is not None:
        _push(options.out, options.push)


def read_names(text: str) -> list[str]:
    """Formats by name. Raises UserError for one that there is not."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in EXPORTS:
            raise UserError(f"--format: unknown format {name!r}{nearest(name, EXPORTS)}")
    if not names:
        raise UserError(f"--format: name one of {', '.join(EXPORTS)}")
    return list(dict.fromkeys(names))


def _tell(verdict: Verdict, checked: bool) -> None:
    say(f"{verdict.folder}: {verdict.format}")
    for note in verdict.notes:
        say(f"  note: {note}")
    for line in verdict.lines:
        say(f"  {line}")
    if checked and verdict.lines:
        say(f"  {verdict.conclusion}")
    for line in verdict.serve:
        say(f"  serve: {line}")


def _push(folder: Path, repo: str) -> None:
    from huggingface_hub import HfApi

    with in_one_line(f"--push={repo}: nothing was uploaded, the export is in {folder}"):
        api = HfApi()
        url = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder)
    files = sum(p.is_file() for p in folder.rglob("*"))
    say(f"{plural(files, 'file')} uploaded: {json.dumps(str(url))}")


if __name__ == "__main__":
    main()
