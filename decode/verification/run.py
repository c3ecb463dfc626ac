"""Runs the six checks over a pair: batches of requests are decoded and recorded, and every round is
checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from time import monotonic
from typing import Any
from unittest import mock

import torch

from decode.engine import engine as engine_module
from decode.engine.decoder import Decoder
from decode.engine.detokenizer import UNFINISHED
from decode.engine.engine import PREFILL_CHUNK, Engine
from decode.evaluation.tokenized import tokenize_prompts
from decode.speculation.sampling import Sampling
from decode.verification import checks, end_to_end, proposals, rules
from decode.verification.checks import Asked
from decode.verification.pair import Cases, VerifyConfig, cases_of
from decode.verification.recording import RecordedRound, Recorder
from decode.verification.reference import Reference
from decode.verification.tally import TITLES, Tally
from specalign.common.errors import UserError
from specalign.common.provenance import decoding_versions, git_commit, machine
from specalign.kernels.linear import rows_library
from specalign.lm.loading import own_model
from specalign.suites.prompt import Prompt

SHORT = 12
"""Tokens of a prompt, counted from its end, that most requests continue."""
LONG, PAST_WINDOW = 600, 40
"""The least length of the long prompt, which exceeds the largest window of attention by at least so
many tokens up to `LONGEST`."""
LONGEST = 2048
LONG_TEXT = 72
"""Tokens of the long texts."""
TOGETHER = 5
"""Requests in one target forward."""
PATHS = 4
"""Of each batch, rounds whose rejected drafts are compared."""
TWO_TOKENS = (0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1)
"""A prompt of two tokens in which every three of them occur. In a text of two tokens long paths are
accepted, and whatever it ends with can be copied."""
CHUNK = 96
"""Tokens of a prompt in one forward pass of the long contexts, so that there are several."""
KEPT = 60
"""Recorded rounds whose p and q go into the check of the rule."""

Say = Callable[[str], object]


@dataclass(frozen=True)
class Batch:
    """Requests that are decoded together: `name` says which, `size` how many in one forward pass,
    `chunk` how many tokens of a prompt."""

    name: str
    decoder: Decoder
    asked: tuple[Asked, ...]
    size: int = TOGETHER
    chunk: int = PREFILL_CHUNK

    def __post_init__(self) -> None:
        """Put requests with the same ends and context next to one another: they are decoded in one
        call."""
        kinds = list(dict.fromkeys(map(_ending, self.asked)))
        object.__setattr__(
            self, "asked", tuple(sorted(self.asked, key=lambda one: kinds.index(_ending(one))))
        )


def _ending(one: Asked) -> tuple[tuple[int, ...] | None, int | None, tuple[str, ...]]:
    return one.eos, one.context, one.stop


def settings(seed: int, common: Sequence[int]) -> list[Sampling]:
    """Every option of a request at two values or more, and all together. `common`: tokens that the
    target likes to say."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.3}, {}, {"temperature": 1.7}, {"top_k": 4}, {"top_k": 50}, {"top_p": 0.5}, {"top_p": 0.9}, {"min_p": 0.02},
        {"min_p": 0.3}, {"repetition_penalty": 1.4}, {"repetition_penalty": 0.8}, {"presence_penalty": 0.8}, {"presence_penalty": -0.6},
        {"banned": tuple(common[:1])}, {"banned": tuple(common[:3])}, {"min_new_tokens": 3}, {"min_new_tokens": 7},
    ]  # fmt: skip
    together = {
        "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.4, "banned": tuple(common[1:2]),
        "min_new_tokens": 5,
    }  # fmt: skip
    options += [{**together, "temperature": 0.6}, {**together, "temperature": 1.3, "top_p": 0.8}]
    return [
        Sampling(**{"temperature": 1.0, "seed": seed + i, **one}) for i, one in enumerate(options)
    ]


