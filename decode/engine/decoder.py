"""The Python API: a `Decoder` answers prompts. `decode.load` makes one (decode/methods/load.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

from align.common.errors import UserError, nearest
from align.common.text import short
from align.target.model import Target
from decode.drafters.base import Drafter
from decode.engine.engine import Engine, run_together
from decode.engine.output import MAX_NEW_TOKENS, Generation
from decode.speculation.sampling import Sampling
from decode.speculation.settings import named
from decode.speculation.verifiers import check_pair, choose, find

Prompt = str | list[dict[str, str]] | list[int]
_OF_LOAD = (
    "target", "drafter", "verifier", "dtype", "device", "draft_tokens", "tree_nodes", "copying", "steps", "order",
    "drafter_tokenizer", "method", "trust_remote_code", "template_kwargs", "system",
)  # fmt: skip
"""The parameters of decode/methods/load.py's `load`."""


class Decoder:
    """A target and its drafter. `generate` may be called any number of times and keeps no state between calls. A seed repeats a
    sampled text, unless the drafter looks at the clock (`controller=cost`, several variants in one method): then the length of
    drafts differs from run to run, and with it the text, but not its distribution.

    Args:
        target: the model whose output distribution is preserved.
        drafter: None = plain decoding.
        verifier: a name in `decode.speculation.verifiers.VERIFIERS`, or auto (`decode.speculation.verifiers.choose`).
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, verifier: str = "auto") -> None:
        if verifier != "auto":
            find(verifier)
        self.target, self.drafter, self.verifier = target, drafter, verifier

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

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        stream: Callable[[str], object] | None = None,
        record_gaps: bool = False,
        raw: bool = False,
        **options: Any,
    ) -> Generation:
        """Continue a prompt.

        Args:
            prompt: a user message, a conversation (role, content), or tokens taken as they are.
            max_new_tokens: the output ends after this many, at EOS, at a stop string or when the context is
                full.
            sampling: default greedy. In its place its fields may be given by name: `temperature=0.7, seed=1`.
            stop: the text ends before the first of these strings. The text leaves out special tokens, so they can't be
                matched.
            stream: called with pieces of the text, never with half a character; together they are `Generation.text`. An
                exception that it raises ends the generation and reaches the caller.
            record_gaps: record each token's top-2 logit gap.
            raw: continue a string as plain text, without a chat template.

        Raises:
            UserError: a wrong argument, or a verifier that would change the output's distribution.
        """
        check_options("generate", options)
        sampling = named(sampling, options)
        engine = self._engine(prompt, max_new_tokens, sampling, stop, stream, record_gaps, raw)
        return engine.run()

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int = 32,
        max_new_tokens: int | Sequence[int] = MAX_NEW_TOKENS,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: str | Sequence[str] = (),
        raw: bool = False,
        **options: Any,
    ) -> list[Generation]:
        """Continue many prompts, `batch_size` at a time in one target call; as one ends the next begins.

        Every output is the one that `generate` gives for its prompt, sampling and seed, whatever else is in the batch. The
        exceptions: products over more rows round differently, and some drafters look at the clock (see the class). The times of
        a request include calls that it shared with others.

        Args:
            prompts, max_new_tokens, sampling, stop, raw: as in `generate`; `max_new_tokens` and `sampling` one for all, or
                one for each. With one `Sampling` for all (or its fields by name), request i has its seed plus i.

        Raises:
            UserError: as `generate`, before anything is generated.
        """
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise UserError(f"batch_size={batch_size!r}: must be a whole number, at least 1")
        check_options("generate_batch", options)
        if options or sampling is None or isinstance(sampling, Sampling):
            if isinstance(sampling, Sequence):
                raise UserError(f"sampling for each prompt and {next(iter(options))} for all: give one")
            base = named(sampling, options)
            settings = [replace(base, seed=(base.seed + i) % 2**63) for i in range(len(prompts))]
        else:
            settings = list(sampling)
        limits = (
            list(max_new_tokens) if isinstance(max_new_tokens, Sequence) else [max_new_tokens] * len(prompts)
        )
        for name, each in (("sampling", settings), ("max_new_tokens", limits)):
            if len(each) != len(prompts):
                raise UserError(f"{name}: {len(each)} for {len(prompts)} prompts")
        engines = [
            self._engine(prompt, limit, own, stop, None, False, raw)
            for prompt, limit, own in zip(prompts, limits, settings, strict=True)
        ]
        run_together(engines, batch_size)
        return [engine.out for engine in engines]

    def _engine(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: Sampling | None,
        stop: str | Sequence[str],
        stream: Callable[[str], object] | None,
        record_gaps: bool,
        raw: bool,
    ) -> Engine:
        sampling = sampling or Sampling()
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens!r}: must be a whole number, at least 1")
        if not all(isinstance(s, str) and s for s in stops):
            raise UserError(f"stop={stop!r}: must be non-empty strings")
        verifier = self.verifier_for(sampling)
        check_banned(sampling, self.target)
        if sampling.min_new_tokens > max_new_tokens:
            raise UserError(
                f"min_new_tokens={sampling.min_new_tokens}: more than max_new_tokens={max_new_tokens}"
            )
        tokens = prompt_tokens(self.target, prompt, raw)
        return Engine(
            self.target, tokens, max_new_tokens, sampling, self.drafter, verifier, stops, stream, record_gaps
        )


def check_options(call: str, given: Iterable[str]) -> None:
    """Raises UserError for an option that `decode.load`, `generate` or `generate_batch` does not have: which of the others has it, or
    the nearest of its own."""
    calls = _options()
    for name in given:
        if name not in calls[call]:
            other = next((other for other, its in calls.items() if name in its), None)
            hint = f": it is an option of {other}" if other else nearest(name, calls[call])
            raise UserError(f"{call} has no option {name!r}{hint}")


@cache
def _options() -> dict[str, Sequence[str]]:
    """The options of each call."""
    sampling = [field.name for field in fields(Sampling)]
    return {"decode.load": _OF_LOAD} | {
        f.__name__: [
            *(k for k, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY),
            *sampling,
        ]
        for f in (Decoder.generate, Decoder.generate_batch)
    }


def check_banned(sampling: Sampling, target: Target) -> None:
    """Raises UserError where a banned token is not in the target's vocabulary, or every token is banned."""
    outside = [i for i in sampling.banned if i >= target.vocab_size]
    if outside:
        raise UserError(f"banned: token {outside[0]} is not within 0..{target.vocab_size - 1}")
    held_back = target.eos_ids if sampling.min_new_tokens else ()
    if len({*sampling.banned, *held_back}) == target.vocab_size:
        raise UserError("banned: every token is banned, so nothing can be generated")


