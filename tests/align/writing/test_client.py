"""A failing request is repeated while that may help; mistakes are one line, without the API key; contradictory replies are refused."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from align.config.data import API_KEY, DataConfig
from align.config.parser import load_recipe
from align.data.synthesis import synthesize
from align.writing.client import CompletionRequest, MismatchError, Server
from specalign.common.errors import UserError
from specalign.lm.model import Target
from tests.loopback_server import Loopback

REQUEST = CompletionRequest((1, 40, 41), 6, 0.7, 11, frozenset((2, 7)))
OF_TWO = replace(REQUEST, max_tokens=2)


def make_server(target: Target, url: str = "http://server", **options: Any) -> Server:
    server = Server(target, DataConfig(writer=f"openai:{url}", **options))
    server.model = "debug"
    return server


def ask(target: Target, url: str, request: Callable[[Server], Any], **options: Any) -> Any:
    async def run() -> Any:
        server = make_server(target, url, **options)
        try:
            return await request(server)
        finally:
            await server.close()

    return asyncio.run(run())


def complete(server: Server) -> Any:
    return server.continue_text(REQUEST)


def list_models(server: Server) -> Any:
    return server.list_models()


@pytest.mark.slow
def test_failing_requests_are_repeated(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = ["429", "500", "dropped"]
    with Loopback(target, fault=lambda n: faults[n] if n < len(faults) else None) as server:
        assert ask(target, server.url, complete)
        assert len(server.asked) == 4
        server.model = "x"
        with pytest.raises(UserError, match="answered 404 .The model 'debug' does not exist"):
            ask(target, server.url, complete)
        server.fault = lambda n: "500"
        monkeypatch.setattr("align.writing.client.RETRIES", 0)
        with pytest.raises(UserError, match="answered 500 'planted'"):
            ask(target, server.url, complete)


def test_no_server_and_another_server(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=rf"{url}/v1/models: no usable answer .*is the server up\?"):
        ask(target, url, list_models)
    with pytest.raises(UserError, match="http://exa"):
        ask(target, "http://exa\u200bmple\u2603..", list_models)
    with Loopback(target) as server:
        with pytest.raises(UserError, match="/elsewhere/v1/models: answered 404"):
            ask(target, f"{server.url}/elsewhere", list_models)
        monkeypatch.setenv("ALL_PROXY", "socks9://127.0.0.1:1")
        with pytest.raises(UserError, match="^cannot connect to http://far.example"):
            ask(target, "http://far.example", list_models)
        assert ask(target, server.url, list_models)  # without the proxy


@pytest.mark.slow
def test_the_api_key(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    with Loopback(target, key="very-secret") as server:
        monkeypatch.setenv(API_KEY, "wrong-secret")
        with pytest.raises(UserError, match=f"set {API_KEY} to the server's API key") as error:
            ask(target, server.url, list_models)
        assert "secret" not in str(error.value)
        monkeypatch.setenv(API_KEY, "very-secret")
        words = ["recipe=debug_block", "data.samples=2", "data.max_answer_tokens=3"]
        recipe = load_recipe([*words, f"data.writer=openai:{server.url}"])
        synthesize(recipe, target, tmp_path, quiet=True)
    assert all(b"secret" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    monkeypatch.setenv(API_KEY, "line\nbreak")
    with pytest.raises(UserError, match="is not a valid API key"):
        ask(target, "http://127.0.0.1:1", list_models)


@pytest.mark.parametrize("sent", [b"[" * 200_000, b"\xff\xfe\x00", b"<html>", b"[]"])
@pytest.mark.parametrize("status", [200, 500])
def test_any_reply_is_one_line(
    target: Target, sent: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "answered 500" if status == 500 else "no usable answer|not a JSON object"
    monkeypatch.setattr("align.writing.client.RETRIES", 0)
    with Loopback(target, alter=lambda _, body: (status, sent)) as server:
        for request in (complete, list_models):
            with pytest.raises(UserError, match=message) as error:
                ask(target, server.url, request)
            assert len(str(error.value)) < 500


def test_the_model_is_chosen_by_name(target: Target) -> None:
    def choose(names: list[str], served: str | None = None, **more: str) -> str:
        server = make_server(target, served_model=served)
        return str(server.choose_model([{"id": name, **more} for name in names])["id"])

    assert choose(["other", "/models/debug/"]) == "/models/debug/"
    assert choose(["alias"], root="/models/Debug") == "alias"
    assert choose(["a", "b"], served="b") == "b"
    with pytest.raises(UserError, match="serves 'a', 'b', not target.name='debug'"):
        choose(["a", "b"])


def reply(target: Target, ids: list[int], finish: str = "length", **more: Any) -> dict[str, Any]:
    text = target.tokenizer.decode(ids, skip_special_tokens=True)
    choice = {"text": text, "finish_reason": finish, "token_ids": ids, **more.pop("choice", {})}
    usage = {"prompt_tokens": 3, "completion_tokens": len(ids)}
    return {"model": "m", "choices": [choice], "usage": usage, **more}


def test_exact_ids_end_at_the_first_end(target: Target) -> None:
    read = make_server(target).read
    assert read(OF_TWO, reply(target, [50, 51])) == [50, 51]
    assert read(REQUEST, reply(target, [50, 2], "stop")) == [50, 2]
    assert read(REQUEST, reply(target, [50, 7, 60], "length")) == [50, 7]
    for name in ("stop_reason", "matched_stop"):
        assert read(REQUEST, reply(target, [50, 51], "stop", choice={name: 7})) == [50, 51, 7]
    assert read(REQUEST, reply(target, [50], "stop")) == [50, 2]


@pytest.mark.parametrize(("ids", "reason"), [([50, 51], "length"), ([50] * 6, "stop")])
def test_texts_without_an_end_are_refused(target: Target, ids: list[int], reason: str) -> None:
    """Training would learn texts without ends, or ends that were never written."""
    with pytest.raises(MismatchError, match=f"{len(ids)} of 6 tokens and finish_reason {reason}"):
        make_server(target).read(REQUEST, reply(target, ids, reason))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choice": {"token_ids": None}}, "no ids of the target's tokens"),
        ({"choice": {"token_ids": [50, 9999]}}, "no ids of the target's tokens"),
        ({"choice": {"token_ids": [50, 60]}}, "ids and text disagree"),
        ({"choice": {"prompt_token_ids": [1, 40]}}, "prompt tokenized differently"),
        ({"usage": {"prompt_tokens": 4, "completion_tokens": 2}}, "prompt tokenized differently"),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 3}}, "number of ids differs"),
    ],
)
def test_contradictions_are_refused(target: Target, change: dict[str, Any], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        make_server(target).read(OF_TWO, reply(target, [50, 51], **change))


def test_an_unfinished_reply_is_refused(target: Target) -> None:
    unfinished = {"choices": [{"text": "a", "finish_reason": None}]}
    for broken in ({}, {"choices": []}, unfinished):
        with pytest.raises(MismatchError, match="no finished text"):
            make_server(target).read(REQUEST, broken)


def test_every_setting_is_sent(target: Target) -> None:
    body = make_server(target, top_p=0.9, top_k=5).make_body(REQUEST)
    expected = {
        "prompt": [1, 40, 41], "stop_token_ids": [2, 7], "return_token_ids": True, "seed": 11,
        "max_tokens": 6, "add_special_tokens": False, "top_p": 0.9, "top_k": 5, "min_p": 0.0,
        "repetition_penalty": 1.0, "temperature": 0.7,
    }  # fmt: skip
    assert body.items() >= expected.items()
