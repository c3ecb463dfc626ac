"""A reply as tokens: exact ids are checked, text is tokenized again, contradictions are refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from align.writing.client import Client, RetryableError
from align.writing.completions import CompletionRequest, Completions, Dialect, MismatchError
from specalign.common.errors import UserError
from specalign.lm.model import Target
from tests.loopback_server import Loopback

REQUEST = CompletionRequest((1, 40, 41), 6, 0.7, 11, frozenset((2, 7)))
OF_TWO = replace(REQUEST, max_tokens=2)
TEXT_ONLY = {"ids_in": False, "ids_out": False}


def completions(target: Target, **dialect: bool) -> Completions:
    found = Completions(Client("http://server", 1, 1), "m", target, 0.9, 5)
    found.dialect = Dialect(**dialect)
    return found


def reply(target: Target, ids: list[int], finish: str = "length", **more: Any) -> dict[str, Any]:
    text = target.tokenizer.decode(ids, skip_special_tokens=True)
    choice = {"text": text, "finish_reason": finish, "token_ids": ids, **more.pop("choice", {})}
    usage = {"prompt_tokens": 3, "completion_tokens": len(ids)}
    return {"model": "m", "choices": [choice], "usage": usage, **more}


def test_exact_ids_end_at_the_first_end(target: Target) -> None:
    read = completions(target).read
    assert read(OF_TWO, reply(target, [50, 51])) == [50, 51]
    assert read(REQUEST, reply(target, [50, 2], "stop")) == [50, 2]
    assert read(REQUEST, reply(target, [50, 7, 60], "length")) == [50, 7]
    for name in ("stop_reason", "matched_stop"):
        assert read(REQUEST, reply(target, [50, 51], "stop", choice={name: 7})) == [50, 51, 7]
    assert read(REQUEST, reply(target, [50], "stop")) == [50, 2]


@pytest.mark.parametrize("dialect", [{}, TEXT_ONLY])
@pytest.mark.parametrize(("ids", "reason"), [([50, 51], "length"), ([50] * 6, "stop")])
def test_a_text_cut_by_the_engine_or_without_an_end_is_refused(
    target: Target, dialect: dict[str, bool], ids: list[int], reason: str
) -> None:
    """Training would learn texts without ends, or ends that were never written."""
    with pytest.raises(MismatchError, match=f"{len(ids)} of 6 tokens and finish_reason {reason}"):
        completions(target, **dialect).read(REQUEST, reply(target, ids, reason))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choice": {"token_ids": [50, 9999]}}, "not the target's tokens"),
        ({"choice": {"token_ids": [50, 60]}}, "ids and text disagree"),
        ({"choice": {"prompt_token_ids": [1, 40]}}, "prompt tokenized differently"),
        ({"usage": {"prompt_tokens": 4, "completion_tokens": 2}}, "prompt tokenized differently"),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 3}}, "number of ids differs"),
    ],
)
def test_a_contradictory_reply_is_refused(
    target: Target, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(MismatchError, match=message):
        completions(target).read(OF_TWO, reply(target, [50, 51], **change))


def test_an_unfinished_reply_is_retryable(target: Target) -> None:
    unfinished = {"choices": [{"text": "a", "finish_reason": None}]}
    for broken in ({}, {"choices": []}, unfinished, reply(target, [50], model="n")):
        with pytest.raises(RetryableError):
            completions(target).read(REQUEST, broken)


def test_text_is_tokenized_again(target: Target) -> None:
    read = completions(target, **TEXT_ONLY).read
    assert read(OF_TWO, reply(target, [50, 51])) == [50, 51]
    usage = {"prompt_tokens": 3, "completion_tokens": 3}  # with the end
    assert read(REQUEST, reply(target, [50, 51], "stop", usage=usage)) == [50, 51, 2]
    with pytest.raises(MismatchError, match="tokenized differently"):
        read(REQUEST, reply(target, [50, 51], usage=usage))
    with pytest.raises(MismatchError, match="does not match its tokens"):
        read(REQUEST, reply(target, [50], choice={"text": "a\ufffd"}))


def test_a_request_in_each_dialect(target: Target) -> None:
    full = completions(target).make_body(REQUEST)
    expected = {
        "prompt": [1, 40, 41], "stop_token_ids": [2, 7], "return_token_ids": True, "seed": 11,
        "max_tokens": 6, "add_special_tokens": False, "top_p": 0.9, "top_k": 5, "min_p": 0.0,
        "repetition_penalty": 1.0, "temperature": 0.7,
    }  # fmt: skip
    assert full.items() >= expected.items()
    plain = completions(target, extensions=False, **TEXT_ONLY).make_body(REQUEST)
    assert plain.keys() == {"model", "prompt", "max_tokens", "temperature", "seed", "top_p", "stop"}
    assert plain["prompt"] == target.tokenizer.decode([1, 40, 41])
    assert plain["stop"] == [target.tokenizer.decode([7])]  # the server knows the target's own end


def test_sampling_that_a_server_does_not_support_is_refused(target: Target) -> None:
    async def find_dialect(url: str) -> None:
        client = Client(url, 5, 0)
        try:
            await Completions(client, "debug", target, 1.0, 5).find_dialect(REQUEST)
        finally:
            await client.close()

    with (
        Loopback(target, strict=True) as server,
        pytest.raises(UserError, match="not support data.top_k=5"),
    ):
        asyncio.run(find_dialect(server.url))
