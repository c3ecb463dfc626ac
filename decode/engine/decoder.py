"""The Python API: a `Decoder` answers prompts. `decode.load` makes one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from numbers import Integral
from typing import Any, Unpack

import torch

from decode.engine.loop import EagerEngine
from decode.engine.output import MAX_NEW_TOKENS, Generation
from decode.engine.prompts import Prompt, Tool, list_prompts, prompt_tokens
from decode.engine.request import Engine, RequestRunner
from decode.proposers.base import Proposer
from decode.speculation.settings import Sampling, SamplingOptions, read_sampling
from decode.speculation.verifiers import check_pair, choose, find
from specalign.common.errors import UserError, nearest
from specalign.common.text import plural
from specalign.lm.model import Target


class GenerateOptions(SamplingOptions, total=False):
    sampling: Sampling | Sequence[Sampling] | None
    tools: Sequence[Tool] | None
    stop: str | Sequence[str] | None
    raw: bool
    trace: bool
    adapt: bool | None


class Decoder:
    """A target and its drafter. Its methods keep no state between calls. Each sampled request has a
    new seed unless one is given, and `Generation.seed` records it. A seed makes outputs
    reproducible, unless drafting depends on timing (the system `duo`).

    Args:
        target: the model whose output distribution is preserved.
        drafter: None = plain decoding.
        verifier: a name in `decode.speculation.verifiers.VERIFIERS`, or auto.
        engine: None = eager.
    """

    def __init__(
        self,
        target: Target,
        drafter: Proposer | None = None,
        verifier: str = "auto",
        engine: Engine | None = None,
    ) -> None:
        if verifier != "auto":
            find(verifier)
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.run_rounds = (engine or EagerEngine()).run_rounds

    def __repr__(self) -> str:
        return f"<Decoder of {self.target.spec}: {self.name}, verifier {self.verifier}>"

    @property
    def name(self) -> str:
        """The drafter's name; `plain` without one."""
        return "plain" if self.drafter is None else self.drafter.name

    def verifier_for(self, sampling: Sampling) -> str:
        """The verifier used under these settings. Raises UserError for one that would change the
        output's distribution."""
        law = self.drafter.law(sampling) if self.drafter is not None else "point"
        name = choose(law, sampling.temperature) if self.verifier == "auto" else self.verifier
        return name if self.drafter is None else check_pair(law, name, sampling.temperature).name

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        stream: Callable[[str], object] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Continue a prompt.

        Args:
            prompt: a user message; a conversation, as a list of messages or in any other row format
                of `data.prompts`; or tokens: a list, a tensor with one row, or a tokenizer's
                output.
            max_new_tokens: the output ends after this many, at EOS, at a stop string or when the
                context is full.
            stream: called with pieces of the text, which together form `Generation.text`.
                Exceptions that it raises end the generation and propagate to the caller.
            sampling: a `Sampling` (default: greedy), or its fields as keyword arguments:
                `temperature=0.7, seed=1`.
            tools: functions or JSON schemas passed to the chat template.
            stop: the text ends before the first of these strings, which may be special tokens
                (`<|im_end|>`).
            raw: continue a string as plain text, without a chat template.
            trace: record every round in `Generation.trace`.
            adapt: whether decoders of `decode.load` draft less, or nothing, where that is faster.
                Default: yes, except for drawn drafts of a single request or one with a seed, whose
                text would depend on the clock.

        Raises:
            UserError: an argument is invalid, or the verifier would change the output's
                distribution.
        """
        if stream is not None and not callable(stream):
            hint = "to iterate: for piece in decoder.stream(…)"
            raise UserError(f"stream={stream!r}: must be a function; {hint}")
        return self._run(self._make_runners([prompt], max_new_tokens, stream, options), 1)[0]

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = MAX_NEW_TOKENS,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Continue a prompt piece by piece: `for piece in decoder.stream(prompt): print(piece,
        end="")`. Takes the same arguments as `generate` and yields the same text. Afterwards the
        iterator's `output` holds the `Generation`; `close()` stops early."""
        pieces: list[str] = []
        [runner] = self._make_runners([prompt], max_new_tokens, pieces.append, options)
        return Stream(runner, self.run_rounds([runner]), pieces)

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int | Sequence[int] = MAX_NEW_TOKENS,
        *,
        batch_size: int = 32,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]:
        """Continue many prompts, `batch_size` at a time per target forward pass; when one finishes,
        the next one starts.

        Each output equals what `generate` returns for its prompt, sampling and seed, except for
        rounding in larger matrix products and for drafters that depend on timing. The times of a
        request include forward passes that it shared with others.

        Args:
            prompts, max_new_tokens and the options: as in `generate`; `max_new_tokens` and
                `sampling` can be a single value or one per prompt. With a single `Sampling`,
                request i uses its seed plus i.
        """
        size = _check_count("batch_size", batch_size)
        runners = self._make_runners(list_prompts(prompts), max_new_tokens, None, options)
        return self._run(runners, size)

    @torch.no_grad()
    def _run(self, runners: Sequence[RequestRunner], most: int) -> list[Generation]:
        for _ in self.run_rounds(runners, most):
            pass
        return [runner.out for runner in runners]

    def _make_runners(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | Sequence[int],
        stream: Callable[[str], object] | None,
        options: GenerateOptions,
    ) -> list[RequestRunner]:
        """Checked requests that have not begun."""
        known = {*GenerateOptions.__optional_keys__, "max_new_tokens"}
        for name in options:
            if name not in known:
                raise UserError(f"unknown option {name!r}{nearest(name, known)}")
        rows = []
        for index, prompt in enumerate(prompts):
            try:
                raw, tools = options.get("raw", False), options.get("tools")
                rows.append(prompt_tokens(self.target, prompt, raw, tools=tools))
            except UserError as error:
                where = f"prompts[{index}]: " if len(prompts) > 1 else ""
                raise UserError(f"{where}{error}") from None
        settings = _sampling_of_each(options, len(rows))
        limits = max_new_tokens
        if not isinstance(limits, Sequence):
            limits = [limits] * len(rows)
        for name, each in (("sampling", settings), ("max_new_tokens", limits)):
            if len(each) != len(rows):
                values, wanted = plural(len(each), "value"), plural(len(rows), "prompt")
                raise UserError(f"{name} has {values} for {wanted}")
        stops = _read_stops(options.get("stop"))
        runners = [
            self._make_runner(tokens, limit, sampling, stops, stream)
            for tokens, limit, sampling in zip(rows, limits, settings, strict=True)
        ]
        adapt = options.get("adapt")
        for runner, sampling in zip(runners, settings, strict=True):
            runner.tracing = bool(options.get("trace"))
            runner.adapt = adapt
            if adapt is None and sampling.seed is None and len(runners) > 1:
                runner.adapt = True  # a single request can be repeated by the seed of its output
        return runners

    def _make_runner(
        self,
        tokens: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        stops: Sequence[str],
        stream: Callable[[str], object] | None,
    ) -> RequestRunner:
        limit, size = _check_count("max_new_tokens", max_new_tokens), self.target.vocab_size
        verifier = self.verifier_for(sampling)
        if max(sampling.banned, default=0) >= size:
            raise UserError(f"banned: token {max(sampling.banned)} is not within 0..{size - 1}")
        if sampling.min_new_tokens > limit:
            least = sampling.min_new_tokens
            raise UserError(f"min_new_tokens={least}: more than max_new_tokens={limit}")
        seeded = _give_seed(sampling)
        return RequestRunner(
            self.target, tokens, limit, seeded, self.drafter, verifier, stops, stream
        )


