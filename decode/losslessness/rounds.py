"""Does a round of verification keep the law of p? Thousands of rounds at logits of the target, over few tokens and without a forward.

The logits after the prefix and after each token are rows of the target's, cut to few tokens; q mixes two of them, so drafts are
accepted often and not always. A round's tokens, continued by draws from p up to a fixed length, have to be distributed as p. Of every
token at every place Σ (1 − p) where it came and Σ −p where it did not is bounded by Freedman's inequality (`conditionals`). Where
that looks unlikely, fresh draws, ten times as many, decide alone, so the first look costs no false alarm.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.engine import engine
from decode.losslessness.law import law, scores
from decode.losslessness.verdict import Check
from decode.speculation.processors import History
from decode.speculation.proposal import DraftProbs, Law, Proposal, Siblings
from decode.speculation.sampling import Sampling, seeded
from decode.speculation.tree import chain
from decode.speculation.tree_drafts import draw_tree, drawn_tree_parents
from decode.speculation.verification import Round

SIZE, ROWS = 24, 4
"""Tokens, and rows of logits."""


class Shape(NamedTuple):
    """Of drafts: over how many tokens, how many levels, of trees how many nodes, and rounds of a setting. weak: the one level at which
    drafts are often rejected; None = at each."""

    size: int
    levels: int
    nodes: int
    draws: int
    weak: int | None = None


WIDE = Shape(SIZE, 2, 4, 800)
DEEP, WEAK = Shape(6, 6, 0, 600), range(2, 6)
"""Chains in which the third, fourth … draft alone is rejected often: what goes wrong behind several accepted ones shows."""
AGAIN, TOGETHER = 10, 200
"""How many times as many rounds decide; rounds in one call."""
LOOK = 1.0
"""The smallest bound, times their number, below which fresh draws decide."""
SPREAD, MIXED = 2.0, 0.5
"""The standard deviation of a row of logits, and the share of another row in those of q."""
NEAR, FAR = 0.05, 1.0
"""That share where one level is weak: at the others, and there."""
PROMPT, TEXT, ENDS = (0, 7), (2,), (1, 4)
"""What stands before the round, and the ends of a text."""
RULES: dict[str, tuple[Law, Siblings | None]] = {
    "point_mass": ("point", None),
    "token": ("causal", None),
    "block": ("causal", None),
    "hybrid": ("unmasked", None),
    "recursive": ("causal", "without_replacement"),
    "traversal": ("causal", "without_replacement"),
    "k_seq": ("causal", "iid"),
}
"""Verifiers, and how their drafts are drawn."""
SETTINGS = {
    "T=1": Sampling(1.0),
    "T=0.1": Sampling(0.1),
    "T=1.5, top-p, penalties": Sampling(1.5, 0.8, repetition_penalty=1.3, presence_penalty=0.5),
    "banned tokens, minimum length": Sampling(0.7, banned=(0, 3), min_new_tokens=len(TEXT) + 2),
}


class _Drawn(NamedTuple):
    """N texts of L = levels + 1 tokens: tokens (N, L), p at each place (N, L, V), whether a whole draft stands in each, and at the places
    of drafts which tokens are more probable under q than under p, bool (N, L − 1, V)."""

    tokens_NL: Tensor
    p_NLV: Tensor
    whole_N: Tensor
    over_NLV: Tensor


def table_of(logits_LV: Tensor) -> Tensor:
    """Rows of logits (ROWS, SIZE) for `rounds_check`, from at least ROWS of the target's: the tokens that are best in the first,
    those of one row spread alike."""
    best = logits_LV[0].topk(SIZE).indices
    z_RV = logits_LV[:ROWS, best].double().cpu()
    z_RV = (z_RV - z_RV.mean(1, keepdim=True)) / z_RV.std(1, keepdim=True)
    return (SPREAD * z_RV).float()


def rounds_check(verifier: str, table_RV: Tensor, seed: int, alpha: float, bug: Any = nullcontext) -> Check:
    """Draw rounds of a verifier of `RULES` under each of `SETTINGS`, while a bug may be planted.

    Args:
        alpha: the probability that a right verifier fails.
    """
    worst, name, drawn = 1.0, next(iter(SETTINGS)), 0
    worlds = {setting: _World(table_RV, sampling, WIDE) for setting, sampling in SETTINGS.items()}
    if RULES[verifier][1] is None:
        worlds |= {
            f"draft {i + 1} of {DEEP.levels}": _World(table_RV, Sampling(1.0), DEEP._replace(weak=i))
            for i in WEAK
        }
    for setting, world in worlds.items():
        with bug():
            draws = world.shape.draws
            found = _least(world.draw(verifier, draws, seed))
            drawn += draws
            if found >= LOOK:
                continue
            found = _least(world.draw(verifier, AGAIN * draws, seed + draws))
            drawn += AGAIN * draws
        found = min(1.0, found * len(worlds))
        if found < worst:
            worst, name = found, setting
    words = f"{drawn} rounds; least likely: {name}, p {worst:.2g}"
    return Check("rounds", verifier, worst >= alpha, drawn, {"drafted": drawn, "p": worst}, words)


def _least(drawn: _Drawn) -> float:
    """The smallest of Freedman's bounds, times their number: over all tokens at each place, and at the last where a whole draft stands
    before it; and at each place over those tokens together of which q has more than p, which a residual leaves out."""
    places = range(drawn.tokens_NL.shape[1])
    parts = [(drawn.tokens_NL[:, i], drawn.p_NLV[:, i]) for i in places]
    parts.append((drawn.tokens_NL[drawn.whole_N, -1], drawn.p_NLV[drawn.whole_N, -1]))
    for i in places[:-1]:
        over_NV, p_NV, tokens_N = drawn.over_NLV[:, i], drawn.p_NLV[:, i], drawn.tokens_NL[:, i]
        p_N = (p_NV * over_NV).sum(1)
        parts.append((over_NV.gather(1, tokens_N[:, None])[:, 0].long(), torch.stack((1 - p_N, p_N), 1)))
    bounds = [_freedman(*part) for part in parts]
    return min(float(bound.min()) for bound in bounds) * sum(map(len, bounds))


def _freedman(tokens_N: Tensor, p_NV: Tensor) -> Tensor:
    """For each token (V,) a bound on the chance that it came as much too often or too seldom."""
    t_V = (torch.bincount(tokens_N, minlength=p_NV.shape[1]) - p_NV.sum(0)).abs()
    return 2 * (-t_V.square() / (2 * ((p_NV * (1 - p_NV)).sum(0) + t_V / 3)).clamp(min=1e-9)).exp()


class _World:
    """Rows of logits under one setting: after every token a row of its own."""

    def __init__(self, table_RV: Tensor, sampling: Sampling, shape: Shape) -> None:
        self.table_RV, self.sampling, self.shape = table_RV[:, : shape.size], sampling, shape
        # at a low temperature logits as far apart as at 1 leave one token, and another temperature the same one
        self.scale = min(1.0, sampling.temperature)
        self.history = History(sampling, PROMPT, shape.size, ENDS, table_RV.device)
        self.history.extend(TEXT)
        self.known: dict[tuple[int, ...], Tensor] = {}

    def rows(self, tokens: Tensor) -> Tensor:
        """The logits after tokens; −1 = the prefix."""
        return self.scale * self.table_RV[(tokens + 1) % ROWS]

    def p(self, path: tuple[int, ...]) -> Tensor:
        """p (V,) after the prefix and these tokens, by the reference."""
        if path not in self.known:
            z_V = self.rows(torch.tensor([-1, *path]))[-1]
            text = [*TEXT, *path]
            z_LV = z_V.repeat(len(text) + 1, 1)
            self.known[path] = law(scores(z_LV, PROMPT, text, self.sampling, ENDS)[-1:], self.sampling)[0]
        return self.known[path]

    def q(self, level: int, above_P: Tensor) -> Tensor:
        """q (P, V) after the tokens above."""
        other_PV = self.table_RV[(above_P + 2) % ROWS]
        share = MIXED if self.shape.weak is None else FAR if self.shape.weak == level else NEAR
        return ((1 - share) * self.rows(above_P) / self.scale + share * other_PV).softmax(-1)

    def round(self, verifier: str, seed: int) -> Round:
        """A round with drafts of its own."""
        drawn_as, siblings = RULES[verifier]
        generator = seeded(seed)
        levels, nodes = self.shape.levels, self.shape.nodes
        parents = chain(levels) if siblings is None else drawn_tree_parents(nodes, levels)
        tokens_N, q_NV = draw_tree(parents, self.q, siblings or "iid", generator, self.table_RV.device)
        steps = torch.arange(levels) if drawn_as == "unmasked" else None
        proposal = Proposal(
            tokens_N,
            drawn_as,
            None if drawn_as == "point" else DraftProbs(q_NV),
            steps,
            None if siblings is None else parents,
            siblings,
            state_only=steps is not None,
        )
        z_MV = self.rows(torch.cat((torch.tensor([-1]), tokens_N))).clone()
        before = self.history.rows(tokens_N, proposal.tree)
        return Round(z_MV, proposal, verifier, self.sampling, before, generator)

    def draw(self, verifier: str, count: int, seed: int) -> _Drawn:
        """`count` texts, each begun by a round and continued by draws from p."""
        own, levels = seeded(seed), self.shape.levels
        texts, rows, whole = [], [], []
        for start in range(0, count, TOGETHER):
            size = min(TOGETHER, count - start)
            rounds = [self.round(verifier, (seed + start + i) * 7919 + 1) for i in range(size)]
            for outcome in engine.verify_rounds(rounds):
                text = [*outcome.accepted, outcome.following]
                whole.append(len(text) > levels)
                while len(text) <= levels:
                    text.append(int(torch.multinomial(self.p(tuple(text)), 1, generator=own)))
                texts.append(text)
                rows.append(torch.stack([self.p(tuple(text[:i])) for i in range(levels + 1)]))
        tokens_NL, p_NLV = torch.tensor(texts), torch.stack(rows)
        above_NL = torch.cat((torch.full((count, 1), -1), tokens_NL), 1)
        q_NLV = torch.stack([self.q(i, above_NL[:, i]) for i in range(levels)], 1)
        return _Drawn(tokens_NL, p_NLV, torch.tensor(whole), q_NLV > p_NLV[:, :-1])
