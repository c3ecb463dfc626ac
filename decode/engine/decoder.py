"""The Python API: a `Decoder` answers prompts. `decode.load` makes one (decode/systems/load.py)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Unpack

import numpy as np
from torch import Tensor

from decode.engine.call_options import checks_options
from decode.engine.engine import Engine, run_together
from decode.engine.output import MAX_NEW_TOKENS, Generation
from decode.engine.prompts import Prompt, Tool, add_tools, prompt_tokens, read_tools
from decode.engine.stream import Stream
from decode.proposers.base import Drafter
from decode.speculation.sampling import Sampling
from decode.speculation.settings import SamplingOptions, check_sampling, named
from decode.speculation.verifiers import check_pair, choose, find
from specalign.common.errors import UserError
from specalign.common.text import short
from specalign.lm.model import Target
from specalign.rows.messages import is_message


class Decoder:
    """A target and its drafter. Its methods may be called any number of times and keep no state
    between calls. Each sampled request has a new seed unless one is given, and `Generation.seed`
    records it. A seed repeats a text, unless the drafter looks at the clock (`controller=cost`,
    several variants in one method): then the length of drafts differs from run to run, and with it
    the text, but not its distribution.

    Args:
        target: the model whose output distribution is preserved.
        drafter: None = plain decoding.
        verifier: a name in `decode.speculation.verifiers.VERIFIERS`, or auto
            (`decode.speculation.verifiers.choose`).
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, verifier: str = "auto"
    ) -> None:
        if verifier != "auto":
            find(verifier)
        self.target, self.drafter, self.verifier = target, drafter, verifier

    def __repr__(self) -> str:
        return f"<Decoder of {self.target.spec}: {self.name}, verifier {self.verifier}>"

    @property
    def name(self) -> str:
        """The drafter's name; `plain` without one."""
        return self.drafter.name if self.drafter is not None else "plain"

    def verifier_for(self, sampling: Sampling) -> str:
        """The verifier used under these settings.

        Raises:
            UserError: it would change the output's distribution: why, and which verifiers fit.
        """
        law = self.drafter.law(sampling) if self.drafter is not None else "point"
        name = choose(law, sampling.temperature) if self.verifier == "auto" else self.verifier
        return name if self.drafter is None else check_pair(law, name, sampling.temperature).name

    @checks_options("generate")
    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        tools: Sequence[Tool] | None = None,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] | None = None,
        stream: Callable[[str], object] | None = None,
        record_gaps: bool = False,
        raw: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """Continue a prompt.

        Args:
            prompt: a user message; a conversation, as a list of messages or in any other shape that
                a row of `data.prompts` may have (`{"messages": […], "tools": […]}`); or tokens
                taken as they are: a list, a tensor of one row, or what a tokenizer returns.
            max_new_tokens: the output ends after this many, at EOS, at a stop string or when the
                context is full.
            tools: functions or JSON schemas that go to the chat template.
            sampling: default greedy. Its fields may be given by name instead: `temperature=0.7,
                seed=1`.
            stop: the text ends before the first of these strings. They may be or contain special
                tokens (`<|im_end|>`), although the text leaves those out.
            stream: called with pieces of the text, never with half a character; together they are
                `Generation.text`. An exception that it raises ends the generation and reaches the
                caller. See also the method `stream`.
            record_gaps: record each token's top-2 logit gap.
            raw: continue a string as plain text, without a chat template.

        Returns:
            The output with its counts and times. Its `finish` says why it ended: `eos`, `length`
                (max_new_tokens), `stop` (a
            stop string), `context` (the target's context is full) or `closed` (a stream that was
                closed early).

        Raises:
            UserError: a wrong argument, or a verifier that would change the output's distribution.
        """
        if stream is not None and not callable(stream):
            raise UserError(
                f"stream={stream!r}: must be a function; to iterate: for piece in decoder.stream(…)"
            )
        tokens = prompt_tokens(self.target, add_tools(prompt, tools), raw)
        settings = named(sampling, options)
        return self._engine(tokens, max_new_tokens, settings, stop, stream, record_gaps).run()

    @checks_options("stream")
    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = MAX_NEW_TOKENS,
        *,
        tools: Sequence[Tool] | None = None,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] | None = None,
        record_gaps: bool = False,
        raw: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Continue a prompt piece by piece: `for piece in decoder.stream(prompt): print(piece,
        end="")`.

        Takes the arguments of `generate`, which gives the same text.

        Returns:
            An iterator over pieces of the text, never with half a character. Afterwards its
                `output` is the `Generation`;
            `close()` ends it early.

        Raises:
            UserError: as `generate`, before anything is generated.
        """
        pieces: list[str] = []
        tokens = prompt_tokens(self.target, add_tools(prompt, tools), raw)
        settings = named(sampling, options)
        engine = self._engine(tokens, max_new_tokens, settings, stop, pieces.append, record_gaps)
        return Stream(engine, pieces)

    @checks_options("generate_batch")
    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int | Sequence[int] = MAX_NEW_TOKENS,
        *,
        batch_size: int = 32,
        tools: Sequence[Tool] | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: str | Sequence[str] | None = None,
        raw: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> list[Generation]:
        """Continue many prompts, `batch_size` at a time in one target forward; as one ends the next
        begins.

        Every output is the one that `generate` gives for its prompt, sampling and seed, whatever
        else is in the batch. The exceptions: products over more rows round differently, and some
        drafters look at the clock (see the class). The times of a request include forwards that it
        shared with others.

        Args:
            prompts, max_new_tokens, tools, sampling, stop, raw: as in `generate`; `max_new_tokens`
                and `sampling` one for all, or one for each. With one `Sampling` for all (or its
                fields by name), request i has its seed plus i.

        Raises:
            UserError: as `generate`, before anything is generated.
        """
        size = _check_count("batch_size", batch_size)
        rows = self._read_batch(prompts, tools, raw)
        settings = _sampling_of_each(sampling, options, len(rows))
        limits = (
            list(max_new_tokens)
            if isinstance(max_new_tokens, Sequence)
            else [max_new_tokens] * len(rows)
        )
        for name, each in (("sampling", settings), ("max_new_tokens", limits)):
            if len(each) != len(rows):
                raise UserError(f"{name}: {len(each)} for {len(rows)} prompts")
        engines = [
            self._engine(tokens, limit, own, stop, None, False)
            for tokens, limit, own in zip(rows, limits, settings, strict=True)
        ]
        run_together(engines, size)
        return [engine.out for engine in engines]

    def _read_batch(self, prompts: Any, tools: Sequence[Tool] | None, raw: bool) -> list[list[int]]:
        """The tokens of each prompt. Raises UserError that names the prompt by its index."""
        schemas, rows = read_tools(tools), []
        for index, prompt in enumerate(_list_prompts(prompts)):
            try:
                rows.append(prompt_tokens(self.target, add_tools(prompt, schemas), raw))
            except UserError as error:
                raise UserError(f"prompts[{index}]: {error}") from None
        return rows

    def _engine(
        self,
        tokens: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        stop: str | Sequence[str] | None,
        stream: Callable[[str], object] | None,
        record_gaps: bool,
    ) -> Engine:
        """A checked request that has not begun; sampling without a seed gets a new one."""
        stops = _read_stops(stop)
        limit = _check_count("max_new_tokens", max_new_tokens)
        verifier = self.verifier_for(sampling)
        check_banned(sampling, self.target)
        if sampling.min_new_tokens > limit:
            raise UserError(
                f"min_new_tokens={sampling.min_new_tokens}: more than max_new_tokens={limit}"
            )
        if sampling.seed is None and not sampling.greedy:
            sampling = replace(sampling, seed=new_seed())
        return Engine(
            self.target, tokens, limit, sampling, self.drafter, verifier, stops, stream, record_gaps
        )


def _read_stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    if not all(isinstance(s, str) and s for s in stops):
        raise UserError(f"stop={stop!r}: must be non-empty strings")
    return stops


def new_seed() -> int:
    """A seed out of the system's entropy, short enough to copy."""
    return secrets.randbits(32)