class Stream(AbstractContextManager["Stream"]):
    """Iterates over pieces of an answer while it is generated; together they form
    `Generation.text`. Nothing runs between two pieces, and leaving the loop early ends the
    generation.

    Args:
        runner: a request that has not started. rounds: the engine that runs it.
        pieces: the list to which the engine appends its pieces of text.
    """

    def __init__(
        self, runner: RequestRunner, rounds: Generator[None, None, None], pieces: list[str]
    ) -> None:
        self._runner = runner
        self._pieces = _iterate(runner, rounds, pieces)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the generation. An incomplete output gets the finish reason `closed` and keeps all
        committed tokens, which can be a few more than were returned."""
        self._pieces.close()
        self._runner.cancel()

    @property
    def output(self) -> Generation:
        """The output with its counts and times. Raises UserError before the end."""
        if not self._runner.out.finish:
            raise UserError("the stream has not ended: iterate to its end, or close() it, first")
        return self._runner.out


@torch.no_grad()
def _iterate(
    runner: RequestRunner, rounds: Generator[None, None, None], pieces: list[str]
) -> Generator[str, None, Generation]:
    """Run the request."""
    with closing(rounds):
        for _ in rounds:
            while pieces:
                yield pieces.pop(0)
    return runner.out


def _read_stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    if not all(isinstance(s, str) and s for s in stops):
        raise UserError(f"stop={stop!r}: must be non-empty strings")
    return stops


def _check_count(name: str, value: object) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name}={value!r}: must be a whole number, at least 1")
    return int(value)


def _sampling_of_each(options: GenerateOptions, count: int) -> list[Sampling]:
    """The settings of each request: with one for all, request i has its seed plus i."""
    sampling = options.get("sampling")
    fields = {k: v for k, v in options.items() if k in SamplingOptions.__optional_keys__}
    if isinstance(sampling, list | tuple):
        if fields:
            raise UserError(f"pass either a list of Sampling or {next(iter(fields))}=…, not both")
        return [read_sampling(one, {}) for one in sampling]
    first = read_sampling(sampling, fields)  # type: ignore[arg-type]
    if first.seed is None:
        return [first] * count
    return [replace(first, seed=(first.seed + i) % 2**63) for i in range(count)]


def _give_seed(sampling: Sampling) -> Sampling:
    if sampling.greedy or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=secrets.randbits(32))  # short enough to copy
