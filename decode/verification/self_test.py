"""A dozen classic bugs, planted in the running engine one at a time. Nothing else imports this
file; tests/contract has the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from decode.engine.detokenizer import TextStream
from decode.engine.engine import RequestRunner
from decode.proposers import autoregressive, block, diffusion
from decode.speculation import rules, verification, verifiers
from decode.speculation.drafts import Drafts, rows_at
from decode.speculation.processors import History
from decode.speculation.proposal import DraftProbs
from decode.speculation.sampling import ProcessorState
from decode.speculation.verification import Outcome, Round
from decode.verification.run import VerificationRun, VerifiedPair
from decode.verification.verdict import MISSED, Tested
from specalign.lm.cache import KVCache

Original = Callable[..., Any]  # the function as it was


def draw_numbers_again(original: Original, count: int, generator: torch.Generator) -> Tensor:
    state = generator.get_state()
    numbers: Tensor = original(count, generator)
    generator.set_state(state)
    return numbers


def ignore_min_p(original: Original, group: Sequence[Round]) -> Any:
    return original([x._replace(sampling=replace(x.sampling, min_p=0.0)) for x in group])


def round_logits(original: Original, group: Sequence[Round]) -> Any:
    return original([x._replace(logits_MV=x.logits_MV.bfloat16().float()) for x in group])


def forget_earlier_siblings(original: Original, self: Drafts, i: Any, above_BN: Tensor) -> Tensor:
    return self.q()[:, i] if isinstance(i, int) else rows_at(self.q(), i)


def forget_latest_step(original: Original, name: str) -> Any:
    def hybrid(p_BMV: Tensor, drafts: Drafts) -> rules.Outcomes:
        steps = drafts.steps_BN
        if steps is not None:
            later = torch.cat((steps[:, :1], steps[:, 1:] >= steps[:, :-1]), 1)
            drafts = replace(drafts, steps_BN=later.long().cummax(1).values)
        return rules.hybrid(p_BMV, drafts)

    verifier = original(name)
    return replace(verifier, rule=hybrid) if name == "hybrid" else verifier


def cool_q(original: Original, probs: Tensor, ids: Tensor | None = None) -> DraftProbs:
    cooled = probs.double() ** 1.5
    return DraftProbs((cooled / cooled.sum(-1, keepdim=True)).to(probs.dtype), ids)


def swap_states(original: Original, states: Any, heights: Sequence[int]) -> Any:
    return original([*states[1:], states[0]] if len(set(heights)) == 1 else states, heights)


def keep_first_rows(original: Original, self: KVCache, start: int, rows: Sequence[int]) -> None:
    original(self, start, list(range(len(rows))))


def see_siblings(original: Original, self: RequestRunner) -> Any:
    call = original(self)
    see_LL = None if call.see_LL is None else torch.ones_like(call.see_LL).tril()
    return call._replace(see_LL=see_LL)


def ignore_drafts(original: Original, held_V: Tensor, *drafts: Any) -> Tensor:
    return held_V


def pass_the_end(original: Original, self: RequestRunner, outcome: Outcome) -> Any:
    with mock.patch.object(self, "eos", self.eos - set(outcome.accepted)):
        return original(self, outcome)


def lose_half(original: Original, self: TextStream, token: int) -> Any:
    stopped = original(self, token)
    self.settled = len(self.tokens)
    return stopped


def accept_always(original: Original, drafts: Any, parents: Any, chosen: Any) -> Outcome:
    found: Outcome = original(drafts, parents, chosen)
    return found if found.path else Outcome(drafts[:1], found.following, [0][: len(drafts)])


BUGS: dict[str, tuple[Original, str, Sequence[Any]]] = {
    "verification and drafter draw with the same random numbers":
        (draw_numbers_again, "uniform", (verifiers, verification)),
    "the rules ignore min-p": (ignore_min_p, "_apply_rule", (verification,)),
    "the rules use logits rounded to bf16": (round_logits, "_apply_rule", (verification,)),
    "siblings without replacement are not corrected": (forget_earlier_siblings, "q_BV", (Drafts,)),
    "the hybrid rule forgets the latest step": (forget_latest_step, "find", (verifiers,)),
    "q is reported at another temperature":
        (cool_q, "DraftProbs", (autoregressive, block, diffusion)),
    "processor states of a batch are swapped": (swap_states, "joined", (ProcessorState,)),
    "the cache keeps rejected rows": (keep_first_rows, "keep", (KVCache,)),
    "nodes of a tree see their siblings": (see_siblings, "draft", (RequestRunner,)),
    "penalties ignore the drafts": (ignore_drafts, "_with", (History,)),
    "the text does not end at an end of sequence": (pass_the_end, "_append", (RequestRunner,)),
    "a partial character is lost between two rounds": (lose_half, "push", (TextStream,)),
    "at temperature 0 a draft is accepted unconditionally":
        (accept_always, "verify_greedy", (verification,)),
}  # fmt: skip
"""A change to a function (the original comes first), the function's name, and where it stands."""


def plant(bug: str) -> ExitStack:
    """Context manager in which a bug is planted."""
    change, name, owners = BUGS[bug]
    stack = ExitStack()
    for owner in owners:
        call: Any = _wrap(change, getattr(owner, name))
        static = isinstance(vars(owner)[name], staticmethod)
        stack.enter_context(mock.patch.object(owner, name, staticmethod(call) if static else call))
    return stack


def _wrap(change: Original, original: Original) -> Original:
    return lambda *args, **options: change(original, *args, **options)


def plant_all(pair: VerifiedPair, say: Callable[[str], object]) -> list[Tested]:
    """Run the checks with each bug; a run ends at its first batch with a difference. Returns what
    became of each bug."""
    tested = []
    short = replace(pair, prompts=pair.prompts[:2], new=8)
    for bug in BUGS:
        run, error = VerificationRun(short, first=True), ""
        try:
            with plant(bug):
                run.run()
        except Exception as broken:  # a bug that breaks the engine is caught, too
            error = f"{type(broken).__name__}: {broken}"
        findings = [finding for tally in run.tallies.values() for finding in tally.findings]
        caught = ", ".join(dict.fromkeys(finding.check for finding in findings))
        caught = caught or ("an error" if error else MISSED)
        tested.append((bug, caught, findings[0].what if findings else error))
        say(f"{bug}: {caught}")
    return tested
