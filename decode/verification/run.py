"""Runs the six checks on a target and drafter: decodes and records batches of requests, and checks
every round."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from typing import Any
from unittest import mock

import torch

from decode.engine import request
from decode.evaluation.tokenized import tokenize_prompts
from decode.speculation.settings import Sampling
from decode.verification import commit, end_to_end, proposals, randomness, rows, rules
from decode.verification.batches import Asked, RequestBatch, Requests, settings
from decode.verification.captured import EngineRecorder, check_graphs
from decode.verification.cases import Cases, cases_of, drafts_so
from decode.verification.pair import VerifyConfig
from decode.verification.recorded import RecordedRequest, RecordedRound
from decode.verification.recording import Recorder
from decode.verification.reference import Reference
from decode.verification.sources import DraftSource
from decode.verification.verdict import TITLES, Tally
from specalign.common.errors import UserError
from specalign.common.provenance import decoding_versions, git_commit, machine
from specalign.common.schema import JsonObject
from specalign.kernels.linear import rows_library
from specalign.lm.loading import own_model
from specalign.suites.prompt import Prompt

RECORDED = 60  # recorded rounds whose p and q go into the check of the rule
Say = Callable[[str], object]


class VerificationRun:
    """The checks of one target and drafter.

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
        self.plain = cases.plain()
        self.requests = Requests(self.target, prompts, cases.captured)

    def run(self) -> list[Tally]:
        """Run all checks, and report each batch."""
        self._check_greedy_texts()
        with self.tallies["commit"].measure_time() as tally:
            commit.check_texts(self.target, tally)
        found = self.only in ("", "rule", "joint law")
        for batch in self.requests.batches(self.cases, self.plain):
            if self.only in ("", batch.name):
                found = True
                self.check(batch)
            if len(self.recorded) == RECORDED:
                self._check_rules()
            if self.first and any(tally.findings for tally in self.tallies.values()):
                return list(self.tallies.values())
        if not found:
            raise UserError(f"--replay: these options decode no batch {self.only!r}")
        if self.only in ("", "joint law"):
            self._check_joint_laws()
        self._check_rules()
        return list(self.tallies.values())

    def _check_rules(self) -> None:
        """Once, as soon as there are enough recorded rounds."""
        tally = self.tallies["rule"]
        if self.only in ("", "rule") and not tally.counts:
            with tally.measure_time():
                rules.check_rules(tally, self.recorded)

    def _check_greedy_texts(self) -> None:
        new, prompts, reference = self.config.max_new_tokens, self.prompts, self.reference
        graphs = self.cases.captured and self.target.device.type == "cuda"
        with self.tallies["end_to_end"].measure_time() as tally:
            texts = end_to_end.check_plain(self.plain, prompts, new, reference, tally)
            for case in self.cases.compared:
                decoder = self.cases.open(case)
                end_to_end.check_greedy(case.name, decoder, prompts, texts, new, reference, tally)
                self.say(f"{case.name}: greedy texts")
            self.requests.common = [t for t, _ in Counter(sum(texts, [])).most_common()]
            for case in self.cases.drawn if graphs and self.target.dtype == torch.float32 else ():
                make = partial(self.cases.open, case)
                chosen = settings(1000, self.requests.common)
                check_graphs(case.name, make, self.requests.short, chosen, tally)
            self.requests.letters = self._letters()

    def _letters(self) -> list[int]:
        """The two tokens that are drafted most often."""
        seeded = enumerate(self.requests.short)
        asked = tuple(Asked(tuple(prompt), Sampling(1.0, seed=i), 12) for i, prompt in seeded)
        batch = RequestBatch("", self.cases.open(self.cases.compared[0]), asked)
        drafts = [one.proposal.tokens_K.tolist() for one in self._decode(batch).rounds]
        ranked = Counter([*sum(drafts, []), *self.requests.common, 0, 1]).most_common()
        return [token for token, _ in ranked if token not in self.target.eos_ids][:2]

    def _check_joint_laws(self) -> None:
        sampling, prompt = Sampling(1.0, top_k=2, seed=5), self.requests.short[0][-4:]
        for case in self.cases.drawn[1:3] or self.cases.drawn:
            decoder = self.cases.open(case)
            with self.tallies["end_to_end"].measure_time() as tally:
                if drafts_so(decoder.drafter, "by_clock"):
                    tally.counts["joint distributions skipped: drafts depend on timing"] += 1
                    continue
                given = (decoder, prompt, self.reference, tally, sampling)
                end_to_end.check_joint_law(case.name, *given)

    def check(self, batch: RequestBatch) -> None:
        """Decode a batch, record it, and check every round."""
        started = {name: len(tally.findings) for name, tally in self.tallies.items()}
        background = drafts_so(batch.decoder.drafter, "in_background")
        recorder = self._decode(batch, enumerate_drafts=not background)
        with self.tallies["rows"].measure_time() as tally:
            rows.check_rows(recorder, self.reference, tally)
        with self.tallies["proposals"].measure_time() as tally:
            if not background:
                proposals.check_drafts(recorder, tally)
        with self.tallies["randomness"].measure_time() as tally:
            randomness.check_decisions(recorder, tally)
            randomness.check_randomness(recorder, tally)
            if batch.adapt or drafts_so(batch.decoder.drafter, "by_clock"):
                what = "not compared with requests alone"
                tally.counts[f"batches whose drafts depend on timing, {what}"] += 1
            elif batch.size > 1:
                self._check_company(recorder, batch, tally)
        with self.tallies["commit"].measure_time() as tally:
            commit.check_commit(recorder, self.target, tally)
            if self.cases.captured:
                left = sum(not one.captured for one in recorder.requests)
                tally.counts["requests that the captured engine left to the eager one"] += left
        room = RECORDED - len(self.recorded)
        self.recorded += [one for one in recorder.rounds if one.by_rule][:room]
        found = [x for name, n in started.items() for x in self.tallies[name].findings[n:]]
        for finding in found:
            finding.place["batch"] = batch.name
        if found:
            found[0].place.update(_describe(recorder, found[0].place))
        differences = f", {len(found)} DIFFERENCES" if found else ""
        counts = f"{len(batch.asked)} requests, {len(recorder.rounds)} rounds"
        self.say(f"{batch.name}: {counts}{differences}")

    def _decode(
        self, batch: RequestBatch, only: Asked | None = None, enumerate_drafts: bool = False
    ) -> Recorder:
        """Decode and record the requests of a batch, or one, those with other ends or another
        context apart. `enumerate_drafts`: with check 2, of the first and the last."""
        asked = batch.asked if only is None else (only,)
        left = {0, len(asked) - 1} if enumerate_drafts else set()

        def before_draft(request: RecordedRequest, source: DraftSource) -> None:
            if request.number in left and len(request.runner.out.tokens) > 1:
                left.discard(request.number)
                with self.tallies["proposals"].measure_time() as tally:
                    proposals.check_proposal(source, tally, batch.name)

        recorder = EngineRecorder(asked, before_draft)
        with recorder, mock.patch.object(request, "PREFILL_CHUNK", batch.chunk):
            for (eos, context, stop), together in groupby(asked, key=lambda one: one.ending):
                group = list(together)
                with self.target.overridden(eos, context):
                    batch.decoder.generate_batch(
                        [list(one.prompt) for one in group],
                        [one.new for one in group],
                        batch_size=batch.size,
                        sampling=_as_one([one.sampling for one in group]),
                        stop=list(stop) or None,
                        adapt=batch.adapt,
                    )
        return recorder

    def _check_company(self, recorder: Recorder, batch: RequestBatch, tally: Tally) -> None:
        """A request alone writes what it wrote among others: the last one of those that ran
        together, whose memory others had before it."""
        together = [x for x in recorder.requests if x.asked.ending == batch.asked[0].ending]
        among = max(together, key=lambda one: (len(one.runner.out.tokens) > 1, one.number))
        (alone,) = self._decode(batch, among.asked).requests
        tally.place = {"request": among.number}
        a, b = among.runner.out.tokens, alone.runner.out.tokens
        right = a == b
        if not right:
            pairs = zip(among.rounds, alone.rounds, strict=False)
            first = next((pair for pair in pairs if _differ(*pair)), None)
            right = first is not None and self._rounding_alone(*first)
            tally.counts["rounding ties"] += right
        what = f"request {among.number} produces {b[:12]} alone and {a[:12]} in a batch"
        tally.expect("requests alone and in a batch", right, what)

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


