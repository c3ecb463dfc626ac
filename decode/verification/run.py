"""Runs the six checks over a pair: batches of requests are decoded and recorded, and every round is
checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any
from unittest import mock

import torch

from decode.engine import engine as engine_module
from decode.engine.decoder import Decoder
from decode.engine.engine import Engine
from decode.evaluation.tokenized import tokenize_prompts
from decode.speculation.sampling import Sampling
from decode.verification import checks, end_to_end, proposals, rules
from decode.verification.batches import RequestBatch, Requests, ending
from decode.verification.checks import Asked
from decode.verification.pair import Cases, VerifyConfig, cases_of
from decode.verification.recording import RecordedRound, Recorder
from decode.verification.reference import Reference
from decode.verification.rows import check_rows
from decode.verification.verdict import TITLES, Tally
from specalign.common.errors import UserError
from specalign.common.provenance import decoding_versions, git_commit, machine
from specalign.common.schema import JsonObject
from specalign.kernels.linear import rows_library
from specalign.lm.loading import own_model
from specalign.suites.prompt import Prompt

RECORDED = 60
"""Recorded rounds whose p and q go into the check of the rule."""

Say = Callable[[str], object]


class VerificationRun:
    """The checks of one pair.

    Args:
        own: the target's model as transformers runs it; None = loaded again.
        only: the name of the one batch, or check, that is run again.
        first: end after the first batch with a difference.
    """

    def __init__(
        self,
        config: VerifyConfig,
        cases: Cases,
        prompts: list[list[int]],
        say: Say,
        own: Any = None,
        only: str = "",
        first: bool = False,
    ) -> None:
        self.config, self.cases, self.prompts, self.say = config, cases, prompts, say
        self.only, self.first = only, first
        self.target = cases.target
        self.reference = Reference(self.target, own_model(self.target) if own is None else own)
        self.tallies = {name: Tally(name) for name in TITLES}
        self.recorded: list[RecordedRound] = []
        self.plain = Decoder(self.target)
        self.requests = Requests(self.target, prompts)

    def run(self) -> list[Tally]:
        """Run all checks, and report each batch."""
        self._check_greedy_texts()
        for batch in self.requests.batches(self.cases, self.plain):
            if not self.only or self.only == batch.name:
                self.check(batch)
            if self.first and any(tally.findings for tally in self.tallies.values()):
                return list(self.tallies.values())
        if not self.only or self.only == "joint law":
            self._check_joint_laws()
        if not self.only or self.only == "rule":
            with self.tallies["rule"].measure_time() as tally:
                rules.check_rules(tally, self.recorded)
        return list(self.tallies.values())

    def _check_greedy_texts(self) -> None:
        new = self.config.max_new_tokens
        with self.tallies["end_to_end"].measure_time() as tally:
            texts = end_to_end.check_plain(self.plain, self.prompts, new, self.reference, tally)
            for case in self.cases.compared:
                decoder = self.cases.open(case)
                prompts, reference = self.prompts, self.reference
                end_to_end.check_greedy(case.name, decoder, prompts, texts, new, reference, tally)
                self.say(f"{case.name}: greedy texts")
            self.requests.common = [t for t, _ in Counter(sum(texts, [])).most_common()]
            self.requests.letters = self._letters()

    def _letters(self) -> list[int]:
        """The two tokens that are drafted most often."""
        asked = [
            Asked(tuple(prompt), Sampling(1.0, seed=i), 12)
            for i, prompt in enumerate(self.requests.short)
        ]
        recorder = self._decode(
            RequestBatch("", self.cases.open(self.cases.compared[0]), tuple(asked))
        )
        drafted = [token for one in recorder.rounds for token in one.proposal.tokens_K.tolist()]
        ranked = Counter([*drafted, *self.requests.common, 0, 1]).most_common()
        return [token for token, _ in ranked if token not in self.target.eos_ids][:2]

    def _check_joint_laws(self) -> None:
        sampling, prompt = Sampling(1.0, top_k=2, seed=5), self.requests.short[0][-4:]
        for case in self.cases.drawn[1:3] or self.cases.drawn:
            decoder = self.cases.open(case)
            with self.tallies["end_to_end"].measure_time() as tally:
                if checks.drafts(decoder.drafter, "by_clock"):
                    tally.counts["joint laws left out, because drafts depend on the clock"] += 1
                    continue
                end_to_end.check_joint_law(
                    case.name, decoder, prompt, self.reference, tally, sampling
                )

    def check(self, batch: RequestBatch) -> None:
        """Decode a batch, record it, and check every round."""
        started = {name: len(tally.findings) for name, tally in self.tallies.items()}
        recorder = self._decode(batch, enumerate_drafts=True)
        background = checks.drafts(batch.decoder.drafter, "in_background")
        with self.tallies["rows"].measure_time() as tally:
            check_rows(recorder, batch.asked, self.reference, tally)
        if not background:
            with self.tallies["proposals"].measure_time() as tally:
                checks.check_drafts(recorder, tally)
        with self.tallies["randomness"].measure_time() as tally:
            checks.check_decisions(recorder, batch.asked, tally)
            if background:
                what = "whose drafts' random numbers are not followed"
                tally.counts[f"batches drafted in the background, {what}"] += 1
            else:
                checks.check_randomness(recorder, batch.asked, tally)
            if background or checks.drafts(batch.decoder.drafter, "by_clock"):
                what = "not compared with requests alone"
                tally.counts[f"batches whose drafts depend on the clock, {what}"] += 1
            elif batch.size > 1:
                self._check_company(recorder, batch, tally)
        with self.tallies["commit"].measure_time() as tally:
            checks.check_commit(recorder, batch.asked, self.target, tally)
        room = RECORDED - len(self.recorded)
        self.recorded += [one for one in recorder.rounds if one.by_rule][: max(0, room)]
        found = [
            finding for name, n in started.items() for finding in self.tallies[name].findings[n:]
        ]
        for finding in found:
            finding.place["batch"] = batch.name
        if found:
            found[0].place.update(_describe(recorder, batch, found[0].place))
        differences = f", {len(found)} DIFFERENCES" if found else ""
        counts = f"{len(batch.asked)} requests, {len(recorder.rounds)} rounds"
        self.say(f"{batch.name}: {counts}{differences}")

    def _decode(
        self,
        batch: RequestBatch,
        only: Sequence[Asked] | None = None,
        enumerate_drafts: bool = False,
    ) -> Recorder:
        """Decode and record requests of a batch (all, or `only` some), those with other ends or
        another context apart. `enumerate_drafts`: with check 2, of the first and the last."""
        asked = batch.asked if only is None else only
        left = {0, len(asked) - 1} if enumerate_drafts else set()
        if checks.drafts(batch.decoder.drafter, "in_background"):
            left.clear()

        def before_draft(engine: Engine) -> None:
            number = recorder.number(engine)
            if number in left and len(engine.out.tokens) > 1:
                left.discard(number)
                with (
                    self.tallies["proposals"].measure_time() as tally,
                    torch._C.DisableTorchFunction(),
                ):
                    proposals.check_proposal_of(engine, tally, batch.name)  # not the request's

        recorder = Recorder(before_draft)
        with recorder, mock.patch.object(engine_module, "PREFILL_CHUNK", batch.chunk):
            for (eos, context, stop), together in groupby(asked, key=ending):
                group = list(together)
                with self.target.overridden(eos, context):
                    batch.decoder.generate_batch(
                        [list(one.prompt) for one in group], batch_size=batch.size, max_new_tokens=[one.new for one in group],
                        sampling=_as_one([one.sampling for one in group]), stop=list(stop) or None,
                    )  # fmt: skip
        return recorder

    def _check_company(self, recorder: Recorder, batch: RequestBatch, tally: Tally) -> None:
        """A request alone writes what it wrote among others."""
        number = min(
            range(len(batch.asked) - 1, 0, -1), key=lambda i: batch.asked[i].new, default=0
        )
        alone = self._decode(batch, [batch.asked[number]])
        tally.place = {"request": number}
        a, b = recorder.engines[number].out.tokens, alone.engines[0].out.tokens
        right = a == b
        if not right:
            pairs = zip(recorder.rounds_of(number), alone.rounds, strict=False)
            first = next((pair for pair in pairs if _differ(*pair)), None)
            right = first is not None and self._rounding_alone(*first)
            tally.counts["rounding ties"] += right
        what = f"request {number} writes {b[:12]} alone and {a[:12]} among others"
        tally.expect("requests alone and among others", right, what)

    def _rounding_alone(self, one: RecordedRound, other: RecordedRound) -> bool:
        """Whether two rounds with the same random numbers differ by no more than rounding
        explains."""
        numbers = zip(one.verifying, other.verifying, strict=False)
        row_V, other_V = one.logits_MV[0], other.logits_MV[0]
        gap = 2 * float((row_V.double() - other_V.double()).abs().nan_to_num(nan=0).max())
        finite_V = row_V.masked_fill(~row_V.isfinite(), 0)
        explained = 0 < gap <= self.reference.rounding_limit(one.text, finite_V, gap)
        return explained and all(torch.equal(x, y) for x, y in numbers)


def _as_one(settings: list[Sampling]) -> Sampling | list[Sampling]:
    """The first of several settings that differ in consecutive seeds alone."""
    first = settings[0]
    consecutive = [replace(first, seed=first.fixed_seed + i) for i in range(len(settings))]
    return first if len(settings) > 1 and settings == consecutive else settings


def _describe(recorder: Recorder, batch: RequestBatch, place: JsonObject) -> JsonObject:
    """The request and the round of a difference, for a reader of its replay.json."""
    number = place.get("request")
    if number is None:
        return {}
    found: JsonObject = {"asked": asdict(batch.asked[number])}
    if "round" not in place:
        return found
    one = recorder.rounds_of(number)[place["round"]]
    proposal = one.proposal
    return found | {
        "text": one.text,
        "drafts": {
            "tokens": proposal.tokens_K.tolist(),
            "parents": proposal.tree,
            "law": proposal.law,
        },
        "outcome": {**one.end._asdict(), "verifier": one.verifier},
        "random_numbers": [x.flatten().tolist() for x in one.verifying],
    }


def _differ(one: RecordedRound, other: RecordedRound) -> bool:
    a, b = one.proposal.tokens_K.tolist(), other.proposal.tokens_K.tolist()
    return a != b or one.end != other.end


def verify(
    config: VerifyConfig, given: Sequence[Prompt], say: Say, only: str = ""
) -> tuple[list[Tally], JsonObject]:
    """Run all checks on the pair that the options name.

    Returns:
        The checks' figures, and what they were run on.

    Raises:
        UserError: an input that can't be used, or nothing was drafted.
    """
    cases, drafter = cases_of(config, say)
    fitting, refused = tokenize_prompts(cases.target, given)
    room = cases.target.context_limit - config.max_new_tokens
    prompts = [tokens for _, tokens in fitting if len(tokens) <= room]
    if not prompts:
        why = refused[0] if refused else f"none leaves room for {config.max_new_tokens} new tokens"
        raise UserError(f"no prompt can be answered: {why}")
    tallies = VerificationRun(config, cases, prompts, say, only=only).run()
    if not only and not tallies[-1].counts["tokens drafted"]:
        raise UserError(
            "nothing was drafted on these prompts, so nothing is shown: take more of them, or "
            "longer outputs"
        )
    return tallies, {**about(config, cases, len(prompts), len(given)), "drafter": drafter}


def about(config: VerifyConfig, cases: Cases, prompts: int, given: int) -> JsonObject:
    """What the checks run on."""
    target = cases.target
    return {
        "target": target.spec,
        "weights": target.weights,
        "prompts": prompts,
        "left_out": given - prompts,
        "max_new_tokens": config.max_new_tokens,
        "methods": [case.name for case in (*cases.compared, *cases.drawn)],
        "dtype": target.dtype_name,
        "device": str(target.device),
        "engine": "eager",
        "kernels": "C" if target.device.type == "cpu" and rows_library() is not None else "torch",
        "layers": "in one call" if target.fused is not None else "module by module",
        "attention": target.attention,
        "prompted": target.chat.description,
        "machine": machine(),
        "versions": decoding_versions(),
        "git_commit": git_commit(),
        "threads": torch.get_num_threads(),
    }
