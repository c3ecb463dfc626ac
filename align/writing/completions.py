"""What is asked of a server, and its reply as tokens: exact ids where it returns them, else its text, tokenised again and checked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from align.common.errors import UserError
from align.common.text import short
from align.writing.client import Client, Refused, Trouble
from align.writing.template import Told

TRIES = 3
"""Times that a reply which contradicts itself is asked for."""


class Mismatch(Exception):
    """A reply whose tokens are not known for certain; the message is what such rows are counted under."""


@dataclass(frozen=True)
class Request:
    """One text to be continued: tokens before it, most tokens of it, how it is drawn, and the tokens that end it."""

    prompt: tuple[int, ...]
    most: int
    temperature: float
    seed: int
    ends: frozenset[int]


@dataclass(frozen=True)
class Continuation:
    """Its tokens without the one that ended it; end: that one, None where the text was cut at its greatest length."""

    tokens: list[int]
    end: int | None


@dataclass(frozen=True)
class Dialect:
    """What a server understands: prompts of token ids, the engines' fields beside OpenAI's; whether replies have token ids."""

    ids_in: bool = True
    extensions: bool = True
    ids_out: bool = True

    @property
    def said(self) -> str:
        return (
            "exact token ids" if self.ids_out else "no token ids: its texts are tokenised again and checked"
        )


@dataclass(frozen=True)
class Drawing:
    """Limits under which every token is drawn."""

    top_p: float
    top_k: int


class Completions:
    """Continuations by one model of a server.

    Args:
        model: its name there.
        target: whose tokens these are.
    """

    def __init__(self, client: Client, model: str, target: Told, drawing: Drawing) -> None:
        self.client, self.model, self.target, self.drawing = client, model, target, drawing
        self.dialect = Dialect()

    async def greet(self, request: Request) -> None:
        """Find the server's dialect by a request of one token.

        Raises:
            UserError: it answers in none that is known here, or can't be asked for what the recipe wants.
        """
        refused: Refused | None = None
        for dialect in (Dialect(), Dialect(ids_in=False), Dialect(ids_in=False, extensions=False)):
            self.dialect = dialect
            try:
                reply = await self._greeting(self.body(replace(request, most=1)))
            except Refused as error:
                if error.status not in (400, 422):
                    raise
                refused = refused or error
                continue
            ids = _choice(reply).get("token_ids")
            self.dialect = replace(dialect, ids_out=isinstance(ids, list))
            self._check_greeting(request, reply)
            if not dialect.extensions and self.drawing.top_k:
                raise UserError(
                    f"{self.client.url} takes OpenAI's own fields alone, and data.top_k={self.drawing.top_k} is none"
                )
            return
        assert refused is not None
        raise refused

    async def _greeting(self, body: dict[str, Any]) -> dict[str, Any]:
        """A reply that has choices. Raises UserError where it has none however often it is asked."""
        for _ in range(TRIES):
            reply = await self.client.complete(body)
            try:
                _choice(reply)
                return reply
            except Trouble as found:
                said = str(found)
        raise UserError(f"{self.client.url}/v1/completions: {said}")

    def _check_greeting(self, request: Request, reply: dict[str, Any]) -> None:
        usage = reply.get("usage")
        try:
            self._check_prompt(request, _choice(reply), usage if isinstance(usage, dict) else {})
        except Mismatch:
            raise UserError(
                f"{self.client.url}: {self.model!r} reads a prompt of {len(request.prompt)} tokens of {self.target.spec!r} as other "
                "tokens: another model, or another tokenizer"
            ) from None

    def body(self, request: Request) -> dict[str, Any]:
        """The request in the server's dialect. Every limit of drawing is said: engines have defaults that the model's folder names."""
        prompt: Any = list(request.prompt)
        if not self.dialect.ids_in:
            prompt = self.target.tokenizer.decode(prompt, skip_special_tokens=False)
        found: dict[str, Any] = {
            "model": self.model, "prompt": prompt, "max_tokens": request.most, "temperature": request.temperature,
            "seed": request.seed,
        }  # fmt: skip
        if self.dialect.extensions or self.drawing.top_p < 1:  # TGI refuses 1, which is OpenAI's default
            found["top_p"] = self.drawing.top_p
        if self.dialect.extensions:
            found |= {
                "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_k": self.drawing.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0,
                "stop_token_ids": sorted(request.ends), "return_token_ids": True, "add_special_tokens": False,
            }  # fmt: skip
        texts = self._stops(request.ends)
        if texts and not self.dialect.ids_out:
            found["stop"] = texts
        return found

    def _stops(self, ends: Collection[int]) -> list[str]:
        """Ends that the server does not know of by itself, as text."""
        unknown = sorted(set(ends) - set(self.target.eos_ids))
        return [self.target.tokenizer.decode([end], skip_special_tokens=False) for end in unknown]

    async def __call__(self, request: Request) -> Continuation:
        """The continuation of a text.

        Raises:
            Mismatch: the server's reply contradicts itself however often it is asked.
            UserError: it does not answer.
        """
        tries = 0
        while True:
            reply = await self.client.complete(self.body(request))
            try:
                return self.read(request, reply)
            except (Mismatch, Trouble) as found:
                tries += 1
                again = self.dialect.ids_out or isinstance(found, Trouble)  # a text is tokenised as before
                if again and tries < TRIES:
                    self.client.failures += 1
                    continue
                if isinstance(found, Trouble):
                    raise UserError(f"{self.client.url}/v1/completions: {found}") from None
                raise

    def read(self, request: Request, reply: dict[str, Any]) -> Continuation:
        """A reply as tokens.

        Raises:
            Trouble: it is none of this protocol, or another model's.
            Mismatch: see `Mismatch`.
        """
        choice, usage = _choice(reply), reply.get("usage")
        if not isinstance(choice.get("text"), str) or choice.get("finish_reason") not in _FINISHES:
            raise Trouble(f"answered {short(choice, 100)}, no finished text")
        if str(reply.get("model") or self.model) != self.model:
            raise Trouble(f"answers as {short(reply['model'])}, asked for {self.model!r}")
        counts = usage if isinstance(usage, dict) else {}
        self._check_prompt(request, choice, counts)
        if self.dialect.ids_out:
            return self._exact(request, choice, counts)
        return self._tokenised(request, choice, counts)

    def _check_prompt(self, request: Request, choice: dict[str, Any], usage: dict[str, Any]) -> None:
        """Whether the server read the prompt as it was meant."""
        seen, count = choice.get("prompt_token_ids"), usage.get("prompt_tokens")
        if isinstance(seen, list) and seen != list(request.prompt):
            raise Mismatch("prompt read as other tokens")
        if isinstance(count, int) and count != len(request.prompt):
            raise Mismatch("prompt read as other tokens")

    def _exact(self, request: Request, choice: dict[str, Any], usage: dict[str, Any]) -> Continuation:
        ids, count = choice.get("token_ids"), usage.get("completion_tokens")
        if not isinstance(ids, list) or not all(
            type(i) is int and 0 <= i < self.target.vocab_size for i in ids
        ):
            raise Mismatch("ids that are none of the target's tokens")
        if isinstance(count, int) and count != len(ids) or len(ids) > request.most:
            raise Mismatch("ids of another number than the reply counts")
        found = _ended(ids, request, choice, _usual_end(self.target, request.ends))
        text = self.target.tokenizer.decode(found.tokens, skip_special_tokens=True)
        if not _plain(choice["text"]).startswith(_plain(text)):
            raise Mismatch("ids and text that differ")
        return found

    def _tokenised(self, request: Request, choice: dict[str, Any], usage: dict[str, Any]) -> Continuation:
        tokenizer, text, count = self.target.tokenizer, choice["text"], usage.get("completion_tokens")
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        ended = choice["finish_reason"] == "stop"
        if "\ufffd" in text or tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise Mismatch("text that is not its tokens")
        if isinstance(count, int) and count - len(ids) not in ((0, 1) if ended else (0,)):
            raise Mismatch("text tokenised as other tokens")
        return _ended(ids, request, choice, _usual_end(self.target, request.ends))


_FINISHES = ("stop", "length", "eos_token", "stop_sequence")
"""Why a text ended: OpenAI's words, and TGI's."""


def _choice(reply: dict[str, Any]) -> dict[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Trouble(f"answered {short(reply, 100)}, without choices")
    return choices[0]


def _ended(ids: Sequence[int], request: Request, choice: dict[str, Any], usual: int) -> Continuation:
    """The tokens up to the first end. One that is not among them is what the reply names (vLLM, SGLang), else `usual`."""
    for place, token in enumerate(ids):
        if token in request.ends:
            return Continuation(list(ids[:place]), token)
    if (choice["finish_reason"] == "length") != (len(ids) >= request.most):
        # an engine with a limit of its own, or one that says why a text ended and is wrong: its end would be learnt
        raise Mismatch(f"{len(ids)} of {request.most} tokens and finish_reason {choice['finish_reason']}")
    if choice["finish_reason"] == "length":
        return Continuation(list(ids), None)
    said = choice.get("stop_reason", choice.get("matched_stop"))
    return Continuation(list(ids), said if type(said) is int and said in request.ends else usual)


def _usual_end(target: Told, ends: Collection[int]) -> int:
    own = target.tokenizer.eos_token_id
    return own if own in ends else min(ends)


def _plain(text: str) -> str:
    """Without what engines decode differently: unfinished characters, spaces at the edges."""
    return text.replace("\ufffd", "").strip()
