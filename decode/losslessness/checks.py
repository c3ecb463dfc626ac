"""The checks of `decode.verify`: greedy and coupled outputs token by token, sampled tokens by their distribution, bf16."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import islice
from time import monotonic
from typing import Any

from torch import Tensor

from align.common.checksums import folder_hash
from align.common.errors import UserError
from align.common.hub import local_path
from align.common.provenance import decoding_versions, git_commit, machine
from align.common.schema import finite
from align.common.text import plural
from align.target.dtypes import has_fast_bf16
from align.target.loading import load_target
from align.target.model import Target
from decode.engine.decoder import Decoder
from decode.losslessness.cases import Cases, VerifyConfig, cases_of
from decode.losslessness.compared import Plain, Planted, same
from decode.losslessness.conditionals import logits_of
from decode.losslessness.options import Decoders, batch_options, drawn_options, same_options
from decode.losslessness.planted import Bug
from decode.losslessness.rounds import RULES, rounds_check, table_of
from decode.losslessness.sampled import sampled_texts
from decode.losslessness.scripted import scripted_check, whole
from decode.losslessness.settings import SHORT, Options
from decode.losslessness.verdict import Caught, Check, Tested, line
from decode.losslessness.widened import BUGS
from decode.speculation.sampling import Sampling
from decode.suites.prompt import Prompt
from decode.suites.tokenized import tokenize_prompts

ALPHA = 1e-3
"""The chance that a correct pair fails the check of sampled tokens, for all its comparisons together."""
_COUNTED = {"accepted", "whole", "drafted"}
"""Figures of every sampled check."""
CANDIDATES = 4
"""Texts are sampled for this many prompts, the ends of the shortest ones."""


def run(
    config: VerifyConfig,
    prompts: Sequence[Prompt],
    say: Callable[[str], object],
    done: Callable[[Sequence[Check], dict[str, Any], Sequence[Caught]], object],
    earlier: Tested | None = None,
) -> tuple[list[Check], dict[str, Any], list[Caught]]:
    """Run all checks. After each, `say` gets a line and `done` the results so far.

    Args:
        earlier: a run that was stopped. Its checks are not run again where target, drafters and prompts are what they were.

    Returns:
        The checks, what they were run on, and the bugs that the self-test planted, caught or missed.

    Raises:
        UserError: an input that can't be used.
    """
    cases, drafter = cases_of(config, say)
    room = _fitting(cases.target, prompts, config.max_new_tokens)
    pair = {"drafter": drafter, "left_out": len(prompts) - len(room), **_about(config, cases, room)}
    plan = _Plan(config, cases, room)
    tested = earlier or Tested()
    if tested.checks and not (
        tested.content == pair["content"] and plan.takes(tested.checks, bool(tested.caught))
    ):
        say("not the pair or the prompts of the run that was stopped here: begun anew")
        tested = Tested()
    checks, caught = list(tested.checks), list(tested.caught)
    if checks:
        planted = f" and {plural(len(caught), 'planted bug')}" if caught else ""
        say(f"going on after {plural(len(checks), 'check')}{planted}: the checks passed before")
        plan.was_sampled(checks)
    for work in () if caught else islice(plan.checks(), len(checks), None):
        started = monotonic()
        check = work()
        check.seconds = monotonic() - started
        checks.append(check)
        say(line(check))
        done(checks, pair, caught)
    if not any(check.figures.get("drafted") for check in checks):
        raise UserError(
            "nothing was drafted on these prompts, so nothing is shown: take more of them, or longer outputs"
        )
    if config.self_test and all(check.passed for check in checks):
        for found in plan.self_test({one.bug for one in caught}):
            caught.append(found)
            say(str(found))
            done(checks, pair, caught)
    return checks, pair, caught


def _about(config: VerifyConfig, cases: Cases, prompts: list[list[int]]) -> dict[str, Any]:
    """What the checks run on. `content`: what files they read."""
    target = cases.target
    return {
        "target": target.spec,
        "prompts": len(prompts),
        "max_new_tokens": config.max_new_tokens,
        "device": str(target.device),
        "trust_remote_code": config.trust_remote_code,
        "template_kwargs": config.template_kwargs,
        "system": config.system,
        "prompted": target.chat.said,
        "machine": machine(),
        "versions": decoding_versions(),
        "git_commit": git_commit(),
        "content": {
            "target": target.hash,
            "drafters": {role: folder_hash(local_path(folder)) for role, folder in cases.drafters.items()},
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        },
    }


def _fitting(target: Target, prompts: Sequence[Prompt], new: int) -> list[list[int]]:
    """Prompts that leave room for `new` tokens. Raises UserError where none does."""
    fitting, refused = tokenize_prompts(target, prompts)
    room = [tokens for _, tokens in fitting if len(tokens) + new <= target.context_limit]
    if not room:
        why = refused[0] if refused else f"none leaves room for {new} new tokens"
        raise UserError(f"no prompt can be answered: {why}")
    return room


class _Plan:
    """All checks of a run, and the outputs without drafts that they compare with."""

    def __init__(self, config: VerifyConfig, cases: Cases, prompts: list[list[int]]) -> None:
        self.config, self.cases, self.prompts = config, cases, prompts
        target, new = cases.target, config.max_new_tokens
        self.greedy = Plain(Decoder(target), prompts, new, None)
        self.coupled = Plain(Decoder(target, None, "gumbel"), prompts, new, config.seed)
        self.few = [prompt[-SHORT:] for prompt in sorted(prompts, key=len)[:CANDIDATES]]
        self.drawn = [
            (case.name if case.verifier == "auto" else f"{case.name}, {case.verifier}", case)
            for case in cases.drawn
        ]
        self.alpha = ALPHA / (1 + len(self.drawn) + len(RULES))
        self.options = Options(target, sorted(prompts, key=len), config.seed, config.piece)
        self.sampled: list[tuple[str, Decoder, Check]] = []
        """The cases that were sampled, without plain decoding."""

    def checks(self) -> Iterator[Callable[[], Check]]:
        target, cases = self.cases.target, self.cases
        for case in cases.compared:
            yield partial(same, "greedy fp32", case.name, self.greedy, cases.open(target, case))
        for case in cases.compared:
            yield partial(same, "coupled fp32", case.name, self.coupled, cases.open(target, case, "gumbel"))
        for kind in ("options", "batch", "long"):
            yield partial(scripted_check, self.options, kind)
        for case in cases.compared:
            decoders = _decoders(cases.open(target, case), cases.open(target, case, "gumbel"))
            yield partial(same_options, case.name, self.options, decoders, self.options.alone)
            yield partial(batch_options, case.name, self.options, decoders)
        yield partial(whole, self.options)
        last = cases.compared[-1]
        decoders = _decoders(cases.open(target, last), cases.open(target, last, "gumbel"))
        long = self.options.long[:1]
        yield partial(same_options, last.name, self.options, decoders, long, name="long context")
        for name, case in self.drawn:
            yield partial(drawn_options, name, self.options, cases.open(target, case))
        for verifier in RULES:
            yield partial(self._rounds, verifier)
        yield partial(sampled_texts, "plain", self.greedy.decoder, self.few, self.config, self.alpha)
        for name, case in self.drawn:
            yield partial(self._sample, name, cases.open(target, case))
        yield from _half(self.config, cases, self.prompts)

    @cached_property
    def _table_RV(self) -> Tensor:
        """Rows of the target's logits, which rounds are drawn from."""
        options = self.options
        return table_of(next(iter(logits_of(options.target, options.prompt, [options.said]))))

    def _rounds(self, verifier: str, bug: Planted = nullcontext) -> Check:
        return rounds_check(verifier, self._table_RV, self.config.seed, self.alpha, bug)

    def _sample(self, name: str, decoder: Decoder) -> Check:
        check = sampled_texts(name, decoder, self.few, self.config, self.alpha)
        self.sampled.append((name, decoder, check))
        return check

    def takes(self, checks: Sequence[Check], whole: bool) -> bool:
        """Whether those of an earlier run passed, with numbers for figures; of a `whole` one, whether every case was sampled."""
        sampled = {c.method: c.figures for c in checks if c.name == "sampled"}
        drawn = [name for name, _ in self.drawn if whole or name in sampled]
        counted = [sampled.get(name, {}).keys() >= _COUNTED for name in drawn]
        numbers = (c.figures.get(k) for c in checks for k in ("sees", "sees_whole", *_COUNTED))
        return all(counted) and all(c.passed for c in checks) and all(n is None or finite(n) for n in numbers)

    def was_sampled(self, checks: Sequence[Check]) -> None:
        """Take the sampled checks from an earlier run."""
        for name, case in self.drawn:
            for check in (c for c in checks if (c.name, c.method) == ("sampled", name)):
                self.sampled.append((name, self.cases.open(self.cases.target, case), check))

    def self_test(self, planted: Container[str] = ()) -> Iterator[Caught]:
        """Plant each bug, but those that are `planted` already, in the case in which it shows most."""
        for bug in (bug for bug in BUGS if bug.name not in planted):
            fitting = [
                (name, decoder, check)
                for name, decoder, check in self.sampled
                if decoder.drafter is not None
                and (not bug.verifiers or decoder.verifier_for(Sampling(1.0)) in bug.verifiers)
                and (not bug.chat or decoder.target.has_chat_template)
                and (not bug.trees or decoder.drafter.draft_nodes > decoder.drafter.draft_tokens)
            ]
            if not fitting:
                yield Caught(bug.name, bug.check, "", None, "does not apply: nothing here is verified so")
                continue
            name, decoder, _ = max(fitting, key=lambda found: found[2].figures[bug.by])
            yield self._catch(bug, name, decoder)

    def _catch(self, bug: Bug, name: str, decoder: Decoder) -> Caught:
        if bug.check in ("options scripted", "batch", "long"):
            check = scripted_check(self.options, bug.check.split()[0], bug.setting, bug.planted)
        elif bug.check == "options":
            decoders = _decoders(*(Decoder(decoder.target, decoder.drafter, v) for v in ("auto", "gumbel")))
            settings = [s for s in self.options.exact if s.name == bug.setting]
            check = same_options(name, self.options, decoders, settings, bug.planted)
        elif bug.check == "options drawn":
            check = drawn_options(name, self.options, decoder, bug.planted)
        elif bug.check == "rounds":
            check = self._any_rounds(decoder.verifier_for(Sampling(1.0)), bug)
            name = check.method
        elif bug.check == "sampled":
            check = sampled_texts(name, decoder, self.few, self.config, self.alpha, bug.planted)
        else:
            plain = self.greedy if bug.check == "greedy" else self.coupled
            verifier = "auto" if bug.check == "greedy" else "gumbel"
            other = Decoder(decoder.target, decoder.drafter, verifier)
            check = same(bug.check, name, plain, other, bug.planted)
        return Caught(bug.name, bug.check, name, not check.passed, check.words)

    def _any_rounds(self, first: str, bug: Bug) -> Check:
        """Rounds by `first`, and by the other rules that have the bug until one shows it: without a bug all of them are drawn too."""
        having = [rule for rule in RULES if not bug.verifiers or rule in bug.verifiers]
        for rule in sorted(having, key=lambda rule: rule != first):
            check = self._rounds(rule, bug.planted)
            if not check.passed:
                break
        return check


def _decoders(greedy: Decoder, coupled: Decoder) -> Decoders:
    return lambda settings: greedy if all(s.sampling.greedy for s in settings) else coupled


def _half(config: VerifyConfig, cases: Cases, prompts: list[list[int]]) -> Iterator[Callable[[], Check]]:
    """The checks in bf16, where forwards of different widths round differently. Without bf16 products in hardware: a few short
    outputs."""
    slow = not has_fast_bf16(cases.target.device)
    if slow:
        prompts, new = [prompt[-SHORT:] for prompt in prompts[:2]], 16
    else:
        new = config.max_new_tokens
    half = load_target(
        cases.target.spec,
        dtype="bfloat16",
        device=str(cases.target.device),
        trust_remote_code=cases.target.trust_remote_code,
    )
    plain = Plain(Decoder(half), prompts, new, None)
    for case in cases.halved:
        yield partial(same, "greedy bf16", case.name, plain, cases.open(half, case, "auto"))
