"""What a block drafter's config may say."""

from __future__ import annotations

from typing import Any

import pytest

from align.common.errors import UserError
from align.models.block_config import BlockConfig
from align.target.model import Target
from tests.builders import block_network


@pytest.fixture(scope="module")
def values(target: Target) -> dict[str, Any]:
    return block_network(target, "shared_kv").config.to_dict()


def test_what_is_written_is_read(values: dict[str, Any]) -> None:
    config = BlockConfig.from_dict({**values, "architectures": ["whoever reads this"]})
    assert config.to_dict() == values


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("context", "shared", "context='shared' is unknown.*did you mean 'shared_kv'"),
        ("block_size", 513, "block_size=513 must be 1 to 512"),
        ("block_size", 0, "mine: block_size=0 must be at least 1"),
        ("block_size", True, "mine: block_size must be a whole number, not True"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps must be a finite number"),
        ("mask_token_id", 10_000, "mask_token_id=10000 is not within 0"),
        ("hidden_act", "silo", "hidden_act='silo' is unknown.*did you mean 'silu'"),
        ("target_layer_ids", [9, 9], "target layer 9 is not within 0..3"),
        ("target_layer_ids", [1], "shared_kv needs one target layer for each drafter layer"),
        ("target_layer_ids", ["a"], "target_layer_ids must be a list of whole numbers"),
        ("rotary", [3], "rotary must be a list of objects"),
        ("rotary", [{}, {}, {}], "rotary needs one entry, or one for each drafter layer"),
        ("rotary", [{"layout": "pair"}], "rotary layout='pair' is unknown.*did you mean 'pairs'"),
        ("rotary", [{"inv_freq": [1.0] * 9}], "rotary: start and inv_freq must lie within head_dim=16"),
        ("rotary", [{"scale": 0}], "rotary: scale must be a number above 0, not 0"),
        ("rotary", [{"inv_freq": ["a"]}], "rotary: start and inv_freq must lie within head_dim=16"),
    ],
)
def test_what_can_not_be_is_refused(values: dict[str, Any], key: str, value: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        BlockConfig.from_dict({**values, key: value}, "mine")


def test_a_missing_key_is_named_and_a_default_is_not_missed(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="missing key 'head_dim', so this is not a block drafter"):
        BlockConfig.from_dict({k: v for k, v in values.items() if k != "head_dim"})
    assert not BlockConfig.from_dict({k: v for k, v in values.items() if k != "qk_norm"}).qk_norm


def test_a_layout_is_stored_as_published_drafters_store_it(values: dict[str, Any]) -> None:
    """`block_size` of a file counts input rows, ours counts drafts; a file of old says its layout by `sample_from_anchor` alone."""
    anchor_first, fill_in = (
        BlockConfig.from_dict({**values, "block_layout": layout, "sample_from_anchor": first})
        for layout, first in (("anchor_first", True), ("fill_in", False))
    )
    rows = values["block_size"]
    assert (anchor_first.block_size, anchor_first.rows) == (rows, rows)
    assert (fill_in.block_size, fill_in.rows) == (rows - 1, rows)
    for config in (anchor_first, fill_in):
        stored = config.to_dict()
        assert stored["block_size"] == rows and stored["sample_from_anchor"] is not config.fill_in
        assert BlockConfig.from_dict(stored) == config
        assert BlockConfig.from_dict({k: v for k, v in stored.items() if k != "block_layout"}) == config
    of_old = {k: v for k, v in values.items() if k not in ("block_layout", "sample_from_anchor")}
    assert BlockConfig.from_dict(of_old) == anchor_first


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_layout": "fill-in"}, "block_layout='fill-in' is unknown.*did you mean 'fill_in'"),
        ({"block_layout": "fill_in"}, "mine: sample_from_anchor=true contradicts block_layout='fill_in'"),
        (
            {"sample_from_anchor": False, "block_layout": "anchor_first"},
            "sample_from_anchor=false contradicts block_layout='anchor_first'",
        ),
        ({"sample_from_anchor": "no"}, "mine: sample_from_anchor must be true or false, not 'no'"),
        (
            {"block_layout": "fill_in", "sample_from_anchor": False, "block_size": 1},
            "block_size=1 must be at least 2",
        ),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(
    values: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        BlockConfig.from_dict({**values, **changes}, "mine")


def test_kinds_of_markov_heads_keep_their_names_of_old(values: dict[str, Any]) -> None:
    for stored, kind in (("", "silu"), ("table", "vanilla"), ("mixed", "silu"), ("tanh", "tanh")):
        config = BlockConfig.from_dict({**values, "markov": stored, "markov_rank": 8})
        assert config.markov_kind == kind
        assert config.to_dict()["markov"] == ("" if kind == "silu" else kind)
    assert BlockConfig.from_dict(values).markov_kind == ""
