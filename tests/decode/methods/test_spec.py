"""Methods as they are written, swept and refused."""

from __future__ import annotations

import pytest

from align.common.errors import UserError
from align.target.loading import load_target
from align.target.model import Target
from decode import Sampling
from decode.methods.build import build, verifier_of
from decode.methods.registry import SYSTEMS, Parts
from decode.methods.spec import check_parts, listing, read_method, swept
from decode.wrappers.adaptive import AdaptiveDrafter
from tests.builders import PROMPT


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


def test_values_out_of_range_name_the_method(parts: Parts) -> None:
    with pytest.raises(UserError, match="method 'specdiff2:candidates=0': candidates=0: must be 1 to"):
        build(read_method("specdiff2:candidates=0"), parts)
    with pytest.raises(UserError, match="needs a drafter of the kind diffusion: --drafter diffusion=FOLDER"):
        build(read_method("tolerator"), Parts(parts.target))


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


def test_more_tokens_than_a_drafter_drafts_are_refused(parts: Parts) -> None:
    """A sweep would show the same point under several names."""
    for text in ("block:gamma=5", "block_tree:gamma=3/5", "d2sd:gamma=9"):
        with pytest.raises(UserError, match="this drafter drafts at most 4 tokens"):
            build(read_method(text), parts)
    for name in ("block", "d2sd"):
        assert build(read_method(name), parts, 9).drafter.draft_tokens == 4  # --draft-tokens: at most
    assert build(read_method("specdiff:gamma=9"), parts).drafter.draft_tokens == 9


def test_what_says_nothing_is_refused_or_left_out(parts: Parts) -> None:
    with pytest.raises(UserError, match="gamma=1 leaves the inner drafter nothing"):
        build(read_method("hierarchical:gamma=1"), parts)
    with pytest.raises(UserError, match="unknown option 'controller'"):
        read_method("compiled:controller=cost")
    points = swept([read_method("specdiff")], ["gamma=2,4", "steps=1,2,8"])
    assert [m.name.removeprefix("specdiff:") for m in points] == [
        "gamma=2:steps=1", "gamma=2:steps=2", "gamma=4:steps=1", "gamma=4:steps=2", "gamma=4:steps=8",
    ]  # fmt: skip
    fixed, own = (build(read_method(f"duo{how}"), parts).drafter for how in (":controller=fixed", ""))
    assert not isinstance(fixed, AdaptiveDrafter) and isinstance(own, AdaptiveDrafter)
    adaptive = build(read_method("diffuspec:gamma=8"), parts).drafter
    assert (adaptive.shortest, adaptive.longest) == (5, 8)  # it does adapt  # type: ignore[union-attr]


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


def test_drafts_that_keep_their_q_are_verified_by_it(parts: Parts) -> None:
    assert verifier_of(read_method("specdiff2")) == "self_selection"
    assert verifier_of(read_method("specdiff2:candidates=2/4")) == "self_selection"
    assert verifier_of(read_method("specdiff2:keep_q=true:verifier=k_seq")) == "k_seq"
    decoder = build(read_method("specdiff2:keep_q=true"), parts)
    assert decoder.verifier_for(Sampling(1.0)) == "traversal" and decoder.verifier_for(Sampling()) == "greedy"


def test_numbers_out_of_range_are_refused_by_every_system(parts: Parts) -> None:
    for text in (
        "lookup:gamma=0",
        "lookup:gamma=-3",
        "lookup:longest=0",
        "retrieval:gamma=0",
        "retrieval:nodes=2000",
    ):
        with pytest.raises(UserError, match="must be"):
            build(read_method(text), parts)
    block = build(read_method("block:gamma=none"), parts).drafter
    assert block is not None and block.draft_tokens == parts.block.config.block_size


def test_where_drafts_may_not_branch(target: Target) -> None:
    by_place = load_target("debug-gptneo", dtype="float32", device="cpu")
    assert by_place.chains_only
    parts = Parts(by_place, {"diffusion": object(), "block": object()})
    for text in ("specdiff2", "block_tree", "specdiff:nodes=0/5", "retrieval:nodes=4"):
        with pytest.raises(UserError, match="windows its attention by place, so drafts may not branch"):
            build(read_method(text), parts)
    assert build(read_method("retrieval"), parts).generate(PROMPT, max_new_tokens=4).tokens