def prompt_tokens(target: Target, prompt: Prompt, raw: bool = False) -> list[int]:
    """A prompt as the target's tokens, checked.

    Raises:
        UserError: empty, malformed, or as long as the context.
    """
    if isinstance(prompt, str):
        _check_text(prompt, "the prompt")
        tokens = target.text_tokens(prompt) if raw else _chat(target, prompt)
    elif not isinstance(prompt, list | tuple) or not prompt:
        raise UserError(f"the prompt must be text, messages or tokens, not {short(prompt, 60)}")
    elif isinstance(prompt[0], dict):
        tokens = _chat(target, [_message(m) for m in prompt])
    elif isinstance(prompt[0], str):
        raise UserError("the prompt is a list of texts: generate takes one, generate_batch several")
    else:
        tokens = [_token(t, target.vocab_size) for t in prompt]
    if not tokens:
        raise UserError("the prompt is empty")
    limit = target.context_limit
    if len(tokens) >= limit:
        raise UserError(
            f"the prompt has {len(tokens)} tokens: the target's context of {limit} leaves no room for an answer"
        )
    return tokens


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
        raise UserError(f"a message needs the strings 'role' and 'content', not {short(message, 60)}")
    _check_text(message["content"], f"the {short(message['role'], 60)} message", empty=True)
    return message


def _token(token: Any, vocab_size: int) -> int:
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise UserError(f"prompt token {short(token, 60)} is not a whole number within 0..{vocab_size - 1}")
    return token


def _check_text(text: str, what: str, empty: bool = False) -> None:
    if not empty and not text.strip():
        raise UserError(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not valid Unicode at character {error.start}") from None


def _chat(target: Target, messages: str | list[dict[str, str]]) -> list[int]:
    from jinja2 import TemplateError

    try:
        return target.chat_tokens(messages)
    except TemplateError as error:
        raise UserError(f"the target's chat template refuses these messages: {error}") from None
