"""A round of many requests: the outcome of each is the one alone, whatever else is verified with it, and so is what its
generator draws next."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode.speculation import rounds as rounds_module
from decode.speculation.history import History
from decode.speculation.proposal import NO_DRAFTS
from decode.speculation.rounds import Round, verify_rounds
from decode.speculation.sampling import best, couple, draw_at, position_noise, probs
from decode.speculation.settings import Sampling
from decode.speculation.tree import depths, path_to, walk
from decode.speculation.verifiers import VERIFIERS, Outcome, run_verifier
from specalign.common.errors import UserError
from tests.fakes import DRAFTERS, SETTINGS

V, CPU = 7, torch.device("cpu")
FORMS = [
    *(replace(s, banned=(6,) if s.banned else ()) for s in SETTINGS.values()),
    Sampling(1.0, top_p=0.8, min_p=0.05),
    Sampling(1.0, min_new_tokens=3),
    Sampling(),
    Sampling(repetition_penalty=1.5, presence_penalty=0.5),
]


def round_of(kind: str, verifier: str, sampling: Sampling, length: int, seed: int) -> Round | None:
    """A round of a request with its own text, generator and drafts; None where the verifier does not take such drafts."""
    text = torch.randint(V, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
    history, generator = History(sampling, text, V, (5,), CPU), torch.Generator().manual_seed(seed)
    target = SimpleNamespace(vocab_size=V)
    parts = {"tokens": text, "sampling": sampling, "history": history, "generator": generator}
    request: Any = SimpleNamespace(target=target, **parts)
    proposal = (DRAFTERS[kind][1](request, length) if length else None) or NO_DRAFTS
    if not VERIFIERS[verifier].is_exact_for_proposal(proposal, sampling.temperature):
        return None
    before = history.rows(proposal.tokens_K, proposal.tree)
    # of fp64 too: some targets' logits are
    logits = torch.randn(len(proposal) + 1, V, generator=generator, dtype=torch.float64) * 2
    logits = logits if seed % 5 == 0 else logits.float()
    coupled = verifier == "gumbel" and not sampling.greedy
    noise = (lambda at: position_noise(seed, at, V, CPU)) if coupled else None
    numbers_T = torch.rand(8, dtype=torch.float64, generator=generator)
    draws = (generator, numbers_T, noise, len(text))
    return Round(logits, proposal, verifier, sampling, before, *draws)


def rounds(step: int = 6) -> list[Round]:
    """Every so manyeth combination of verifier, kind of drafts, form of sampling and length, shuffled."""
    combinations = list(itertools.product(DRAFTERS, VERIFIERS, FORMS, range(4)))
    order = torch.randperm(len(combinations), generator=torch.Generator().manual_seed(0)).tolist()
    made = (round_of(*combinations[i], seed=i) for i in order[::step])
    return [one for one in made if one is not None]


def twin(one: Round) -> Round:
    """The same round, not yet verified."""
    generator = torch.Generator()
    generator.set_state(one.generator.get_state())
    return one._replace(logits_MV=one.logits_MV.clone(), generator=generator)


def same(together: list[Outcome], given: list[Round], alone: list[Round]) -> bool:
    """Whether each request's outcome, and the state of its generator after it, is the one alone."""
    expected = [verify_rounds([one])[0] for one in alone]
    states = zip(given, alone, strict=True)
    return together == expected and all(
        torch.equal(a.generator.get_state(), b.generator.get_state()) for a, b in states
    )


@pytest.fixture(scope="module")
def many() -> list[Round]:
    return rounds()


@pytest.mark.parametrize("device", ["CPU", "one that is read once"])
def test_rounds_are_alone(many: list[Round], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device != "CPU":  # there p is computed at all nodes, before anything is known of the path
        monkeypatch.setattr(rounds_module, "SEEN_AT_ONCE", frozenset())
    alone, given = [twin(one) for one in many], [twin(one) for one in many]
    together = verify_rounds(given)
    monkeypatch.undo()
    assert same(together, given, alone)
    assert len(many) > 250 and {len(out.accepted) for out in together} == {0, 1, 2, 3}


def test_a_rule_verifies_with_every_processor(many: list[Round]) -> None:
    """The outcome is the rule's for p as `probs` makes it; at temperature 0 the lossy rules look at p of temperature 1."""
    compared = 0
    for one in (x for x in many if x.by_rule):
        given, sampling = twin(one), one.sampling
        warm = replace(sampling, temperature=sampling.temperature or 1.0)
        p_MV = probs(given.logits_MV, warm, one.before)
        verdict = run_verifier(one.verifier, [one.proposal], p_MV[None], [given.generator])
        end = int(verdict.end_B)
        following = int(best(given.logits_MV[end], sampling, one.before.rows(end)) if sampling.greedy else verdict.next_B)  # fmt: skip
        path = path_to(one.proposal.tree, end)
        expected = Outcome([int(one.proposal.tokens_K[i]) for i in path], following, path)
        assert verify_rounds([twin(one)]) == [expected]
        compared += 1
    assert compared > 120


def test_without_a_rule_the_targets_own_tokens_are_followed(many: list[Round]) -> None:
    """Its argmax, its draw or its coupled draw at every node, with every processor."""
    compared = 0
    for one in (x for x in many if not x.by_rule):
        given, sampling = twin(one), one.sampling
        p_MV = probs(given.logits_MV, sampling, one.before)
        if sampling.greedy:
            chosen_M = p_MV.argmax(-1)
        elif one.noise is not None:
            levels = (0, *depths(one.proposal.tree))
            chosen_M = couple(p_MV, one.noise, [one.position + level for level in levels])
        else:
            assert one.numbers_T is not None
            chosen_M = draw_at(p_MV, one.numbers_T[[0, *depths(one.proposal.tree)]])
        tokens, chosen = one.proposal.tokens_K.tolist(), chosen_M.tolist()
        choose = partial(lambda chosen, at: [chosen[i] for _, i in at], chosen)
        ((path, following),) = walk([tokens], [one.proposal.tree], choose)
        assert verify_rounds([twin(one)]) == [Outcome([tokens[i] for i in path], following, path)]
        compared += 1
    assert compared > 120


def test_a_round_is_fetched_at_once(many: list[Round], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a transfer waits for the device, a round has one."""
    monkeypatch.setattr(rounds_module, "SEEN_AT_ONCE", frozenset())
    monkeypatch.setattr(torch.Tensor, "tolist", counted := Counted(torch.Tensor.tolist))
    few = [one for one in many[:150] if one.sampling.top_k == 0 and one.sampling.top_p == 1]
    verify_rounds([twin(one) for one in few])
    assert counted.calls == 1


class Counted:
    """A method that counts its calls."""

    def __init__(self, method: Callable[[Any], Any]) -> None:
        self.method, self.calls = method, 0

    def __get__(self, owner: Any, kind: Any) -> Callable[[], Any]:
        def run() -> Any:
            self.calls += 1
            return self.method(owner)

        return run


def test_one_wrong_pair_is_refused_before_anything_is_drawn(many: list[Round]) -> None:
    given = [twin(one) for one in many[:20]]
    states = [one.generator.get_state() for one in given]
    unmasked = (x for x in many if x.proposal.law == "unmasked" and len(x.proposal))
    drawn = next(x for x in unmasked if not x.sampling.greedy)
    with pytest.raises(UserError, match="would change the output's distribution"):
        verify_rounds([*given, twin(drawn)._replace(verifier="token")])
    assert all(torch.equal(x.generator.get_state(), s) for x, s in zip(given, states, strict=True))


# ---- one round by itself ----

GREEDY, WARM = Sampling(), Sampling(1.0)
