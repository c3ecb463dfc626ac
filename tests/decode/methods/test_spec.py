"""Methods as they are written, swept and refused."""

from __future__ import annotations

import pytest

from align.common.errors import UserError
from decode.methods.registry import SYSTEMS, Parts
from decode.methods.spec import check_parts, listing, read_method, swept


def test_methods_as_they_are_written() -> None:
    method = read_method("specdiff:gamma=16:steps=4:hot_start=true")
    assert method.name == "specdiff:gamma=16:steps=4:hot_start=true"
    assert method.options == {"gamma": 16, "steps": 4, "hot_start": True}
    assert read_method("specdiff2:draft_temperature=1.5").options == {"draft_temperature": 1.5}
    assert read_method("specdiff2:draft_temperature=none").options == {"draft_temperature": None}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("specdif", "unknown method 'specdif'.*'specdiff'"),
        ("specdiff:stepps=2", "unknown option 'stepps'.*'steps'"),
        ("specdiff:tree_nodes=3", "unknown option 'tree_nodes' .did you mean 'nodes'"),
        ("plain:gamma=4", "unknown option 'gamma': plain has none"),
        ("specdiff:steps", "'steps' is not key=value"),
        ("specdiff:steps=two", "steps='two' must be a whole number"),
        ("specdiff:hot_start=maybe", "hot_start='maybe' must be true or false"),
        ("specdiff2:draft_temperature=x", "draft_temperature='x' must be a number"),
        ("specdiff:steps=1:steps=2", "steps is given twice"),
        ("specdiff:controller=ema", "controller='ema' is unknown"),
    ],
)
def test_methods_that_are_none(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_method(text)


def test_values_that_are_no_numbers_or_files() -> None:
    for text, says in (
        ("block:confidence=nan", "confidence='nan' must be a number"),
        ("specdiff2:draft_temperature=inf", "draft_temperature='inf' must be a number"),
        ("block:verifier=blok", "method 'block:verifier=blok': verifier='blok' is unknown .*'block'"),
        ("retrieval:corpus=nowhere.txt", "corpus='nowhere.txt': no such file"),
    ):
        with pytest.raises(UserError, match=says):
            read_method(text)


def test_a_sweep_is_every_combination() -> None:
    methods = [read_method(x) for x in ("lookup", "specdiff:order=random", "tolerator:steps=1")]
    names = [m.name for m in swept(methods, ["gamma=4,8", "steps=1,2"])]
    assert names == [
        "lookup:gamma=4",
        "lookup:gamma=8",
        *(f"specdiff:order=random:gamma={g}:steps={t}" for g in (4, 8) for t in (1, 2)),
        "tolerator:steps=1:gamma=4",
        "tolerator:steps=1:gamma=8",
    ]
    with pytest.raises(UserError, match="no method here has the option 'gama'.*'gamma'"):
        swept(methods, ["gama=4"])
    with pytest.raises(UserError, match="'gamma' is not key=value"):
        swept(methods, ["gamma"])


def test_the_help_names_every_system_and_option() -> None:
    text = listing()
    for name, system in SYSTEMS.items():
        assert f"  {name}: {system.says}" in text
        assert all(f"{option}=" in text for option in system.options)


def test_a_sweep_says_nothing_twice(parts: Parts) -> None:
    two = [read_method("specdiff:gamma=4"), read_method("block")]
    for methods, sweep, says in (
        (two[:1], ["gamma=2,3"], "--sweep: specdiff:gamma=4 says gamma itself"),
        (two[1:], ["gamma=2,3", "gamma=4"], r"--sweep: gamma is given twice \(gamma=2,3 and gamma=4\)"),
    ):
        with pytest.raises(UserError, match=says):
            swept(methods, sweep)
    assert [m.name for m in swept(two, ["gamma=2,3"])] == [
        "specdiff:gamma=4",
        "block:gamma=2",
        "block:gamma=3",
    ]


def test_an_option_may_need_a_drafter_of_its_own(parts: Parts) -> None:
    method = read_method("hierarchical:inner=diffusion")
    assert method.needs == ("autoregressive", "diffusion")
    with pytest.raises(UserError, match="needs a drafter of the kind diffusion: --drafter diffusion=FOLDER"):
        check_parts([method], {"autoregressive": "x"})
    check_parts([method], {"autoregressive": "x", "diffusion": "y"})
