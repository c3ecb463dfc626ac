"""Reading and writing a block drafter's config."""

from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig
from tests.builders import block_network

FILL_IN = {"block_layout": "fill_in", "sample_from_anchor": False}


@pytest.fixture(scope="module")
def values(target: Target) -> dict[str, Any]:
    return block_network(target, "shared_kv").config.to_dict()


def test_a_config_round_trips(values: dict[str, Any]) -> None:
    config = BlockConfig.from_dict({**values, "architectures": ["of another reader"]})
    assert config.to_dict() == values
    assert not BlockConfig.from_dict({k: v for k, v in values.items() if k != "qk_norm"}).qk_norm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": "shared"}, "context='shared' is unknown.*did you mean 'shared_kv'"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf must be"),
        ({"mask_token_id": 10_000}, "mask_token_id=10000 is not within 0"),
        ({"target_layer_ids": [9, 9]}, r"target_layer_ids=.9, 9. are not within 0..3"),
        ({"target_layer_ids": [1]}, "shared_kv needs one target layer for each drafter layer"),
        ({"rotary": [{"layout": "pairs", "start": 0}]}, "rotary=.*inv_freq"),
        ({"block_layout": "fill_in"}, "mine: sample_from_anchor=true contradicts .*='fill_in'"),
        ({**FILL_IN, "block_size": 1}, "block_size=0 must be at least 1"),
    ],
)
def test_wrong_values_fail(values: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BlockConfig.from_dict({**values, **changes}, "mine")


def test_layouts_are_stored_as_published(values: dict[str, Any]) -> None:
    """A file's `block_size` counts input rows, ours counts drafts; older files have only `sample_from_anchor`, or neither."""
    rows = values["block_size"]
    for layout, first in (("anchor_first", True), ("fill_in", False)):
        own = {"block_layout": layout, "sample_from_anchor": first}
        config = BlockConfig.from_dict({**values, **own})
        assert (config.block_size, config.rows) == (rows - (not first), rows)
        stored = config.to_dict()
        assert stored["block_size"] == rows and stored["sample_from_anchor"] is first
        assert BlockConfig.from_dict(stored) == config
        stored.pop("block_layout", None)
        assert BlockConfig.from_dict(stored) == config
    old = {k: v for k, v in values.items() if k not in ("block_layout", "sample_from_anchor")}
    assert BlockConfig.from_dict(old).block_layout == "anchor_first"
