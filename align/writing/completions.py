"""Completion requests, and replies as tokens: exact ids, or text that is tokenized again and
checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

from align.writing.client import Client, RequestRefused, RetryableError
from align.writing.template import TargetInfo
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
                returns_ids = await self._send(request, self._returns_ids)
            except RequestRefused as error:
                if error.status not in (400, 422):
                    raise
                refused = refused or error
                continue
            except MismatchError:
                raise UserError(
                    f"{self.client.url}: {self.model!r} reads a prompt of {len(request.prompt)} "
                    f"tokens of {self.target.spec!r} as other tokens: another model, or another "
                    "tokenizer"
                ) from None
            if not dialect.extensions and self.top_k:
                raise UserError(f"{self.client.url} does not support data.top_k={self.top_k}")
            self.dialect = replace(dialect, ids_out=returns_ids)
            return
        assert refused is not None
        raise refused

    async def _send(
        self, request: CompletionRequest, read: Callable[[CompletionRequest, dict[str, Any]], T]
    ) -> T:
        """A reply as `read` reads it, requested again while that raises and may help."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(self._may_help), stop=stop_after_attempt(_TRIES), reraise=True
        )

        async def send() -> T:
            return read(request, await self.client.complete(self.make_body(request)))

        try:
            return await retrying(send)
        except RetryableError as error:
            raise UserError(f"{self.client.url}/v1/completions: {error}") from None

    def _may_help(self, error: BaseException) -> bool:
        """Text would be tokenized as before."""
        is_mismatch = isinstance(error, MismatchError) and self.dialect.ids_out
        return is_mismatch or isinstance(error, RetryableError)

    def _returns_ids(self, request: CompletionRequest, reply: dict[str, Any]) -> bool:
        """Raises MismatchError if the prompt was read as other tokens."""
        _check_prompt(request, reply)
        return isinstance(_choice(reply).get("token_ids"), list)

    def make_body(self, request: CompletionRequest) -> dict[str, Any]:
        """The request in the server's dialect."""
        tokenizer = self.target.tokenizer
        prompt: Any = list(request.prompt)
        if not self.dialect.ids_in:
            prompt = tokenizer.decode(prompt, skip_special_tokens=False)
        body: dict[str, Any] = {
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

        Raises:
            MismatchError: the reply contradicts itself in every try.
            UserError: no usable reply.
        """
        return await self._send(request, self.read)

    def read(self, request: CompletionRequest, reply: dict[str, Any]) -> list[int]:
        """A reply's tokens.

        Raises:
            RetryableError: not a finished completion of this model.
            MismatchError: tokens that are uncertain.
        """
        choice = _choice(reply)
        is_text = isinstance(choice.get("text"), str)
        if not is_text or choice.get("finish_reason") not in _FINISH_REASONS:
            raise RetryableError(f"answered {short(choice, 100)}, which is no finished text")
        if str(reply.get("model") or self.model) != self.model:
            raise RetryableError(f"answered as {short(reply['model'])}, asked for {self.model!r}")
        _check_prompt(request, reply)
        count = _usage(reply).get("completion_tokens")
        if not self.dialect.ids_out:
            return self._cut_at_end(request, choice, self._tokenize(choice, count))
        tokens = self._cut_at_end(request, choice, self._read_ids(request, choice, count))
        answer = tokens[:-1] if tokens and tokens[-1] in request.ends else tokens
        text = self.target.tokenizer.decode(answer, skip_special_tokens=True)
        if not _comparable(choice["text"]).startswith(_comparable(text)):
            raise MismatchError("ids and text that differ")
        return tokens

    def _read_ids(
        self, request: CompletionRequest, choice: dict[str, Any], count: Any
    ) -> list[int]:
        ids = choice.get("token_ids")
        size = self.target.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            raise MismatchError("ids that are not the target's tokens")
        if (isinstance(count, int) and count != len(ids)) or len(ids) > request.max_tokens:
            raise MismatchError("more or fewer ids than the reply counts")
        return ids

    def _tokenize(self, choice: dict[str, Any], count: Any) -> list[int]:
        tokenizer = self.target.tokenizer
        text = choice["text"]
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if "\ufffd" in text or tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise MismatchError("text that is not its tokens")
        possible = (0, 1) if choice["finish_reason"] == "stop" else (0,)  # the end may be counted
        if isinstance(count, int) and count - len(ids) not in possible:
            raise MismatchError("text tokenized as other tokens")
        return ids

    def _cut_at_end(
        self, request: CompletionRequest, choice: dict[str, Any], ids: list[int]
    ) -> list[int]:
        """The tokens up to the first end. An end that the reply leaves out is appended."""
        for place, token in enumerate(ids):
            if token in request.ends:
                return ids[: place + 1]
        reason = choice["finish_reason"]
        is_cut = reason == "length"
        if is_cut != (len(ids) >= request.max_tokens):  # the engine's own limit, or a wrong reason
            counts = f"{len(ids)} of {request.max_tokens} tokens"
            raise MismatchError(f"{counts} and finish_reason {reason}")
        if is_cut:
            return ids
        named = choice.get("stop_reason", choice.get("matched_stop"))
        if type(named) is int and named in request.ends:
            return [*ids, named]
        eos = self.target.tokenizer.eos_token_id
        return [*ids, eos if eos in request.ends else min(request.ends)]


def _check_prompt(request: CompletionRequest, reply: dict[str, Any]) -> None:
    """Raises MismatchError if the server has read the prompt as other tokens."""
    ids = _choice(reply).get("prompt_token_ids")
    count = _usage(reply).get("prompt_tokens")
    is_other = isinstance(ids, list) and ids != list(request.prompt)
    if is_other or (isinstance(count, int) and count != len(request.prompt)):
        raise MismatchError("prompt read as other tokens")


def _choice(reply: dict[str, Any]) -> dict[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise RetryableError(f"answered {short(reply, 100)}, without choices")
    return choices[0]


def _usage(reply: dict[str, Any]) -> dict[str, Any]:
    usage = reply.get("usage")
    return usage if isinstance(usage, dict) else {}


def _comparable(text: str) -> str:
    """Without what engines decode differently: incomplete characters and outer white space."""
    return text.replace("\ufffd", "").strip()
