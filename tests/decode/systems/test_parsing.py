"""Methods, sweeps and lists of methods as they are typed; the registry's declarations."""

import pytest

from decode.speculation import verifiers
from decode.systems import registry
from decode.systems.parsing import Method, read_method, read_methods, read_sweep, sweep_methods
from decode.systems.registry import LOSSY, SYSTEMS, DraftingSystem, SpecDiff, SpecDiff2
from specalign.common.errors import UserError


def test_a_method_is_a_typed_object() -> None:
    method = read_method("specdiff:draft_tokens=16:steps=4:order=random")
    assert method.name == "specdiff:draft_tokens=16:steps=4:order=random"
    assert method.system == SpecDiff(draft_tokens=16, steps=4, order="random")
    assert method.given == {"draft_tokens", "steps", "order"}
    assert read_method("specdiff2:draft_temperature=1.5").system == SpecDiff2(draft_temperature=1.5)
    assert read_method("specdiff2:draft_temperature=none").system == SpecDiff2()


def test_an_option_is_given_once() -> None:
    sweep = read_sweep(["draft_tokens=2,4"])
    names = [m.name for m in sweep_methods([read_method("lookup")], sweep)]
    assert names == ["lookup:draft_tokens=2", "lookup:draft_tokens=4"]
    with pytest.raises(UserError, match="draft_tokens is given twice"):
        read_method("lookup:draft_tokens=2:draft_tokens=4")
    with pytest.raises(UserError, match="or its key is repeated"):
        read_sweep(["draft_tokens=2,3", "draft_tokens=4"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("specdif", "unknown method 'specdif'.*'specdiff'"),
        ("specdiff:stepps=2", "method 'specdiff:stepps=2': unknown option 'stepps'.*'steps'"),
        ("plain:draft_tokens=4", "unknown option 'draft_tokens': plain has none"),
        ("specdiff:steps=two", "steps='two': must be a whole number"),
        ("lookup:copying=maybe", "copying='maybe': must be true or false"),
        ("specdiff2:draft_temperature=x", "draft_temperature='x': must be a number"),
        ("block:verifier=blok", "'block:verifier=blok': verifier='blok' is unknown .*'block'"),
        ("retrieval:corpus=nowhere.txt", "corpus='nowhere.txt': no such file"),
        ("lookup:draft_tokens=0", "method 'lookup:draft_tokens=0': draft_tokens=0: must be"),
    ],
)
def test_what_can_not_be_read_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_method(text)


def names(methods: list[Method]) -> list[str]:
    return [method.name for method in methods]


def test_a_sweep_is_every_combination() -> None:
    methods = [read_method(x) for x in ("lookup", "specdiff:order=random", "tolerator:steps=1")]
    assert names(sweep_methods(methods, read_sweep(["draft_tokens=4,8", "steps=1,2"]))) == [
        *(f"lookup:draft_tokens={n}" for n in (4, 8)),
        *(f"specdiff:order=random:draft_tokens={g}:steps={t}" for g in (4, 8) for t in (1, 2)),
        *(f"tolerator:steps=1:draft_tokens={n}" for n in (4, 8)),
    ]
    # a draft takes no more steps than it has tokens
    once = sweep_methods([read_method("specdiff")], read_sweep(["draft_tokens=2,4", "steps=1,2,8"]))
    assert [name.removeprefix("specdiff:") for name in names(once)] == [
        "draft_tokens=2:steps=1", "draft_tokens=2:steps=2", "draft_tokens=4:steps=1", "draft_tokens=4:steps=2", "draft_tokens=4:steps=8",
    ]  # fmt: skip
    two = [read_method("specdiff:draft_tokens=4"), read_method("block")]
    swept = ["specdiff:draft_tokens=4", "block:draft_tokens=2", "block:draft_tokens=3"]
    assert names(sweep_methods(two, read_sweep(["draft_tokens=2,3"]))) == swept
    for methods, sweep, says in (
        (two, ["draft_token=4"], "leaves the option 'draft_token' open.*'draft_tokens'"),
        (two, ["draft_tokens"], "'draft_tokens' is not key=value"),
        (two, ["draft_tokens=,"], "'draft_tokens=,' is not key=value"),
        (two[:1], ["draft_tokens=2,3"], "leaves the option 'draft_tokens' open"),
    ):
        with pytest.raises(UserError, match=says):
            sweep_methods(methods, read_sweep(sweep))


def test_all_is_every_system_whose_drafters_are_given() -> None:
    methods, missing = read_methods("lookup:draft_tokens=2, all").expand({"diffusion": "x"})
    assert names(methods)[0] == "lookup:draft_tokens=2"
    expected = [n for n, s in SYSTEMS.items() if s.in_all and set(s.needs) <= {"diffusion"}]
    assert names(methods)[1:] == expected
    assert "d2sd: no drafter of kind block (--drafter block=FOLDER)" in missing
    with pytest.raises(UserError, match="unknown method 'al'"):
        read_methods("al")
    with pytest.raises(UserError, match="unknown method ''"):
        read_methods(" , ")


def test_names_that_need_no_torch_are_those_of_the_code() -> None:
    assert set(registry.VERIFIERS) == set(verifiers.VERIFIERS)
    lossy = {name for name, verifier in verifiers.VERIFIERS.items() if verifier.lossy}
    assert {name for name in registry.VERIFIERS if name.startswith(LOSSY)} == lossy
    assert {registry.MAIN, *registry.TITLES} <= set(SYSTEMS)


def test_every_system_is_whole() -> None:
    for name, system in SYSTEMS.items():
        assert set(system.needs) <= {*registry.ROLES, registry.ANY} and system.__doc__
        assert {*system.grid} <= system.limits().keys()
        assert system.drafts == issubclass(system, DraftingSystem)
        default = system()
        if isinstance(default, DraftingSystem):
            assert (LOSSY in name) == default.verifier_name.startswith(LOSSY)
