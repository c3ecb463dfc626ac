"""`python -m decode.verify`: check that decoding is lossless with a target and a drafter on this
machine.

Runs six checks on recorded decoding rounds:

    rows         the distribution used in verification equals that of a fresh forward pass without a
                 cache, processed by transformers
    proposals    drafts follow the distribution q that is reported with them
    rule         for any p and q, the verifier's output follows exactly p
    randomness   every random number comes from the request's own generator and is used once
    commit       the text consists of the prompt and each round's accepted path and next token, and
                 stops where the stopping rules say
    end_to_end   greedy outputs equal those of plain decoding and of transformers' generate; the
                 joint distribution of four sampled tokens is p's

The exit code is 1 if a check finds a difference that rounding does not explain; `--replay
replay.json` then reruns the batch of the first one. `--self-test` plants classic bugs in the
engine, one at a time, and reports which check catches each.
"""

from collections.abc import Sequence
from pathlib import Path

from decode.cli import Parser, parse_whole, path
from decode.verification.pair import LIMIT, NEW_TOKENS, VerifyConfig
from decode.verification.verdict import read_replay, write_verdict
from specalign.common.claims import Claim
from specalign.common.errors import cli
from specalign.common.text import say


def parser() -> Parser:
    """The command's options."""
    about = "Check that speculative decoding is lossless on this machine. Exit code 1 if it is not."
    p = Parser(prog="python -m decode.verify", description=about)
    add = p.add_argument
    p.add_target_options(dtype=False)
    dtypes = ("float32", "bfloat16", "float16", "auto")
    add("--dtype", choices=dtypes, default="float32", help="target dtype (default float32)")
    p.add_chat_options()
    p.add_engine_option()
    drafter = "a drafter's folder, or lookup (default: the shipped one, for the default target)"
    several = "--drafter can then list several: KIND=FOLDER,…"
    vocabulary = "standalone drafters: the tokenizer, if the vocabulary is not the target's"
    add("--drafter", help=drafter)
    add("--methods", help=f"comma-separated systems, as in decode.eval, or all; {several}")
    add("--drafter-tokenizer", metavar="FOLDER", help=vocabulary)
    p.add_prompt_options("one or more suites, comma-separated (default mtbench)")
    for name, least, default, what in (
        ("--limit", 1, LIMIT, "prompts of each suite, evenly spread"),
        ("--max-new-tokens", 4, NEW_TOKENS, "length of greedy outputs"),
    ):
        count = parse_whole(least, 100_000)
        add(name, type=count, default=default, metavar="N", help=f"{what} (default {default})")
    self_test = "also plant classic bugs in the engine, and report which check catches each"
    replay = "rerun the batch of a replay.json with the options of its run"
    out = Path("runs/verify")
    add("--self-test", action="store_true", help=self_test)
    add("--replay", type=path, metavar="FILE", help=replay)
    written = f"output folder for verdict.md and verdict.json (default {out})"
    add("--out", type=path, metavar="DIR", default=out, help=written)
    return p


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    given = vars(parser().parse_args(arguments))
    file, only = given.pop("replay"), ""
    if file is not None:
        options, only = read_replay(file)
        options = VerifyConfig.read_options(options, str(file))
        given = {**options, "self_test": False, "out": given["out"]}
    config = VerifyConfig(**given)
    with Claim(config.out, "--out"):
        prompts = config.load_prompts()
        from decode.verification.run import verify

        tallies, pair = verify(config, prompts, say, only)
        different = any(tally.findings for tally in tallies)
        tested = []
        if config.self_test and not different:
            from decode.verification.self_test import plant_all

            tested = plant_all(config, prompts, say)
        say("\n" + write_verdict(config.out, tallies, pair, vars(config), tested))
    say(f"Verdict: {config.out / 'verdict.md'}")
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
