"""A client that streams from an OpenAI-compatible server and notes the times of its pieces."""

import asyncio
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx2

from specalign.common.errors import UserError
from specalign.common.schema import JsonObject, parse_json
from specalign.common.text import say_once, short
from specalign.rows.conversation import Conversation
from specalign.suites.long import CHARACTERS, shorten
from specalign.suites.prompt import Prompt

_COUNTER = re.compile(
    r"^(?:vllm|llamacpp):spec_decode_num_(drafts|draft_tokens|accepted_tokens)(?:_total)?(?:\{.*\})? (\d\S*)$",
    re.MULTILINE,
)


@dataclass
class ServedRequest:
    """One request. first_seconds: to its first token; gaps: between the pieces after it."""

    suite: str
    prompt: str
    first_seconds: float
    seconds: float
    tokens: int
    gaps: list[float]

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first."""
        return (self.seconds - self.first_seconds) / (self.tokens - 1) if self.tokens > 1 else None


class Endpoint:
    """A server by the address of its API (`http://127.0.0.1:8000`, with or without `/v1`). Raises
    UserError for no answer, or one of another protocol."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._certificates = httpx2.create_ssl_context()  # 0.1 s, not in the time of each round
        models = self.ask("/v1/models").get("data") or [{}]
        if "id" not in models[0]:
            raise UserError(
                f"{self.url}/v1/models: no model listed: not an OpenAI-compatible server"
            )
        self.model = str(models[0]["id"])
        self.owner = models[0].get("owned_by")

    def ask(self, path: str, body: JsonObject | None = None) -> JsonObject:
        """The object that the server answers, to a POST with a body."""
        found = parse_json(self._request(path, body), f"{self.url}{path}")
        return found if isinstance(found, dict) else {}

    def read_counters(self) -> dict[str, float]:
        """Its `drafts` (rounds), `draft_tokens` and `accepted_tokens` so far; empty if it counts
        none, or has no page of metrics."""
        totals = defaultdict[str, float](float)
        with suppress(UserError):
            for name, value in _COUNTER.findall(self._request("/metrics")):
                totals[name] += float(value)
        return totals

    def _request(self, path: str, body: JsonObject | None = None) -> str:
        """Raises UserError for no answer, or one of failure."""
        method = "GET" if body is None else "POST"
        try:
            answer = httpx2.request(
                method, self.url + path, json=body, timeout=600, verify=self._certificates
            )
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            hint = "is the server up? decode.export prints the line that starts it (vllm serve …)"
            raise UserError(f"{self.url}{path}: no answer ({error}); {hint}") from None
        if answer.is_error:
            text = short(answer.text, 200)
            raise UserError(f"{self.url}{path}: answered {answer.status_code}: {text}")
        return answer.text

    def send(
        self,
        prompts: Sequence[tuple[str, Prompt, int]],
        concurrency: int,
        temperature: float,
        most_tokens: int | None = None,
    ) -> list[ServedRequest]:
        """Send prompts (suite, prompt, length limit), at most `concurrency` at a time. A prompt
        that the server refuses, because it is too long for its context, is left out, with a note.
        Raises UserError for a request that fails otherwise."""
        return asyncio.run(self._send_all(prompts, concurrency, temperature, most_tokens))

    async def _send_all(
        self,
        prompts: Sequence[tuple[str, Prompt, int]],
        concurrency: int,
        temperature: float,
        most_tokens: int | None,
    ) -> list[ServedRequest]:
        from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient, OpenAIError

        refused: list[str] = []
        key = os.environ.get("SPECALIGN_API_KEY", "none")
        places = asyncio.Semaphore(concurrency)
        http = DefaultAsyncHttpxClient(verify=self._certificates)
        async with AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http
        ) as client:

            async def one(suite: str, prompt: Prompt, limit: int) -> ServedRequest | None:
                async with places:
                    limit = min(limit, most_tokens or limit)
                    try:
                        return await self._stream(client, suite, prompt, limit, temperature)
                    except BadRequestError as error:
                        refused.append(f"{suite}: {prompt.id}: {short(str(error), 160)}")
                        return None

            try:
                found = await asyncio.gather(*(one(*each) for each in prompts))
            except OpenAIError as error:
                raise UserError(f"{self.url}: {error}") from None
            except UserError:
                raise
            except (ValueError, TypeError, AttributeError) as error:
                raise UserError(f"{self.url}: a broken event in its stream ({error})") from None
        for line in refused:
            say_once(f"left out: {line}")
        return [request for request in found if request is not None]

    async def _stream(
        self, client: Any, suite: str, prompt: Prompt, limit: int, temperature: float
    ) -> ServedRequest:
        options: dict[str, Any] = {
            "model": self.model,
            "max_tokens": limit,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begun = perf_counter()
        if prompt.raw:
            stream = await client.completions.create(prompt=prompt.content, **options)
        else:
            stream = await client.chat.completions.create(**as_messages(prompt), **options)
        times: list[float] = []
        ended = begun
        tokens: int | None = None
        async for event in stream:
            if event.usage is not None:
                tokens = event.usage.completion_tokens
            for choice in event.choices:
                ended = perf_counter()  # also of a chunk with the end of sequence alone
                if has_text(choice):
                    times.append(ended)
        if tokens is None:
            why = "its streams have no usage (stream_options.include_usage)"
            raise UserError(f"{self.url}: {why}, so their tokens can't be counted")
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        first = (times[0] if times else ended) - begun
        return ServedRequest(suite, prompt.id, first, ended - begun, tokens, gaps)


def has_text(choice: Any) -> bool:
    """Whether a chunk of a stream carries what the model wrote: an answer, reasoning (servers name
    it differently) or a tool call."""
    delta = getattr(choice, "delta", None)
    if delta is None:
        return bool(choice.text)
    return any(value for name, value in delta.model_dump().items() if name != "role")


def as_messages(prompt: Prompt) -> dict[str, Any]:
    """A prompt as the chat API takes it."""
    content = prompt.content
    if isinstance(content, str):
        if prompt.cut is not None:
            content = shorten(content, CHARACTERS * prompt.cut)
        return {"messages": [{"role": "user", "content": content}]}
    if isinstance(content, Conversation):
        tools = {"tools": list(content.tools)} if content.tools else {}
        return {"messages": list(content.messages), **tools}
    return {"messages": content}
