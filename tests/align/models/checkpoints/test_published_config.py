"""Configs of the published layouts: what is written is read as the same plan."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from align.common.errors import UserError
from align.models.checkpoints.published_config import OWN, ScheduleSpec, hub_config, read_plan
from tests.builders import ddit_config

NOTHING = torch.empty(11, 1)


@pytest.mark.parametrize(
    ("family", "graph", "changes"),
    [
        ("sedd", "absorbing", {"scale_by_sigma": True}),
        ("sedd", "uniform", {}),
        ("radd", "absorbing", {"time_input": "none", "norm_bias": True}),
        ("mdlm", "absorbing", {"time_input": "zero"}),
        ("bd3lm", "absorbing", {"attention": "block_causal", "block_size": 4}),
        (OWN, "absorbing", {"attention": "block_causal", "block_size": 4}),
    ],
)
def test_round_trip(family: str, graph: str, changes: dict[str, Any]) -> None:
    config = ddit_config(**{"scale_by_sigma": False, **changes})
    mask_id = 10 if graph == "absorbing" else None
    schedule = ScheduleSpec() if family in ("mdlm", "bd3lm") else ScheduleSpec("geometric", 1e-3, 5.0)
    plan = read_plan(hub_config(config, family, graph, schedule, mask_id), family, "mine", NOTHING)
    assert (plan.config, plan.graph, plan.schedule, plan.mask_id) == (config, graph, schedule, mask_id)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": True}, "mine: tokens must be a whole number, not True"),
        ({"noise": {"type": "geometric", "sigma_min": 2, "sigma_max": 1}}, "0 < min < max"),
        ({"noise": {"type": "loglinaer"}}, "noise.type='loglinaer' is unknown .did you mean 'loglinear'"),
        ({"mask_token_id": 11}, "mask_token_id=11 is not an id within 0..10"),
        ({"graph": {}}, re.escape("missing key 'graph.type'")),
    ],
)
def test_what_a_config_can_not_say(changes: dict[str, Any], says: str) -> None:
    good = hub_config(ddit_config(scale_by_sigma=True), "sedd", "absorbing", ScheduleSpec(), 10)
    with pytest.raises(UserError, match=says):
        read_plan({**good, **changes}, "sedd", "mine", NOTHING)
