"""Completion requests, and replies as tokens: exact ids, or text that is tokenized again and
checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from align.writing.client import Client, Json, RequestRefused, RetryableError
from align.writing.outline import TargetInfo
from specalign.common.errors import UserError
from specalign.common.text import short

T = TypeVar("T")
_TRIES = 3
_FINISH_REASONS = ("stop", "length", "eos_token", "stop_sequence")  # the last two are TGI's
_ENGINE_DEFAULTS = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "repeat_penalty": 1.0, "return_token_ids": True, "add_special_tokens": False,
}  # fmt: skip
"""Sent explicitly, because engines take missing values from the model's folder."""


class MismatchError(Exception):
    """A reply whose tokens are uncertain; such rows are counted under the message."""


@dataclass(frozen=True)
class CompletionRequest:
    """A text to continue, how to draw its tokens, and the tokens that end it."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    ends: frozenset[int]


@dataclass(frozen=True)
class Dialect:
    """Whether a server takes token ids, takes the engines' extensions, and returns token ids."""

    ids_in: bool = True
    extensions: bool = True
    ids_out: bool = True


def _first_choice(reply: Json) -> Json:
    """The first choice, with the counts of tokens and the model's name. Raises RetryableError for a
    reply without choices."""
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise RetryableError(f"answered {short(reply, 100)}, without choices")
    usage = reply.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return {**choices[0], **counts, "model": reply.get("model")}


def _check_prompt(reply: Json, prompt: tuple[int, ...]) -> None:
    """Raises MismatchError if the server has read the prompt as other tokens."""
    is_other = reply.get("prompt_token_ids") not in (None, list(prompt))
    if is_other or reply.get("prompt_tokens") not in (None, len(prompt)):
        raise MismatchError("prompt tokenized differently")


