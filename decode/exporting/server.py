"""A running server (vLLM or llama.cpp): its greedy outputs, and its counters of speculative decoding."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from itertools import zip_longest
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from align.common.errors import UserError
from align.common.text import short

_LABELS = r'(?:[^"}]|"(?:\\.|[^"\\])*")*'  # values may hold a brace
_SAMPLE = re.compile(
    rf"^(?:vllm|llamacpp):spec_decode_num_(?P<name>\w+?)(?:_total)?(?:\{{(?P<labels>{_LABELS})\}})? "
    r"(?P<value>\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)$"
)
_GREEDY = {
    "temperature": 0,
    "repetition_penalty": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""In every request: servers fill in the rest from the model's generation_config.json."""
_MOST = 1 << 26
"""Bytes of an answer."""


@dataclass(frozen=True)
class Counts:
    """Speculative decoding since a server started: rounds, drafted and accepted tokens, accepted ones by position."""

    calls: float = 0
    drafted: float = 0
    accepted: float = 0
    at_position: tuple[float, ...] = ()

    @classmethod
    def of(cls, outputs: Sequence[Sequence[int]], drafts: int) -> Counts:
        """From the accepted tokens of each round of each output. `drafts`: per round."""
        rounds = [accepted for output in outputs for accepted in output]
        at = tuple(float(sum(accepted > k for accepted in rounds)) for k in range(drafts))
        return cls(len(rounds), len(rounds) * drafts, sum(rounds), at)

    def since(self, before: Counts) -> Counts:
        """What came after `before`; negative for a server that was restarted."""
        pairs = zip_longest(self.at_position, before.at_position, fillvalue=0.0)
        return Counts(
            self.calls - before.calls,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(a - b for a, b in pairs),
        )

    @property
    def drafts(self) -> int:
        """Drafts per round; fewer near a text's end."""
        per_round = math.ceil(self.drafted / self.calls) if self.calls else 1
        return max(1, len(self.at_position), per_round)

    @property
    def tau(self) -> float:
        return 1 + self.accepted / self.calls if self.calls else 1.0

    def matches(self, other: Counts, parted: float = 0.0) -> bool:
        """Whether `other` accepts as many drafts, in all and at each position, up to near-ties.

        A difference of three or a tenth comes from near-ties (vLLM accepted 117 19 1 for our 114 17 1); a fault in vLLM turned
        39 3 into 28 3. After two texts part, each is its own sample: three times the root of a count.

        Args:
            parted: the share of texts that part.
        """
        if min(self.calls, other.calls) <= 0:
            return self.calls == other.calls
        own = (self.accepted, *self.at_position)
        theirs = (other.accepted, *other.at_position)
        for a, b in zip(own, theirs, strict=False):  # some servers count no positions
            scaled = b * self.calls / other.calls
            largest = max(a, scaled)
            if abs(a - scaled) > max(3.0, 0.1 * largest, 3 * math.sqrt(largest * parted)):
                return False
        return True

    @property
    def line(self) -> str:
        positions = " ".join(f"{a:.0f}" for a in self.at_position)
        return f"{self.calls:.0f} rounds, τ {self.tau:.3f}, accepted at each position {positions}"


class Server:
    """A server by the address of its API (`http://127.0.0.1:8000`, with or without `/v1`).

    Raises:
        UserError: no address, no answer, or one of another protocol.
    """

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError:
            parts = urlsplit("")
        if " " in url or parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError(f"--engine={url!r}: no address; an example: http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        try:
            model = self._request_json("/v1/models")["data"][0]
            self.model = str(model["id"])
        except (KeyError, IndexError, TypeError):
            raise UserError(
                f"{self.url}/v1/models: names no model, so this is no OpenAI-compatible server"
            ) from None
        self.llama = model.get("owned_by") == "llamacpp"
        """llama.cpp returns tokens by its own protocol only."""

    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The greedy output for a prompt, both as tokens."""
        body = {**_GREEDY, "prompt": list(prompt)}
        try:
            if self.llama:
                body |= {"n_predict": max_new_tokens, "return_tokens": True}
                tokens = self._request_json("/completion", body)["tokens"]
            else:
                body |= {"max_tokens": max_new_tokens, "model": self.model, "return_token_ids": True}
                tokens = self._request_json("/v1/completions", body)["choices"][0]["token_ids"]
        except (KeyError, IndexError, TypeError):
            tokens = None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise UserError(
                f"{self.url}: its answer has no token ids, so outputs can't be compared; vLLM's has from 0.11 "
                "on, and llama.cpp's"
            )
        return tokens

    def counts(self) -> Counts:
        """Its counters now. Raises UserError if it has no drafter."""
        totals: dict[str, float] = {}
        positions: dict[int, float] = {}
        for line in self._request("/metrics").splitlines():
            match = _SAMPLE.match(line)
            if match is None:
                continue
            name, value = match["name"], float(match["value"])
            if name != "accepted_tokens_per_pos":
                totals[name] = totals.get(name, 0.0) + value
            elif place := re.search(r'position="([0-9]{1,3})"', match["labels"] or ""):
                positions[int(place[1])] = positions.get(int(place[1]), 0.0) + value
        if "drafts" not in totals:
            raise UserError(
                f"{self.url}/metrics: counts no drafts: start the server with the drafter (vLLM: "
                "--speculative-config; llama-server: -md FILE --metrics)"
            )
        at = tuple(positions.get(k, 0.0) for k in range(max(positions, default=-1) + 1))
        return Counts(
            totals["drafts"], totals.get("draft_tokens", 0.0), totals.get("accepted_tokens", 0.0), at
        )

    def _request_json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        text = self._request(path, body)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.url}{path}: answered {short(text)}, no JSON object")
        return found

    def _request(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(self.url + path, data, {"Content-Type": "application/json"})
            with urlopen(request, timeout=self.timeout) as answer:
                text = bytes(answer.read(_MOST + 1)).decode("utf-8", "replace")
        except (URLError, OSError, HTTPException, UnicodeError) as error:
            raise self._explain(path, error) from None
        if len(text) > _MOST:
            raise UserError(f"{self.url}{path}: answered more than {_MOST >> 20} MiB")
        return text

    def _explain(self, path: str, error: Exception) -> UserError:
        """An error page's text, or that nobody answers."""
        if isinstance(error, HTTPError):
            try:
                page = error.read(4096).decode("utf-8", "replace")
                return UserError(f"{self.url}{path}: answered {error.code}: {short(page, 200)}")
            except (OSError, HTTPException) as broken:
                error = broken
        return UserError(
            f"{self.url}{path}: no answer ({getattr(error, 'reason', error)}); is the server up? decode.export "
            "prints the line that starts it with a drafter (vllm serve …, llama-server …)"
        )
