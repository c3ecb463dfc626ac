"""A failing request is repeated while that may help; mistakes are one line, without the API key."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from align.config.data import API_KEY
from align.config.parser import load_recipe
from align.data.synthesis import synthesize
from align.writing.client import Client, RequestRefused, choose_model
from specalign.common.errors import UserError
from specalign.lm.model import Target
from tests.loopback_server import Loopback

BODY = {"model": "debug", "prompt": [1, 5, 9], "max_tokens": 3, "temperature": 0.0, "seed": 0}


def ask(url: str, request: Callable[[Client], Any], retry: float = 5.0, reply: float = 5.0) -> Any:
    async def run() -> Any:
        client = Client(url, reply, retry)
        try:
            return await request(client)
        finally:
            await client.close()

    return asyncio.run(run())


def complete(client: Client) -> Any:
    return client.complete(BODY)


def list_models(client: Client) -> Any:
    return client.list_models()


def test_failing_requests_are_repeated_and_refused_ones_are_not(target: Target) -> None:
    faults = ["429", "500", "dropped", "truncated"]
    with Loopback(target, fault=lambda n: faults[n] if n < len(faults) else None) as server:
        assert isinstance(ask(server.url, complete)["choices"][0]["text"], str)
        assert len(server.asked) == 5
        server.fault = lambda n: "500"
        with pytest.raises(UserError, match="answered 500 'planted', for 0 s"):
            ask(server.url, complete, retry=0.0)
        server.fault = lambda n: None
        with pytest.raises(RequestRefused, match="answered 404 .The model 'x' does not exist"):
            ask(server.url, lambda c: c.complete(BODY | {"model": "x"}))


def test_no_server_and_another_server(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=rf"{url}/v1/models: no answer .*; is the server up\?"):
        ask(url, list_models)
    with pytest.raises(UserError, match="http://exa"):
        ask("http://exa\u200bmple\u2603..", list_models)
    with Loopback(target) as server:
        with pytest.raises(UserError, match="404 .*no OpenAI-compatible server"):
            ask(f"{server.url}/elsewhere", list_models)
        monkeypatch.setenv("ALL_PROXY", "socks9://127.0.0.1:1")
        with pytest.raises(UserError, match="data.writer: cannot connect to http://far.example"):
            ask("http://far.example", list_models)
        assert ask(server.url, list_models)  # without the proxy


def test_the_api_key(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    with Loopback(target, key="very-secret") as server:
        with pytest.raises(UserError, match=f"API key missing: set .* variable {API_KEY}"):
            ask(server.url, list_models)
        monkeypatch.setenv(API_KEY, "wrong-secret")
        with pytest.raises(UserError, match="API key rejected") as error:
            ask(server.url, list_models)
        assert "secret" not in str(error.value)
        monkeypatch.setenv(API_KEY, "very-secret")
        words = ["recipe=debug_block", "data.samples=2", "data.max_answer_tokens=3"]
        recipe = load_recipe([*words, f"data.writer=openai:{server.url}"])
        synthesize(recipe, target, tmp_path, quiet=True)
    assert all(b"secret" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    monkeypatch.setenv(API_KEY, "line\nbreak")
    with pytest.raises(UserError, match="is not a valid API key"):
        ask("http://127.0.0.1:1", list_models)


@pytest.mark.parametrize("sent", [b"[" * 200_000, b"\xff\xfe\x00", b"<html>", b"[]"])
@pytest.mark.parametrize("status", [200, 500])
def test_any_reply_is_one_line(target: Target, sent: bytes, status: int) -> None:
    message = "answered 500" if status == 500 else "not a JSON object"
    with Loopback(target, alter=lambda _, body: (status, sent)) as server:
        for request in (complete, list_models):
            with pytest.raises(UserError, match=message) as error:
                ask(server.url, request, retry=0.0)
            assert len(str(error.value)) < 500


def test_an_endless_reply_times_out() -> None:
    async def drip(_: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        out.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not out.is_closing():
                out.write(b" ")
                await out.drain()
                await asyncio.sleep(0.01)

    async def run() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = Client(url, 0.2, 0.0)
        with pytest.raises(UserError, match=r"no answer within 0.2 s \(data.reply_seconds\)"):
            await client.complete(BODY)
        await client.close()
        server.close()

    asyncio.run(run())


def test_the_model_is_chosen_by_name() -> None:
    def choose(names: list[str], served: str | None = None, **more: str) -> str:
        models = [{"id": name, **more} for name in names]
        return str(choose_model(models, "http://x", "org/Model-1B", served)["id"])

    assert choose(["other", "/models/model-1b/"]) == "/models/model-1b/"
    assert choose(["alias"], root="/models/Model-1B") == "alias"
    assert choose(["a", "b"], served="b") == "b"
    with pytest.raises(UserError, match="serves 'a', 'b', not target.name='org/Model-1B'"):
        choose(["a", "b"])
