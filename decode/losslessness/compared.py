"""Outputs with drafts against those without, token by token: greedy, and coupled, where the noise of each position is fixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from decode.losslessness.divergence import BUG, examine
from decode.losslessness.verdict import Check
from decode.speculation.sampling import Sampling, position_noise, probs

Planted = Callable[[], AbstractContextManager[Any]]
COUPLED = 1.0
"""The temperature of coupled outputs."""


class Plain:
    """Outputs without drafts, generated when the first is needed: in one batch where that computes the same to the bit, else one at
    a time. `seed` None = greedy, else coupled at temperature 1."""

    def __init__(self, decoder: Decoder, prompts: Sequence[list[int]], new: int, seed: int | None) -> None:
        self.decoder, self.prompts, self.new, self.seed = decoder, prompts, new, seed
        self.sampling = Sampling() if seed is None else Sampling(COUPLED, seed=seed)
        self._outputs: dict[int, list[int]] = {}

    def output(self, index: int) -> list[int]:
        if index not in self._outputs:
            if self.decoder.target.fused:
                several = [self.sampling] * len(self.prompts)  # one alone would give each a seed of its own
                outs = self.decoder.generate_batch(self.prompts, max_new_tokens=self.new, sampling=several)
                self._outputs = dict(enumerate(out.tokens for out in outs))
            else:
                self._outputs[index] = self.answer(self.decoder, index).tokens
        return self._outputs[index]

    def answer(self, decoder: Decoder, index: int) -> Generation:
        return decoder.generate(self.prompts[index], max_new_tokens=self.new, sampling=self.sampling)


def same(name: str, method: str, plain: Plain, other: Decoder, bug: Planted = nullcontext) -> Check:
    """Compare outputs with drafts, while a bug may be planted, with those without drafts."""
    prompts, seed, sampling = plain.prompts, plain.seed, plain.sampling
    found, calls, committed, drafted = [], 0, 0, 0
    for i, prompt in enumerate(prompts):
        expected = plain.output(i)
        with bug():
            out = plain.answer(other, i)
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
