"""A dozen classic bugs, planted in both engines, one at a time. Nothing else imports this file;
tests/contract has the rest."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from decode.captured import acceptance, causal, denoising
from decode.captured import block as captured_block
from decode.captured import round as captured_round
from decode.captured import rows as captured_rows
from decode.captured.acceptance import Path
from decode.captured.drafting import Draft
from decode.captured.state import RowState
from decode.engine.detokenizer import TextStream
from decode.engine.request import RequestRunner
from decode.evaluation.tokenized import tokenize_prompts
from decode.proposers import autoregressive, block, diffusion
from decode.speculation import drafts, history, rounds, rules, sampling, tree, verifiers
from decode.speculation.proposal import DraftProbs
from decode.speculation.rounds import Round
from decode.speculation.sampling import ProcessorState
from decode.speculation.settings import Sampling
from decode.speculation.verifiers import Outcome
from decode.verification.cases import cases_of
from decode.verification.pair import VerifyConfig
from decode.verification.run import VerificationRun
from decode.verification.verdict import PlantedBug
from specalign.lm.cache import KVCache
from specalign.lm.loading import own_model
from specalign.suites.prompt import Prompt

Patch = tuple[object, str, object]


def reused_numbers() -> list[Patch]:
    """Verification draws with the numbers that the drafter drew with."""
    original = sampling.uniform
    drawn: dict[int, Tensor] = {}

    def remember(count: int, generator: torch.Generator) -> Tensor:
        drawn[id(generator)] = original(count, generator)
        return drawn[id(generator)]

    def reuse(count: int, generator: torch.Generator) -> Tensor:
        last = drawn.get(id(generator))
        return original(count, generator) if last is None else last.repeat(count)[:count]

    patches: list[Patch] = [(module, "uniform", remember) for module in (sampling, block)]
    patches.append((verifiers, "uniform", reuse))
    first = RowState.uniform
    same = lambda state, at, counts: first(state, torch.zeros_like(at), counts)  # noqa: E731
    return [*patches, (RowState, "uniform", same)]


def _before_the_rules(
    settings: Callable[[Sampling], Sampling], logits: Callable[[Tensor], Tensor] = lambda x: x
) -> list[Patch]:
    """The rules receive other settings or logits."""
    original, probs = rounds._apply_rule, sampling.probs

    def change(one: Round) -> Round:
        return one._replace(sampling=settings(one.sampling), logits_MV=logits(one.logits_MV))

    def changed_probs(logits_BMV: Tensor, own: Sampling, *args: Any, **options: Any) -> Tensor:
        return probs(logits(logits_BMV), settings(own), *args, **options)

    return [
        (rounds, "_apply_rule", lambda group: original([change(x) for x in group])),
        (acceptance, "probs", changed_probs),
    ]


def half_top_k() -> list[Patch]:
    return _before_the_rules(lambda x: replace(x, top_k=(x.top_k + 1) // 2))


def no_min_p() -> list[Patch]:
    return _before_the_rules(lambda x: replace(x, min_p=0.0))


def rounded_logits() -> list[Patch]:
    return _before_the_rules(lambda x: x, lambda logits: logits.bfloat16().float())


def siblings_not_corrected() -> list[Patch]:
    def q_BV(self: Any, i: int, above_BN: Tensor) -> Tensor:
        return self.q()[:, i] if isinstance(i, int) else drafts.rows_at(self.q(), i)

    return [(drafts.Drafts, "q_BV", q_BV)]


def forgotten_step() -> list[Patch]:
    def hybrid(p_BMV: Tensor, given: Any) -> Any:
        steps = given.steps_BN
        if steps is not None:
            later = torch.cat((steps[:, :1], steps[:, 1:] >= steps[:, :-1]), 1)
            given = replace(given, steps_BN=later.long().cummax(1).values)
        return rules.hybrid(p_BMV, given)

    wrong = replace(verifiers.VERIFIERS["hybrid"], rule=hybrid)
    return [(verifiers, "VERIFIERS", {**verifiers.VERIFIERS, "hybrid": wrong})]


def other_temperature() -> list[Patch]:
    """q is reported at another temperature than drafts were drawn at."""

    def report(probs: Tensor, ids: Tensor | None = None) -> DraftProbs:
        cooled = probs.double() ** 1.5
        return DraftProbs((cooled / cooled.sum(-1, keepdim=True)).to(probs.dtype), ids)

    def draw_at(weights: Tensor, u: Tensor) -> Tensor:
        return sampling.draw_at(weights**1.5, u)

    reported = [(module, "DraftProbs", report) for module in (autoregressive, block, diffusion)]
    modules = (captured_block, causal, denoising)
    return [*reported, *((module, "draw_at", draw_at) for module in modules)]


def swapped_states() -> list[Patch]:
    """In a batch, requests get one another's processor states."""
    original = ProcessorState.joined

    def joined(states: Sequence[ProcessorState], heights: Sequence[int]) -> ProcessorState:
        return original([*states[1:], states[0]] if len(set(heights)) == 1 else states, heights)

    before = RowState.before

    def shifted(self: RowState, *args: Any) -> ProcessorState:
        return ProcessorState(*(x if x is None else x.roll(1, 0) for x in before(self, *args)))

    return [(ProcessorState, "joined", staticmethod(joined)), (RowState, "before", shifted)]


