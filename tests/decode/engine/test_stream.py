"""An answer as an iterator over its pieces: the text of `generate`, its output, and ends before the end."""

from typing import Any

import pytest

from decode.engine.decoder import Decoder
from decode.engine.request import RequestRunner
from decode.proposers.block import BlockProposer
from decode.proposers.lookup import LookupProposer
from specalign.common.errors import UserError
from specalign.lm.model import Target
from tests.builders import PROMPT
from tests.builders import block_network as network


@pytest.fixture
def decoders(target: Target) -> list[Decoder]:
    drafted = Decoder(target, BlockProposer(network(target, "shared_kv"), tree_nodes=None))
    return [Decoder(target), Decoder(target, LookupProposer()), drafted]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_pieces_are_the_text_of_generate(decoders: list[Decoder], temperature: float) -> None:
    for decoder in decoders:
        options: Any = {"max_new_tokens": 20, "temperature": temperature, "seed": 3}
        pieces = decoder.stream(PROMPT, **options)
        expected = decoder.generate(PROMPT, **options)
        assert "".join(pieces) == expected.text == pieces.output.text
        assert pieces.output.tokens == expected.tokens and pieces.output.finish == expected.finish
        assert list(pieces) == []


def test_streams_in_turns_do_not_disturb_one_another(decoders: list[Decoder]) -> None:
    for decoder in decoders:
        expected = [decoder.generate([*PROMPT, i], max_new_tokens=12).text for i in range(3)]
        streams = [decoder.stream([*PROMPT, i], max_new_tokens=12) for i in range(3)]
        texts = ["", "", ""]
        for _ in range(60):
            for i, one in enumerate(streams):
                texts[i] += next(one, "")
        assert texts == expected


def test_the_output_is_there_at_the_end(target: Target) -> None:
    def answer(decoder: Decoder) -> Any:
        return (yield from decoder.stream(PROMPT, max_new_tokens=4))

    pieces = Decoder(target).stream(PROMPT, max_new_tokens=4)
    with pytest.raises(UserError, match="the stream has not ended"):
        _ = pieces.output
    steps = answer(Decoder(target))
    with pytest.raises(StopIteration) as ended:
        while True:
            next(steps)
    assert ended.value.value.text == "".join(pieces) == str(pieces.output)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closed_streams_end(target: Target, monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    closed: list[RequestRunner] = []
    monkeypatch.setattr(RequestRunner, "close", lambda self: closed.append(self))
    whole = Decoder(target).generate(PROMPT, max_new_tokens=30)
    closed.clear()
    with Decoder(target).stream(PROMPT, max_new_tokens=30) as pieces:
        for _ in range(taken):
            next(pieces)
    assert len(closed) == (taken > 0)  # one that never ran has no session
    out = pieces.output
    assert out.finish == "closed" and len(out.tokens) < len(whole.tokens)
    assert out.tokens == whole.tokens[: len(out.tokens)] and whole.text.startswith(out.text)
    assert next(pieces, None) is None


def test_wrong_arguments_are_refused_at_once(target: Target) -> None:
    decoder = Decoder(target)
    with pytest.raises(UserError, match="max_new_tokens=0"):
        decoder.stream(PROMPT, max_new_tokens=0)
    with pytest.raises(UserError, match=r"to iterate: for piece in decoder.stream"):
        decoder.generate(PROMPT, stream=True)  # type: ignore[arg-type]
