"""Sizes and layers of a fresh block drafter, for targets of all kinds."""

import pytest

from align.makers.block import block_config
from align.makers.geometry import first_layers, start_layers
from specalign.common.errors import UserError
from tests.builders import block_options as options
from tests.target_models import needs_recent, tiny_target


def test_layers_without_keys_are_left_out() -> None:
    target = tiny_target("lfm2")
    config = block_config(target, options(layers=2), None)
    assert config.target_layer_ids == config.init_layer_ids == [1, 3] and config.rotary == []
    assert start_layers(target, 3) == [1, 3, 3]
    says = r"shared_kv: layer 0 of target 'lfm2' has no keys .*context=taps"
    with pytest.raises(UserError, match=says):
        block_config(target, options(layers=2, target_layers=[0, 1]), None)


def test_more_layers_than_the_target_has_are_refused() -> None:
    target = tiny_target("llama")
    many = options(layers=target.num_layers + 1, target_layers=None)
    for made in (lambda: first_layers(target, many), lambda: block_config(target, many, None)):
        with pytest.raises(UserError, match=r"drafter\.layers=.*target 'llama' has"):
            made()
    last = options(context="taps", layers=99, target_layers=[-1])
    assert first_layers(target, last) == [target.num_layers - 1]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mamba", "it does not cache keys"),
        ("dory", "its layers have a non-standard call signature"),
    ],
)
def test_keys_that_cannot_be_shared_are_refused_in_one_line(kind: str, why: str) -> None:
    target = tiny_target(kind)
    says = f"target '{kind}' has no keys and values that a drafter can share: {why}; use drafter.context=taps"
    with pytest.raises(UserError, match=says):
        block_config(target, options(), None)
    config = block_config(target, options(context="taps"), None)
    assert config.head_dim % 2 == 0 and config.num_attention_heads % config.num_key_value_heads == 0


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        ("gemma3n_text", "use drafter.context=shared_kv"),
        ("hy_v4", "--methods lookup needs no drafter"),
    ],
)
@needs_recent
def test_layers_of_several_states_are_refused(kind: str, instead: str) -> None:
    with pytest.raises(
        UserError, match=f"the layers of target '{kind}' do not output one .*{instead}"
    ):
        block_config(tiny_target(kind), options(context="taps"), None)