def stale_cache() -> list[Patch]:
    """The cache keeps the first rows of a call in place of the accepted path."""
    original = KVCache.keep

    def keep(self: KVCache, start: int, offsets: Sequence[int]) -> None:
        original(self, start, list(range(len(offsets))))

    return [(KVCache, "keep", keep), (KVCache, "move_rows", lambda *_: None)]


def blind_tree() -> list[Patch]:
    """Nodes of a tree attend to their siblings."""
    original = RequestRunner.draft

    def draft(self: RequestRunner, size: int | None = None) -> object:
        call = original(self, size)
        see_LL = None if call.see_LL is None else torch.ones_like(call.see_LL).tril()
        return call._replace(see_LL=see_LL)

    mask = captured_round._mask

    def see_all(see_BMM: Tensor, *args: Any) -> Tensor:
        return mask(torch.ones_like(see_BMM).tril(), *args)

    return [(RequestRunner, "draft", draft), (captured_round, "_mask", see_all)]


def penalty_of_the_text_alone() -> list[Patch]:
    """The penalties of a node do not see the drafts on its path."""
    text_alone = staticmethod(lambda held_V, tokens_K, parents: held_V)
    held = RowState._held
    blind = lambda self, held_BV, drafts, tokens: held(self, held_BV, None, tokens)  # noqa: E731
    return [(history.History, "_with", text_alone), (RowState, "_held", blind)]


def past_the_end() -> list[Patch]:
    """An end of sequence inside an accepted path does not end the text."""
    original = RequestRunner._append

    def append(self: RequestRunner, tokens: Sequence[int]) -> list[int]:
        with mock.patch.object(self, "eos", self.eos - set(tokens[:-1])):
            return original(self, tokens)

    run_round = captured_round.run_round

    def run_on(state: RowState, *args: Any) -> None:
        state.eos_V.zero_()
        run_round(state, *args)

    return [(RequestRunner, "_append", append), (captured_rows, "run_round", run_on)]


def lost_half() -> list[Patch]:
    """The first half of a character is lost."""
    original = TextStream.push

    def push(self: TextStream, token: int) -> bool:
        stopped = original(self, token)
        self.settled = len(self.tokens)
        return stopped

    return [(TextStream, "push", push)]


def always_accepted() -> list[Patch]:
    """The first draft of a path is accepted whatever p says."""
    original_walk, original_greedy = tree.walk, verifiers.verify_greedy

    def walk(tokens: Any, forest: Any, choose: Any) -> object:
        found = zip(original_walk(tokens, forest, choose), tokens, strict=True)
        return [(path or [0][: len(own)], token) for (path, token), own in found]

    def verify_greedy(draft_tokens: Any, parents: Any, target_tokens: Any) -> Outcome:
        found = original_greedy(draft_tokens, parents, target_tokens)
        first = Outcome(draft_tokens[:1], found.following, [0][: len(draft_tokens)])
        return found if found.path else first

    accept = acceptance.accept_own_tokens

    def accept_first(draft: Draft, *args: Any) -> Path:
        path = accept(draft, *args)
        some_B = draft.live_BN[:, :1].any(1)
        return path._replace(end_B=torch.where(some_B, path.end_B.clamp(min=1), path.end_B))

    return [
        (rounds, "walk", walk),
        (rounds, "verify_greedy", verify_greedy),
        (acceptance, "accept_own_tokens", accept_first),
    ]


BUGS: dict[str, Callable[[], list[Patch]]] = {
    "verification draws with the drafter's random numbers": reused_numbers,
    "the rules use half of top-k": half_top_k,
    "the rules ignore min-p": no_min_p,
    "the rules use logits rounded to bf16": rounded_logits,
    "siblings without replacement are not corrected": siblings_not_corrected,
    "the hybrid rule forgets the latest step": forgotten_step,
    "q is reported at another temperature": other_temperature,
    "processor states of a batch are swapped": swapped_states,
    "the cache keeps rejected rows": stale_cache,
    "nodes of a tree see their siblings": blind_tree,
    "penalties ignore the drafts": penalty_of_the_text_alone,
    "the text does not end at an end of sequence": past_the_end,
    "a partial character is lost between two rounds": lost_half,
    "a draft is accepted unconditionally": always_accepted,
}


def plant_all(
    config: VerifyConfig, given: Sequence[Prompt], say: Callable[[str], object]
) -> list[PlantedBug]:
    """Run the checks with each bug; a run ends at its first batch with a difference. Returns what
    became of each bug."""
    tested = []
    cases, _ = cases_of(config, lambda _: None)
    own = own_model(cases.target)
    short = replace(config, max_new_tokens=8)
    prompts = [tokens for _, tokens in tokenize_prompts(cases.target, given)[0]][:2]
    for name, make in BUGS.items():
        run = VerificationRun(short, cases, prompts, lambda _: None, own, first=True)
        error = ""
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
