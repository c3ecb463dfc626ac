"""`python -m decode.parity --drafter DIR --engine URL|transformers`: check that an engine drafts as
this project's decoder does."""

from __future__ import annotations

from collections.abc import Sequence

from decode.cli import Parser, parse_whole, path
from decode.systems.drafter_folders import AUTOREGRESSIVE, check_there, kind_of, target_for
from specalign.common.claims import scratch
from specalign.common.errors import UserError, cli, nearest
from specalign.common.text import say

ENGINES = ("transformers", "vllm")
VLLM = "http://127.0.0.1:8000"
"""The default address of `vllm serve`."""
_EPILOG = """example: python -m decode.parity --drafter runs/mine/drafter --engine vllm --export exported;
exit codes: 0 the same, 1 the files do not match this drafter, 2 invalid input, 3 the files match
but the engine drafts differently"""


def parser() -> Parser:
    """The command's options."""
    what = "Check that an engine's drafts and outputs match those of specalign's decoder."
    p = Parser(prog="python -m decode.parity", description=what, epilog=_EPILOG)
    engines = f"transformers (in this process), the URL of a running server, or vllm: {VLLM}"
    export = "the export that the engine has loaded (default for transformers: a fresh one)"
    length = "tokens per prompt (default 64)"
    add, count = p.add_argument, parse_whole(2)
    add("--drafter", required=True, help="the original drafter's folder or hub id")
    add("--engine", required=True, help=engines)
    add("--export", type=path, metavar="DIR", help=export)
    p.add_target_options(dtype=False)
    p.add_prompt_options("one or more suites, comma-separated (default builtin)")
    number = parse_whole(1)
    add("--limit", type=number, default=8, metavar="N", help="prompts of each suite (default 8)")
    add("--max-new-tokens", type=count, default=64, metavar="N", help=length)
    return p


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exit codes: 0 the same, 1 the files are not this drafter, 3 they are and the
    engine differs."""
    options = parser().parse_args(arguments)
    url = VLLM if options.engine == "vllm" else options.engine
    served = url.lower().startswith(("http:", "https:"))
    if not served and options.engine not in ENGINES:
        near = nearest(options.engine, ENGINES)
        raise UserError(f"--engine={options.engine!r} is neither a URL nor a known engine{near}")
    check_there(options.drafter)

    from decode.exporting.exports import DrafterPair, check_export, export_drafter
    from decode.exporting.server import check_server
    from specalign.suites.registry import prompts_of

    suites, _ = prompts_of(
        options.suite, options.prompts, options.data_dir, options.limit, options.prompts_column
    )
    prompts = [prompt for suite in suites for prompt in suite.prompts]
    role, target = kind_of(options.drafter), target_for(options.target, options.drafter)
    pair = DrafterPair(options.drafter, role, target, options.device, options.trust_remote_code)
    length, export = options.max_new_tokens, options.export
    if served:
        verdict = check_server(pair, url, prompts, length, export)
    elif export is not None:
        verdict = check_export(pair, export, prompts, length)
    else:
        form = "draft_model" if role == AUTOREGRESSIVE else "transformers"
        with scratch("specalign-parity-") as place:
            (verdict,) = export_drafter(pair, {form: place / form}, "bfloat16", prompts, length)
    for line in (*verdict.lines, verdict.conclusion):
        say(line)
    if verdict.exit_code:
        raise SystemExit(verdict.exit_code)


if __name__ == "__main__":
    main()
