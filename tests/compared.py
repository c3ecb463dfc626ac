"""Outputs with drafts against those without, token by token: greedy, and coupled, where the noise of each position is fixed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from decode.evaluation.divergence import BUG, explain_divergence
from decode.speculation.sampling import position_noise, probs
from decode.speculation.settings import Sampling

COUPLED = 1.0
"""The temperature of coupled outputs."""


class Same(NamedTuple):
    """How many outputs were compared, are equal, part at a rounding tie, part otherwise; and how many tokens were drafted."""

    compared: int
    identical: int
    ties: int
    bugs: int
    drafted: int


class Plain:
    """Outputs without drafts, generated when the first is needed: in one batch where that computes the same to the bit, else one at
    a time. `seed` None = greedy, else coupled at temperature 1."""

    def __init__(
        self, decoder: Decoder, prompts: Sequence[list[int]], new: int, seed: int | None
    ) -> None:
        self.decoder, self.prompts, self.new, self.seed = decoder, prompts, new, seed
        self.sampling = Sampling() if seed is None else Sampling(COUPLED, seed=seed)
        self._outputs: dict[int, list[int]] = {}

    def output(self, index: int) -> list[int]:
        if index not in self._outputs:
            if self.decoder.target.fused:
                # a single Sampling would give each prompt another seed
                several = [self.sampling] * len(self.prompts)
                outs = self.decoder.generate_batch(self.prompts, self.new, sampling=several)
                self._outputs = dict(enumerate(out.tokens for out in outs))
            else:
                self._outputs[index] = self.answer(self.decoder, index).tokens
        return self._outputs[index]

    def answer(self, decoder: Decoder, index: int) -> Generation:
        return decoder.generate(self.prompts[index], self.new, sampling=self.sampling)


def same(plain: Plain, other: Decoder) -> Same:
    """Compare outputs with drafts with those without drafts."""
    prompts, seed, sampling = plain.prompts, plain.seed, plain.sampling
    found, drafted = [], 0
    for i, prompt in enumerate(prompts):
        expected = plain.output(i)
        out = plain.answer(other, i)
        drafted += sum(out.nodes)
        score = None
        if seed is not None:

            def score(z_V: Any, index: int, start: int = len(prompt)) -> Any:
                noise_V = position_noise(seed, start + index, z_V.shape[-1], z_V.device)
                return probs(z_V, sampling).double().log() + noise_V

        outputs = (expected, out.tokens, out.drafted, out.accepted, out.trees)
        judged = explain_divergence(plain.decoder.target, prompt, *outputs, score)
        if judged is not None:
            found.append(judged)
    bugs = [d for d in found if d.kind == BUG]
    return Same(len(prompts), len(prompts) - len(found), len(found) - len(bugs), len(bugs), drafted)
