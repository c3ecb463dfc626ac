"""The joint law of four tokens of every system, enumerated through the whole engine over a tiny target."""

from collections.abc import Sequence
from unittest import mock

import pytest

from decode.engine import loop
from decode.engine.pace import Trials
from decode.engine.request import RequestRunner
from decode.proposers.adaptive import CostAware
from decode.speculation.settings import Sampling
from decode.systems.registry import SYSTEMS
from decode.verification import end_to_end
from decode.verification.cases import Case, Cases, of_methods
from decode.verification.reference import Reference
from decode.verification.verdict import Tally
from specalign.formats.block import save_drafter
from specalign.formats.standalone import save_causal, save_standalone
from specalign.lm.debug import debug_model
from specalign.lm.loading import load_target
from tests.builders import block_network, causal_drafter, diffusion_drafter

PROMPT = [4, 90, 17, 203, 90, 17, 203, 90, 17]
OTHERS = tuple(i for i in range(260) if i not in (17, 90))
"""So texts have two tokens, and drafters and target the same ones."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    folder = tmp_path_factory.mktemp("drafters")
    target = load_target("debug", dtype="float32", device="cpu")
    save_drafter(block_network(target, "shared_kv", markov_rank=8), folder / "block")
    save_standalone(diffusion_drafter(target, "masked_lm"), folder / "diffusion")
    save_causal(causal_drafter(target), folder / "autoregressive")
    drafters = {role: str(folder / role) for role in ("block", "diffusion", "autoregressive")}
    drafters["variable_prefix"] = drafters["block"]
    return of_methods("all", drafters, target, lambda _: None)


@pytest.fixture(scope="module")
def reference(cases: Cases) -> Reference:
    return Reference(cases.target, debug_model("Llama")[0])


LENGTHS = {"specdiff2": 2, "d2sd": 3, "specdiff": 3, "hierarchical": 3, "duo": 3, "double": 3}
"""Fewer tokens of a system that draws several drafts a round."""


@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if system.drafts])
def test_the_joint_law_of_a_system(
    name: str, cases: Cases, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next((case for case in cases.drawn if case.name == name), None)
    if case is None:
        pytest.skip("needs another drafter, or changes the distribution on purpose")
    monkeypatch.setattr(CostAware, "length", lambda _, most: most)  # no clock
    check(case, cases, reference, Sampling(1.2, seed=1, banned=OTHERS))


def check(
    case: Case, cases: Cases, reference: Reference, sampling: Sampling, adapt: bool = False
) -> None:
    tally = Tally("end_to_end")
    with mock.patch.object(end_to_end, "LENGTH", LENGTHS.get(case.name, end_to_end.LENGTH)):
        decoder = cases.open(case)
        given = (decoder, PROMPT, reference, tally, sampling, adapt)
        end_to_end.check_joint_law(case.name, *given)
    assert not tally.findings and tally.largest, tally


FEWER = [
    ("block", 1),
    ("block", 2),
    ("autoregressive", 2),
    *((x, 1) for x in ("specdiff", "d2sd", "hierarchical")),
]


@pytest.mark.parametrize(("name", "few"), FEWER)
def test_the_joint_law_with_fewer_drafts_in_some_rounds(
    name: str, few: int, cases: Cases, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request without a seed. How many depends on the output so far alone."""
    running: list[RequestRunner] = []

    def can_pace(runners: Sequence[RequestRunner]) -> bool:
        running[:] = runners
        return runners[0].adapts

    sizes: set[int | None] = set()

    def choose(*_: object) -> int | None:
        size = (None, few, 0)[len(running[0].out.tokens) % 3]
        sizes.add(size)
        return size

    monkeypatch.setattr(loop, "can_pace", can_pace)
    monkeypatch.setattr(Trials, "choose", choose)
    case = next(case for case in cases.drawn if case.name == name)
    check(case, cases, reference, Sampling(1.2, banned=OTHERS), adapt=True)
    assert len(sizes) > 1