class Run:
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
        self.kept: list[RecordedRound] = []
        self.plain = Decoder(self.target)
        self.short = [prompt[-SHORT:] for prompt in sorted(prompts, key=len)]
        self.common: list[int] = []
        self.letters: list[int] = []

    def run(self) -> list[Tally]:
        """Run all checks, and report each batch."""
        new = self.config.max_new_tokens
        with self._time_check("end_to_end") as tally:
            texts = end_to_end.check_plain(self.plain, self.prompts, new, self.reference, tally)
        flat = [token for text in texts for token in text]
        self.common = list(dict.fromkeys(sorted(flat, key=lambda t: -flat.count(t)))) or [0]
        for case in self.cases.compared:
            decoder = self.cases.open(self.target, case)
            with self._time_check("end_to_end") as tally:
                end_to_end.check_greedy(case.name, decoder, self.prompts, texts, new, tally)
            self.say(f"{case.name}: greedy texts")
        self.letters = self._letters()
        for batch in self.batches():
            if not self.only or self.only == batch.name:
                self.check(batch)
            if self.first and any(tally.findings for tally in self.tallies.values()):
                return list(self.tallies.values())
        if not self.only or self.only == "joint law":
            for case in self.cases.drawn[1:3] or self.cases.drawn:
                with self._time_check("end_to_end") as tally:
                    decoder = self.cases.open(self.target, case)
                    if checks.drafts(decoder.drafter, "by_clock"):
                        tally.counts["joint laws left out, because drafts depend on the clock"] += 1
                        continue
                    sampling = Sampling(1.0, top_k=2, seed=5)
                    end_to_end.check_joint_law(
                        case.name, decoder, self.short[0][-16:], self.reference, tally, sampling
                    )
        if not self.only or self.only == "rule":
            with self._time_check("rule") as tally:
                rules.check_rules(tally, self.kept)
        return list(self.tallies.values())

    def batches(self) -> Iterator[Batch]:
        """What is decoded: at every option, greedy, coupled, at every kind of end, over a long
        context."""
        every = settings(1000, self.common)
        for number, case in enumerate(self.cases.drawn):
            decoder = self.cases.open(self.target, case)
            name = f"{case.name}, {case.verifier}"
            # every option with the first rules by ratio; after that each method takes a part
            chosen = every if number == 0 else every[number % 3 :: 3] + every[-1:]
            yield Batch(
                f"{name}: sampled",
                decoder,
                tuple(self._asked(i, one) for i, one in enumerate(chosen)),
            )
            yield Batch(
                f"{name}: two tokens", decoder, tuple(self._of_letters(Sampling(1.0, seed=2000)))
            )
        for case in self.cases.compared:
            decoder = self.cases.open(self.target, case)
            cold = [replace(one, temperature=0.0) for one in every[9:]]
            yield Batch(
                f"{case.name}: greedy",
                decoder,
                tuple(self._asked(i, one) for i, one in enumerate(cold[::2])),
            )
            coupled = self.cases.open(self.target, case, "gumbel")
            yield Batch(
                f"{case.name}: coupled",
                coupled,
                (
                    *(self._asked(i, one) for i, one in enumerate(every[1::5])),
                    *self._of_letters(Sampling(1.0, seed=2000)),
                ),
            )
        for case, own in (
            *((one, Sampling()) for one in self.cases.compared[-1:]),
            *((one, Sampling(1.0, seed=7)) for one in self.cases.drawn[:1]),
        ):
            long = self._long_prompt()
            two = (Asked(tuple(long), own, 10), Asked(tuple(long[-len(long) // 2 :]), own, 10))
            yield Batch(
                f"{case.name}: long context", self.cases.open(self.target, case), two, 2, CHUNK
            )
        for case in self.cases.drawn[:1]:
            for verifier in (None, "gumbel"):
                decoder = self.cases.open(self.target, case, verifier)
                asked = Asked(tuple(self.short[0]), every[-1], LONG_TEXT)
                yield Batch(
                    f"{case.name}, {verifier or case.verifier}: long text", decoder, (asked,), 1
                )
        for case in self.cases.compared[-1:]:
            decoder = self.cases.open(self.target, case)
            yield Batch(f"{case.name}: ends", decoder, tuple(self._ends()))

    def _long_prompt(self) -> list[int]:
        """The longest prompt; where it is short, all of them, one after the other and again."""
        windows = [
            getattr(self.target.config, name, None) or 0
            for name in ("sliding_window", "attention_chunk_size")
        ]
        most = max(LONG, min(max(windows) + PAST_WINDOW, LONGEST))
        longest, room = max(self.prompts, key=len), min(most, self.target.context_limit - 16)
        together = [token for prompt in self.prompts for token in prompt]
        return longest if len(longest) >= room else (together * (1 + room // len(together)))[:room]

    def _asked(self, i: int, sampling: Sampling) -> Asked:
        prompt = self.short[i % len(self.short)]
        if i % 3 == 1:
            prompt = prompt[-4:] * 3  # something to copy
        eos = tuple(self.common[:2]) if sampling.min_new_tokens else None
        return Asked(
            tuple(prompt), sampling, max(8 + 3 * (i % 3), sampling.min_new_tokens + 1), eos=eos
        )

    def _letters(self) -> list[int]:
        """The two tokens that are drafted most often."""
        asked = [
            Asked(tuple(prompt), Sampling(1.0, seed=i), 12) for i, prompt in enumerate(self.short)
        ]
        decoder = self.cases.open(self.target, self.cases.compared[0])
        recorder = self._decode(Batch("", decoder, tuple(asked)), asked)
        drafted = [token for one in recorder.rounds for token in one.proposal.tokens_K.tolist()]
        ranked = Counter([*drafted, *self.common, 0, 1]).most_common()
        return [token for token, _ in ranked if token not in self.target.eos_ids][:2]

    def _of_letters(self, sampling: Sampling) -> Iterator[Asked]:
        """Requests whose texts consist of two tokens: one setting and consecutive seeds."""
        prompt = tuple(self.letters[i] for i in TWO_TOKENS)
        own = replace(sampling, banned=self._all_but(self.letters))
        for i in range(3):
            yield Asked(prompt, replace(own, seed=own.fixed_seed + i), 16)

    def _all_but(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(i for i in range(self.target.vocab_size) if i not in tokens)

    def _ends(self) -> Iterator[Asked]:
        """Requests that end in every way, at every place of a block."""
        given = tuple(self.short[0])
        text = self.plain.generate(list(given), max_new_tokens=12).tokens
        for new in (5, 3, 2, 1):
            yield Asked(given, Sampling(), new)
        for at in range(1, min(6, len(text))):
            yield Asked(given, Sampling(), 12, eos=(text[at],))
        unused = next(i for i in range(self.target.vocab_size - 1, 0, -1) if i not in text)
        for at in range(1, min(4, len(text))):
            yield Asked(given, Sampling(), 12, eos=(unused, text[at], text[-1]))
        words = self.target.decode(text)
        yield Asked(
            given, Sampling(), 12, stop=(words[12:15] or "x", "never there", words[6:9] or "y")
        )
        for start in range(1, min(len(words) - 4, 20), 5):
            yield Asked(given, Sampling(), 12, stop=(words[start : start + 4],))
        special = next(
            (i for i in self.target.tokenizer.all_special_ids if i < self.target.vocab_size), None
        )
        if special is not None:
            own = Sampling(1.0, seed=3, banned=self._all_but([special, *self.letters]))
            name = self.target.tokenizer.convert_ids_to_tokens(special)
            for stop in (name, self.target.decode(self.letters[:1]) + name):
                yield Asked(given, own, 12, stop=(stop,), eos=())
        every = range(self.target.vocab_size)
        half = next((i for i in every if self.target.decode([i]) == UNFINISHED), None)
        if half is not None:  # texts that end within a character
            banned = self._all_but([half, *self.letters])
            for new in range(1, 9):
                yield Asked(given, Sampling(1.0, seed=new, banned=banned), new, eos=())
        for room in (1, 3, 6):
            yield Asked(given, Sampling(), 12, context=len(given) + room)

    def check(self, batch: Batch) -> None:
        """Decode a batch, record it, and check every round."""
        started = {name: len(tally.findings) for name, tally in self.tallies.items()}
        recorder = self._decode(batch, batch.asked)
        with self._time_check("rows") as tally:
            checks.check_rows(recorder, batch.asked, self.reference, tally, PATHS)
        background = checks.drafts(batch.decoder.drafter, "in_background")
        if not background:
            with self._time_check("proposals") as tally:
                checks.check_drafts(recorder, batch.asked, tally)
        with self._time_check("randomness") as tally:
            checks.check_decisions(recorder, batch.asked, tally)
            if background:
                tally.counts[
                    "batches drafted in the background, whose drafts' random numbers are not "
                    "followed"
                ] += 1
            else:
                checks.check_randomness(recorder, batch.asked, tally)
            if background or checks.drafts(batch.decoder.drafter, "by_clock"):
                tally.counts[
                    "batches whose drafts depend on the clock, not compared with requests alone"
                ] += 1
            elif batch.size > 1:
                self._check_company(recorder, batch, len(batch.asked) // 2, tally)
        with self._time_check("commit") as tally:
            checks.check_commit(recorder, batch.asked, self.target, tally)
        self.kept += [one for one in recorder.rounds if one.by_rule][
            : max(0, KEPT - len(self.kept))
        ]
        found = 0
        for name, tally in self.tallies.items():
            for finding in tally.findings[started[name] :]:
                finding.place["batch"] = batch.name
                if found == 0:
                    finding.place.update(_describe(recorder, batch, finding.place))
                found += 1
        rounds = len(recorder.rounds)
        self.say(
            f"{batch.name}: {len(batch.asked)} requests, {rounds} rounds"
            + (f", {found} DIFFERENCES" if found else "")
        )

    def _decode(self, batch: Batch, asked: Sequence[Asked]) -> Recorder:
        """Decode and record requests, those with other ends or another context apart."""
        done: set[int] = set()
        tally = self.tallies["proposals"]

        def before_draft(engine: Engine) -> None:
            number = recorder.engines.index(engine)
            if (
                asked is batch.asked
                and not checks.drafts(engine.drafter, "in_background")
                and len(engine.out.tokens) > 1
                and number in (0, len(asked) - 1)
                and number not in done
            ):
                done.add(number)
                started = monotonic()
                with torch._C.DisableTorchFunction():  # these draws are not the request's
                    proposals.check_proposal_of(engine, tally, batch.name)
                tally.seconds += monotonic() - started

        recorder = Recorder(before_draft)
        with recorder:
            for (eos, context, stop), together in groupby(asked, key=_ending):
                group = list(together)
                chunk = mock.patch.object(engine_module, "PREFILL_CHUNK", batch.chunk)
                with self.target.overridden(eos, context), chunk:
                    batch.decoder.generate_batch(
                        [list(one.prompt) for one in group], batch_size=batch.size, max_new_tokens=[one.new for one in group],
                        sampling=_as_one([one.sampling for one in group]), stop=list(stop) or None,
                    )  # fmt: skip
        return recorder

    def _check_company(self, recorder: Recorder, batch: Batch, number: int, tally: Tally) -> None:
        """A request alone writes what it wrote among others."""
        alone = self._decode(batch, [batch.asked[number]])
        tally.counts["requests alone and among others"] += 1
        a, b = recorder.engines[number].out.tokens, alone.engines[0].out.tokens
        if a == b:
            return
        own = [one for one in recorder.rounds if one.request == number]
        pairs = zip(own, alone.rounds, strict=False)
        first = next((pair for pair in pairs if _differ(*pair)), None)
        if first is not None and self._rounding_alone(*first):
            tally.counts["rounding ties"] += 1
            return
        tally.find(
            f"request {number} writes {b[:12]} alone and {a[:12]} among others", request=number
        )

    def _rounding_alone(self, one: RecordedRound, other: RecordedRound) -> bool:
        """Whether two rounds with the same random numbers differ by no more than rounding
        explains."""
        same_numbers = all(
            torch.equal(x, y) for x, y in zip(one.verifying, other.verifying, strict=False)
        )
        row_V, other_V = one.logits_MV[0], other.logits_MV[0]
        gap = 2 * float((row_V.double() - other_V.double()).abs().nan_to_num(nan=0).max())
        finite_V = row_V.masked_fill(~row_V.isfinite(), 0)
        return same_numbers and 0 < gap <= self.reference.rounding_limit(one.text, finite_V, gap)

    @contextmanager
    def _time_check(self, name: str) -> Iterator[Tally]:
        started = monotonic()
        yield self.tallies[name]
        self.tallies[name].seconds += monotonic() - started


def _as_one(settings: list[Sampling]) -> Sampling | list[Sampling]:
    """The first of several settings that differ in consecutive seeds alone."""
    first = settings[0]
    consecutive = [replace(first, seed=first.fixed_seed + i) for i in range(len(settings))]
    return first if len(settings) > 1 and settings == consecutive else settings


def _describe(recorder: Recorder, batch: Batch, place: dict[str, Any]) -> dict[str, Any]:
    """The request and the round of a difference, for a reader of its replay.json."""
    number = place.get("request")
    if number is None:
        return {}
    rounds = [one for one in recorder.rounds if one.request == number]
    found: dict[str, Any] = {"asked": asdict(batch.asked[number])}
    if "round" in place:
        one = rounds[place["round"]]
        drafts = {
            "tokens": one.proposal.tokens_K.tolist(),
            "parents": one.proposal.tree,
            "law": one.proposal.law,
        }
        outcome = {
            "accepted": one.end.accepted,
            "following": one.end.following,
            "verifier": one.verifier,
        }
        numbers = [x.flatten().tolist() for x in one.verifying]
        found |= {"text": one.text, "drafts": drafts, "outcome": outcome, "random_numbers": numbers}
    return found


def _differ(one: RecordedRound, other: RecordedRound) -> bool:
    return (
        one.proposal.tokens_K.tolist() != other.proposal.tokens_K.tolist() or one.end != other.end
    )


def verify(
    config: VerifyConfig, given: Sequence[Prompt], say: Say, only: str = ""
) -> tuple[list[Tally], dict[str, Any]]:
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
    tallies = Run(config, cases, prompts, say, only=only).run()
    if not only and not tallies[-1].counts["tokens drafted"]:
        raise UserError(
            "nothing was drafted on these prompts, so nothing is shown: take more of them, or "
            "longer outputs"
        )
    return tallies, {**about(config, cases, len(prompts), len(given)), "drafter": drafter}


def about(config: VerifyConfig, cases: Cases, prompts: int, given: int) -> dict[str, Any]:
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
