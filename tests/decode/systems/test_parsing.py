"""Methods, sweeps and lists of methods as they are typed."""

from __future__ import annotations

import pytest

from decode.systems.parsing import (
    Method,
    read_method,
    read_methods,
    read_sweep,
    sweep_methods,
)
from decode.systems.registry import SYSTEMS, SpecDiff, SpecDiff2
from specalign.common.errors import UserError


def test_a_method_is_a_typed_object() -> None:
    method = read_method("specdiff:gamma=16:steps=4:order=random")
    assert method.name == "specdiff:gamma=16:steps=4:order=random"
    assert method.system == SpecDiff(draft_tokens=16, steps=4, order="random")
    assert method.given == {"draft_tokens", "steps", "order"}
    assert read_method("specdiff2:draft_temperature=1.5").system == SpecDiff2(draft_temperature=1.5)
    assert read_method("specdiff2:draft_temperature=none").system == SpecDiff2()


def test_options_have_two_spellings() -> None:
    short, long = (
        read_method("specdiff:gamma=4:nodes=5"),
        read_method("specdiff:draft_tokens=4:tree_nodes=5"),
    )
    assert (
        short.system == long.system and short.name != long.name
    )  # records keep the name that was typed
    names = [
        m.name for m in sweep_methods([read_method("lookup")], read_sweep(["draft_tokens=2,4"]))
    ]
    assert names == ["lookup:draft_tokens=2", "lookup:draft_tokens=4"]
    with pytest.raises(UserError, match="draft_tokens is given twice"):
        read_method("lookup:gamma=2:draft_tokens=4")
    with pytest.raises(
        UserError,
        match="--sweep: 'draft_tokens=4' is not key=value,value,…, or its key is repeated",
    ):
        read_sweep(["gamma=2,3", "draft_tokens=4"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("specdif", "unknown method 'specdif'.*'specdiff'"),
        ("specdiff:stepps=2", "method 'specdiff:stepps=2': unknown option 'stepps'.*'steps'"),
        ("plain:gamma=4", "unknown option 'gamma': plain has none"),
        ("specdiff:steps", "unknown option 'steps'"),
        ("specdiff:steps=two", "steps='two': must be a whole number"),
        ("diffuspec:path_search=maybe", "path_search='maybe': must be true or false"),
        ("specdiff2:draft_temperature=x", "draft_temperature='x': must be a number"),
        ("specdiff:steps=1:steps=2", "steps is given twice"),
        (
            "block:verifier=blok",
            "method 'block:verifier=blok': verifier='blok' is unknown .*'block'",
        ),
        ("retrieval:corpus=nowhere.txt", "corpus='nowhere.txt': no such file"),
        ("lookup:gamma=0", "method 'lookup:gamma=0': draft_tokens=0: must be"),
    ],
)
def test_what_can_not_be_read_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_method(text)


def names(methods: list[Method]) -> list[str]:
    return [method.name for method in methods]


def test_a_sweep_is_every_combination() -> None:
    methods = [read_method(x) for x in ("lookup", "specdiff:order=random", "tolerator:steps=1")]
    assert names(sweep_methods(methods, read_sweep(["gamma=4,8", "steps=1,2"]))) == [
        "lookup:gamma=4",
        "lookup:gamma=8",
        *(f"specdiff:order=random:gamma={g}:steps={t}" for g in (4, 8) for t in (1, 2)),
        "tolerator:steps=1:gamma=4",
        "tolerator:steps=1:gamma=8",
    ]
    # a draft takes no more steps than it has tokens
    once = sweep_methods([read_method("specdiff")], read_sweep(["gamma=2,4", "steps=1,2,8"]))
    assert [name.removeprefix("specdiff:") for name in names(once)] == [
        "gamma=2:steps=1", "gamma=2:steps=2", "gamma=4:steps=1", "gamma=4:steps=2", "gamma=4:steps=8",
    ]  # fmt: skip
    two = [read_method("specdiff:gamma=4"), read_method("block")]
    swept = ["specdiff:gamma=4", "block:gamma=2", "block:gamma=3"]
    assert names(sweep_methods(two, read_sweep(["gamma=2,3"]))) == swept
    for methods, sweep, says in (
        (two, ["gama=4"], "no method here leaves the option 'gama' open.*'gamma'"),
        (two, ["gamma"], "'gamma' is not key=value"),
        (two, ["gamma=,"], "'gamma=,' is not key=value"),
        (two[:1], ["gamma=2,3"], "leaves the option 'gamma' open"),
    ):
        with pytest.raises(UserError, match=says):
            sweep_methods(methods, read_sweep(sweep))


def test_all_is_every_system_whose_drafters_are_given() -> None:
    methods, missing = read_methods("lookup:gamma=2, all").expand({"diffusion": "x"})
    assert names(methods)[0] == "lookup:gamma=2"
    expected = [n for n, s in SYSTEMS.items() if s.in_all and set(s.needs) <= {"diffusion"}]
    assert names(methods)[1:] == expected
    assert "d2sd: no drafter of the kind block (--drafter block=FOLDER)" in missing
    with pytest.raises(UserError, match="unknown method 'al'"):
        read_methods("al")
    with pytest.raises(UserError, match="unknown method ''"):
        read_methods(" , ")
