"""Hardware by name."""

from __future__ import annotations

import json

import pytest

from align.common.errors import UserError
from align.planning.hardware import STATED, named_hardware, this_processor, with_stated


def test_every_entry_says_where_it_is_from() -> None:
    for name, entry in json.loads(STATED.read_text()).items():
        assert entry["source"] and named_hardware(name).stated


def test_a_count_multiplies() -> None:
    found = named_hardware("h100x8")
    assert (found.count, found.memory) == (8, named_hardware("h100").memory)
    assert named_hardware("RTX4090").count == 1 and named_hardware("rtx4090x2").count == 2


@pytest.mark.parametrize("word", ["h1000", "h100x0", "x8", ""])
def test_an_unknown_name_names_the_nearest(word: str) -> None:
    with pytest.raises(UserError, match="--hardware .*unknown"):
        named_hardware(word)


def test_given_figures_win() -> None:
    found = with_stated(named_hardware("h100"), 40, None, 1000)
    assert (found.memory, found.bandwidth, found.flops) == (40e9, 1e12, 989.4e12)


def test_this_processor_is_measured() -> None:
    found = this_processor()
    assert found.flops > 0 and found.bandwidth > 0 and not found.gpu and not found.stated
