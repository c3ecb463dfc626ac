"""A reply as tokens: exact ones checked, texts tokenised again, what contradicts itself never taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from align.common.errors import UserError
from align.target.model import Target
from align.writing.client import Trouble
from align.writing.completions import Completions, Continuation, Dialect, Drawing, Mismatch, Request

REQUEST = Request((1, 40, 41), 6, 0.7, 11, frozenset((2, 7)))
OF_TWO = replace(REQUEST, most=2)


class NoClient:
    url = "http://server"


def completions(target: Target, **dialect: bool) -> Completions:
    found = Completions(NoClient(), "m", target, Drawing(0.9, 5))  # type: ignore[arg-type]
    found.dialect = Dialect(**dialect)
    return found


def reply(target: Target, ids: list[int], finish: str = "length", **more: Any) -> dict[str, Any]:
    text = target.tokenizer.decode(ids, skip_special_tokens=True)
    choice = {"text": text, "finish_reason": finish, "token_ids": ids, **more.pop("choice", {})}
    return {
        "model": "m",
        "choices": [choice],
        "usage": {"prompt_tokens": 3, "completion_tokens": len(ids)},
        **more,
    }


def test_exact_ids_end_at_the_first_end(target: Target) -> None:
    read = completions(target).read
    assert read(OF_TWO, reply(target, [50, 51])) == Continuation([50, 51], None)
    assert read(REQUEST, reply(target, [50, 2], "stop")) == Continuation([50], 2)
    assert read(REQUEST, reply(target, [50, 7, 60], "length")) == Continuation([50], 7)
    for name in ("stop_reason", "matched_stop"):
        left_out = reply(target, [50, 51], "stop", choice={name: 7})
        assert read(REQUEST, left_out) == Continuation([50, 51], 7)
    assert read(REQUEST, reply(target, [50], "stop")) == Continuation([50], 2)


@pytest.mark.parametrize("exact", [True, False])
def test_a_text_that_the_server_cut_or_that_has_no_end_is_not_taken(target: Target, exact: bool) -> None:
    """An engine's own limit of tokens would teach the drafter texts without ends, a wrong reason ends that were never written."""
    read = completions(target, **({} if exact else {"ids_in": False, "ids_out": False})).read
    for ids, why in (([50, 51], "length"), ([50] * 6, "stop")):
        usage = {"prompt_tokens": 3, "completion_tokens": len(ids)}
        with pytest.raises(Mismatch, match=f"{len(ids)} of 6 tokens and finish_reason {why}"):
            read(REQUEST, reply(target, ids, why, usage=usage))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"choice": {"token_ids": [50, 9999]}}, "none of the target's tokens"),
        ({"choice": {"token_ids": ["a", 4]}}, "none of the target's tokens"),
        ({"choice": {"token_ids": [50, 60]}}, "ids and text that differ"),
        ({"choice": {"prompt_token_ids": [1, 40]}}, "prompt read as other tokens"),
        ({"usage": {"prompt_tokens": 4, "completion_tokens": 2}}, "prompt read as other tokens"),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 3}}, "ids of another number"),
    ],
)
def test_what_contradicts_itself_is_not_taken(target: Target, change: dict[str, Any], says: str) -> None:
    with pytest.raises(Mismatch, match=says):
        completions(target).read(OF_TWO, reply(target, [50, 51], **change))
    with pytest.raises(Mismatch, match="another number"):
        completions(target).read(REQUEST, reply(target, [50] * 7))


@pytest.mark.parametrize(
    "broken",
    [{}, {"choices": []}, {"choices": [{"text": None, "finish_reason": "stop"}]}, {"choices": [{"text": "a", "finish_reason": None}]}],
)  # fmt: skip
def test_what_is_no_reply_is_trouble(target: Target, broken: dict[str, Any]) -> None:
    with pytest.raises(Trouble):
        completions(target).read(REQUEST, broken)
    with pytest.raises(Trouble, match="answers as 'n', asked for 'm'"):
        completions(target).read(REQUEST, reply(target, [50], model="n"))


def test_texts_are_tokenised_again(target: Target) -> None:
    read = completions(target, ids_in=False, ids_out=False).read
    assert read(OF_TWO, reply(target, [50, 51])) == Continuation([50, 51], None)
    ended = reply(target, [50, 51], "stop", usage={"prompt_tokens": 3, "completion_tokens": 3})
    assert read(REQUEST, ended) == Continuation([50, 51], 2)
    for count in (1, 3):  # a text that was cut has no end that is counted
        with pytest.raises(Mismatch, match="tokenised as other tokens"):
            read(REQUEST, reply(target, [50, 51], usage={"completion_tokens": count}))
    with pytest.raises(Mismatch, match="not its tokens"):
        read(REQUEST, reply(target, [50], choice={"text": "a\ufffd"}))


def test_a_request_in_each_dialect(target: Target) -> None:
    full = completions(target).body(REQUEST)
    assert full["add_special_tokens"] is False and full["seed"] == 11 and full["max_tokens"] == 6
    assert full["prompt"] == [1, 40, 41] and full["stop_token_ids"] == [2, 7] and full["return_token_ids"]
    assert (full["top_p"], full["top_k"], full["repetition_penalty"], full["min_p"]) == (0.9, 5, 1.0, 0.0)
    plain = completions(target, ids_in=False, extensions=False, ids_out=False).body(REQUEST)
    assert (
        plain["prompt"] == target.tokenizer.decode([1, 40, 41])
        and not {"top_k", "stop_token_ids"} & plain.keys()
    )
    assert plain["top_p"] == 0.9 and "presence_penalty" not in plain
    assert plain["stop"] == [target.tokenizer.decode([7])]  # the target's own end it knows by itself


def test_limits_that_a_server_does_not_know_are_refused(target: Target) -> None:
    import asyncio

    from align.writing.client import Client, Patience
    from tests.loopback_server import Loopback

    async def greet(url: str) -> None:
        client = Client(url, 1, Patience(5, 0), quiet=True)
        try:
            await Completions(client, "debug", target, Drawing(1.0, 5)).greet(REQUEST)
        finally:
            await client.close()

    with Loopback(target, strict=True) as server, pytest.raises(UserError, match="data.top_k=5 is none"):
        asyncio.run(greet(server.url))
