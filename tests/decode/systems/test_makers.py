"""Every system as it is built: greedy output is plain decoding's, sampled output has the target's distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from align.common.errors import UserError
from align.target.model import Target
from decode import Decoder, Sampling
from decode.systems.construction import build
from decode.systems.parsing import read_method
from decode.systems.proposers import OpenDrafters
from decode.systems.registry import SYSTEMS
from tests.builders import PROMPT, VARIED
from tests.exact_distribution import exact_law
from tests.fakes import frequencies, plausible

METHODS = [
    *(name for name in SYSTEMS if name != "compiled"),
    "specdiff:gamma=5:steps=3:hot_start=true",
    "specdiff:gamma=4:nodes=6",
    "specdiff2:candidates=3:keep_q=true:verifier=traversal",
    "diffuspec:path_search=false",
    "tolerator:rounds=3:controller=cost",
    "specdiff:gamma=6:controller=adl",
    "hierarchical:inner=diffusion",
    "retrieval:nodes=6",
    "retrieval:gamma=2/5:nodes=0/4",
    "specdiff:gamma=3/5:steps=1/2/3",
    "specdiff2:candidates=2/5",
    "block_tree:nodes=3/7",
    "d2sd:boundaries=1/3",
    "specdiff:gamma=1/4:steps=1/2:order=random",
    "duo:controller=fixed",
    "specdiff:gamma=3/5:copying=true",
    "duo:copying=true",
    "d2sd:copying=true",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_greedy_output_is_plain_decodings(parts: OpenDrafters, name: str) -> None:
    decoder = build(read_method(name), parts)
    if decoder.verifier in ("traversal", "lossy_top_beta"):  # the drafts are looked at here
        decoder.verifier = "auto"
    for sampling in (Sampling(), VARIED):
        expected = Decoder(parts.target).generate(PROMPT, max_new_tokens=25, sampling=sampling)
        assert decoder.generate(PROMPT, max_new_tokens=25, sampling=sampling).tokens == expected.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "double",
        "duo",
        "hierarchical:gamma=2",
        "autoregressive:gamma=2",
        "specdiff:gamma=2/3:steps=1/3",
        "specdiff:gamma=2/3:steps=1/2:order=random",
        "specdiff2:candidates=1/3",
        "block_tree:nodes=2/4",
        "specdiff2:copying=true",
        "double:copying=true",
    ],
)
def test_sampled_output_has_the_targets_joint_law(shallow_parts: OpenDrafters, name: str) -> None:
    runs, sampling = 300, Sampling(1.0, top_k=2)
    decoder = build(read_method(name), shallow_parts, 2)
    found = frequencies(decoder, sampling, runs, PROMPT, 4)
    assert plausible(found, exact_law(shallow_parts.target, PROMPT, 4, sampling), runs)


def test_a_compiler_that_is_not_there_is_one_line(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(body: Any, dynamic: bool) -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("No working C++ compiler found\nlong story")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(
        UserError, match="method 'compiled': torch.compile does not work here: No working C.. compiler found$"
    ):
        build(read_method("compiled"), OpenDrafters(target))
