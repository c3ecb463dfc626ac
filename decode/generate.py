"""`python -m decode.generate "prompt"`: stream the target's answer, drafted ahead, and say how fast it was."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from align.common.errors import UserError, cli
from align.common.text import say
from decode.cli import TRUST_HELP, VERIFIER_HELP, Parser, whole
from decode.method_names import LOSSY
from decode.methods.drafter_spec import DEFAULT_DRAFTER, NO_FOLDERS, check_there, given_drafters
from decode.methods.options import DraftOptions
from decode.methods.spec import read_method

if TYPE_CHECKING:
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
    p.add_argument("prompt", nargs="?", help="the user's message; - reads standard input")
    p.add_argument("--target", help="hub id, folder, FILE.gguf or debug; default: SmolLM2-135M-Instruct")
    p.add_argument("--drafter", help="folder, hub id, lookup or none; default: the shipped one, else lookup")
    p.add_argument("--method", help="a system by name, specdiff:steps=4 (decode.eval --help lists them)")
    p.add_argument("--verifier", default="auto", help=VERIFIER_HELP)
    p.add_argument("--draft-tokens", type=whole(1, 4096), help="draft at most this many tokens ahead")
    p.add_argument(
        "--tree-nodes",
        type=whole(0, 4096),
        help="drafted tokens a call, branching; 0 = a chain; default: 5 up to temperature 0.7, else 0",
    )
    p.add_argument("--drafter-tokenizer", help="of a standalone drafter whose vocabulary is not the target's")
    p.add_argument(
        "--steps",
        type=whole(1, 4096),
        default=1,
        help="standalone drafters: passes that unmask a draft; default: 1",
    )
    p.add_argument(
        "--order",
        default="left_to_right",
        help="in which order: left_to_right (default), blockwise, random or confidence",
    )
    p.add_argument(
        "--copying",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="where the text repeats itself, copy instead of drafting (default: on)",
    )
    p.add_argument(
        "--max-new-tokens", type=whole(1), default=256, help="length limit of the answer; default: 256"
    )
    p.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    p.add_argument(
        "--top-p", type=float, default=1.0, help="keep the most probable tokens up to this mass; default: 1"
    )
    p.add_argument(
        "--top-k", type=int, default=0, help="keep this many most probable tokens; default: 0 = all"
    )
    p.add_argument("--repetition-penalty", type=float, default=1.0, help="default: 1 = off")
    p.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="keep tokens at least so likely beside the best; default: 0 = all",
    )
    p.add_argument("--presence-penalty", type=float, default=0.0, help="default: 0 = off")
    p.add_argument(
        "--ban",
        type=whole(0),
        action="append",
        default=[],
        metavar="ID",
        help="a token that never comes; may be repeated",
    )
    p.add_argument("--min-new-tokens", type=whole(0), default=0, help="do not end before; default: 0")
    p.add_argument(
        "--seed",
        type=int,
        default=0,
        help="same seed and settings, same answer, unless --method looks at the clock (controller=cost, several variants); default: 0",
    )
    p.add_argument("--stop", action="append", default=[], help="end before this string; may be repeated")
    p.add_argument("--system", help="a system message before the prompt")
    p.add_argument("--raw", action="store_true", help="continue the prompt as plain text, no chat template")
    p.add_argument("--dtype", default="auto", help="auto (default), float32, bfloat16 or float16")
    p.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    p.add_argument("--trust-remote-code", action="store_true", help=TRUST_HELP)
    return p


def _parse(argv: list[str] | None) -> argparse.Namespace:
    p = parser()
    args = p.parse_args(argv)
    if args.prompt is None:
        p.error('no prompt: give it in quotes, or "-" for standard input')
    if args.raw and args.system:
        p.error("--system needs the chat template that --raw leaves out")
    return args


def _check(args: argparse.Namespace) -> None:
    """Raises UserError, before anything heavy is imported, for what is misspelt or not there."""
    DraftOptions(args.verifier, args.draft_tokens, args.tree_nodes, args.steps, args.order)
    if args.method is not None:
        read_method(args.method)
        given_drafters(args.drafter)
    elif args.drafter is not None:
        check_there(args.drafter)


def _load(args: argparse.Namespace) -> Decoder:
    from align.target.loading import DEFAULT_TARGET
    from decode.methods.load import load

    target, drafter, note = args.target, args.drafter, ""
    target = DEFAULT_TARGET if target is None else target
    if drafter is None and target == DEFAULT_TARGET:
        drafter = str(DEFAULT_DRAFTER)
        if args.method is None and not (DEFAULT_DRAFTER / "config.json").is_file():
            drafter, note = "lookup", f"no drafter at {DEFAULT_DRAFTER}: prompt lookup drafts instead"
    elif drafter is None and args.method is None:
        drafter, note = "lookup", f"no drafter is shipped for {target}: prompt lookup drafts instead"
    if note:
        say(f"note: {note}", error=True)
    copies = args.method is None and drafter not in NO_FOLDERS
    return load(
        target,
        drafter,
        args.verifier,
        dtype=args.dtype,
        device=args.device,
        draft_tokens=args.draft_tokens,
        tree_nodes=args.tree_nodes,
        copying=copies if args.copying is None else args.copying and drafter not in NO_FOLDERS,
        steps=args.steps,
        order=args.order,
        drafter_tokenizer=args.drafter_tokenizer,
        method=args.method,
        trust_remote_code=args.trust_remote_code,
    )


def _read_prompt(given: str) -> str:
    if given != "-":
        return given
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not valid text: {error}") from None


def summary(decoder: Decoder, out: Generation, verifier: str) -> str:
    """The line that follows an answer."""
    parts = [f"{len(out.tokens)} tokens ({out.finish})"]
    if out.calls:
        parts.append(f"{out.tokens_per_second:.1f} tokens/s")
        parts.append(f"τ {out.tau:.2f}")
    if decoder.drafter is not None:
        drafted, accepted = sum(out.nodes), sum(out.accepted)
        share = f" ({accepted / drafted:.0%})" if drafted else ""
        parts.append(f"accepted {accepted} of {drafted} drafted{share}")
    parts.append(f"prefill {out.prefill_seconds:.2f} s")
    who = f"{decoder.name}, {verifier}" if decoder.drafter is not None else "plain decoding"
    return f"[{who}] " + " · ".join(parts)


@cli
def main(argv: list[str] | None = None) -> None:
    """Run the command. Exit code 0, 2 for an input that can't be used, 130 when interrupted."""
    args = _parse(argv)
    _check(args)
    from decode.speculation.sampling import Sampling

    sampling = Sampling(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        min_p=args.min_p,
        presence_penalty=args.presence_penalty,
        banned=tuple(args.ban),
        min_new_tokens=args.min_new_tokens,
    )
    text = _read_prompt(args.prompt)
    decoder = _load(args)
    verifier = decoder.verifier_for(sampling)
    if verifier.startswith(LOSSY):
        say(f"note: {verifier} does NOT keep the output's distribution", error=True)
    messages = [{"role": "system", "content": args.system}, {"role": "user", "content": text}]
    out = decoder.generate(
        messages if args.system else text,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        stop=args.stop,
        stream=lambda piece: say(piece, end=""),
        raw=args.raw,
    )
    say()
    say(summary(decoder, out, verifier), error=True)


if __name__ == "__main__":
    main()
