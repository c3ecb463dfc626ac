"""The checks of `decode.verify`: greedy and coupled outputs token by token, sampled tokens by their distribution, bf16."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from align.common.errors import UserError
from align.common.provenance import decoding_versions, git_commit, machine
from align.common.text import plural
from align.target.loading import has_fast_bf16, load_target
from decode.engine.decoder import Decoder
from decode.losslessness.cases import Cases, VerifyConfig, cases_of
from decode.losslessness.compared import Plain, Planted, same
from decode.losslessness.conditionals import Tally, logits_of
from decode.losslessness.options import Decoders, batch_options, drawn_options, same_options, together
from decode.losslessness.planted import Bug
from decode.losslessness.rounds import RULES, rounds_check, table_of
from decode.losslessness.scripted import scripted_check, whole
from decode.losslessness.settings import SHORT, Options
from decode.losslessness.verdict import Caught, Check, line
from decode.losslessness.widened import BUGS
from decode.speculation.sampling import Sampling
from decode.suites.prompt import Prompt
from decode.suites.tokenized import tokenize_prompts
from decode.wrappers.recorded import RecordedDrafter

ALPHA = 1e-3
"""The chance that a correct pair fails the check of sampled tokens, for all its comparisons together."""
SETTINGS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=0.5": {"temperature": 0.5},
    "T=0.1": {"temperature": 0.1},
    "T=1.5, top-p, penalties": {
        "temperature": 1.5, "top_p": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5,
    },
}  # fmt: skip
"""The settings under which texts are sampled, by name."""
CANDIDATES = 4
"""Texts are sampled for this many prompts, the ends of the shortest ones."""
LENGTH = 24
"""Tokens of a sampled text; more where the first token, a whole draft and two more tokens need more."""
SAMPLES_TOGETHER = 16
"""Sampled texts in one target call where `align.kernels` sets no smaller number; greedy and coupled outputs are decoded one at a
time."""
PORTION = 48
"""Sampled texts whose drafts are in memory at one time."""


def run(
    config: VerifyConfig,
    prompts: Sequence[Prompt],
    say: Callable[[str], object],
    done: Callable[[Sequence[Check], dict[str, Any], Sequence[Caught]], object],
    earlier: tuple[Sequence[Check], Sequence[Caught]] = ((), ()),
) -> tuple[list[Check], dict[str, Any], list[Caught]]:
    """Run all checks. After each, `say` gets a line and `done` the results so far.

    Args:
        earlier: the checks of a self-test that was stopped, which are not run again, and what it had planted.

    Returns:
        The checks, what they were run on, and the bugs that the self-test planted, caught or missed.

    Raises:
        UserError: an input that can't be used.
    """
    cases, drafter = cases_of(config, say)
    target = cases.target
    fitting, refused = tokenize_prompts(target, prompts)
    room = [tokens for _, tokens in fitting if len(tokens) + config.max_new_tokens <= target.context_limit]
    if not room:
        why = refused[0] if refused else f"none leaves room for {config.max_new_tokens} new tokens"
        raise UserError(f"no prompt can be answered: {why}")
    pair = {
        "target": target.spec,
        "drafter": drafter,
        "prompts": len(room),
        "left_out": len(prompts) - len(room),
        "max_new_tokens": config.max_new_tokens,
        "device": str(target.device),
        "trust_remote_code": config.trust_remote_code,
        "template_kwargs": config.template_kwargs,
        "system": config.system,
        "prompted": target.chat.said,
        "machine": machine(),
        "versions": decoding_versions(),
        "git_commit": git_commit(),
    }
    checks, caught = list(earlier[0]), list(earlier[1])
    plan = _Plan(config, cases, room)
    if caught:
        say(f"going on after {plural(len(caught), 'planted bug')}: the checks passed before")
        plan.was_sampled(checks)
    for work in () if caught else plan.checks():
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
        yield partial(_texts, "plain", self.greedy.decoder, self.few, self.config, self.alpha)
        for name, case in self.drawn:
            yield partial(self._sample, name, cases.open(target, case))
        yield from _half(self.config, cases, self.prompts)

    def _rounds(self, verifier: str, bug: Planted = nullcontext) -> Check:
        options = self.options
        table_RV = table_of(next(iter(logits_of(options.target, options.prompt, [options.said]))))
        return rounds_check(verifier, table_RV, self.config.seed, self.alpha, bug)

    def _sample(self, name: str, decoder: Decoder) -> Check:
        check = _texts(name, decoder, self.few, self.config, self.alpha)
        self.sampled.append((name, decoder, check))
        return check

    def was_sampled(self, checks: Sequence[Check]) -> None:
        """Take the sampled checks from an earlier run."""
        for name, case in self.drawn:
            check = next(c for c in checks if (c.name, c.method) == ("sampled", name))
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
            verifier = decoder.verifier_for(Sampling(1.0))
            check = self._rounds(verifier if verifier in RULES else "token", bug.planted)
            name = check.method
        elif bug.check == "sampled":
            check = _texts(name, decoder, self.few, self.config, self.alpha, bug.planted)
        else:
            plain = self.greedy if bug.check == "greedy" else self.coupled
            verifier = "auto" if bug.check == "greedy" else "gumbel"
            other = Decoder(decoder.target, decoder.drafter, verifier)
            check = same(bug.check, name, plain, other, bug.planted)
        return Caught(bug.name, bug.check, name, not check.passed, check.words)


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


def _texts(
    method: str,
    decoder: Decoder,
    prompts: Sequence[list[int]],
    config: VerifyConfig,
    alpha: float,
    bug: Planted = nullcontext,
) -> Check:
    """Test sampled texts under each of `SETTINGS`, token by token, against the target's own distribution. A bug may be planted
    while they are drawn."""
    target, drafter = decoder.target, decoder.drafter
    length = max(LENGTH, drafter.draft_tokens + 3) if drafter is not None else LENGTH
    settings = {name: Sampling(**options) for name, options in SETTINGS.items()}
    places = [(p, name) for name in settings for p in range(len(prompts))]
    texts = [(*places[i % len(places)], config.seed + 1_000_003 * (i + 1)) for i in range(config.samples)]
    tally, accepted, drafted = Tally(), 0, 0
    for start in range(0, len(texts), PORTION):
        part = texts[start : start + PORTION]
        recorded = None if drafter is None else RecordedDrafter(drafter)
        with bug():
            outs = Decoder(target, recorded, decoder.verifier).generate_batch(
                [prompts[p] for p, _, _ in part],
                batch_size=together(decoder) if target.fused else SAMPLES_TOGETHER,
                max_new_tokens=length,
                sampling=[replace(settings[name], seed=seed) for _, name, seed in part],
            )
        rounds = [[] for _ in part] if recorded is None else [s.rounds for s in recorded.sessions]
        for p, name in dict.fromkeys((p, name) for p, name, _ in part):
            own = [i for i, text in enumerate(part) if text[:2] == (p, name)]
            tally.add(
                target, prompts[p], [outs[i] for i in own], [rounds[i] for i in own], settings[name], name
            )
        accepted += sum(sum(out.accepted) for out in outs)
        drafted += sum(sum(out.nodes) for out in outs)
    statistic, group, worst = tally.worst()
    least, least_whole = tally.least("all", alpha), tally.least("whole", alpha)
    figures = {
        "drafted": drafted, "accepted": accepted, "tokens": tally.tokens("all"), "whole": tally.tokens("whole"),
        "impossible": tally.impossible, "worst": [statistic, group], "p": worst.p_value, "comparisons": len(tally.sums),
        "sees": least, "sees_whole": least_whole if least_whole < 1 else None,
    }  # fmt: skip
    words = [f"{figures['tokens']} tokens"]
    if tally.impossible:
        words.append(f"{tally.impossible} of them have no probability under the target")
    words.append(f"least likely: {statistic!r} of {_GROUPS.get(group, group)}, p {worst.p_value:.2g}")
    if drafter is not None:
        words.append(
            f"{accepted} of {drafted} drafts accepted" if drafted else "NOTHING DRAFTED, nothing shown"
        )
    words.append(f"sees a shift of {least:.2f} per token")
    if drafted:
        whole = f"one of {least_whole:.2f}" if least_whole < 1 else "none"
        words.append(f"{whole} after a whole draft ({figures['whole']} tokens)")
    return Check("sampled", method, tally.passed(alpha), config.samples, figures, "; ".join(words))


_GROUPS = {"all": "all tokens", "whole": "tokens after a whole draft"}
