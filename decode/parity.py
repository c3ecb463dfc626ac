"""`python -m decode.parity --drafter DIR --engine URL`: check that a running server drafts as this
project's decoder does.

`decode.export` checks exports by themselves, and in transformers."""

from collections.abc import Sequence

from decode.cli import Parser, load_prompts, parse_whole, path
from decode.systems.drafter_folders import BLOCKS, check_there, kind_of, target_for
from specalign.common.errors import UserError, cli
from specalign.common.text import say

_EPILOG = """example: python -m decode.parity --drafter runs/mine/drafter --export exported --engine
http://127.0.0.1:8000; exit codes: 0 the same, 1 the files do not match this drafter, 2 invalid
input, 3 the files match but the engine drafts differently"""


def parser() -> Parser:
    """The command's options."""
    what = "Check that a server's drafts and outputs match those of specalign's decoder."
    p = Parser(prog="python -m decode.parity", description=what, epilog=_EPILOG)
    length = "tokens per prompt (default 64)"
    add = p.add_argument
    add("--drafter", required=True, help="the original drafter's folder or hub id")
    add("--engine", required=True, metavar="URL", help="address of a running server")
    add("--export", type=path, metavar="DIR", help="the export that the server has loaded")
    p.add_target_options(dtype=False)
    p.add_prompt_options("one or more suites, comma-separated (default builtin)")
    number = parse_whole(1)
    add("--limit", type=number, default=8, metavar="N", help="prompts of each suite (default 8)")
    add("--max-new-tokens", type=parse_whole(2), default=64, metavar="N", help=length)
    return p


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exit codes: 0 the same, 1 the files are not this drafter, 3 they are and the
    engine differs."""
    options = parser().parse_args(arguments)
    url = options.engine
    if not url.lower().startswith(("http:", "https:")):
        hint = "decode.export checks exports for transformers"
        raise UserError(f"--engine={url!r} is not the URL of a server (http://…); {hint}")
    check_there(options.drafter)
    if kind_of(options.drafter) not in BLOCKS:
        raise UserError(f"--drafter={options.drafter}: is not a block drafter")

    from decode.exporting.server import check_server
    from specalign.lm.loading import load_target

    prompts = [prompt for suite in load_prompts(options, say) for prompt in suite.prompts]
    name, trust = target_for(options.target, options.drafter), options.trust_remote_code
    target = load_target(name, "float32", options.device, trust_remote_code=trust)
    length, export = options.max_new_tokens, options.export
    verdict = check_server(options.drafter, target, url, prompts, length, export)
    for line in (*verdict.lines, verdict.conclusion):
        say(line)
    if verdict.exit_code:
        raise SystemExit(verdict.exit_code)


if __name__ == "__main__":
    main()
