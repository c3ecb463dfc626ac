"""`python -m decode.generate "prompt"`: stream the target's answer, drafted ahead, and say how fast it was."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from align.common.errors import UserError, cli
from align.common.text import plural, say
from align.target.names import DEFAULT_TARGET, check_given
from decode.cli import Parser, number, whole
from decode.engine.output import MAX_NEW_TOKENS
from decode.method_names import LOSSY
from decode.methods.drafter_spec import AUTO, check_named, check_there, given_drafters
from decode.methods.options import DraftOptions
from decode.methods.spec import read_method
from decode.speculation.settings import Sampling

if TYPE_CHECKING:
    from align.target.model import Target
    from decode.engine.decoder import Decoder
    from decode.engine.output import Generation


def parser() -> Parser:
    """The command's options."""
    p = Parser(
        prog="python -m decode.generate",
        description="Answer a prompt with a target, sped up by a drafter; the output keeps its distribution.",
        epilog='example: python -m decode.generate --temperature 0.7 "Explain tides to a child."',
    )
    p.stray = " (quote the prompt)"
    add = p.add_argument
    copying = "where the text repeats itself, copy instead of drafting (default: on)"
    min_p = "keep tokens at least P times as probable as the best (default 0: all)"
    seed = "repeats a sampled answer, unless --method looks at the clock (controller=cost, several variants); default: a new one"
    add("prompt", nargs="?", help="the user's message; - reads standard input")
    p.add_target_options()
    add(
        "--drafter",
        default=AUTO,
        help="folder, hub id, lookup, none or auto (default): the shipped one, else lookup",
    )
    add(
        "--method", help="a system by name with its options, specdiff:steps=4 (decode.eval --help lists them)"
    )
    add("--copying", action=argparse.BooleanOptionalAction, default=None, help=copying)
    p.add_drafting_options("how the drafter drafts")
    p.add_sampling_options(seed, None)
    add("--repetition-penalty", type=number, default=1.0, metavar="X", help="default 1: off")
    add("--min-p", type=number, default=0.0, metavar="P", help=min_p)
    add("--presence-penalty", type=number, default=0.0, metavar="X", help="default 0: off")
    add(
        "--ban",
        dest="banned",
        type=whole(0),
        action="append",
        default=[],
        metavar="ID",
        help="never this token; may be repeated",
    )
    add(
        "--max-new-tokens",
        type=whole(1),
        default=MAX_NEW_TOKENS,
        metavar="N",
        help=f"length limit (default {MAX_NEW_TOKENS})",
    )
    add(
        "--min-new-tokens",
        type=whole(0),
        default=0,
        metavar="N",
        help="no end of the answer before (default 0)",
    )
    add("--stop", action="append", default=[], help="end before this string; may be repeated")
    p.add_chat_options()
    add("--raw", action="store_true", help="continue the prompt as plain text, no chat template")
    add("--verbose", action="store_true", help="say how the target runs: which attention, what limits drafts")
    return p


def _parse(argv: list[str] | None) -> argparse.Namespace:
    p = parser()
    args = p.parse_args(argv)
    if args.prompt is None:
        p.error('no prompt: give it in quotes, or "-" for standard input')
    for option in ("system", "template_kwargs"):
        if args.raw and getattr(args, option):
            p.error(f"--{option.replace('_', '-')} needs the chat template that --raw leaves out")
    return args


def _check(args: argparse.Namespace) -> DraftOptions:
    """The options of drafting. Raises UserError, before anything heavy is imported, for what is misspelt or not there."""
    named = None if args.drafter == AUTO else args.drafter
    if args.method is not None:
        read_method(args.method)
        given_drafters(named)
    elif named is not None:
        check_there(named)
    options = DraftOptions.out_of({**vars(args)})
    check_given(args.target, args.device, args.dtype)
    if args.method is not None:
        check_named([args.method], named, args.target)
    return options


def _load(args: argparse.Namespace, options: DraftOptions) -> Decoder:
    from decode.methods.load import load

    return load(
        DEFAULT_TARGET if args.target is None else args.target,
        args.drafter,
        **{**vars(options), "copying": args.copying},
        dtype=args.dtype,
        device=args.device,
        method=args.method,
        trust_remote_code=args.trust_remote_code,
        template_kwargs=args.template_kwargs,
        system=args.system,
    )


def _read_prompt(given: str) -> str:
    if given != "-":
        return given
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not valid text: {error}") from None


def summary(decoder: Decoder, out: Generation, verifier: str) -> str:
    """The line after an answer: its length, speed, τ and acceptance."""
    parts = [f"{len(out.tokens)} tokens ({out.finish})"]
    if out.calls:
        parts.append(f"{out.tokens_per_second:.1f} tokens/s")
        parts.append(f"{plural(out.calls, 'call')} of the target, τ {out.tau:.2f} tokens each")
    if decoder.drafter is not None and out.calls:
        helped = sum(accepted > 0 for accepted in out.accepted)
        parts.append(f"drafts accepted in {helped / out.calls:.0%} of them")
    parts.append(f"prefill {out.prefill_seconds:.2f} s")
    if out.seed is not None:
        parts.append(f"seed {out.seed}")
    who = f"{decoder.name}, {verifier}" if decoder.drafter is not None else "plain decoding"
    return f"[{who}] " + " · ".join(parts)


def how_it_runs(target: Target) -> str:
    """The line of --verbose: which attention the target runs, and what that means for drafts."""
    parts = [f"{target.attention} attention"]
    if target.fused is not None:
        parts.append("few rows in one call")
    if target.anatomy.recurrent:
        by_token = ", by single tokens" if target.stepwise else ""
        parts.append(f"recurrent states, replayed after rejected drafts{by_token}")
    if target.chains_only:
        parts.append("chains alone, no trees")
    if not target.together:
        parts.append("requests of a batch one by one")
    return f"[target, {target.dtype_name} on {target.device}] " + " · ".join(parts)


@cli
def main(argv: list[str] | None = None) -> None:
    """Run the command. Exit code 0, 2 for an input that can't be used, 130 when interrupted."""
    args = _parse(argv)
    options = _check(args)
    sampling = Sampling(**{field.name: getattr(args, field.name) for field in fields(Sampling)})
    text = _read_prompt(args.prompt)
    decoder = _load(args, options)
    verifier = decoder.verifier_for(sampling)
    if verifier.startswith(LOSSY):
        say(f"note: {verifier} does NOT keep the output's distribution", error=True)
    out = decoder.generate(
        text,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        stop=args.stop,
        stream=lambda piece: say(piece, end=""),
        raw=args.raw,
    )
    say()
    say(summary(decoder, out, verifier), error=True)
    if args.verbose:
        say(how_it_runs(decoder.target), error=True)


if __name__ == "__main__":
    main()
