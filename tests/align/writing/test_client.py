"""One request: sent again while it may be answered, a mistake of the user's in one line, and the key in no record."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from align.common.errors import UserError
from align.config.recipe import API_KEY
from align.target.model import Target
from align.writing import client as module
from align.writing.client import Client, Patience, Refused, choose_model
from tests.loopback_server import Loopback

BODY = {"model": "debug", "prompt": [1, 5, 9], "max_tokens": 3, "temperature": 0.0, "seed": 0}


def asked(url: str, ask: Callable[[Client], Any], retry: float = 5.0) -> Any:
    async def run() -> Any:
        client = Client(url, 4, Patience(5.0, retry), quiet=True)
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(run())


def test_a_request_is_sent_again_until_it_is_answered(target: Target) -> None:
    faults = ["429", "500", "dropped", "truncated"]
    with Loopback(target, fault=lambda n: faults[n] if n < len(faults) else None) as server:
        reply = asked(server.url, lambda c: c.complete(BODY))
        assert len(reply["choices"][0]["text"]) >= 0 and len(server.asked) == 5
        with pytest.raises(UserError, match="answered 500 'planted', for 0 s"):
            server.fault = lambda n: "500"
            asked(server.url, lambda c: c.complete(BODY), retry=0.0)


def test_what_is_refused_is_not_sent_again(target: Target) -> None:
    with Loopback(target) as server:
        with pytest.raises(Refused, match="answered 404 .The model 'x' does not exist") as found:
            asked(server.url, lambda c: c.complete(BODY | {"model": "x"}))
        assert found.value.status == 404 and len(server.asked) == 1


def test_nobody_there_and_somebody_else_there(target: Target) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=rf"{url}/v1/models: no answer .*; is the server up\?"):
        asked(url, lambda c: c.models())
    with (
        Loopback(target) as server,
        pytest.raises(UserError, match="answered 404 .*no OpenAI-compatible server answers there"),
    ):
        asked(f"{server.url}/elsewhere", lambda c: c.models())


def test_addresses_and_proxies_that_are_none(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="data.writer: http://exa.*: no address"):
        asked("http://exa\u200bmple\u2603..", lambda c: c.models())
    monkeypatch.setenv("ALL_PROXY", "socks9://127.0.0.1:1")
    with pytest.raises(
        UserError, match="data.writer: no connection to http://far.example with this environment"
    ):
        asked("http://far.example", lambda c: c.models())
    with Loopback(target) as server:
        assert asked(server.url, lambda c: c.models())  # none stands before this machine


def test_the_key_comes_from_the_environment(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    with Loopback(target, key="very-secret") as server:
        with pytest.raises(
            UserError, match=f"wants an API key; put it into the environment variable {API_KEY}"
        ):
            asked(server.url, lambda c: c.models())
        monkeypatch.setenv(API_KEY, "wrong-secret")
        with pytest.raises(
            UserError, match=f"refuses the key in the environment variable {API_KEY}"
        ) as found:
            asked(server.url, lambda c: c.models())
        assert "secret" not in str(found.value)
        monkeypatch.setenv(API_KEY, "very-secret")
        assert asked(server.url, lambda c: c.models())[0]["id"] == "debug"
    monkeypatch.setenv(API_KEY, "line\nbreak")
    with pytest.raises(UserError, match="holds characters that no key has"):
        asked("http://127.0.0.1:1", lambda c: c.models())


def test_the_key_is_in_no_file(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from align.config.parser import load_recipe
    from align.data.synthesis import synthesize

    monkeypatch.setenv(API_KEY, "very-secret")
    with Loopback(target, key="very-secret") as server:
        words = ["recipe=debug_block", "data.samples=2", "data.batch_size=4", "data.max_answer_tokens=3"]
        recipe = load_recipe([*words, f"data.writer=openai:{server.url}"])
        synthesize(recipe, target, tmp_path, quiet=True)
    assert all(b"secret" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_the_model_is_chosen_by_name() -> None:
    def choose(names: list[str], target: str = "org/Model-1B", served: str | None = None, **more: str) -> str:
        return choose_model([{"id": name, **more} for name in names], "http://x", target, served)

    assert choose(["other", "/models/model-1b/"]) == "/models/model-1b/"
    assert choose(["alias"], root="/models/Model-1B") == "alias"
    assert choose(["a", "b"], served="b") == "b"
    with pytest.raises(
        UserError, match=r"serves 'a', 'b', not target.name='org/Model-1B'.*served_model=NAME"
    ):
        choose(["a", "b"])


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"[" * 200_000, "no JSON"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "no JSON"),
        (b"9" * 5000, "no JSON"),
        (b'{"data": NaN}', "no JSON"),
        (b'{"data": "\\ud800"}', "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b" " * 70_000, "more than 0 MiB"),
        (b"[]", "no JSON object"),
    ],
)
@pytest.mark.parametrize("status", [200, 500])
def test_whatever_a_server_sends_is_one_line(
    target: Target, monkeypatch: pytest.MonkeyPatch, sent: bytes, says: str, status: int
) -> None:
    """JSON without end, other text, or more than a reply can be; with an error's status too, of which it is the message."""
    if "MiB" in says:
        monkeypatch.setattr(module, "MOST_BYTES", 1 << 16)
    with Loopback(target, alter=lambda _, body: (status, sent)) as server:
        for ask in (lambda c: c.complete(BODY), lambda c: c.models()):
            with pytest.raises(UserError) as error:
                asked(server.url, ask, retry=0.0)
            line = str(error.value)
            assert len(line) < 500 and (says in line or (status == 500 and "answered 500" in line)), line


def test_a_reply_that_never_ends_is_given_up(target: Target) -> None:
    """A byte now and then is no silence, and no answer either."""

    async def drip(_: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        out.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not out.is_closing():
                out.write(b" ")
                await out.drain()
                await asyncio.sleep(0.01)

    async def run() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 1, Patience(0.2, 0.0), True)
        try:
            with pytest.raises(UserError, match=r"no answer within 0.2 s \(data.reply_seconds\)"):
                await client.complete(BODY)
        finally:
            await client.close()
            server.close()

    asyncio.run(run())


def test_packed_replies_are_not_unpacked(target: Target) -> None:
    """A thousand bytes would be a million."""
    packed = gzip.compress(b"{" + b" " * 10**6 + b"}", mtime=0)
    with (
        Loopback(target, alter=lambda status, body: (status, packed)) as server,
        pytest.raises(UserError, match="no JSON"),
    ):
        asked(server.url, lambda c: c.models())


def test_a_server_that_asks_for_time_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: 1_445_412_470.0)
    for text, seconds in {
        "7": 7.0,
        "Wed, 21 Oct 2015 07:28:00 GMT": 10.0,
        "Wed, 21 Oct 2015 07:27:00 GMT": 0.0,  # over
        "Wed, 21 Oct": 0.0,
        "nan": 0.0,
        "": 0.0,
    }.items():
        assert module._seconds(text) == seconds
    assert module._seconds(None) == 0.0
