"""The OpenAI completions protocol, as engines speak it (vLLM, SGLang, TGI, llama.cpp): one request, its retries, its errors in a line.

The client is httpx2, which huggingface-hub brings along. The `openai` package would add its own retries, a key that it asks for,
headers that describe this machine, and no field of those that are read here: token ids are extensions of the engines.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from align.common.errors import UserError, nearest
from align.common.schema import parse_json
from align.common.text import say, short
from align.config.recipe import API_KEY

TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""Statuses after which the same request may be answered."""
_HERE = {"127.0.0.1", "localhost", "::1"}
MOST_BYTES = 1 << 26
"""Of a reply; an ordinary one has a thousandth of it."""
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 30.0
_SAY_EVERY = 30.0
"""Seconds between lines about requests that fail."""


class Trouble(Exception):
    """A request without a usable reply, which may have one when it is sent again. wait: seconds that the server asks for."""

    def __init__(self, what: str, wait: float = 0.0) -> None:
        super().__init__(what)
        self.wait = wait


class Refused(UserError):
    """What the server will answer again. status: of HTTP."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(what)
        self.status = status


@dataclass(frozen=True)
class Patience:
    """How long is waited: seconds for a reply, and seconds for which a request that fails is sent again."""

    reply: float
    retry: float


class Client:
    """Requests to one server; for one event loop.

    Args:
        url: its address without `/v1`.
        connections: most of them at once. key: the recipe's, that asks for a server, for messages.

    Raises:
        UserError: the package httpx2 is missing.
    """

    def __init__(
        self, url: str, connections: int, patience: Patience, quiet: bool = False, key: str = "data.writer"
    ) -> None:
        try:
            import httpx2
        except ImportError:
            raise UserError(
                f"{key}={url}: the package httpx2 is not installed here (pip install httpx2)"
            ) from None
        self.url, self.patience, self.quiet, self.key = url, patience, quiet, key
        secret = os.environ.get(API_KEY, "").strip()
        if not secret.isascii() or not secret.isprintable():
            raise UserError(f"the environment variable {API_KEY} holds characters that no key has")
        self._errors = (httpx2.TransportError, httpx2.DecodingError)
        self._no_address = (httpx2.InvalidURL, UnicodeError)
        try:
            self._http = httpx2.AsyncClient(
                headers={"Accept-Encoding": "identity"}
                | ({"Authorization": f"Bearer {secret}"} if secret else {}),
                timeout=httpx2.Timeout(patience.reply, connect=min(30.0, patience.reply), pool=None),
                limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
                trust_env=urlsplit(url).hostname not in _HERE,  # no proxy stands before this machine
            )
        except (ValueError, ImportError) as error:  # a proxy of another kind, certificates that are not there
            raise UserError(f"{key}: no connection to {url} with this environment: {error}") from None
        self._said = -_SAY_EVERY
        self.failures = 0
        """Requests that were sent again."""

    async def close(self) -> None:
        await self._http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """The models that the server names. Not tried again: an address may be wrong.

        Raises:
            UserError: no answer, or one that is none of this protocol.
        """
        try:
            found = (await self._once("GET", "/v1/models")).get("data")
        except Trouble as trouble:
            raise UserError(f"{self.url}/v1/models: {trouble}; is the server up?") from None
        if not isinstance(found, list) or not all(isinstance(m, dict) and "id" in m for m in found):
            found = []
        if not found:
            raise UserError(f"{self.url}/v1/models: names no model, so this is no OpenAI-compatible server")
        return found

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply to a completion request, sent again for as long as `patience` says.

        Raises:
            Refused: what is asked for is not answered.
            UserError: no reply in time.
        """
        started, wait = time.monotonic(), _FIRST_WAIT
        while True:
            try:
                return await self._once("POST", "/v1/completions", body)
            except Trouble as trouble:
                self.failures += 1
                past = time.monotonic() - started
                if past >= self.patience.retry:
                    raise UserError(
                        f"{self.url}/v1/completions: {trouble}, for {past:.0f} s (data.retry_seconds); what is written stays, and "
                        "the same command goes on"
                    ) from None
                self._tell(trouble)
                pause = max(trouble.wait, wait * random.uniform(0.5, 1.0))
                await asyncio.sleep(min(pause, _LONGEST_WAIT, self.patience.retry - past + 0.01))
                wait *= 2

    def _tell(self, trouble: Trouble) -> None:
        if not self.quiet and time.monotonic() - self._said >= _SAY_EVERY:
            self._said = time.monotonic()
            say(f"{self.url}: {trouble}; sent again ({self.failures} so far)", error=True)

    async def _once(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request's JSON object.

        Raises:
            Trouble: none, which another try may mend.
            Refused: an answer that another try will not mend.
        """
        reply, text = await self._reply(method, path, body)
        status = reply.status_code
        if status in TRANSIENT:
            raise Trouble(f"answered {status} {_said(text)}", _seconds(reply.headers.get("retry-after")))
        if status in (401, 403):
            has = "refuses the key in" if os.environ.get(API_KEY) else "wants an API key; put it into"
            raise Refused(
                f"{self.url}{path}: answered {status}: it {has} the environment variable {API_KEY}", status
            )
        if not reply.is_success:
            hint = (
                "; no OpenAI-compatible server answers there" if status in (301, 302, 307, 308, 404) else ""
            )
            raise Refused(f"{self.url}{path}: answered {status} {_said(text)}{hint}", status)
        try:
            found = parse_json(text, "")
        except UserError:
            raise Trouble(f"answered {short(text, 60)}, no JSON") from None
        if not isinstance(found, dict):
            raise Trouble(f"answered {short(found, 60)}, no JSON object")
        return found

    async def _reply(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[Any, str]:
        """A reply and its text, read up to `MOST_BYTES`, not unpacked, and for as long as `patience` says: a server can send without end.

        Raises:
            Trouble: none.
        """
        parts, size = list[bytes](), 0
        try:
            async with (
                asyncio.timeout(self.patience.reply),
                self._http.stream(method, self.url + path, json=body) as reply,
            ):
                async for part in reply.aiter_raw():
                    parts.append(part)
                    size += len(part)
                    if size > MOST_BYTES:
                        raise Trouble(f"answered more than {MOST_BYTES >> 20} MiB")
        except self._no_address as error:
            raise UserError(f"{self.key}: {self.url}: no address ({error})") from None
        except TimeoutError:
            raise Trouble(f"no answer within {self.patience.reply:g} s (data.reply_seconds)") from None
        except self._errors as error:
            raise Trouble(f"no answer ({str(error) or type(error).__name__})") from None
        return reply, b"".join(parts).decode("utf-8", "replace")


def _said(text: str) -> str:
    """What a server says of an error, in a few words."""
    try:
        found = parse_json(text, "")
        error = found.get("error", found)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (UserError, AttributeError):
        pass
    return short(" ".join(str(text).split()), 200)


def _seconds(text: str | None) -> float:
    """What a Retry-After asks for, a number of seconds or a date (RFC 9110, 10.2.3); 0 = nothing, or what is neither."""
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text or "").timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def choose_model(models: Sequence[dict[str, Any]], url: str, target: str, served: str | None) -> str:
    """The name under which the server has the target.

    Raises:
        UserError: it has no such model.
    """
    names = [str(model["id"]) for model in models]
    if served is not None:
        if served not in names:
            raise UserError(f"data.served_model={served!r}: {url} does not serve it{nearest(served, names)}")
        return served
    wanted = _last(target)
    for model in models:
        if wanted in (_last(str(model["id"])), _last(str(model.get("root") or ""))):
            return str(model["id"])
    serves = ", ".join(short(name) for name in names[:8])
    raise UserError(
        f"{url} serves {serves}, not target.name={target!r}; if that is the same model under another name: "
        f"data.served_model={names[0] if len(names) == 1 else 'NAME'}"
    )


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
