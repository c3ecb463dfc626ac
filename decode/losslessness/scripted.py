"""Drafts by script: the right text, with wrong tokens at known places. Whatever a drafter is worth, so every option meets drafts that
are accepted whole, in part and not at all, along chains and along trees, and tokens that are drafts of their own round; in a
long context too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from decode.drafters.base import DraftSession, Request
from decode.engine.decoder import Decoder
from decode.losslessness.divergence import dtype_limit
from decode.losslessness.law import DRAFTED, Setting, choice
from decode.losslessness.options import IMPOSSIBLE, Decoders, batch_options, same_options
from decode.losslessness.settings import Options
from decode.losslessness.verdict import Check
from decode.speculation.proposal import Law, Proposal
from decode.speculation.sampling import Sampling

NAME = "scripted drafts"
TOGETHER = 32
"""Requests of one target call: what `generate_batch` takes where nothing is said, and more than `options.together` allows."""


class ScriptedDrafter:
    """Drafts by scripts, the first request by the first.

    Args:
        branch: whether every third draft is a tree.
        lengths: of each script's drafts, in tokens; empty: `DRAFTED`.
    """

    name = NAME

    def __init__(self, scripts: Sequence[list[int]], branch: bool, lengths: Sequence[int] = ()) -> None:
        self.scripts, self.branch, self.begun = scripts, branch, 0
        self.lengths = lengths or [DRAFTED] * len(scripts)
        self.draft_tokens = max(self.lengths)
        self.draft_nodes = 2 * self.draft_tokens + 1

    def law(self, sampling: Sampling) -> Law:
        return "point"

    def start(self, request: Request) -> ScriptedSession:
        number = self.begun % len(self.scripts)
        self.begun += 1
        return ScriptedSession(request, self.scripts[number], self.branch, self.lengths[number])


class ScriptedSession(DraftSession):
    """One request's drafts. Round by round: all right; the last but one wrong; a tree in which the right token stands behind a wrong
    one."""

    def __init__(self, request: Request, script: list[int], branch: bool, length: int) -> None:
        self.request, self.script, self.branch, self.length = request, script, branch, length
        self.prompt, self.round = len(request.tokens), -1

    def propose(self, k: int) -> Proposal | None:
        place = len(self.request.tokens) - self.prompt
        right = self.script[place : place + min(k, self.length)]
        if not right:
            return None
        self.round += 1
        wrong = [(token + 1) % self.request.target.vocab_size for token in right]
        shape = self.round % (3 if self.branch else 2)
        if shape == 2:  # the first wrong token is continued too, by what would be right after it
            pairs = [token for both in zip(wrong, right, strict=True) for token in both]
            parents = [2 * (i // 2) - 1 for i in range(len(pairs))]
            if len(right) > 1:
                pairs, parents = [*pairs, right[1]], [*parents, 0]
            return Proposal(self._tensor(pairs), "point", parents=tuple(parents))
        if shape == 1:
            at = min(self.length - 2, len(right) - 1)
            right[at] = wrong[at]
        return Proposal(self._tensor(right), "point")

    def _tensor(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor(tokens, device=self.request.target.device)


def scripted(options: Options) -> Decoders:
    """Decoders that draft the texts which the settings ask for."""
    target = options.target

    def decoders(settings: Sequence[Setting]) -> Decoder:
        scripts = [options.text(s).tokens for s in settings]
        verifier = "auto" if all(s.sampling.greedy for s in settings) else "gumbel"
        lengths = [s.drafts for s in settings]
        return Decoder(target, ScriptedDrafter(scripts, not target.chains_only, lengths), verifier)

    return decoders


@torch.no_grad()
def whole(options: Options) -> Check:
    """Is the text in a long context the one that the model writes when it reads all of it at once, without a cache?"""
    target, setting = options.target, options.long[0]
    prompt, text = options.tokens(setting), options.text(setting)
    tokens_1L = torch.tensor([[*prompt, *text.tokens[:-1]]], device=target.device)
    hidden_BLD = target.forward(tokens_1L, logits=False).hidden_BLD[:, len(prompt) - 1 :]
    wrong = 0
    for i, z_V in enumerate(target.head(hidden_BLD)[0]):
        found_V = choice(z_V, prompt, text.tokens[:i], setting, ()).nan_to_num(neginf=IMPOSSIBLE)
        wrong += bool(found_V.max() - found_V[text.tokens[i]] > 2 * dtype_limit(target.dtype, z_V))
    words = f"{len(text.tokens) - wrong} of {len(text.tokens)} tokens after {len(prompt)} are those of one call without a cache"
    return Check("long context", "plain", not wrong, 1, {"drafted": 0, "wrong": wrong}, words)


def scripted_check(options: Options, kind: str, only: str | None = None, bug: Any = nullcontext) -> Check:
    """The check of a kind (options, batch or long) with scripted drafts, while a bug may be planted. `only`: the name of one setting."""
    if kind == "batch":
        return batch_options(NAME, options, scripted(options), bug, size=TOGETHER)
    name, settings = (
        ("long context", options.long[1:]) if kind == "long" else ("options, exact", options.exact)
    )
    chosen = [s for s in settings if only is None or s.name == only]
    return same_options(NAME, options, scripted(options), chosen, bug, name)
