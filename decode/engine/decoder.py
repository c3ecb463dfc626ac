"""The Python API: a `Decoder` answers prompts. `decode.load` makes one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Unpack

import numpy as np
from torch import Tensor

from decode.engine.engine import RequestRunner, run_batch
from decode.engine.output import MAX_NEW_TOKENS, Generation
from decode.engine.prompts import Prompt, Tool, prompt_tokens
from decode.engine.stream import Stream
from decode.proposers.base import Proposer
from decode.speculation.settings import Sampling, SamplingOptions, read_sampling
from decode.speculation.verifiers import check_pair, choose, find
from specalign.common.errors import UserError, nearest
from specalign.common.text import short
from specalign.lm.model import Target
from specalign.rows.conversation import is_message

LOADING_OPTIONS = (
    "drafter", "verifier", "dtype", "device", "draft_tokens", "tree_nodes", "copying", "steps",
    "order", "method", "template_kwargs", "system",
)  # fmt: skip
"""Of `decode.load`, for the error where one is passed to `generate`."""


class GenerateOptions(SamplingOptions, total=False):
    sampling: Sampling | None
    tools: Sequence[Tool] | None
    stop: str | Sequence[str] | None
    raw: bool
    trace: bool


class BatchOptions(GenerateOptions, total=False):
    sampling: Sampling | Sequence[Sampling] | None  # type: ignore[misc]


class Decoder:
    """A target and its drafter. Its methods keep no state between calls. Each sampled request has a
    new seed unless one is given, and `Generation.seed` records it. A seed makes outputs
    reproducible, unless drafting depends on timing (`controller=cost`).

    Args:
        target: the model whose output distribution is preserved.
        drafter: None = plain decoding.
        verifier: a name in `decode.speculation.verifiers.VERIFIERS`, or auto.
    """

    def __init__(
        self, target: Target, drafter: Proposer | None = None, verifier: str = "auto"
    ) -> None:
        if verifier != "auto":
            find(verifier)
        self.target, self.drafter, self.verifier = target, drafter, verifier

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

        Raises:
            UserError: an argument is invalid, or the verifier would change the output's
                distribution.
        """
        if stream is not None and not callable(stream):
            hint = "to iterate: for piece in decoder.stream(…)"
            raise UserError(f"stream={stream!r}: must be a function; {hint}")
        tokens = self._read_prompt(prompt, options)
        return self._make_runners([tokens], max_new_tokens, stream, options)[0].run()

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
        tokens = self._read_prompt(prompt, options)
        return Stream(
            self._make_runners([tokens], max_new_tokens, pieces.append, options)[0], pieces
        )

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int | Sequence[int] = MAX_NEW_TOKENS,
        *,
        batch_size: int = 32,
        **options: Unpack[BatchOptions],
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
        rows = []
        for index, prompt in enumerate(_list_prompts(prompts)):
            try:
                rows.append(self._read_prompt(prompt, options))
            except UserError as error:
                raise UserError(f"prompts[{index}]: {error}") from None
        runners = self._make_runners(rows, max_new_tokens, None, options)
        run_batch(runners, size)
        return [runner.out for runner in runners]

    def _read_prompt(self, prompt: Prompt, options: Mapping[str, Any]) -> list[int]:
        raw, tools = options.get("raw", False), options.get("tools")
        return prompt_tokens(self.target, prompt, raw, tools=tools)

    def _make_runners(
        self,
        rows: Sequence[list[int]],
        max_new_tokens: int | Sequence[int],
        stream: Callable[[str], object] | None,
        options: Mapping[str, Any],
    ) -> list[RequestRunner]:
        """Checked requests that have not begun."""
        known = {*GenerateOptions.__optional_keys__, "max_new_tokens"}
        for name in options:
            if name in LOADING_OPTIONS:
                raise UserError(f"{name!r} is an option of decode.load")
            if name not in known:
                raise UserError(f"unknown option {name!r}{nearest(name, known)}")
        fields = {k: v for k, v in options.items() if k in SamplingOptions.__optional_keys__}
        settings = _sampling_of_each(options.get("sampling"), fields, len(rows))
        limits = max_new_tokens
        if not isinstance(limits, Sequence):
            limits = [limits] * len(rows)
        for name, each in (("sampling", settings), ("max_new_tokens", limits)):
            if len(each) != len(rows):
                raise UserError(f"{name}: {len(each)} for {len(rows)} prompts")
        stops = _read_stops(options.get("stop"))
        runners = [
            self._make_runner(tokens, limit, sampling, stops, stream)
            for tokens, limit, sampling in zip(rows, limits, settings, strict=True)
        ]
        for runner in runners:
            runner.tracing = bool(options.get("trace"))
        return runners

    def _make_runner(
        self,
        tokens: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        stops: Sequence[str],
        stream: Callable[[str], object] | None,
    ) -> RequestRunner:
        limit = _check_count("max_new_tokens", max_new_tokens)
        verifier = self.verifier_for(sampling)
        check_banned(sampling, self.target)
        if sampling.min_new_tokens > limit:
            least = sampling.min_new_tokens
            raise UserError(f"min_new_tokens={least}: more than max_new_tokens={limit}")
        return RequestRunner(
            self.target, tokens, limit, sampling, self.drafter, verifier, stops, stream
        )


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


def _list_prompts(prompts: Any) -> list[Prompt]:
    """The prompts of a batch. Raises UserError for one prompt or for padded rows of tokens."""
    single = isinstance(prompts, str | Mapping | Tensor | np.ndarray)
    single = single or not isinstance(prompts, Iterable)
    found = [] if single else list(prompts)
    first = found[0] if found else None
    if single or (isinstance(first, Mapping) and ("role" in first or is_message(dict(first)))):
        raise UserError(f"generate_batch takes a list of prompts, not {short(prompts, 60)}")
    return found


def _sampling_of_each(
    sampling: Sampling | Sequence[Sampling] | None, fields: Mapping[str, Any], count: int
) -> list[Sampling]:
    """The settings of each request: with one for all, request i has its seed plus i."""
    if isinstance(sampling, list | tuple):
        if fields:
            raise UserError(f"sampling for each prompt and {next(iter(fields))} for all: give one")
        return [_sampling_of_each(one, {}, 1)[0] for one in sampling]
    base = read_sampling(sampling, fields)  # type: ignore[arg-type]
    drawn = base.seed is None and not base.greedy
    seed = secrets.randbits(32) if drawn else base.fixed_seed  # short enough to copy
    return [replace(base, seed=(seed + i) % 2**63) for i in range(count)]


def check_banned(sampling: Sampling, target: Target) -> None:
    """Raises UserError for a banned token outside the vocabulary, or where every token is
    banned."""
    outside = [i for i in sampling.banned if i >= target.vocab_size]
    if outside:
        raise UserError(f"banned: token {outside[0]} is not within 0..{target.vocab_size - 1}")
    held_back = target.eos_ids if sampling.min_new_tokens else ()
    if len({*sampling.banned, *held_back}) == target.vocab_size:
        raise UserError("banned: every token is banned, so nothing can be generated")
