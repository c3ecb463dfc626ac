"""`python -m decode.verify`: is this pair lossless here, on this machine, with these weights? A verdict on one page.

    greedy     outputs in fp32, with drafts and without, are equal token by token
    coupled    so are outputs at temperature 1, where the noise of each position is fixed
    options    every option of a request, one at a time and together, does what a reference without the engine's code does
    rounds     thousands of rounds of every verifier, at logits of the target, keep the law of p
    sampled    each token of sampled texts, under several settings, has the target's distribution after the tokens before it
    half       outputs in bf16 differ from plain decoding's by rounding ties alone

A difference is a rounding tie only where decode/losslessness/divergence.py can explain it by rounding. Exit code 1 when a bug is found.
`--self-test` plants known bugs in the running engine, one at a time, and says which of them the checks catch with this number of samples;
the same command goes on with one that was stopped while it planted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from align.common.claims import Claim
from align.common.errors import cli
from align.common.text import say
from decode.cli import Parser, path, whole
from decode.losslessness.cases import QUICK, THOROUGH, VerifyConfig, check
from decode.losslessness.verdict import Caught, Check, read_tested, write_verdict


def parser() -> Parser:
    """The command's options."""
    p = Parser(
        prog="python -m decode.verify",
        description="Is speculative decoding with this pair lossless, here? Exit code 1 when it is not.",
    )
    add = p.add_argument
    drafter = "a drafter's folder, or lookup (default: the shipped one, for the default target)"
    methods = (
        "systems by name, as decode.eval has them, or all; --drafter may then name several: KIND=FOLDER,…"
    )
    tokenizer = "of a standalone drafter whose vocabulary is not the target's"
    self_test = "then plant known bugs in the engine, one at a time, and say which of them these checks catch"
    p.add_target_options(dtype=False)
    p.add_chat_options()
    add("--drafter", help=drafter)
    add("--methods", help=methods)
    add("--drafter-tokenizer", metavar="FOLDER", help=tokenizer)
    p.add_prompt_options("the prompts (default mtbench)")
    for name, least, words in (
        ("limit", 1, "prompts of each suite, evenly spread"),
        ("max-new-tokens", 4, "the length of greedy and coupled outputs"),
        ("samples", 12, "sampled texts of each method, at least 12"),
    ):
        key = name.replace("-", "_")
        default = f"default {QUICK[key]}; with --thorough {THOROUGH[key]}"
        add(f"--{name}", type=whole(least, 100_000), metavar="N", help=f"{words} ({default})")
    add("--thorough", action="store_true", help="longer outputs and twenty times as many samples")
    add("--self-test", action="store_true", help=self_test)
    add("--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="of everything sampled (default 0)")
    out = "verdict.md and verdict.json go there (default runs/verify)"
    add("--out", type=path, metavar="DIR", default=Path("runs/verify"), help=out)
    return p


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    given = vars(parser().parse_args(arguments))
    counts = THOROUGH if given.pop("thorough") else QUICK
    config = VerifyConfig(**{**given, **{k: given.get(k) or default for k, default in counts.items()}})
    with Claim(config.out, "--out"):
        prompts = check(config)
        from decode.losslessness.checks import run

        asked = config.asked()
        earlier = read_tested(config.out, asked)

        def done(checks: Sequence[Check], pair: Mapping[str, Any], caught: Sequence[Caught]) -> None:
            write_verdict(config.out, checks, pair, False, caught, asked)

        checks, pair, caught = run(config, prompts, say, done, earlier)
        say("\n" + write_verdict(config.out, checks, pair, True, caught, asked))
    say(f"Verdict: {config.out / 'verdict.md'}")
    if not all(check.passed for check in checks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
