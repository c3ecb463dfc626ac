"""A small OpenAI-compatible server on the loopback interface, over this project's decoder on a tiny target, with faults to order.

It speaks what `align.writing` reads: GET /v1/models and POST /v1/completions with vLLM's `return_token_ids` and `stop_token_ids`.
The same request is answered the same way, whoever else asks.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from decode.engine.decoder import Decoder
from specalign.lm.model import Target

FAULTS = ("429", "500", "dropped", "slow")
"""What may befall a request in place of its answer."""
SLOW = 2.5
"""Seconds that a slow reply takes."""


@dataclass
class Loopback:
    """The server, as a context; `url` is its address.

    Args:
        target: which it serves, under the name `model`.
        fault: what befalls the n-th completion request, from 0 on; None = nothing.
        ids: token ids are returned.
        key: the API key that it asks for.
        limit: the longest text that it takes.
        alter: status and body of a reply → those that are sent.
        states: the folder in which it stores hidden states of `layers`, as vLLM does; None = it returns none. lag: seconds
            after the reply until they are there. change: the states (tokens, layers, D) → those that are stored.
    """

    target: Target
    model: str = "debug"
    fault: Callable[[int], str | None] = lambda number: None
    ids: bool = True
    key: str | None = None
    limit: int = 512
    alter: Callable[[int, bytes], tuple[int, bytes]] = lambda status, body: (status, body)
    states: Path | None = None
    layers: list[int] = field(default_factory=list)
    lag: float = 0.0
    change: Callable[[Tensor], Tensor] = lambda states: states
    asked: list[dict[str, Any]] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    most_at_once: int = 0
    _now: int = 0
    _stored: Iterator[int] = field(default_factory=itertools.count)
    _known: dict[str, list[int]] = field(default_factory=dict)

    def __enter__(self) -> Loopback:
        self._lock = threading.Lock()
        self._decoding = threading.Lock()
        server = self

        class Handler(_Handler):
            app = server

        self._http = _Quiet(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def begin(self, body: dict[str, Any]) -> str | None:
        """Count a request; what befalls it."""
        with self._lock:
            number = len(self.asked)
            self.asked.append(body)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            fault = self.fault(number)
            self.met[str(fault)] += 1
            return fault

    def end(self) -> None:
        with self._lock:
            self._now -= 1

    def refusal(self, body: dict[str, Any]) -> str | None:
        """Why a request is not taken."""
        if body["model"] != self.model:
            return f"The model {body['model']!r} does not exist."
        return None

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request."""
        tokenizer, prompt = self.target.tokenizer, body["prompt"]
        ends = {*self.target.eos_ids, *body.get("stop_token_ids", ())}
        asked = {k: v for k, v in body.items() if k != "return_token_ids"}
        key = json.dumps([prompt, asked], sort_keys=True)
        with self._decoding:
            if key not in self._known:
                out = Decoder(self.target).generate(
                    prompt, max_new_tokens=body["max_tokens"], temperature=body["temperature"], seed=body.get("seed", 0)
                )  # fmt: skip
                stop = next((i + 1 for i, t in enumerate(out.tokens) if t in ends), len(out.tokens))
                self._known[key] = out.tokens[:stop]
        tokens = self._known[key]
        ended = tokens[-1] in ends
        choice: dict[str, Any] = {
            "index": 0, "text": tokenizer.decode(tokens, skip_special_tokens=True),
            "finish_reason": "stop" if ended else "length", "stop_reason": None,
        }  # fmt: skip
        if self.ids and body.get("return_token_ids"):
            choice |= {"token_ids": tokens, "prompt_token_ids": prompt}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        reply = {"object": "text_completion", "model": self.model}
        reply |= {"choices": [choice], "usage": usage}
        if self.states is not None:
            path = str(self._store(self.states, prompt))
            reply["kv_transfer_params"] = {"hidden_states_path": path}
        return reply

    def _store(self, folder: Path, prompt: list[int]) -> Path:
        """A file of the prompt's states, locked until it is written."""
        path = folder / f"cmpl-{next(self._stored)}.safetensors"
        with self._decoding:
            text = torch.tensor([prompt])
            taps = self.target.forward(text, taps=self.layers, logits=False).taps_BLFD
        assert taps is not None
        tensors = {"hidden_states": self.change(taps[0]).contiguous(), "token_ids": text[0]}
        lock = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            with lock:
                time.sleep(self.lag)
                save_file(tensors, str(path))

        threading.Thread(target=write, daemon=True).start()
        return path


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing is said of a client that went away."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    app: Loopback

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self._allowed():
            return
        if self.path != "/v1/models":
            self._send(404, {"detail": "Not Found"})
            return
        model = {"id": self.app.model, "object": "model", "max_model_len": self.app.limit}
        self._send(200, {"object": "list", "data": [model]})

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        if len(sent) < int(self.headers["Content-Length"]):  # by a client that was killed
            self.close_connection = True
            return
        body = json.loads(sent)
        if not self._allowed():
            return
        fault = self.app.begin(body)
        try:
            self._complete(body, fault)
        except ConnectionError:  # a client that was killed, or waits no longer
            self.close_connection = True
        finally:
            self.app.end()

    def _allowed(self) -> bool:
        if self.app.key is None or self.headers.get("Authorization") == f"Bearer {self.app.key}":
            return True
        self._send(401, {"error": {"message": "Unauthorized"}})
        return False

    def _complete(self, body: dict[str, Any], fault: str | None) -> None:
        if fault in ("404", "429", "500"):
            self._send(int(fault), {"error": {"message": "planted"}}, **{"Retry-After": "0"})
            return
        if fault == "dropped":
            self.close_connection = True
            return
        if why := self.app.refusal(body):
            self._send(404 if "does not exist" in why else 400, {"error": {"message": why}})
            return
        reply = self.app.answer(body)
        if fault == "slow":
            time.sleep(SLOW)
        self._send(200, reply)

    def _send(self, status: int, content: dict[str, Any], **more: str) -> None:
        data = json.dumps(content).encode()
        plain = status, data
        status, data = self.app.alter(status, data)
        if (status, data) != plain:
            self.close_connection = True  # what stands behind a wrong length is no request
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        for name, value in (headers | more).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
