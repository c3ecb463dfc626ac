"""The checks of `decode.verify`: token by token, by frequencies, in bf16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from align.common.errors import UserError
from decode.losslessness.config import VerifyConfig
from decode.losslessness.verdict import Check, line

if TYPE_CHECKING:
    from decode.engine.decoder import Decoder
    from decode.engine.output import Generation
    from decode.losslessness.cases import Cases
    from decode.losslessness.exact_distribution import Law
    from decode.speculation.sampling import Sampling


ALPHA = 1e-3
"""The chance that a correct pair fails the frequency test, for all its comparisons together."""
COUPLED, TOP_K = 1.0, 3
CANDIDATES = 4
"""Of so many of the shortest prompts one is sampled from."""
SAMPLES_TOGETHER = 8
"""Sampled texts in one target call; greedy and coupled outputs are decoded one at a time."""


def run(
    config: VerifyConfig,
    say: Callable[[str], object],
    done: Callable[[Sequence[Check], dict[str, Any]], object],
) -> tuple[list[Check], dict[str, Any]]:
    """All checks, one after the other; after each, `say` gets a line and `done` what there is so far.

    Returns:
        The checks, and what they were run on.

    Raises:
        UserError: an input that can't be used.
    """
    from decode.losslessness.cases import check as check_typed
    from decode.suites.registry import prompts_of

    check_typed(config)
    suite = config.suite or (None if config.prompts else "mtbench")
    loaded, _ = prompts_of(suite, config.prompts, config.data_dir, config.limit)
    prompts = [prompt for one in loaded for prompt in one.prompts]

    from align.common.provenance import decoding_versions, git_commit, machine
    from decode.losslessness.cases import cases_of
    from decode.methods.load import load
    from decode.suites.tokenized import tokenize_prompts

    cases, drafter = cases_of(config, say)
    target = cases.target
    fitting, refused = tokenize_prompts(load(target), prompts)
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
        "machine": machine(),
        "versions": decoding_versions(),
        "git_commit": git_commit(),
    }
    checks: list[Check] = []
    for work in _plan(config, cases, room):
        started = monotonic()
        check = work()
        check.seconds = monotonic() - started
        checks.append(check)
        say(line(check))
        done(checks, pair)
    if not any(check.figures.get("drafted") for check in checks):
        raise UserError(
            "nothing was drafted on these prompts, so nothing is shown: take more of them, or longer outputs"
        )
    return checks, pair


def _plan(config: VerifyConfig, cases: Cases, prompts: list[list[int]]) -> Iterator[Callable[[], Check]]:
    from decode.losslessness.exact_distribution import entropy, exact_law
    from decode.methods.load import load

    new, seed, target = config.max_new_tokens, config.seed, cases.target
    plain = _Plain(load(target), prompts, new, None)
    for case in cases.compared:
        yield partial(_same, "greedy fp32", case.name, plain, cases.open(target, case))
    coupled = _Plain(load(target, None, "gumbel"), prompts, new, seed)
    for case in cases.compared:
        yield partial(_same, "coupled fp32", case.name, coupled, cases.open(target, case, "gumbel"))
    counted = [("plain", plain.decoder)]
    counted += [
        (case.name if case.verifier == "auto" else f"{case.name}, {case.verifier}", cases.open(target, case))
        for case in cases.drawn
    ]
    alpha = ALPHA / (2 * len(counted))
    # short, because it goes through the target once a sample; of these the one that leaves most to chance
    few = sorted(prompts, key=len)[:CANDIDATES]
    found = [(exact_law(target, prompt, 3, sampled(0)), prompt) for prompt in few]
    law, prompt = max(found, key=lambda pair: entropy(pair[0]))
    for name, decoder in counted:
        yield partial(_frequencies, name, decoder, prompt, law, config.samples, seed, alpha)
    yield from _half(config, cases, prompts)


class _Plain:
    """Outputs without drafts, each made when it is first asked for. `seed` None = greedy, else coupled at temperature 1."""

    def __init__(self, decoder: Decoder, prompts: Sequence[list[int]], new: int, seed: int | None) -> None:
        from decode.speculation.sampling import Sampling

        self.decoder, self.prompts, self.new, self.seed = decoder, prompts, new, seed
        self.sampling = Sampling() if seed is None else Sampling(COUPLED, seed=seed)
        self._outputs: dict[int, list[int]] = {}

    def output(self, index: int) -> list[int]:
        if index not in self._outputs:
            self._outputs[index] = self.answer(self.decoder, index).tokens
        return self._outputs[index]

    def answer(self, decoder: Decoder, index: int) -> Generation:
        return decoder.generate(self.prompts[index], max_new_tokens=self.new, sampling=self.sampling)


def _same(name: str, method: str, plain: _Plain, other: Decoder) -> Check:
    """Outputs with drafts against those without."""
    from decode.losslessness.divergence import BUG, examine
    from decode.speculation.sampling import position_noise, probs

    prompts, seed, sampling = plain.prompts, plain.seed, plain.sampling
    found, calls, committed, drafted = [], 0, 0, 0
    for i, prompt in enumerate(prompts):
        expected, out = plain.output(i), plain.answer(other, i)
        calls, committed = calls + out.calls, committed + len(out.tokens) - 1
        drafted += sum(out.nodes)
        score = None
        if seed is not None:

            def score(z_V: Any, index: int, start: int = len(prompt)) -> Any:
                noise_V = position_noise(seed, start + index, z_V.shape[-1], z_V.device)
                return probs(z_V, sampling).double().log() + noise_V

        judged = examine(
            plain.decoder.target, prompt, expected, out.tokens, out.drafted, out.accepted, out.trees, score
        )
        if judged is not None:
            found.append(judged)
    bugs = [d for d in found if d.kind == BUG]
    same, tau = len(prompts) - len(found), committed / calls if calls else 0.0
    words = f"{same} of {len(prompts)} outputs identical, τ {tau:.2f}"
    if found:
        worst = (bugs or found)[0]
        gap = "no logits explain it" if worst.gap is None else f"gap {worst.gap:.2g}, bound {worst.bound:.2g}"
        words += f"; {len(found) - len(bugs)} rounding ties, {len(bugs)} bugs (token {worst.index}: {gap})"
    if not drafted:
        words += "; NOTHING DRAFTED, nothing shown"
    figures = {
        "drafted": drafted,
        "identical": same,
        "ties": len(found) - len(bugs),
        "bugs": len(bugs),
        "tau": tau,
    }
    return Check(name, method, not bugs, len(prompts), figures, words)


def _half(config: VerifyConfig, cases: Cases, prompts: list[list[int]]) -> Iterator[Callable[[], Check]]:
    """bf16, where other widths round otherwise. On hardware without bf16 products a few short outputs."""
    from align.target.loading import has_fast_bf16, load_target
    from decode.methods.load import load

    slow = not has_fast_bf16(cases.target.device)
    prompts, new = (prompts[:2], 16) if slow else (prompts, config.max_new_tokens)
    half = load_target(cases.target.spec, dtype="bfloat16", device=str(cases.target.device))
    plain = _Plain(load(half), prompts, new, None)
    for case in cases.halved:
        yield partial(_same, "greedy bf16", case.name, plain, cases.open(half, case, "auto"))


def sampled(seed: int) -> Sampling:
    """How the texts are sampled whose tokens are counted."""
    from decode.speculation.sampling import Sampling

    return Sampling(1.0, top_k=TOP_K, seed=seed)


def _frequencies(
    method: str,
    decoder: Decoder,
    prompt: list[int],
    exact: Law,
    runs: int,
    seed: int,
    alpha: float,
) -> Check:
    """Pearson's chi-square of the first two and three tokens of sampled texts against the target's exact law."""
    from decode.losslessness.exact_distribution import beginnings, chi_square, chi_square_tail, detectable

    outs = decoder.generate_batch(
        [prompt] * runs,
        batch_size=SAMPLES_TOGETHER,
        max_new_tokens=4,
        sampling=[sampled(seed + 1_000_003 * (i + 1)) for i in range(runs)],
    )
    texts = [tuple(out.tokens) for out in outs]
    accepted, drafted = sum(sum(out.accepted) for out in outs), sum(sum(out.nodes) for out in outs)
    figures: dict[str, Any] = {"drafted": drafted, "accepted": accepted}
    passed, words = True, []
    for length in (2, 3):
        law = beginnings(exact, length)
        found = Counter(x[:length] for x in texts)
        strange = sum(n for x, n in found.items() if x not in law)
        statistic, freedom = chi_square(found, law, runs)
        p_value = chi_square_tail(statistic, freedom)
        least = detectable(freedom, runs, alpha)
        figures[f"tokens_{length}"] = {
            "chi_square": statistic, "freedom": freedom, "p": p_value, "impossible": strange, "detectable_tv": least,
        }  # fmt: skip
        passed &= p_value >= alpha and not strange
        words.append(f"{length} tokens: χ² {statistic:.1f} on {freedom}, p {p_value:.2g}")
    if not drafted and decoder.drafter is not None:
        words.append("NOTHING DRAFTED, nothing shown")
    words.append(f"{accepted} of {drafted} drafts accepted; sees TV ≥ {least:.2f} in 9 of 10 runs")
    return Check("frequencies T=1", method, passed, runs, figures, "; ".join(words))