class Completions:
    """Continuations by one model of a server."""

    def __init__(
        self, client: Client, model: str, target: TargetInfo, top_p: float, top_k: int
    ) -> None:
        self.client, self.model, self.target = client, model, target
        self.top_p, self.top_k = top_p, top_k
        self.dialect = Dialect()

    async def find_dialect(self, request: CompletionRequest) -> None:
        """Find out what the server understands, by requests of one token. Raises UserError: it
        understands none of the dialects, or cannot do what the recipe asks for."""
        request = replace(request, max_tokens=1)
        refused: RequestRefused | None = None
        for dialect in (Dialect(), Dialect(ids_in=False), Dialect(ids_in=False, extensions=False)):
            self.dialect = dialect
            try:
                reply = await self._ask(request, _first_choice)
                _check_prompt(reply, request.prompt)
            except RequestRefused as error:
                if error.status not in (400, 422):
                    raise
                refused = refused or error
                continue
            except MismatchError:
                raise UserError(
                    f"{self.client.url}: {self.model!r} tokenizes a prompt of "
                    f"{len(request.prompt)} tokens differently from {self.target.spec!r}: another "
                    "model, or another tokenizer"
                ) from None
            if not dialect.extensions and self.top_k:
                raise UserError(f"{self.client.url} does not support data.top_k={self.top_k}")
            self.dialect = replace(dialect, ids_out=reply.get("token_ids") is not None)
            return
        assert refused is not None
        raise refused

    def make_body(self, request: CompletionRequest) -> Json:
        """The request in the server's dialect."""
        tokenizer = self.target.tokenizer
        prompt: object = list(request.prompt)
        if not self.dialect.ids_in:
            prompt = tokenizer.decode(list(request.prompt), skip_special_tokens=False)
        body: Json = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        if self.dialect.extensions or self.top_p < 1:  # TGI refuses 1, OpenAI's default
            body["top_p"] = self.top_p
        if self.dialect.extensions:
            body |= {"top_k": self.top_k or -1, "stop_token_ids": sorted(request.ends)}
            body |= _ENGINE_DEFAULTS
        other_ends = sorted(request.ends - set(self.target.eos_ids))
        if other_ends and not self.dialect.ids_out:
            ends = [tokenizer.decode([end], skip_special_tokens=False) for end in other_ends]
            body["stop"] = ends
        return body

    async def continue_text(self, request: CompletionRequest) -> list[int]:
        """The tokens of a continuation, with the one that ends it unless it was cut at its length.
        Raises MismatchError: the reply contradicts itself in every try; UserError: no usable
        reply."""
        return await self._ask(request, lambda reply: self.read(request, reply))

    async def _ask(self, request: CompletionRequest, read: Callable[[Json], T]) -> T:
        """A reply as `read` reads it, requested again while that raises and may help."""
        for attempt in range(1, _TRIES + 1):
            reply = await self.client.complete(self.make_body(request))
            try:
                return read(reply)
            except MismatchError:
                if attempt == _TRIES or not self.dialect.ids_out:  # text would be read as before
                    raise
            except RetryableError as error:
                if attempt == _TRIES:
                    raise UserError(f"{self.client.url}/v1/completions: {error}") from None
        raise AssertionError

    def read(self, request: CompletionRequest, answer: Json) -> list[int]:
        """A reply's tokens. Raises RetryableError: not a finished completion of this model;
        MismatchError: tokens that are uncertain."""
        reply = _first_choice(answer)
        text, model = reply.get("text"), reply["model"] or self.model
        if not isinstance(text, str) or reply.get("finish_reason") not in _FINISH_REASONS:
            raise RetryableError(f"answered {short(answer, 100)}, which is not a finished text")
        if model != self.model:
            raise RetryableError(f"answered as {short(model)}, but {self.model!r} was requested")
        _check_prompt(reply, request.prompt)
        if not self.dialect.ids_out:
            return self._cut_at_end(request, reply, self._tokenize(text, reply))
        tokens = self._cut_at_end(request, reply, self._read_ids(request, reply))
        ids = tokens[:-1] if tokens and tokens[-1] in request.ends else tokens
        decoded = str(self.target.tokenizer.decode(ids, skip_special_tokens=True))
        if not _comparable(text).startswith(_comparable(decoded)):
            raise MismatchError("ids and text disagree")
        return tokens

    def _read_ids(self, request: CompletionRequest, reply: Json) -> list[int]:
        ids, size = reply.get("token_ids"), self.target.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            raise MismatchError("ids that are not the target's tokens")
        if reply.get("completion_tokens") not in (None, len(ids)) or len(ids) > request.max_tokens:
            raise MismatchError("number of ids differs from the reply's count")
        return ids

    def _tokenize(self, text: str, reply: Json) -> list[int]:
        tokenizer = self.target.tokenizer
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if "\ufffd" in text or tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise MismatchError("text does not match its tokens")
        counts = [None, len(ids)]
        if reply["finish_reason"] == "stop":  # the end may be counted
            counts.append(len(ids) + 1)
        if reply.get("completion_tokens") not in counts:
            raise MismatchError("text tokenized differently")
        return ids

    def _cut_at_end(self, request: CompletionRequest, reply: Json, ids: list[int]) -> list[int]:
        """The tokens up to the first end. An end that the reply leaves out is appended."""
        for place, token in enumerate(ids):
            if token in request.ends:
                return ids[: place + 1]
        reason = reply["finish_reason"]
        is_cut = reason == "length"
        if is_cut != (len(ids) >= request.max_tokens):  # the engine's own limit, or a wrong reason
            counts = f"{len(ids)} of {request.max_tokens} tokens"
            raise MismatchError(f"{counts} and finish_reason {reason}")
        if is_cut:
            return ids
        eos = self.target.tokenizer.eos_token_id
        end = eos if eos in request.ends else min(request.ends)
        stop = reply.get("stop_reason", reply.get("matched_stop"))
        if type(stop) is int and stop in request.ends:
            end = stop
        return [*ids, end]


def _comparable(text: str) -> str:
    """Without what engines decode differently: incomplete characters and outer white space."""
    return text.replace("\ufffd", "").strip()
