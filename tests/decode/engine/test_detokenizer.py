import pytest

from decode.engine.detokenizer import TextStream

TEXT = "naïve 🙂👩‍👩‍👧 日本語 ok"


def decode(tokens: list[int]) -> str:
    """One token per byte."""
    return bytes(tokens).decode(errors="replace")


def run(text: str, stops: tuple[str, ...] = ()) -> tuple[str, list[str], int]:
    pieces: list[str] = []
    stream = TextStream(decode, stops, pieces.append)
    count = 0
    for count, byte in enumerate(text.encode(), 1):  # noqa: B007
        if stream.push(byte):
            break
    return stream.finish(), pieces, count


def test_pieces_never_hold_half_a_character() -> None:
    text, pieces, _ = run(TEXT)
    assert text == TEXT == "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) == len(TEXT)


def test_bytes_that_are_no_text_come_out_in_the_end() -> None:
    pieces: list[str] = []
    stream = TextStream(decode, (), pieces.append)
    for byte in (97, 0xFF, 98, 0xF0, 0x9F):
        stream.push(byte)
    assert stream.finish() == "".join(pieces) == decode([97, 0xFF, 98, 0xF0, 0x9F])


@pytest.mark.parametrize("width", [1, 2, 12])
def test_text_is_cut_before_the_first_stop_string(width: int) -> None:
    for start in range(len(TEXT) - width + 1):
        stop = TEXT[start : start + width]
        at = TEXT.index(stop)
        text, pieces, count = run(TEXT, (stop, "zzz"))
        assert text == TEXT[:at] == "".join(pieces)
        assert count == len(TEXT[: at + width].encode())


def test_of_two_stop_strings_in_one_token_the_first_counts() -> None:
    stream = TextStream(lambda tokens: "".join("a.b.c" for _ in tokens), (".",), None)
    assert stream.push(0) and stream.finish() == "a"


def test_what_may_become_a_stop_string_is_held_back() -> None:
    pieces: list[str] = []
    stream = TextStream(decode, ("abcd",), pieces.append)
    for byte in b"xabc":
        assert not stream.push(byte)
    assert pieces == ["x"]
    stream.push(ord("e"))
    assert "".join(pieces) == "xabce"
    for byte in b"ab":
        stream.push(byte)
    assert "".join(pieces) == "xabce" and stream.finish() == "xabceab" == "".join(pieces)


def test_a_stop_inside_the_token_that_begins_a_character() -> None:
    table = {0: b"END\xe2", 1: b"\x82\xac", 2: b"x"}

    def decode_table(tokens: list[int]) -> str:
        return b"".join(table[t] for t in tokens).decode(errors="replace")

    stream = TextStream(decode_table, ("END",))
    assert not stream.push(2)
    assert stream.push(0)
    assert stream.finish() == "x"


def test_a_special_token_that_is_a_stop_string_ends_the_text() -> None:
    pieces: list[str] = []
    stream = TextStream(decode, ("<|end|>",), pieces.append, {256})
    assert not any(stream.push(byte) for byte in [*b"ab", 0xC3])
    assert stream.push(256) and stream.finish() == "ab\ufffd" == "".join(pieces)
    spelt = TextStream(decode, ("<|end|>",), None, {256})
    assert [spelt.push(byte) for byte in b"x<|end|>"][-1] and spelt.finish() == "x"
