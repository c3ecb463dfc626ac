"""Batches draft what pays off; their text stays what it is."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from decode.captured.engine import CapturedEngine
from decode.engine.decoder import Decoder
from decode.engine.loop import EagerEngine, prefill_batch
from decode.engine.pace import KEEP, SIZES, TRY_AGAIN, DraftPace, Trials
from decode.proposers.base import DraftSession
from decode.proposers.block import BlockProposer
from decode.speculation.proposal import Proposal
from decode.speculation.settings import Sampling
from tests.builders import PROMPTS, block_network, shallow_target


@pytest.mark.parametrize("best", SIZES)
def test_the_fastest_size_is_chosen_and_others_are_tried_again(best: int | None) -> None:
    trials = Trials()
    chosen: Counter[int | None] = Counter()
    for _ in range(8 * TRY_AGAIN):
        size = trials.choose()
        chosen[size] += 1
        trials.observe(size, 3, 1.0 if size == best else 1.4)
    assert chosen[best] > 0.95 * 8 * TRY_AGAIN - len(SIZES)
    assert set(chosen) == {*SIZES}


@pytest.mark.parametrize(("nodes", "temperature"), [(0, 0.0), (5, 0.0), (5, 1.0)])
def test_sizes_keep_text(nodes: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target = shallow_target(3, fast=False)
    proposer = BlockProposer(block_network(target, "taps", 8), 4, nodes)
    sampling = Sampling(temperature, seed=1)
    wanted = Decoder(target, proposer).generate_batch(PROMPTS, 14, sampling=sampling)
    sizes: list[int | None] = []

    def choose(trials: Trials, _: bool) -> int | None:
        sizes.append(trials.sizes[len(sizes) % len(trials.sizes)])
        return sizes[-1]

    monkeypatch.setattr(Trials, "choose", choose)
    for engine in (EagerEngine(paced=True), CapturedEngine(target, proposer, paced=True)):
        sizes.clear()
        decoder = Decoder(target, proposer, engine=engine)
        found = decoder.generate_batch(PROMPTS, 14, sampling=sampling)
        assert [x.tokens for x in found] == [x.tokens for x in wanted]
        assert len({*sizes}) > 1
        depths = {depth for x in found for depth in x.drafted}
        assert 0 in depths and max(depths) > 0
        longest = max(range(len(wanted)), key=lambda i: len(wanted[i].tokens))
        own = replace(sampling, seed=1 + longest)
        alone = decoder.generate(PROMPTS[longest], 14, sampling=own)
        assert alone.tokens == wanted[longest].tokens and {0} < {*alone.drafted}


def test_drawn_drafts_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pace: DraftPace, requests: int, length: int) -> Trials:
        raise AssertionError("the clock would change the text of a seed")

    monkeypatch.setattr(DraftPace, "of", fail)
    target = shallow_target(3, fast=False)
    proposer = BlockProposer(block_network(target, "taps", 8), 4, 0)
    for engine in (EagerEngine(paced=True), CapturedEngine(target, proposer, paced=True)):
        decoder = Decoder(target, proposer, engine=engine)
        decoder.generate_batch(PROMPTS, 6, temperature=1.0, seed=1)
        decoder.generate(PROMPTS[0], 6, adapt=False)
        decoder.generate(PROMPTS[0], 6, temperature=1.0)  # the seed of its output repeats it
        Decoder(target, engine=EagerEngine(paced=True)).generate(PROMPTS[0], 6)


@pytest.mark.parametrize(("cost", "drafts"), [(2.025, True), (2.06, False), (4.0, False)])
def test_a_single_request_drafts_unless_plain_decoding_is_faster(cost: float, drafts: bool) -> None:
    """Rounds with drafts commit a token or three; more than 2% slower counts."""
    trials, chosen = DraftPace().of(1, 9), list[int | None]()
    for i in range(2000):
        chosen.append(trials.choose())
        trials.observe(
            chosen[-1], 1 if chosen[-1] == 0 else 1 + 2 * (i % 2), 1.0 if chosen[-1] == 0 else cost
        )
    assert chosen[:8] == [None] * 8 and chosen[8] == 0 and {*chosen} == {None, 0}
    assert chosen[100:].count(None if drafts else 0) > 0.96 * 1900


@pytest.mark.parametrize(
    ("slowness", "wait"), [(1.06, 32), (1.226, 91), (3.999, 1200), (32.999, 12800)]
)
def test_slow_sizes_are_tried_again_at_the_same_share_of_the_time(
    slowness: float, wait: int
) -> None:
    """And soon after the first time."""
    trials, tries = Trials((None, 0)), list[int]()
    for i in range(2 * wait + 40):
        size = trials.choose()
        if size == 0:
            tries.append(i)
        trials.observe(size, 3, 10.0 if size is None else 10.0 * slowness)
    assert tries == [1, 33, 33 + wait, 33 + 2 * wait]


@pytest.mark.parametrize(("draining", "cost"), [(False, 1.02), (True, 1.17)])
def test_the_slowest_request_decides_when_none_waits(draining: bool, cost: float) -> None:
    """So rounds with drafts have to commit 15% more in the time of plain ones."""
    for gain, fastest in ((cost, None), (cost - 0.04, 0)):
        trials, chosen = DraftPace().of(8, 9), list[int | None]()
        for _ in range(400):
            chosen.append(trials.choose(draining))
            trials.observe(chosen[-1], gain if chosen[-1] is None else 1, 1 + (chosen[-1] or 0))
        assert chosen.count(fastest) > 370


def test_first_rounds_are_forgotten_and_later_ones_fade() -> None:
    """By the rounds since, to no less than half; a slow one counts as 1.5 average ones."""
    trials, seen = Trials(), []
    for i, tokens, seconds in ((1, 4, 2.0), (2, 6, 3.0), (3, 10, 4.0), (6, 1, 1.0), (20, 2, 99.0)):
        trials.rounds = i
        trials.observe(0, tokens, seconds)
        seen.append((trials.tokens[0], trials.seconds[0]))
    weight = 1 + KEEP**3 * (1 + KEEP)
    faded = 1 + KEEP**3 * (KEEP * 6 + 10), 1 + KEEP**3 * (KEEP * 3 + 4)
    assert seen[:3] == [(4, 2), (6, 3), (KEEP * 6 + 10, KEEP * 3 + 4)]
    assert seen[3] == pytest.approx(faded)
    assert seen[4] == pytest.approx((faded[0] / 2 + 2, faded[1] / 2 + 1.5 * faded[1] / weight))


def test_powers_of_two_share_trials() -> None:
    pace = DraftPace()
    assert pace.of(5, 300) is pace.of(8, 1023) and pace.of(4, 300) is not pace.of(5, 300)
    assert pace.of(5, 1024) is pace.of(5, 4095) is not pace.of(5, 300)
    assert pace.of(5, 300) is not pace.of(5, 255) is pace.of(5, 9)


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize(("late", "cost", "drafts"), [(None, 2.3, True), (0, 3.0, False)])
def test_rounds_that_something_else_delays_count_little(
    requests: int, late: int | None, cost: float, drafts: bool
) -> None:
    trials, chosen = DraftPace().of(requests, 9), list[int | None]()
    for i in range(3000):
        size = trials.choose()
        chosen.append(size)
        seconds = 1.0 if size == 0 else cost
        delay = 1000.0 if i % 100 in (98, 99) and size == late else 0.0
        trials.observe(size, 1 if size == 0 else 2.6, seconds + delay)
    assert sum((size != 0) is drafts for size in chosen[500:]) > 0.93 * 2500


@pytest.mark.parametrize("requests", [1, 8])
def test_drafts_return_after_texts_where_they_did_not_pay(requests: int) -> None:
    trials, chosen = DraftPace().of(requests, 9), list[int | None]()
    for i in range(10_256):
        chosen.append(trials.choose())
        drafts = chosen[-1] != 0
        trials.observe(chosen[-1], 3 if drafts and i > 10_000 else 1, 1.5 if drafts else 1.0)
    assert chosen[-128:].count(0) < 20


def test_long_texts_do_not_bind_short_ones() -> None:
    pace, chosen = DraftPace(), list[int | None]()
    for i in range(1064):
        trials = pace.of(1, 20_000 if i < 1000 else 60)
        chosen.append(trials.choose())
        plain, drafting = (5.0, 20.0) if i < 1000 else (1.0, 1.2)
        drafts = chosen[-1] is None
        trials.observe(chosen[-1], 3 if drafts else 1, drafting if drafts else plain)
    assert chosen[900:1000].count(0) > 95 and chosen[-20:].count(None) > 15


def test_another_number_of_requests_begins_with_the_best_size_of_the_nearest() -> None:
    pace = DraftPace()
    pace.of(64, 9).observe(None, 3, 1.0)  # not all sizes yet
    for requests, fastest in ((8, 0), (2, None)):
        trials = pace.of(requests, 9)
        for _ in range(200):
            size = trials.choose()
            trials.observe(size, 3, 1.0 if size == fastest else 2.0)
    trials = pace.of(32, 9)
    assert [trials.choose() for _ in range(20)] == [0] * 20
    trials.observe(0, 60, 4.0)  # five times the tokens per second: so the others, by estimate
    speed = {size: trials.tokens[size] / trials.seconds[size] for size in SIZES}
    assert speed == pytest.approx({None: 7.5, 0: 15.0, 2: 7.5, 1: 7.5})


def test_estimates_are_those_of_the_nearest_number_and_then_length() -> None:
    """And never those of a single request for several."""
    pace = DraftPace((None, 0))
    for tokens, (requests, length) in enumerate([(8, 2000), (2, 9), (2, 5000)], 1):
        for size in (None, 0):
            pace.of(requests, length).observe(size, tokens, 1.0)
    assert pace.of(2, 2000).tokens == {None: 3, 0: 3} and not pace.of(1, 9).tokens
    assert pace.of(4, 2000).tokens == {None: 1, 0: 1}  # two are equally near


def test_what_is_slow_for_other_texts_is_tried_sooner_but_not_at_once() -> None:
    pace, tries = DraftPace((None, 0)), list[list[int]]()
    for length in (9, 300):
        trials, found = pace.of(8, length), list[int]()
        for i in range(200):
            size = trials.choose()
            found += [i] if size is None else []
            trials.observe(size, 1, 1.0 if size == 0 else 4.0)
        tries.append(found)
    assert tries == [[0, 32], [149, 181]]  # slower by 3 / 0.0025 rounds, an eighth of them


def test_estimates_of_few_requests_do_not_bind_many() -> None:
    """Drafts pay off for two; for 32 they do not, and all sizes commit more tokens."""
    pace, chosen = DraftPace(), Counter[int | None]()
    for requests, rounds in ((2, 100), (32, 400)):
        trials = pace.of(requests, 9)
        for _ in range(rounds):
            size = trials.choose()
            chosen[size] += requests == 32
            trials.observe(size, 5 * requests, 1.0 if (size is None) is (requests == 2) else 2.0)
    assert chosen[None] < 50


def test_every_round_is_measured_and_drafts_no_more_than_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of requests that join while others run, and of those that fall back to the eager engine."""
    target = shallow_target(3, fast=False)
    proposer = BlockProposer(block_network(target, "taps", 8), 4, 0)
    sizes: list[int | None] = []
    asked: list[tuple[int | None, int]] = []
    drains: list[bool] = []

    def choose(trials: Trials, draining: bool) -> int | None:
        drains.append(draining)
        sizes.append(trials.sizes[len(sizes) % len(trials.sizes)])
        return sizes[-1]

    measured: list[tuple[int | None, int, float]] = []
    monkeypatch.setattr(Trials, "choose", choose)
    monkeypatch.setattr(Trials, "observe", lambda _, *values: measured.append(values))
    session = type(proposer).session
    propose = session.propose

    def propose_and_note(self: DraftSession, most: int) -> Proposal | None:
        asked.append((sizes[-1], most))
        return propose(self, most)

    monkeypatch.setattr(session, "propose", propose_and_note)
    for verifier, engine in (
        ("block", EagerEngine(paced=True)),
        ("block", CapturedEngine(target, proposer, paced=True)),
        ("gumbel", CapturedEngine(target, proposer, paced=True)),
    ):
        sizes.clear()
        measured.clear()
        asked.clear()
        drains.clear()
        decoder = Decoder(target, proposer, verifier, engine)
        options = {"temperature": 1.0, "seed": 1, "adapt": True}
        outs = decoder.generate_batch(PROMPTS * 2, 9, batch_size=2, **options)
        # the captured engine begins a round before it sees that all requests have ended
        assert len(sizes) > 8 and len(sizes) - len(measured) <= (verifier == "block")
        assert all(most <= (4 if size is None else size) for size, most in asked)
        first = drains.index(True)  # when the last request has joined
        assert first > 4 and all(drains[first : first + 2])
        assert [size for size, *_ in measured] == sizes[: len(measured)]
        assert all(0 < seconds < 60 for *_, seconds in measured)
        missing = sum(len(x.tokens) - 1 for x in outs) - sum(tokens for _, tokens, _ in measured)
        # captured rounds are measured by the tokens of a row
        assert missing == 0 or (getattr(engine, "_rows", None) and missing > 0)
    measured.clear()
    decoder = Decoder(target, proposer, engine=CapturedEngine(target, proposer, paced=True))
    decoder.generate_batch(PROMPTS, 9, batch_size=1)
    assert len(measured) > 8 and all(tokens > 0 for _, tokens, _ in measured)


