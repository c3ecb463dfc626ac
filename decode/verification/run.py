"""Runs the six checks on a target and drafter: decodes and records batches of requests, and checks
every round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any
from unittest import mock

import torch

from decode.engine import engine as engine_module
from decode.engine.decoder import Decoder
from decode.engine.engine import RequestRunner, run_rounds
from decode.evaluation.tokenized import tokenize_prompts
from decode.speculation.sampling import Sampling
from decode.systems.construction import build
from decode.systems.opening import open_drafters
from decode.systems.parsing import Method
from decode.verification import checks, end_to_end, proposals, rules
from decode.verification.options import VerifyConfig
from decode.verification.recording import Recorder
from decode.verification.reference import Reference
from decode.verification.requests import Asked, RequestBatch, Requests, drafts_so
from decode.verification.verdict import TITLES, Tally
from specalign.common.errors import UserError
from specalign.common.provenance import decoding_versions, git_commit, machine
from specalign.common.schema import JsonObject
from specalign.kernels.linear import rows_library
from specalign.lm.loading import load_target, own_model
from specalign.lm.model import Target
from specalign.lm.names import DEFAULT_TARGET
from specalign.suites.prompt import Prompt

Say = Callable[[str], object]


@dataclass(frozen=True)
class VerifiedPair:
    """A target with decoders by name. compared: the names of those whose texts are compared at
    temperature 0 and coupled, too. own: the target's model as transformers runs it. new: tokens of
    greedy texts."""

    target: Target
    own: Any
    prompts: list[list[int]]
    decoders: Mapping[str, Decoder] = field(default_factory=dict)
    compared: Sequence[str] = ()
    new: int = 8
    drafters: str = ""
    left_out: int = 0

    def describe(self) -> JsonObject:
        """What the checks are run on, for the verdict."""
        target, on_cpu = self.target, self.target.device.type == "cpu"
        return {
            "target": target.spec,
            "weights": target.weights,
            "drafter": self.drafters,
            "methods": [*self.decoders],
            "prompts": len(self.prompts),
            "prompts left out because they are too long": self.left_out,
            "greedy tokens": self.new,
            "prompted": target.chat.description,
            "dtype": target.dtype_name,
            "device": str(target.device),
            "kernels": "C" if on_cpu and rows_library() is not None else "torch",
            "layers": "in one call" if target.fused is not None else "module by module",
            "attention": target.attention,
            "threads": torch.get_num_threads(),
            "commit": git_commit(),
            "versions": decoding_versions(),
            "machine": machine(),
        }


def open_pair(
    config: VerifyConfig,
    drafters: Mapping[str, str],
    methods: Sequence[Method],
    left_out: list[str],
    given: Sequence[Prompt],
    say: Say,
) -> VerifiedPair:
    """The pair of the options, with these drafters and methods. `say` gets a line for each method
    of `all` that is left out. Raises UserError for an input that can't be used, or a method that
    was named and can't be verified."""
    target = load_target(
        config.target or DEFAULT_TARGET,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        template_kwargs=config.template_kwargs,
        system=config.system,
    )
    opened = open_drafters(methods, drafters, target, config.drafter_tokenizer)
    named = [name.strip() for name in (config.methods or "").split(",")]
    decoders: dict[str, Decoder] = {}
    for method in methods:
        try:
            decoders[method.name] = build(method, opened)
        except UserError as error:
            if method.name in named:
                raise
            left_out.append(str(error))
    for line in left_out:
        say(f"left out: {line}")
    if not decoders:
        raise UserError(f"--methods={config.methods!r} names nothing to verify")
    fitting, refused = tokenize_prompts(target, given)
    room = target.context_limit - config.max_new_tokens
    prompts = [tokens for _, tokens in fitting if len(tokens) <= room]
    if not prompts:
        why = refused[0] if refused else f"none leaves room for {config.max_new_tokens} new tokens"
        raise UserError(f"no prompt can be answered: {why}")
    name = ", ".join(f"{kind}={folder}" for kind, folder in drafters.items()) or "none"
    # of the default methods, one verifier each
    compared = [one for one in decoders if config.methods or ":verifier=" not in one]
    compared = compared or [*decoders]
    left, new = len(given) - len(prompts), config.max_new_tokens
    return VerifiedPair(target, own_model(target), prompts, decoders, compared, new, name, left)


