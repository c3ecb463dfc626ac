"""Are sampled tokens drawn from p? Every token of a text is compared with the target's own distribution after the tokens before
it, computed without drafts, and the differences are summed over texts, prompts and settings.

For a statistic f of a token, f(x) − Σ p·f has mean 0 under p, whatever came before, so the sums are martingales. Freedman's
inequality (Annals of Probability 3, 1975) bounds their tails without a normal approximation, so few tokens cause no false alarm.

    likeliest     x is the most probable token
    surprise      −ln p(x), up to 10 nats
    row before    what p gave x one position earlier
    seen          x stands in the prompt or in the text already
    order         the share of p below x, tokens by their ids
    order twice   the same, times that of the token before: two draws from one random number
    draft         min(1, q(x)/p(x)), or whether x was drafted where drafts have no q, at the first token of a round

One more, `temperature`, holds other temperatures against the one asked for, by the ratio of their probabilities of all tokens.

They are summed over all tokens, over those of each setting, and over those after a draft that was accepted whole. After such a
draft every exact verifier draws from p itself. After a partly accepted one it draws from the rest of p, and only together with the
acceptances does the token have the distribution p; so those tokens are no group of their own. The first token of a round has the
distribution p, whatever q is. The statistic `draft` uses q and not the drafted token, on which the token depends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from align.kernels.linear import MOST_ROWS
from align.target.model import Target
from decode.engine.output import Generation
from decode.losslessness.law import Written, law, scores
from decode.speculation.sampling import Sampling
from decode.wrappers.recorded import First

Moments = tuple[Tensor, Tensor, Tensor]
MOST_SURPRISE = 10.0
NINE_IN_TEN = 1.2816
"""The normal quantile of 0.9."""
PORTION = 8
"""Texts in one forward, where no smaller number is faster."""
OTHERS = (1 / 3, 3.0)
"""Of the temperature: what the statistic `temperature` holds against it."""
ROUNDING = 1e-3
"""A token outside top-k or top-p by no more than this share of its logit counts as inside."""


@dataclass
class Sum:
    """Σ of f(x) − Σ p·f over some tokens, with its variance under p. The values of each f span at most 1."""

    tokens: int = 0
    difference: float = 0.0
    variance: float = 0.0

    def add(self, found_L: Tensor, mean_L: Tensor, variance_L: Tensor) -> None:
        """Add L tokens: the values of f, their means and variances under p."""
        self.tokens += len(found_L)
        self.difference += float((found_L - mean_L).sum())
        self.variance += float(variance_L.clamp(min=0).sum())

    @property
    def p_value(self) -> float:
        """A bound on the probability of so large a difference if the tokens are drawn from p."""
        t = abs(self.difference)
        return min(1.0, 2 * math.exp(-t * t / (2 * (self.variance + t / 3)))) if t else 1.0

    def least(self, alpha: float) -> float:
        """The mean shift per token that nine of ten runs would detect at the level α."""
        c = 2 * math.log(2 / alpha)
        critical = c / 6 + math.sqrt(c * c / 36 + c * self.variance)
        return (critical + NINE_IN_TEN * math.sqrt(self.variance)) / self.tokens if self.tokens else math.inf


@dataclass
class Ratio:
    """How much more probable some tokens are at other temperatures than at the one asked for: under p the mean of these ratios is at
    most 1, so they reach 1/α with a probability of at most α (Ville's inequality)."""

    tokens: int = 0
    logs: list[float] = field(default_factory=lambda: [0.0] * len(OTHERS))

    def add(self, z_LV: Tensor, p_LV: Tensor, tokens_L: Tensor, temperature: float) -> None:
        """Add L tokens that were to be drawn from p = softmax(z / temperature)."""
        self.tokens += len(tokens_L)
        at_L1 = tokens_L[:, None]
        own_L = p_LV.gather(1, at_L1)[:, 0].log()
        for i, factor in enumerate(OTHERS):
            warm_LV = z_LV / (temperature * factor)
            other_L = warm_LV.gather(1, at_L1)[:, 0] - warm_LV.logsumexp(1)
            # mixed with p, so that a single token can't make the ratio 0
            mixed_L = torch.logaddexp(other_L + math.log(0.9), own_L + math.log(0.1))
            self.logs[i] += float((mixed_L - own_L).nan_to_num().sum())

    @property
    def p_value(self) -> float:
        mean = sum(math.exp(min(log, 700.0)) for log in self.logs) / len(self.logs)
        return min(1.0, 1.0 / mean)


class Tally:
    """The sums of every statistic over groups of tokens: `all`, `whole` (those after a wholly accepted draft), and one group for
    each setting."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str], Sum | Ratio] = {}
        self.impossible = 0
        """How many tokens have probability 0 under p."""

    def add(
        self,
        target: Target,
        prompt: list[int],
        outputs: Sequence[Generation],
        rounds: Sequence[Sequence[First]],
        sampling: Sampling,
        name: str,
    ) -> None:
        """Add texts that continue one prompt under one setting, which differ in their seed.

        Args:
            rounds: the first positions of each text's drafts.
            name: of the setting.
        """
        logits = logits_of(target, prompt, outputs)
        for output, logits_LV, firsts in zip(outputs, logits, rounds, strict=True):
            tokens_L = torch.tensor(output.tokens, device=target.device)
            z_LV = scores(logits_LV, prompt, output.tokens, sampling, target.eos_ids)
            p_LV = law(z_LV, sampling)
            self.impossible += outside(z_LV, p_LV, tokens_L)
            whole_L = torch.zeros(len(tokens_L), dtype=torch.bool, device=target.device)
            whole_L[list(_after_whole(output))] = True
            groups = {"all": whole_L | True, name: whole_L | True, "whole": whole_L}
            for statistic, found in _statistics(p_LV, tokens_L, prompt).items():
                first = len(tokens_L) - len(found[0])  # some begin with the second token
                for group, at_L in groups.items():
                    self._sum(statistic, group).add(*(x_L[at_L[first:]] for x_L in found))
            if not sampling.truncates:
                ratio = self.sums.setdefault(("temperature", name), Ratio())
                assert isinstance(ratio, Ratio)
                ratio.add(z_LV, p_LV, tokens_L, sampling.temperature)
            if (drafts := _of_drafts(p_LV, tokens_L, firsts)) is not None:
                self._sum("draft", "all").add(*drafts)
                self._sum("draft", name).add(*drafts)

    def _sum(self, statistic: str, group: str) -> Sum:
        found = self.sums.setdefault((statistic, group), Sum())
        assert isinstance(found, Sum)
        return found

    def tokens(self, group: str) -> int:
        """The number of tokens in the group."""
        return max((s.tokens for (_, g), s in self.sums.items() if g == group), default=0)

    def worst(self) -> tuple[str, str, Sum | Ratio]:
        """The statistic and the group with the smallest p-value, and their sum."""
        (statistic, group), found = min(self.sums.items(), key=lambda item: item[1].p_value)
        return statistic, group, found

    def least(self, group: str, alpha: float) -> float:
        """The shift of the most probable token's share that nine of ten runs would detect; infinite without tokens."""
        found = self.sums.get(("likeliest", group), Sum())
        return found.least(alpha / len(self.sums)) if isinstance(found, Sum) else math.inf

    def passed(self, alpha: float) -> bool:
        """Whether the differences of all sums together have a probability of at least α under p."""
        return not self.impossible and self.worst()[2].p_value * len(self.sums) >= alpha


@torch.no_grad()
def logits_of(target: Target, prompt: list[int], outputs: Sequence[Generation | Written]) -> Iterable[Tensor]:
    """Of each text the logits (L, V), fp64, from which its tokens were to be drawn. A few texts in one forward, each after a copy
    of the prompt's keys and values: without trees, rollbacks or any code of the engine."""
    source = target.new_cache(1, len(prompt))
    if len(prompt) > 1:
        target.forward(torch.tensor([prompt[:-1]], device=target.device), cache=source, logits=False)
    count = max(1, MOST_ROWS // max(len(o.tokens) for o in outputs)) if target.fused else PORTION
    for start in range(0, len(outputs), count):
        fed, caches = [], []
        for output in outputs[start : start + count]:
            fed.append(torch.tensor([[prompt[-1], *output.tokens[:-1]]], device=target.device))
            caches.append(target.new_cache(1, len(prompt) + len(output.tokens)))
            caches[-1].fill(source)
            caches[-1].advance(source.length)
        for found in target.forward_together(fed, caches, [None] * len(fed)):
            assert found.logits_BLV is not None
            yield found.logits_BLV[0].double()


def outside(z_LV: Tensor, p_LV: Tensor, tokens_L: Tensor) -> int:
    """How many tokens have no mass under p, without those that rounding may have let through. z: the scores that p is made of."""
    z_L = z_LV.gather(1, tokens_L[:, None])[:, 0]
    least_L = z_LV.masked_fill(p_LV == 0, math.inf).amin(1)
    return int((z_L < least_L - ROUNDING * least_L.abs().clamp(min=1)).sum())


def _after_whole(output: Generation) -> Iterable[int]:
    """The places of the tokens after a draft of which a path was accepted to its end."""
    place = 1  # the first token is the prefill's
    for depth, accepted, tree in zip(output.drafted, output.accepted, output.trees, strict=True):
        place += accepted
        if tree is None:
            whole = 0 < depth == accepted
        else:  # the path ends at a leaf, and the text did not end on the way
            whole = 0 < accepted == len(tree.path) and tree.path[-1] not in tree.parents
        if whole and place < len(output.tokens):
            yield place
        place += 1


def _moments(f_LV: Tensor, p_LV: Tensor, tokens_L: Tensor) -> Moments:
    """The value of f at the tokens, its mean and its variance under p."""
    weighted_LV = p_LV * f_LV
    mean_L, square_L = weighted_LV.sum(1), torch.einsum("lv,lv->l", weighted_LV, f_LV)
    return f_LV.gather(1, tokens_L[:, None])[:, 0], mean_L, square_L - mean_L.square()


def _of_yes_or_no(found_L: Tensor, mean_L: Tensor) -> Moments:
    """The same of an f that is 0 or 1."""
    return found_L.to(mean_L.dtype), mean_L, mean_L * (1 - mean_L)


def _of_drafts(p_LV: Tensor, tokens_L: Tensor, firsts: Sequence[First]) -> Moments | None:
    """The moments of `draft`; None without drafts."""
    firsts = [first for first in firsts if first.place < len(tokens_L)]
    if not firsts:
        return None
    places = [first.place for first in firsts]
    p_RV = p_LV[places]
    f_RV = torch.zeros_like(p_RV)
    for f_V, p_V, first in zip(f_RV, p_RV, firsts, strict=True):
        if first.q_V is None:
            f_V[first.tokens] = 1.0
        else:
            f_V.copy_((first.q_V.double() / p_V).nan_to_num(0.0).clamp(max=1.0))
    return _moments(f_RV, p_RV, tokens_L[places])


def _statistics(p_LV: Tensor, tokens_L: Tensor, prompt: list[int]) -> dict[str, Moments]:
    """The moments of the other statistics; of those that look back, from the second token on."""

    def moments(f_LV: Tensor, first: int = 0) -> Moments:
        return _moments(f_LV, p_LV[first:], tokens_L[first:])

    best_L = p_LV.argmax(1)
    order_LV = p_LV.cumsum(1) - p_LV / 2
    order, mean, variance = moments(order_LV)
    before_L = order[:-1] - 0.5  # a factor of each row of `order twice`
    return {
        "likeliest": _of_yes_or_no(tokens_L == best_L, p_LV.gather(1, best_L[:, None])[:, 0]),
        "surprise": moments((-p_LV.log()).clamp(max=MOST_SURPRISE) / MOST_SURPRISE),
        "row before": moments(p_LV[:-1], 1),
        "seen": _seen(p_LV, tokens_L, prompt),
        "order": (order, mean, variance),
        "order twice": (
            before_L * (order[1:] - 0.5),
            before_L * (mean[1:] - 0.5),
            before_L.square() * variance[1:],
        ),
    }


def _seen(p_LV: Tensor, tokens_L: Tensor, prompt: list[int]) -> Moments:
    """Of each token whether it stands in the prompt or before itself."""
    seen, found, means = dict.fromkeys(prompt), [], []
    for p_V, token in zip(p_LV, tokens_L.tolist(), strict=True):
        found.append(token in seen)
        means.append(p_V[list(seen)].sum())
        seen[token] = None
    return _of_yes_or_no(torch.tensor(found, device=p_LV.device), torch.stack(means))
