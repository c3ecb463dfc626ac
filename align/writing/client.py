"""A client for OpenAI-compatible servers: requests with retries, and one-line errors."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Sequence
from urllib.parse import urlsplit

import httpx
import openai
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from align.config.data import API_KEY
from specalign.common.errors import UserError, nearest
from specalign.common.text import say_once, short

Json = dict[str, object]
_RETRYABLE_STATUSES = {408, 409, 425, 429}
_LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}
_LONGEST_WAIT = 30.0


class RetryableError(Exception):
    """A request got no usable reply; repeating it may help."""


class RequestRefused(UserError):
    """The server refuses a request, with this HTTP status; repeating it will not help."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Requests to one server, within one event loop. Raises UserError: an invalid address, API key
    or proxy.

    Args:
        url: the server's address without `/v1`.
        reply, retry: seconds to wait for one reply, and for which a failing request is repeated.
    """

    def __init__(self, url: str, reply: float, retry: float) -> None:
        self.url, self.reply, self.retry = url, reply, retry
        self._secret = os.environ.get(API_KEY, "").strip()
        if not self._secret.isascii() or not self._secret.isprintable():
            raise UserError(f"the environment variable {API_KEY} is not a valid API key")
        try:
            use_proxies = urlsplit(url).hostname not in _LOCAL_HOSTS
            self._api = openai.AsyncOpenAI(
                base_url=f"{url}/v1",
                api_key=self._secret or "none",
                max_retries=0,
                timeout=reply,
                http_client=openai.DefaultAsyncHttpxClient(trust_env=use_proxies),
            )
        except Exception as error:  # invalid URLs, proxies and certificates have no common class
            raise UserError(f"data.writer: cannot connect to {url}: {error}") from None

    async def close(self) -> None:
        await self._api.close()

    async def list_models(self) -> list[Json]:
        """The models that the server lists. Not retried, as the address may be wrong. Raises
        UserError: no server, or not an OpenAI-compatible one."""
        where = f"{self.url}/v1/models"
        try:
            reply = await self._read(where, self._api.get("/models", cast_to=httpx.Response))
        except RetryableError as error:
            raise UserError(f"{where}: {error}; is the server up?") from None
        models = reply.get("data")
        listed = models if isinstance(models, list) else []
        if not listed or not all(isinstance(model, dict) and "id" in model for model in listed):
            raise UserError(f"{where}: lists no models, so it is not an OpenAI-compatible server")
        return listed

    async def complete(self, body: Json) -> Json:
        """The reply to a completion request, repeated for `retry` seconds. Raises
        RequestRefused: repeating the request will not help; UserError: no reply in time."""
        where = f"{self.url}/v1/completions"

        async def send() -> Json:
            request = self._api.post("/completions", body=body, cast_to=httpx.Response)
            return await self._read(where, request)

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(RetryableError),
            stop=stop_after_delay(self.retry),
            wait=wait_random_exponential(0.25, min(_LONGEST_WAIT, self.retry)),
            before_sleep=self._report_retry,
            reraise=True,
        )
        started = time.monotonic()
        try:
            return await retrying(send)
        except RetryableError as error:
            seconds = time.monotonic() - started
            raise UserError(
                f"{where}: {error}, for {seconds:.0f} s (data.retry_seconds); finished samples "
                "are kept; rerun the command to resume"
            ) from None

    def _report_retry(self, state: RetryCallState) -> None:
        assert state.outcome is not None
        say_once(f"{self.url}: {state.outcome.exception()}; retrying")

    async def _read(self, where: str, request: Awaitable[httpx.Response]) -> Json:
        """One request's JSON object. Raises RetryableError or RequestRefused."""
        try:
            async with asyncio.timeout(self.reply):
                response = await request
            reply = json.loads(response.text)
        except (TimeoutError, openai.APITimeoutError):
            message = f"no answer within {self.reply:g} s (data.reply_seconds)"
            raise RetryableError(message) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise RetryableError(f"no answer ({str(cause) or type(cause).__name__})") from None
        except openai.APIStatusError as error:
            raise self._status_error(where, error) from None
        except (ValueError, RecursionError):
            reply = response.text
        if not isinstance(reply, dict):
            raise RetryableError(f"answered {short(reply, 60)}, which is not a JSON object")
        return reply

    def _status_error(self, where: str, error: openai.APIStatusError) -> Exception:
        status = error.status_code
        message = error.body.get("message") if isinstance(error.body, dict) else None
        answer = f"answered {status} {short(message or error.response.text, 200)}"
        if status in _RETRYABLE_STATUSES or status >= 500:
            return RetryableError(answer)
        hint = ""
        if status in (401, 403):
            verb = "rejected" if self._secret else "missing"
            hint = f"; API key {verb}: set the environment variable {API_KEY}"
        elif status == 404:
            hint = "; no OpenAI-compatible server answers there"
        return RequestRefused(f"{where}: {answer}{hint}", status)


def choose_model(models: Sequence[Json], url: str, target: str, served: str | None) -> Json:
    """The server's entry for the target; `served`: the name given by the user. Raises UserError:
    the server has no such model."""
    by_name = {str(model["id"]): model for model in models}
    if served is not None:
        if served not in by_name:
            raise UserError(
                f"data.served_model={served!r}: not served by {url}{nearest(served, by_name)}"
            )
        return by_name[served]
    for name, model in by_name.items():
        names = (name, str(model.get("root") or ""))
        if _last_part(target) in map(_last_part, names):
            return model
    listed = ", ".join(short(name) for name in list(by_name)[:8])
    hint = next(iter(by_name)) if len(by_name) == 1 else "NAME"
    raise UserError(
        f"{url} serves {listed}, not target.name={target!r}; if it is the same model under another "
        f"name: data.served_model={hint}"
    )


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