class VerificationRun:
    """The checks of a pair.

    Args:
        only: the name of the one batch, or check, that is run again.
        first: end after the first batch with a difference.
    """

    def __init__(
        self, pair: VerifiedPair, say: Say = lambda _: None, only: str = "", first: bool = False
    ) -> None:
        self.pair, self.target, self.say = pair, pair.target, say
        self.only, self.first = only, first
        self.reference = Reference(self.target, pair.own)
        self.tallies = {name: Tally(name) for name in TITLES}
        self.plain = Decoder(self.target)
        self.requests = Requests(self.target, pair.prompts)

    def run(self) -> list[Tally]:
        """Run all checks, and report each batch."""
        pair, tallies = self.pair, list(self.tallies.values())
        self._check_greedy_texts()
        for batch in self.requests.batches(pair.decoders, pair.compared, self.plain):
            if self.only in ("", batch.name):
                self.check(batch)
            if self.first and any(tally.findings for tally in tallies):
                return tallies
        if self.only in ("", "joint law"):
            self._check_joint_laws()
        if self.only in ("", "rule"):
            with self.tallies["rule"].measure_time() as tally:
                rules.check_rules(tally)
        return tallies

    def _check_greedy_texts(self) -> None:
        texts: list[list[int]] = []
        given = self.pair.prompts, self.pair.new
        drafters = {name: self.pair.decoders[name].drafter for name in self.pair.compared}
        with self.tallies["end_to_end"].measure_time() as tally:
            for name, drafter in {"plain": None, **drafters}.items():
                decoder = Decoder(self.target, drafter)
                found = end_to_end.check_greedy(name, decoder, *given, texts, self.reference, tally)
                texts = texts or found
                self.say(f"{name}: greedy texts")
        self.requests.common = [token for token, _ in Counter(sum(texts, [])).most_common()]
        # the two tokens that are drafted most often
        seeded = enumerate(self.requests.short)
        asked = tuple(Asked(prompt, Sampling(1.0, seed=i), 12) for i, prompt in seeded)
        recorder = self._decode(RequestBatch("", next(iter(self.pair.decoders.values())), asked))
        drafts = [one.proposal.tokens_K.tolist() for one in recorder.rounds]
        ranked = Counter([*sum(drafts, []), *self.requests.common, 0, 1]).most_common()
        fitting = [token for token, _ in ranked if token not in self.target.eos_ids]
        self.requests.letters = fitting[:2]

    def _check_joint_laws(self) -> None:
        sampling, prompt = Sampling(1.0, top_k=2, seed=5), list(self.requests.short[0][-4:])
        each = list(self.pair.decoders.items())
        for name, decoder in each[1:3] or each:
            with self.tallies["end_to_end"].measure_time() as tally:
                if drafts_so(decoder.drafter, "by_clock"):
                    tally.counts["joint distributions skipped: drafts depend on timing"] += 1
                    continue
                given = (decoder, prompt, self.reference, tally, sampling)
                end_to_end.check_joint_law(name, *given)

    def check(self, batch: RequestBatch) -> None:
        """Decode a batch, record it, and check every round."""
        started = {name: len(tally.findings) for name, tally in self.tallies.items()}
        background = drafts_so(batch.decoder.drafter, "in_background")
        recorder = self._decode(batch)
        with self.tallies["rows"].measure_time() as tally:
            checks.check_rows(recorder, self.reference, tally)
        with self.tallies["randomness"].measure_time() as tally:
            checks.check_decisions(recorder, tally)
            if background:
                tally.counts["batches drafted in the background: random numbers not checked"] += 1
            else:
                checks.check_randomness(recorder, tally)
        with self.tallies["proposals"].measure_time() as tally:
            if not background:
                proposals.check_drafts(recorder, tally)
                self._check_proposals(batch, tally)
        with self.tallies["commit"].measure_time() as tally:
            checks.check_commit(recorder, self.target, tally)
        found = [x for name, n in started.items() for x in self.tallies[name].findings[n:]]
        for finding in found:
            finding.place["batch"] = batch.name
        for finding in found[:1]:
            request = recorder.requests[finding.place.get("request", 0)]
            finding.place["asked"] = asdict(request.asked)
            for one in request.rounds[finding.place.get("round", len(request.rounds)) :][:1]:
                drafts = {"tokens": one.proposal.tokens_K.tolist(), "parents": one.proposal.tree}
                finding.place |= {"text": one.text, "drafts": drafts, "outcome": one.end}
        differences = f", {len(found)} DIFFERENCES" if found else ""
        counts = f"{len(batch.asked)} requests, {len(recorder.rounds)} rounds"
        self.say(f"{batch.name}: {counts}{differences}")

    def _decode(self, batch: RequestBatch) -> Recorder:
        """Decode and record the requests of a batch, those with other ends or another context
        apart."""
        recorder = Recorder(batch.asked)
        with recorder, mock.patch.object(engine_module, "PREFILL_CHUNK", batch.chunk):
            for (eos, context, stop), together in groupby(
                batch.asked, key=lambda one: (one.eos, one.context, one.stop)
            ):
                group = list(together)
                with self.target.overridden(eos, context):
                    batch.decoder.generate_batch(
                        [list(one.prompt) for one in group],
                        [one.new for one in group],
                        batch_size=batch.size,
                        sampling=_as_one([one.sampling for one in group]),
                        stop=list(stop) or None,
                    )
        return recorder

    @torch.no_grad()
    def _check_proposals(self, batch: RequestBatch, tally: Tally) -> None:
        """Enumerate what the first and the last request draft after one round."""
        drafter = batch.decoder.drafter
        for asked in dict.fromkeys((batch.asked[0], batch.asked[-1])):
            verifier = batch.decoder.verifier_for(asked.sampling)
            point = drafter is None or drafter.law(asked.sampling) == "point"
            if point or verifier == "gumbel":  # nothing is drawn
                continue
            with self.target.overridden(asked.eos, asked.context):
                given = (list(asked.prompt), asked.new, asked.sampling, drafter, verifier)
                runner = RequestRunner(self.target, *given)
            rounds = run_rounds([runner])
            next(rounds), next(rounds, None)
            if not runner.out.finish:
                proposals.check_proposals(runner, tally, batch.name)
            rounds.close()


def _as_one(settings: list[Sampling]) -> Sampling | list[Sampling]:
    """The first of several settings that differ in consecutive seeds alone."""
    first = settings[0]
    consecutive = [replace(first, seed=first.fixed_seed + i) for i in range(len(settings))]
    return first if len(settings) > 1 and settings == consecutive else settings


def verify(pair: VerifiedPair, say: Say, only: str = "") -> list[Tally]:
    """Run all checks; `only`: one batch or check. Raises UserError if nothing was drafted."""
    tallies = VerificationRun(pair, say, only).run()
    if not only and not tallies[-1].counts["tokens drafted"]:
        what = "nothing was drafted on these prompts, so there is nothing to verify"
        raise UserError(f"{what}: use more prompts, or longer outputs")
    return tallies
