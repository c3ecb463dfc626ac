"""Coupled output is that without drafts, whatever the drafts' law; a wrong law is refused. On a table of a few tokens."""

from dataclasses import replace

import pytest

from decode.engine.decoder import Decoder
from decode.proposers.base import Request
from decode.speculation.proposal import Proposal
from decode.speculation.settings import Sampling
from specalign.common.errors import UserError
from tests.fakes import DRAFTERS, LETTERS, SETTINGS, ScriptedDrafter, TableTarget, right_to_left


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_coupled_output_is_the_same_with_and_without_drafts(setting: str) -> None:
    """At any temperature, token for token, whatever drafts and however many."""
    target, settings = TableTarget(5, seed=2), SETTINGS[setting]
    plain = Decoder(target, None, "gumbel")  # type: ignore[arg-type]
    different = set()
    for seed in range(10):
        sampling = replace(settings, seed=seed)
        expected = plain.generate(LETTERS, max_new_tokens=24, sampling=sampling)
        different.add(tuple(expected.tokens))
        for kind, (law, propose) in DRAFTERS.items():
            drafter = ScriptedDrafter(law, propose)
            decoder = Decoder(target, drafter, "gumbel")  # type: ignore[arg-type]
            out = decoder.generate(LETTERS, max_new_tokens=24, sampling=sampling)
            assert out.tokens == expected.tokens, kind
    assert len(different) == 10


def test_a_drafter_that_lies_about_its_order_is_refused() -> None:
    def surest_first(request: Request, k: int) -> Proposal:
        return replace(right_to_left(request, k), state_only=False)

    drafter = ScriptedDrafter("unmasked", surest_first)
    decoder = Decoder(TableTarget(3), drafter, "hybrid")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="looked at drawn values"):
        decoder.generate(LETTERS, max_new_tokens=5, sampling=Sampling(1.0))
