"""`python -m decode.generate "prompt"`: answer a prompt with speculative decoding and print the
speed."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import TYPE_CHECKING

from decode.cli import Parser, number, parse_whole, pop_drafting, pop_sampling
from decode.engine.output import MAX_NEW_TOKENS
from decode.speculation.settings import Sampling
from decode.systems.drafter_folders import AUTO, check_methods, check_there, read_drafters
from decode.systems.parsing import read_method
from decode.systems.registry import LOSSY
from specalign.common.errors import UserError, cli
from specalign.common.schema import JsonObject
from specalign.common.text import plural, say
from specalign.lm.names import DEFAULT_TARGET, check_given

if TYPE_CHECKING:
    from decode.engine.decoder import Decoder
    from decode.engine.output import Generation


def parser() -> Parser:
    """The command's options."""
    p = Parser(
        prog="python -m decode.generate",
        description="Answer a prompt with the target, sped up by a drafter without changing the "
        "output's distribution.",
        epilog='example: python -m decode.generate --temperature 0.7 "Explain tides to a child."',
    )
    p.stray = " (quote the prompt)"
    add = p.add_argument
    drafter = "folder, hub id, lookup, none, or auto (default): the shipped drafter, else lookup"
    method = "a system with its options, e.g. specdiff:steps=4 (decode.eval --help lists them)"
    copying = "where the text repeats itself, copy instead of drafting (default: on)"
    min_p = "keep only tokens at least P times as probable as the best one (default 0: all)"
    seed = "makes a sampled answer reproducible, except with duo (default: a new seed each time)"
    ban = "never generate this token; can be repeated"
    limit = f"length limit (default {MAX_NEW_TOKENS})"
    least = "do not end the answer before N tokens (default 0)"
    raw = "continue the prompt as plain text, without the chat template"
    whole = parse_whole(0)
    add("prompt", nargs="?", help="the user's message; - reads standard input")
    p.add_target_options()
    p.add_engine_option()
    add("--drafter", default=AUTO, help=drafter)
    add("--method", help=method)
    add("--copying", action=argparse.BooleanOptionalAction, default=None, help=copying)
    p.add_drafting_options("drafting options")
    p.add_sampling_options(seed, None)
    add("--repetition-penalty", type=number, default=1.0, metavar="X", help="1 = off (default)")
    add("--min-p", type=number, default=0.0, metavar="P", help=min_p)
    add("--presence-penalty", type=number, default=0.0, metavar="X", help="0 = off (default)")
    add("--ban", dest="banned", type=whole, action="append", default=[], metavar="ID", help=ban)
    add("--max-new-tokens", type=parse_whole(1), default=MAX_NEW_TOKENS, metavar="N", help=limit)
    add("--min-new-tokens", type=whole, default=0, metavar="N", help=least)
    add("--stop", action="append", default=[], help="stop before this string; can be repeated")
    p.add_chat_options()
    add("--raw", action="store_true", help=raw)
    return p


def read_arguments(argv: list[str] | None) -> tuple[str, Sampling, JsonObject]:
    """The prompt, the sampling options and the others of a command line. Raises UserError: what is
    mistyped, a drafter that does not exist, or a method whose drafter is not given."""
    p = parser()
    typed = vars(p.parse_args(argv))
    prompt = typed.pop("prompt")
    if prompt is None:
        p.error('no prompt: give it in quotes, or "-" for standard input')
    sampling = pop_sampling(typed)
    pop_drafting(dict(typed))  # refuses values out of range before torch is imported
    check_given(typed["target"], typed["device"], typed["dtype"])
    named = None if typed["drafter"] == AUTO else typed["drafter"]
    if typed["method"] is not None:
        check_methods([read_method(typed["method"])], read_drafters(named), typed["target"])
    elif named is not None:
        check_there(named)
    if typed["raw"] and (typed["system"] or typed["template_kwargs"]):
        option = "--system" if typed["system"] else "--template-kwargs"
        raise UserError(f"{option} needs the chat template, which --raw omits")
    return prompt, sampling, typed


def _read_prompt(given: str) -> str:
    if given != "-":
        return given
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not valid text: {error}") from None


def summary(decoder: Decoder, out: Generation, verifier: str) -> str:
    """The line after an answer: its length, speed, τ and acceptance."""
    drafts = decoder.drafter is not None
    parts = [f"{len(out.tokens)} tokens ({out.finish})"]
    if out.calls:
        parts.append(f"{out.tokens_per_second:.1f} tokens/s")
        parts.append(f"{plural(out.calls, 'round')} · τ {out.tau:.2f}")
    if drafts and out.calls:
        helped = sum(accepted > 0 for accepted in out.accepted)
        parts.append(f"drafts accepted in {helped / out.calls:.0%} of rounds")
    parts.append(f"prefill {out.prefill_seconds:.2f} s")
    if out.seed is not None:
        parts.append(f"seed {out.seed}")
    who = f"{decoder.name}, {verifier}" if drafts else "plain decoding"
    return f"[{who}] " + " · ".join(parts)


@cli
def main(argv: list[str] | None = None) -> None:
    """Run the command. Exit code 0, 2 for an unusable input, 130 when interrupted."""
    given, sampling, typed = read_arguments(argv)
    prompt = _read_prompt(given)
    answer = {name: typed.pop(name) for name in ("max_new_tokens", "stop", "raw")}

    from decode.systems.load import load

    decoder = load(typed.pop("target") or DEFAULT_TARGET, **typed)
    verifier = decoder.verifier_for(sampling)
    if verifier.startswith(LOSSY):
        say(f"note: {verifier} CHANGES the output's distribution", error=True)
    stream = functools.partial(say, end="")
    out = decoder.generate(prompt, sampling=sampling, stream=stream, **answer)
    say()
    say(summary(decoder, out, verifier), error=True)


if __name__ == "__main__":
    main()