def _describe(recorder: Recorder, place: JsonObject) -> JsonObject:
    """The request and the round of a difference, for a reader of its replay.json."""
    if "request" not in place:
        return {}
    request = recorder.requests[place["request"]]
    found: JsonObject = {"asked": asdict(request.asked)}
    if "round" not in place:
        return found
    one = request.rounds[place["round"]]
    tokens, parents = one.proposal.tokens_K.tolist(), one.proposal.tree
    return found | {
        "text": one.text,
        "drafts": {"tokens": tokens, "parents": parents, "law": one.proposal.law},
        "outcome": {**one.end._asdict(), "verifier": one.verifier},
        "random_numbers": [x.flatten().tolist() for x in one.verifying],
    }


def _differ(one: RecordedRound, other: RecordedRound) -> bool:
    a, b = one.proposal.tokens_K.tolist(), other.proposal.tokens_K.tolist()
    return a != b or one.end != other.end


def verify(
    config: VerifyConfig, given: Sequence[Prompt], say: Say, only: str = ""
) -> tuple[list[Tally], JsonObject]:
    """Run all checks on the pair that the options name. Returns the checks' figures, and what they
    were run on. Raises UserError for an input that can't be used, or if nothing was drafted."""
    cases, drafter = cases_of(config, say)
    fitting, refused = tokenize_prompts(cases.target, given)
    room = cases.target.context_limit - config.max_new_tokens
    prompts = [tokens for _, tokens in fitting if len(tokens) <= room]
    if not prompts:
        why = refused[0] if refused else f"none leaves room for {config.max_new_tokens} new tokens"
        raise UserError(f"every prompt was rejected: {why}")
    tallies = VerificationRun(config, cases, prompts, say, only=only).run()
    if not only and not tallies[-1].counts["tokens drafted"]:
        what = "nothing was drafted on these prompts, so there is nothing to verify"
        raise UserError(f"{what}: use more prompts, or longer outputs")
    target = cases.target
    on_cpu = target.device.type == "cpu"
    return tallies, {
        "target": target.spec,
        "weights": target.weights,
        "prompts": len(prompts),
        "left_out": len(given) - len(prompts),
        "max_new_tokens": config.max_new_tokens,
        "methods": [case.name for case in (*cases.compared, *cases.drawn)],
        "dtype": target.dtype_name,
        "device": str(target.device),
        "engine": "captured" if cases.captured else "eager",
        "kernels": "C" if on_cpu and rows_library() is not None else "torch",
        "layers": "in one call" if target.fused is not None else "module by module",
        "attention": target.attention,
        "prompted": target.chat.description,
        "machine": machine(),
        "versions": decoding_versions(),
        "git_commit": git_commit(),
        "threads": torch.get_num_threads(),
        "drafter": drafter,
    }