@pytest.mark.parametrize(
    ("verifier", "temperature", "adapts", "nodes"),
    [("lossy_typical", 1.0, False, 5), ("gumbel", 1.0, True, 2), ("self_selection", 0.0, True, 2)],
)
def test_lossy_drafts_are_whole(
    verifier: str, temperature: float, adapts: bool, nodes: int
) -> None:
    """A size limits the levels of a tree that a rule reads, and the nodes of other trees."""
    target = shallow_target(3, fast=False)
    proposer = BlockProposer(block_network(target, "taps", 8), 4, 5)
    [runner] = Decoder(target, proposer, verifier)._make_runners(
        [PROMPTS[0]], 8, None, {"temperature": temperature, "adapt": True}
    )
    assert runner.adapts is adapts
    prefill_batch({runner: runner.prefill()})
    assert runner.draft(2).tokens_1L.shape == (1, 1 + nodes)
    assert (runner.request.noise is None) is (verifier != "gumbel")


def test_the_first_nodes_of_a_tree_are_a_tree() -> None:
    tree = Proposal(torch.tensor([5, 6, 7, 8]), "point", parents=(-1, -1, 0, 2))
    assert tree.first(2).parents == (-1, -1)
    assert tree.first(3).tokens_K.tolist() == [5, 6, 7]
    assert tree.first(None) is tree
