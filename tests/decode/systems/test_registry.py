"""The declarations: names that need no torch, limits, help."""

from __future__ import annotations

from decode.speculation import verifiers
from decode.systems.registry import (
    ANY,
    LOSSY,
    MAIN,
    ROLES,
    SYSTEMS,
    TITLES,
    VERIFIERS,
    DraftingSystem,
)


def test_names_that_need_no_torch_are_those_of_the_code() -> None:
    assert set(VERIFIERS) == set(verifiers.VERIFIERS)
    lossy = {name for name, verifier in verifiers.VERIFIERS.items() if verifier.lossy}
    assert {name for name in VERIFIERS if name.startswith(LOSSY)} == lossy
    assert {MAIN, *TITLES} <= set(SYSTEMS)


def test_every_system_is_whole() -> None:
    for name, system in SYSTEMS.items():
        assert set(system.needs) <= {*ROLES, ANY} and system.__doc__
        assert {*system.grid} <= system.limits().keys()
        assert system.drafts == issubclass(system, DraftingSystem)
        default = system()
        if isinstance(default, DraftingSystem):
            assert (LOSSY in name) == default.verifier_name.startswith(LOSSY)
