"""What a stream gives at each place: permutations of the rows, other text before the target's own words."""

from __future__ import annotations

from align.data.packing import pack
from align.data.shards import from_lists
from align.data.stream import TEXT, Shuffled, TextFirst


def stream_of(count: int, number: int = 1) -> Shuffled:
    texts = [[10 * number + i] * 8 for i in range(count)]
    return Shuffled(pack(from_lists(texts, [1] * count, [1.0] * count), 8, 0), 3, number)


def test_every_epoch_has_every_row_once_in_another_order() -> None:
    stream = stream_of(7)
    epochs = [[stream.key(7 * e + i) for i in range(7)] for e in (0, 1, 2, 0)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] == epochs[3] and epochs[0] != epochs[1]
    assert [stream_of(7, 2).key(i) for i in range(7)] != epochs[0]


def test_text_comes_first_and_does_not_move_the_rest() -> None:
    text, own = stream_of(3, 2), stream_of(4)
    both = TextFirst(text, own, 5)
    keys = [both.key(i) for i in range(9)]
    assert [key >= TEXT for key in keys] == [True] * 5 + [False] * 4
    assert keys[5:] == [own.key(i) for i in range(4)]
    for key in keys:
        expected = text.row(key - TEXT) if key >= TEXT else own.row(key)
        assert both.row(key).tokens_L.equal(expected.tokens_L)
