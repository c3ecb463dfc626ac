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
from decode.speculation import drafts, processors, rules, sampling, tree, verification, verifiers
from decode.speculation.proposal import DraftProbs
from decode.speculation.sampling import ProcessorState
from decode.speculation.verification import Outcome, Round
from decode.verification.run import VerificationRun, VerifiedPair
from decode.verification.verdict import PlantedBug
from specalign.lm.cache import KVCache

Patch = tuple[object, str, object]


def reused_numbers() -> list[Patch]:
    """Verification draws with the drafter's random numbers."""
    original = sampling.uniform
    drawn: dict[int, Tensor] = {}

    def remember(count: int, generator: torch.Generator) -> Tensor:
        drawn[id(generator)] = original(count, generator)
        return drawn[id(generator)]

    def reuse(count: int, generator: torch.Generator) -> Tensor:
        last = drawn.get(id(generator))
        return original(count, generator) if last is None else last.repeat(count)[:count]

    patches: list[Patch] = [(module, "uniform", remember) for module in (sampling, block)]
    return patches + [(module, "uniform", reuse) for module in (verifiers, verification)]


def _before_the_rules(change: Callable[[Round], Round]) -> list[Patch]:
    """The rules receive changed rounds."""
    original = verification._apply_rule
    return [(verification, "_apply_rule", lambda group: original([change(x) for x in group]))]


def _sampled_otherwise(one: Round, **options: Any) -> Round:
    return one._replace(sampling=replace(one.sampling, **options))


def half_top_k() -> list[Patch]:
    """The rules use half of top-k."""
    return _before_the_rules(lambda x: _sampled_otherwise(x, top_k=(x.sampling.top_k + 1) // 2))


def no_min_p() -> list[Patch]:
    """The rules ignore min-p."""
    return _before_the_rules(lambda x: _sampled_otherwise(x, min_p=0.0))


def rounded_logits() -> list[Patch]:
    """The rules use logits rounded to bf16."""
    return _before_the_rules(lambda x: x._replace(logits_MV=x.logits_MV.bfloat16().float()))


def siblings_not_corrected() -> list[Patch]:
    """Siblings without replacement are not corrected."""

    def q_BV(self: Any, i: int, above_BN: Tensor) -> Tensor:
        return self.q()[:, i] if isinstance(i, int) else drafts.rows_at(self.q(), i)

    return [(drafts.Drafts, "q_BV", q_BV)]


def forgotten_step() -> list[Patch]:
    """The hybrid rule forgets the latest step."""

    def hybrid(p_BMV: Tensor, given: Any) -> Any:
        steps = given.steps_BN
        if steps is not None:
            later = torch.cat((steps[:, :1], steps[:, 1:] >= steps[:, :-1]), 1)
            given = replace(given, steps_BN=later.long().cummax(1).values)
        return rules.hybrid(p_BMV, given)

    wrong = replace(verifiers.VERIFIERS["hybrid"], rule=hybrid)
    return [(verifiers, "VERIFIERS", {**verifiers.VERIFIERS, "hybrid": wrong})]


def other_temperature() -> list[Patch]:
    """Q is reported at another temperature."""

    def report(probs: Tensor, ids: Tensor | None = None) -> DraftProbs:
        cooled = probs.double() ** 1.5
        return DraftProbs((cooled / cooled.sum(-1, keepdim=True)).to(probs.dtype), ids)

    return [(module, "DraftProbs", report) for module in (autoregressive, block, diffusion)]


def swapped_states() -> list[Patch]:
    """Processor states of a batch are swapped."""
    original = ProcessorState.joined

    def joined(states: Sequence[ProcessorState], heights: Sequence[int]) -> ProcessorState:
        return original([*states[1:], states[0]] if len(set(heights)) == 1 else states, heights)

    return [(ProcessorState, "joined", staticmethod(joined))]


def stale_cache() -> list[Patch]:
    """The cache keeps rejected rows."""
    original = KVCache.keep

    def keep(self: KVCache, start: int, offsets: Sequence[int]) -> None:
        original(self, start, list(range(len(offsets))))

    return [(KVCache, "keep", keep)]


def blind_tree() -> list[Patch]:
    """Nodes of a tree see their siblings."""
    original = RequestRunner.draft

    def draft(self: RequestRunner) -> object:
        call = original(self)
        see_LL = None if call.see_LL is None else torch.ones_like(call.see_LL).tril()
        return call._replace(see_LL=see_LL)

    return [(RequestRunner, "draft", draft)]


def penalty_of_the_text_alone() -> list[Patch]:
    """Penalties ignore the drafts."""
    return [(processors.History, "_with", staticmethod(lambda held_V, tokens_K, parents: held_V))]


def past_the_end() -> list[Patch]:
    """The text does not end at an end of sequence."""
    original = RequestRunner._append

    def append(self: RequestRunner, outcome: Outcome) -> int:
        with mock.patch.object(self, "eos", self.eos - set(outcome.accepted)):
            return original(self, outcome)

    return [(RequestRunner, "_append", append)]


def lost_half() -> list[Patch]:
    """A partial character is lost between two rounds."""
    original = TextStream.push

    def push(self: TextStream, token: int) -> bool:
        stopped = original(self, token)
        self.settled = len(self.tokens)
        return stopped

    return [(TextStream, "push", push)]


def always_accepted() -> list[Patch]:
    """A draft is accepted unconditionally."""
    original_walk, original_greedy = tree.walk, verification.verify_greedy

    def walk(tokens: Any, forest: Any, say: Any) -> object:
        found = zip(original_walk(tokens, forest, say), tokens, strict=True)
        return [(path or [0][: len(own)], token) for (path, token), own in found]

    def verify_greedy(draft_tokens: Any, parents: Any, target_tokens: Any) -> Outcome:
        found = original_greedy(draft_tokens, parents, target_tokens)
        first = Outcome(draft_tokens[:1], found.following, [0][: len(draft_tokens)])
        return found if found.path else first

    return [(verification, "walk", walk), (verification, "verify_greedy", verify_greedy)]


BUGS: dict[str, Callable[[], list[Patch]]] = {
    str(make.__doc__): make
    for make in (
        reused_numbers,
        half_top_k,
        no_min_p,
        rounded_logits,
        siblings_not_corrected,
        forgotten_step,
        other_temperature,
        swapped_states,
        stale_cache,
        blind_tree,
        penalty_of_the_text_alone,
        past_the_end,
        lost_half,
        always_accepted,
    )
}


def plant_all(pair: VerifiedPair, say: Callable[[str], object]) -> list[PlantedBug]:
    """Run the checks with each bug; a run ends at its first batch with a difference. Returns what
    became of each bug."""
    tested = []
    short = replace(pair, prompts=pair.prompts[:2], new=8)
    for name, make in BUGS.items():
        run, error = VerificationRun(short, first=True), ""
        try:
            with ExitStack() as stack:
                for patch in make():
                    stack.enter_context(mock.patch.object(*patch))
                run.run()
        except Exception as broken:  # a bug that breaks the engine is caught, too
            error = f"{type(broken).__name__}: {broken}"
        findings = [finding for tally in run.tallies.values() for finding in tally.findings]
        caught = list(dict.fromkeys(finding.check for finding in findings))
        caught = caught or (["an error"] if error else [])
        tested.append(PlantedBug(name, caught, findings[0].what if findings else error))
        say(f"{'caught' if caught else 'MISSED'}: {name} ({', '.join(caught)})")
    return tested
