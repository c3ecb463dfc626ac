"""A client that streams from an OpenAI-compatible server and notes the times of its pieces."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx2

from specalign.common.errors import UserError
from specalign.common.schema import parse_json
from specalign.rows.conversation import Conversation
from specalign.suites.prompt import Prompt

_COUNTER = re.compile(
    r"^\w+:(?:spec_decode_)?num_(drafts|accepted_tokens)(?:_total)?(?:\{.*\})? (\d\S*)$",
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
    """An OpenAI-compatible server. Raises UserError if it does not answer, or names no model."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        found = parse_json(self._read("/v1/models"), f"{self.url}/v1/models")
        models = found.get("data") if isinstance(found, dict) else None
        if not models:
            raise UserError(
                f"{self.url}/v1/models no model listed: not an OpenAI-compatible server"
            )
        self.model = str(models[0].get("id"))

    def _read(self, path: str) -> str:
        try:
            answer = httpx2.get(self.url + path, timeout=60)
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            raise UserError(f"{self.url}{path}: no answer ({error}); is the server up?") from None
        if answer.is_error:
            raise UserError(f"{self.url}{path}: answered {answer.status_code}")
        return answer.text

    def read_counters(self) -> tuple[float, float] | None:
        """Rounds of drafts and accepted drafts so far; None if the server counts none."""
        try:
            found = _COUNTER.findall(self._read("/metrics"))
        except UserError:
            return None
        totals = {"drafts": 0.0, "accepted_tokens": 0.0}
        for name, value in found:
            totals[name] += float(value)
        return (totals["drafts"], totals["accepted_tokens"]) if totals["drafts"] else None

    def send(
        self,
        prompts: Sequence[tuple[str, Prompt, int]],
        concurrency: int,
        temperature: float,
        most_tokens: int | None = None,
    ) -> list[ServedRequest]:
        """Send prompts (suite, prompt, length limit), at most `concurrency` at a time. Raises
        UserError for a request that fails."""
        return asyncio.run(self._send_all(prompts, concurrency, temperature, most_tokens))

    async def _send_all(
        self,
        prompts: Sequence[tuple[str, Prompt, int]],
        concurrency: int,
        temperature: float,
        most_tokens: int | None,
    ) -> list[ServedRequest]:
        from openai import AsyncOpenAI, OpenAIError

        key = os.environ.get("SPECALIGN_API_KEY", "none")
        places = asyncio.Semaphore(concurrency)
        async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0) as client:

            async def one(suite: str, prompt: Prompt, limit: int) -> ServedRequest:
                async with places:
                    limit = min(limit, most_tokens or limit)
                    return await self._stream(client, suite, prompt, limit, temperature)

            try:
                return list(await asyncio.gather(*(one(*each) for each in prompts)))
            except OpenAIError as error:
                raise UserError(f"{self.url}: {error}") from None

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
        tokens = 0
        async for event in stream:
            if event.usage is not None:
                tokens = event.usage.completion_tokens
            for choice in event.choices:
                delta = getattr(choice, "delta", None)
                piece = choice.text if delta is None else delta.content
                if piece or getattr(delta, "reasoning_content", None):
                    times.append(perf_counter())
        ended = times[-1] if times else perf_counter()
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        first = (times[0] if times else ended) - begun
        return ServedRequest(suite, prompt.id, first, ended - begun, tokens or len(times), gaps)


def as_messages(prompt: Prompt) -> dict[str, Any]:
    """A prompt as the chat API takes it."""
    content = prompt.content
    if isinstance(content, str):
        return {"messages": [{"role": "user", "content": content}]}
    if isinstance(content, Conversation):
        tools = {"tools": list(content.tools)} if content.tools else {}
        return {"messages": list(content.messages), **tools}
    return {"messages": content}
