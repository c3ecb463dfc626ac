"""Sampled output has the target's joint law: every draft law, verifier and processor, on a table of a few tokens."""

from dataclasses import replace

import pytest

from decode.engine.decoder import Decoder
from decode.proposers.base import Request
from decode.proposers.lookup import LookupProposer
from decode.speculation.proposal import Proposal
from decode.speculation.settings import Sampling
from specalign.common.errors import UserError
from tests.fakes import (
    DRAFTERS,
    LENGTH,
    LETTERS,
    RUNS,
    SETTINGS,
    ScriptedDrafter,
    TableTarget,
    frequencies,
    plausible,
    right_to_left,
)

CASES = [
    ("causal", "token", "penalty"),
    ("guessed", "point_mass", "penalty"),
    ("pruned", "block", "plain"),
    ("causal", "block", "sharp top-k"),
    ("right to left", "hybrid", "plain"),
    ("i.i.d. siblings", "k_seq", "plain"),
    ("i.i.d. siblings", "traversal", "penalty"),
    ("without replacement", "recursive", "sharp top-k"),
    ("branching", "gumbel", "penalty"),
    ("independent", "block", "everything"),
    ("pruned", "token", "everything"),
    ("branching", "point_mass", "everything"),
    ("without replacement", "traversal", "everything"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "verifier", "setting"), CASES)
def test_joint_frequencies(kind: str, verifier: str, setting: str) -> None:
    target = TableTarget(3)
    if setting == "everything":
        target = TableTarget(4)
        target.eos_ids = (3,)
    decoder = Decoder(target, ScriptedDrafter(*DRAFTERS[kind]), verifier)  # type: ignore[arg-type]
    law = target.law(LETTERS, LENGTH, SETTINGS[setting])
    assert plausible(frequencies(decoder, SETTINGS[setting]), law, RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["independent", "branching"])
def test_joint_frequencies_with_an_end_of_sequence_inside(kind: str) -> None:
    target = TableTarget(3, seed=3)
    target.eos_ids = (2,)
    decoder = Decoder(target, ScriptedDrafter(*DRAFTERS[kind]))  # type: ignore[arg-type]
    law = target.law(LETTERS, LENGTH, SETTINGS["plain"])
    assert plausible(frequencies(decoder, SETTINGS["plain"]), law, RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["plain", "penalty"])
def test_joint_frequencies_of_lookup_and_plain_decoding(setting: str) -> None:
    target = TableTarget(3, seed=5)
    law = target.law(LETTERS, LENGTH, SETTINGS[setting])
    for drafter in (LookupProposer(3), None):
        found = frequencies(Decoder(target, drafter), SETTINGS[setting])  # type: ignore[arg-type]
        assert plausible(found, law, RUNS)


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