def _check_count(name: str, value: Any) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name}={value!r}: must be a whole number, at least 1")
    return int(value)


def _list_prompts(prompts: Any) -> list[Prompt]:
    """The prompts of a batch. Raises UserError for one prompt, and for rows of tokens that may be
    padded."""
    if isinstance(prompts, str | Mapping):
        raise UserError(
            f"generate_batch takes a list of prompts, not {short(prompts, 60)}: put it into a list"
        )
    if isinstance(prompts, Tensor | np.ndarray):
        raise UserError(
            "generate_batch takes a list of prompts: give a list of token lists, without padding"
        )
    if not isinstance(prompts, Iterable):
        raise UserError(f"generate_batch takes a list of prompts, not {short(prompts, 60)}")
    found = list(prompts)
    if (
        found
        and isinstance(found[0], Mapping)
        and ("role" in found[0] or is_message(dict(found[0])))
    ):
        raise UserError(
            "generate_batch takes a list of prompts: put the conversation into a list, [messages]"
        )
    return found


def _sampling_of_each(
    sampling: Sampling | Sequence[Sampling] | None, options: Mapping[str, Any], count: int
) -> list[Sampling]:
    """The settings of each request: with one for all, request i has its seed plus i."""
    if not (options or sampling is None or isinstance(sampling, Sampling)):
        return (
            [check_sampling(one) for one in sampling]
            if isinstance(sampling, Sequence)
            else [check_sampling(sampling)]
        )
    if isinstance(sampling, Sequence):
        raise UserError(f"sampling for each prompt and {next(iter(options))} for all: give one")
    base = named(sampling, options)
    seed = new_seed() if base.seed is None and not base.greedy else base.fixed_seed
    return [replace(base, seed=(seed + i) % 2**63) for i in range(count)]


def check_banned(sampling: Sampling, target: Target) -> None:
    """Raises UserError where a banned token is not in the target's vocabulary, or every token is
    banned."""
    outside = [i for i in sampling.banned if i >= target.vocab_size]
    if outside:
        raise UserError(f"banned: token {outside[0]} is not within 0..{target.vocab_size - 1}")
    held_back = target.eos_ids if sampling.min_new_tokens else ()
    if len({*sampling.banned, *held_back}) == target.vocab_size:
        raise UserError("banned: every token is banned, so nothing can be generated")
