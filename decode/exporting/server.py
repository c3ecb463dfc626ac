"""A running server as it serves a drafter, vLLM or llama.cpp's: its outputs, and from its metrics how many drafts were accepted."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from align.common.errors import UserError
from align.common.text import short
from decode.exporting.verdict import Counts

_LABELS = r'(?:[^"}]|"(?:\\.|[^"\\])*")*'  # their values may hold a brace
_SAMPLE = re.compile(rf"^(?P<name>[\w:]+?)(?:_total)?(?:\{{(?P<labels>{_LABELS})\}})? (?P<value>[-+.\deE]+)$")
_COUNTERS = re.compile(r"^(?:vllm|llamacpp):spec_decode_num_(?P<name>\w+)$")
"""Both count the same under the same names."""
_GREEDY = {
    "temperature": 0,
    "repetition_penalty": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Of every request: servers fill what is not said from the model's generation_config.json or the command line."""
_MOST = 1 << 26
"""Bytes of an answer."""


class Server:
    """One server, by the address of its API (`http://127.0.0.1:8000`, with or without `/v1`).

    Raises:
        UserError: no address, no answer, or an answer that is none of this protocol.
    """

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError:
            parts = urlsplit("")
        if " " in url or parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError(f"--engine={url!r}: no address; an example: http://127.0.0.1:8000")
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout
        models = self._json("/v1/models").get("data")
        if (
            not isinstance(models, list)
            or not models
            or not isinstance(models[0], dict)
            or "id" not in models[0]
        ):
            raise UserError(f"{self.url}/v1/models: names no model, so this is no OpenAI-compatible server")
        self.model = str(models[0]["id"])
        self.llama = models[0].get("owned_by") == "llamacpp"
        """llama.cpp's server returns tokens by a protocol of its own alone."""

    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The server's greedy output for a prompt of tokens, as tokens."""
        if self.llama:
            body = {**_GREEDY, "prompt": list(prompt), "n_predict": max_new_tokens, "return_tokens": True}
            tokens = self._json("/completion", body).get("tokens")
        else:
            body = {**_GREEDY, "prompt": list(prompt), "max_tokens": max_new_tokens}
            answer = self._json("/v1/completions", {**body, "model": self.model, "return_token_ids": True})
            choices = answer.get("choices")
            choice = choices[0] if isinstance(choices, list) and choices else None
            tokens = choice.get("token_ids") if isinstance(choice, dict) else None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise UserError(
                f"{self.url}: its answer has no token ids, so outputs can't be compared; vLLM's has from 0.11 on, and llama.cpp's"
            )
        return tokens

    def counts(self) -> Counts:
        """Its counters now. Raises UserError where it counts no drafts, so that it has no drafter."""
        found, positions = dict[str, float](), dict[int, float]()
        for line in self._text("/metrics").splitlines():
            match = _SAMPLE.match(line)
            counter = None if match is None else _COUNTERS.match(match["name"])
            if match is None or counter is None:
                continue
            name, value = counter["name"], _number(match["value"])
            if name == "accepted_tokens_per_pos":
                place = re.search(r'position="([0-9]{1,3})"', match["labels"] or "")
                if place is not None:
                    positions[int(place[1])] = positions.get(int(place[1]), 0.0) + value
            else:
                found[name] = found.get(name, 0.0) + value
        if "drafts" not in found:
            raise UserError(
                f"{self.url}/metrics: counts no drafts: start the server with the drafter (vLLM: --speculative-config; llama-server: -md FILE --metrics)"
            )
        at = tuple(positions.get(k, 0.0) for k in range(max(positions, default=-1) + 1))
        return Counts(found["drafts"], found.get("draft_tokens", 0.0), found.get("accepted_tokens", 0.0), at)

    def _json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        text = self._text(path, body)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.url}{path}: answered {short(text)}, no JSON object")
        return found

    def _text(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            try:
                with urlopen(request, timeout=self.timeout) as answer:
                    text = bytes(answer.read(_MOST + 1)).decode("utf-8", "replace")
            except HTTPError as error:
                said = error.read(4096).decode("utf-8", "replace")
                raise UserError(f"{self.url}{path}: answered {error.code}: {short(said, 200)}") from None
            if len(text) > _MOST:
                raise UserError(f"{self.url}{path}: answered more than {_MOST >> 20} MiB")
            return text
        except (URLError, OSError, HTTPException, UnicodeError) as error:  # the last: of an address
            raise UserError(
                f"{self.url}{path}: no answer ({getattr(error, 'reason', error)}); is the server up? decode.export prints the line that starts "
                "it with a drafter (vllm serve …, llama-server …)"
            ) from None


def _number(text: str) -> float:
    """A counter's value; 0 for what is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0
