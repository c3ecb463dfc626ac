"""Names without torch: those that the code has."""

from __future__ import annotations

from decode.drafters import diffusion
from decode.method_names import LOSSY, MAIN, ORDERS, TITLES, VERIFIERS, written
from decode.methods.registry import SYSTEMS
from decode.speculation import verifiers


def test_the_lists_are_the_code_s() -> None:
    assert set(VERIFIERS) == set(verifiers.VERIFIERS) and set(ORDERS) == set(diffusion.ORDERS)
    assert {name for name in VERIFIERS if name.startswith(LOSSY)} == {
        name for name, verifier in verifiers.VERIFIERS.items() if verifier.lossy
    }
    assert {MAIN, *TITLES} <= set(SYSTEMS)


def test_a_method_as_it_is_written() -> None:
    assert written("lookup", {}) == "lookup"
    assert written("specdiff", {"gamma": "4", "steps": "2"}) == "specdiff:gamma=4:steps=2"
