"""Bugs planted in the captured engine, one at a time: the check that each belongs to sees it. And right pairs, which pass."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from decode.captured import acceptance, block, denoising, engine, rows
from decode.captured import round as round_module
from decode.captured.acceptance import Path
from decode.captured.engine import CapturedEngine, GroupRun
from decode.captured.state import RowState
from decode.engine.decoder import Decoder
from decode.engine.loop import EagerEngine
from decode.engine.pace import Trials
from decode.engine.request import Prefill, RequestRunner
from decode.proposers.lookup import LookupProposer
from decode.speculation import sampling
from decode.speculation.settings import Sampling
from decode.verification import end_to_end, self_test
from decode.verification.batches import Asked, RequestBatch
from decode.verification.captured import EngineRecorder, check_graphs
from decode.verification.cases import Cases
from decode.verification.pair import VerifyConfig
from decode.verification.run import VerificationRun
from decode.verification.verdict import Tally
from specalign.lm.debug import debug_model
from tests.builders import shallow_target
from tests.captured_drafters import DRAFTERS, make
from tests.contract.test_planted import findings, name_of, skipped

Patch = tuple[Any, str, Any]
PROMPTS = [[4, 90, 17, 203, 90, 17], [5, 9, 30], [1, 90, 17, 40, 60, 90]]
GREEDY = Sampling(presence_penalty=1.5, repetition_penalty=1.3)
SAMPLED = Sampling(1.2, top_k=20, min_p=0.05, repetition_penalty=1.4, banned=(17,), seed=3)
TWO_TOKENS = Sampling(
    seed=5, temperature=1.0, banned=tuple(i for i in range(260) if i not in (40, 90))
)
LONG_PATHS = tuple(replace(TWO_TOKENS, seed=seed) for seed in (5, 50, 80))
EVERY = (GREEDY, SAMPLED, Sampling(0.8, top_p=0.8, min_new_tokens=5, seed=30))


@pytest.fixture(scope="module")
def run() -> VerificationRun:
    target, own = shallow_target(3, fast=False), debug_model("Llama")[0].eval()
    own.model.layers, own.config.num_hidden_layers = own.model.layers[:3], 3
    cases = Cases(target, {}, [], [], engine="captured")
    return VerificationRun(VerifyConfig(), cases, PROMPTS, lambda _: None, own)


@pytest.fixture(autouse=True)
def fresh(run: VerificationRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(note: str) -> None:
        raise AssertionError(note)

    monkeypatch.setattr(engine, "say_once", fail)
    yield
    run.tallies = {name: Tally(name) for name in run.tallies}
    run.recorded = []


def make_batch(
    run: VerificationRun,
    name: str,
    settings: tuple[Sampling, ...] = EVERY,
    verifier: str = "auto",
    eos: tuple[int, ...] | None = None,
) -> RequestBatch:
    """Three requests at each of the settings, two at a time."""
    proposer = make(run.target, name)
    decoder = Decoder(run.target, proposer, verifier, CapturedEngine(run.target, proposer))
    asked = []
    for one in settings:
        each = enumerate(PROMPTS)
        asked += [
            Asked(tuple(x), Sampling(**{**vars(one), "seed": one.fixed_seed + i}), 14 - 2 * i, eos=eos)
            for i, x in each
        ]  # fmt: skip
    return RequestBatch(name, decoder, tuple(asked), 2, chunk=4)


RIGHT = {
    name: ("recursive" if "without" in name else "k_seq" if "iid" in name else "auto")
    for name in DRAFTERS
    if name != "plain"
}


QUICK = ("lookup", "taps 8 5", "taps 0 6 iid", "ddit 2 confidence", "copy autoregressive")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in RIGHT]
)
def test_a_right_pair_passes(run: VerificationRun, name: str) -> None:
    settings = EVERY if name == "taps 8 5" or "full" in name else EVERY[:2]
    if RIGHT[name] != "auto":
        settings = EVERY[1:]
    run.check(make_batch(run, name, settings, RIGHT[name], eos=(90, 17)))
    assert not [f.what for tally in run.tallies.values() for f in tally.findings]
    assert run.tallies["rows"].counts["logits of a node"] > 40
    assert run.tallies["randomness"].counts["outcomes of rounds"] > 10
    counts = run.tallies["proposals"].counts
    assert name == "lookup" or counts["chosen proposals, drafted twice"] or settings != EVERY
    point = name in ("lookup", "taps 8 5", "shared_kv 0 5", "copy shared_kv 8 5")
    assert point or counts["drafted tokens recomputed from q and random number"] > 10
    assert point or counts["drafted token against its q, total variation"] > 0


# ---- bugs ----


def _with_path(change: Callable[[Path], Path]) -> list[Patch]:
    original = acceptance.verify
    return [(round_module, "verify", lambda *args: change(original(*args)))]


def entries_one_too_late() -> list[Patch]:
    """A round's keys and values are written one place behind the text's end."""
    original = RowState.place

    def place(self: RowState, *args: Any, **options: Any) -> Any:
        found = original(self, *args, **options)
        slots = self.cache.slots
        assert slots is not None
        self.cache.slots = slots._replace(at_BL=(slots.at_BL + 1).clamp(max=slots.end - 1))
        return found

    return [(RowState, "place", place)]


def positions_by_index() -> list[Patch]:
    """The nodes of a tree are placed one after the other, not by their depth."""
    original = RowState.place

    def place(self: RowState, depth_BM: Tensor, *args: Any, **options: Any) -> Any:
        index_BM = torch.arange(depth_BM.shape[1]).expand_as(depth_BM)
        return original(self, index_BM, *args, **options)

    return [(RowState, "place", place)]


def rows_exchanged() -> list[Patch]:
    """Requests get the logits of their neighbours."""
    original = acceptance.verify

    def verify(state: RowState, name: str, draft: Any, logits: Tensor, see: Tensor) -> Path:
        return original(state, name, draft, logits.roll(1, 0), see)

    return [(round_module, "verify", verify)]


def appended_tokens_not_marked() -> list[Patch]:
    """The penalties see the prompt and the drafts alone."""
    original = RowState.append

    def append(self: RowState, *args: Any) -> None:
        seen = None if self.seen_BV is None else self.seen_BV.clone()
        original(self, *args)
        if self.seen_BV is not None:
            self.seen_BV.copy_(seen)

    return [(RowState, "append", append)]


def minimum_from_the_prompt() -> list[Patch]:
    """The minimum length counts the prompt."""
    original = RowState._barred

    def barred(self: RowState, depth_BM: Tensor) -> Tensor | None:
        return original(self, depth_BM + 4)

    return [(RowState, "_barred", barred)]


def row_keeps_its_bans() -> list[Patch]:
    """A row forgets what is banned."""
    original = RowState._barred

    def barred(self: RowState, depth_BM: Tensor) -> Tensor | None:
        found = original(self, depth_BM)
        return None if found is None else torch.zeros_like(found)

    return [(RowState, "_barred", barred)]


def cursor_stays() -> list[Patch]:
    """Each round takes the same random numbers."""
    return _with_path(lambda path: path._replace(used_B=torch.zeros_like(path.used_B)))


def one_row_of_numbers() -> list[Patch]:
    """All requests take the numbers of the first row."""
    original = RowState.uniform

    def uniform(self: RowState, at_BR: Tensor, counts_BR: Tensor) -> Tensor:
        kept = self.u_BT
        self.u_BT = kept[:1].expand_as(kept)
        try:
            return original(self, at_BR, counts_BR)
        finally:
            self.u_BT = kept

    return [(RowState, "uniform", uniform)]


def drafts_with_the_verifiers_number() -> list[Patch]:
    """The last draft and its verification share a number."""

    def change(path: Path) -> Path:
        return path._replace(used_B=path.used_B - 1)

    return _with_path(change)


def own_numbers_of_the_next_position() -> list[Patch]:
    """Accepted tokens are drawn with the numbers of the positions after theirs."""
    original = RowState.own_numbers

    def own_numbers(self: RowState, depth_BM: Tensor, counts_BM: Tensor) -> Tensor:
        return original(self, depth_BM + (depth_BM > 0).long(), counts_BM)

    return [(RowState, "own_numbers", own_numbers)]


def shared_generator() -> list[Patch]:
    """The numbers of a row come from torch's shared generator."""
    draw = lambda count, _: torch.rand(count, dtype=torch.float64)  # noqa: E731
    return [(rows, "uniform", draw)]


def q_of_the_next_position() -> list[Patch]:
    original = block.BlockDrafting._dense

    def dense(self: Any, state: RowState, q_BNV: Tensor) -> Tensor:
        return original(self, state, q_BNV.roll(-1, 1))

    return [(block.BlockDrafting, "_dense", dense)]


def other_q_for_siblings() -> list[Patch]:
    """Siblings without replacement are drawn with replacement."""
    original = Tensor.scatter

    def scatter(self: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
        kept = isinstance(value, float) and value == 0
        return self if kept else original(self, dim, index, value)

    return [(Tensor, "scatter", scatter)]


def drafts_by_a_counter() -> list[Patch]:
    """Chosen drafts depend on more than the text."""
    original, calls = sampling.best, iter(range(10**6))

    def best(*args: Any, **options: Any) -> Tensor:
        return original(*args, **options) + next(calls) % 3

    return [(denoising, "best", best)]


def last_token_forgotten() -> list[Patch]:
    """The token after the accepted path is not the one that was drawn."""
    return _with_path(lambda path: path._replace(next_B=(path.next_B + 1) % 200))


def shorter_path_committed() -> list[Patch]:
    """The last accepted draft is dropped when a round is committed."""
    original = round_module._commit

    def commit(
        state: Any, draft: Any, tokens: Any, see_BMM: Tensor, path: Path, path_BM: Any
    ) -> None:
        end_B = torch.where(
            path.end_B > 0,
            draft.above_BN.gather(1, (path.end_B - 1).clamp(min=0)[:, None])[:, 0],
            0,
        )
        original(state, draft, tokens, see_BMM, path._replace(end_B=end_B), path_BM)

    return [(round_module, "_commit", commit)]


def rejected_context() -> list[Patch]:
    """A block drafter remembers the hidden state of the last node, not of the path's end: its drafts change with what was rejected, and stay exact."""
    original = block.BlockDrafting.observe

    def observe(self: block.BlockDrafting, state: RowState, seen: Any) -> None:
        last_B = torch.full_like(seen.end_B, seen.hidden_BMD.shape[1] - 1)
        original(self, state, seen._replace(end_B=last_B))

    return [(block.BlockDrafting, "observe", observe)]


def room_of_the_batch() -> list[Patch]:
    """Every row drafts as little as the one that is nearest to its end."""
    original = block.room_of

    def room_of(state: RowState, most: int) -> Tensor:
        room_B, runs_B = original(state, most), state.counter("active")
        return torch.where(runs_B > 0, room_B, most).amin() * runs_B

    return [(block, "room_of", room_of)]


def bucket_too_small() -> list[Patch]:
    """The drafts do not count as entries that a round reads."""
    original = rows.Rows.run

    def run_round(self: rows.Rows, longest: int, *args: Any) -> Any:
        return original(self, longest - self.drafting.nodes, *args)

    return [(rows.Rows, "run", run_round)]


def round_under_way_forgotten() -> list[Patch]:
    """A round reads the entries that the host knows of; the one under way may have added some."""
    original = GroupRun._begin_round

    def begin(self: GroupRun) -> Any:
        pending, self.pending = self.pending, None
        begun = original(self)
        self.pending = pending
        return begun

    return [(GroupRun, "_begin_round", begin)]


def results_of_other_requests() -> list[Patch]:
    """A round's results go to the requests that run now."""
    original = GroupRun._commit

    def commit(self: GroupRun) -> None:
        if self.pending is not None:
            some = [bool(result.tokens) for result in self.pending[0].wait()]
            now = {row: runner for row, runner in self.running.items() if some[row]}
            self.pending = self.pending[0], now, self.pending[2]
        original(self)

    return [(GroupRun, "_commit", commit)]


def temperature_twice() -> list[Patch]:
    original = sampling.probs

    def probs(logits: Tensor, own: Sampling, *args: Any, **options: Any) -> Tensor:
        return original(logits / own.temperature, own, *args, **options)

    return [(acceptance, "probs", probs)]


Seen = tuple[str, str, tuple[Sampling, ...], str]
CHAIN, TREE, DRAWN = "shared_kv 8 0", "taps 8 5", "shared_kv 8 6 without_replacement"
BUGS: dict[Callable[[], list[Patch]], Seen] = {
    entries_one_too_late: ("rows", CHAIN, EVERY[:1], "auto"),
    positions_by_index: ("rows", TREE, EVERY[:1], "auto"),
    rows_exchanged: ("rows", CHAIN, EVERY[:1], "auto"),
    appended_tokens_not_marked: ("rows", CHAIN, EVERY[1:2], "auto"),
    minimum_from_the_prompt: ("rows", CHAIN, EVERY[2:], "auto"),
    row_keeps_its_bans: ("rows", CHAIN, EVERY[1:2], "auto"),
    temperature_twice: ("rows", CHAIN, EVERY[1:2], "auto"),
    cursor_stays: ("randomness", CHAIN, EVERY[1:2], "auto"),
    one_row_of_numbers: ("randomness", CHAIN, EVERY[1:2], "auto"),
    drafts_with_the_verifiers_number: ("randomness", CHAIN, EVERY[1:2], "auto"),
    own_numbers_of_the_next_position: ("randomness", TREE, (TWO_TOKENS,), "auto"),
    shared_generator: ("randomness", CHAIN, EVERY[1:2], "auto"),
    q_of_the_next_position: ("proposals", CHAIN, EVERY[1:2], "auto"),
    other_q_for_siblings: ("proposals", DRAWN, EVERY[1:2], "recursive"),
    drafts_by_a_counter: ("proposals", "ddit 2 confidence", EVERY[:1], "auto"),
    last_token_forgotten: ("randomness", CHAIN, EVERY[1:2], "auto"),
    room_of_the_batch: ("randomness", CHAIN, EVERY[1:], "auto"),
    bucket_too_small: ("rows", CHAIN, EVERY[:1], "auto"),
    round_under_way_forgotten: ("rows", CHAIN, LONG_PATHS, "auto"),
    shorter_path_committed: ("commit", "lookup", (Sampling(),), "auto"),
    self_test.reused_numbers: ("randomness", CHAIN, EVERY[1:2], "auto"),
    self_test.half_top_k: ("rows", CHAIN, EVERY[1:2], "auto"),
    self_test.no_min_p: ("rows", CHAIN, (Sampling(1.0, min_p=0.3, seed=3),), "auto"),
    self_test.rounded_logits: ("rows", CHAIN, EVERY[1:2], "auto"),
    self_test.other_temperature: ("proposals", CHAIN, EVERY[1:2], "auto"),
    self_test.swapped_states: ("rows", CHAIN, EVERY[1:2], "auto"),
    self_test.stale_cache: ("rows", TREE, (TWO_TOKENS,), "auto"),
    self_test.blind_tree: ("rows", TREE, EVERY[:1], "auto"),
    self_test.penalty_of_the_text_alone: ("rows", TREE, EVERY[:1], "auto"),
    self_test.always_accepted: ("randomness", TREE, EVERY[:1], "auto"),
}


@pytest.mark.parametrize("name", [CHAIN, TREE])
def test_long_accepted_paths_pass(run: VerificationRun, name: str) -> None:
    assert findings(run, make_batch(run, name, LONG_PATHS), []) == set()


def test_siblings_of_which_one_is_possible_pass(run: VerificationRun) -> None:
    batch = make_batch(run, DRAWN, (Sampling(1.0, top_k=1, seed=3),), "recursive")
    assert findings(run, batch, []) == set()


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_bug_is_seen(run: VerificationRun, bug: Callable[[], list[Patch]]) -> None:
    check, name, settings, verifier = BUGS[bug]
    batch = make_batch(run, name, settings, verifier)
    assert check in findings(run, batch, [*bug(), *skipped(check)])


@pytest.mark.parametrize("finish", ["eos", "stop"])
def test_ends(run: VerificationRun, finish: str) -> None:
    text = make_batch(run, "plain").decoder.generate(PROMPTS[1], 12).tokens
    eos = (text[3],) if finish == "eos" else None
    stop = (run.target.detokenize(text)[2:4],) if finish == "stop" else ()
    asked = tuple(Asked(tuple(x), Sampling(), 12, stop, eos) for x in PROMPTS * 2)
    batch = RequestBatch("ends", make_batch(run, "lookup").decoder, asked, 2)
    assert findings(run, batch, []) == set()
    assert run.tallies["commit"].counts[f"ended by {finish}"] > 0
    bug = self_test.past_the_end if finish == "eos" else results_of_other_requests
    assert "commit" in findings(run, batch, bug())


def test_ends_and_penalties_within_accepted_paths_pass(run: VerificationRun) -> None:
    run.requests.letters = [90, 40]
    asked = (*run.requests.ends_of_letters(), *run.requests.of_few_tokens(1))
    batch = RequestBatch(CHAIN, make_batch(run, CHAIN).decoder, asked, 2)
    assert findings(run, batch, []) == set()
    assert run.tallies["commit"].counts["ended by eos"] > 8


def test_another_context_is_no_difference(run: VerificationRun) -> None:
    batch = make_batch(run, CHAIN, EVERY[1:2])
    assert findings(run, batch, rejected_context()) == set()


def test_joint_laws_are_enumerated_without_graphs(run: VerificationRun) -> None:
    proposer, tally = LookupProposer(2), Tally("end_to_end")
    decoder = Decoder(run.target, proposer, "auto", CapturedEngine(run.target, proposer, "traced"))
    given = ([4, 90, 4, 90], run.reference, tally, Sampling(1.0, top_k=2, seed=5))
    end_to_end.check_joint_law("lookup", decoder, *given)
    assert tally.counts["runs of the engine"] > 8 and not tally.findings


@pytest.mark.parametrize(
    "name",
    [
        "shared_kv 8 0",
        "shared_kv 8 2 without_replacement",
        "autoregressive",
        "copy autoregressive",
        "ddit 1 left_to_right",
    ],
)
def test_the_joint_law_with_skipped_rounds(
    run: VerificationRun, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request without a seed, in both engines: every second round drafts nothing."""
    sizes: list[int | None] = []
    make_runners = Decoder._make_runners

    def begin(decoder: Decoder, *args: Any) -> list[RequestRunner]:
        sizes.clear()
        return make_runners(decoder, *args)

    def choose(*_: object) -> int | None:
        sizes.append(0 if len(sizes) % 2 else None)
        return sizes[-1]

    monkeypatch.setattr(Decoder, "_make_runners", begin)
    monkeypatch.setattr(Trials, "choose", choose)
    proposer, tally = make(run.target, name), Tally("end_to_end")
    proposer.draft_tokens = 1
    verifier = "block" if getattr(proposer, "siblings", None) is None else "traversal"
    sampling = Sampling(1.0, top_k=2, repetition_penalty=1.3)
    for runs in (EagerEngine(True), CapturedEngine(run.target, proposer, paced=True)):
        decoder = Decoder(run.target, proposer, verifier, runs)
        given = ([4, 90, 4, 90], run.reference, tally, sampling)
        end_to_end.check_joint_law(name, decoder, *given, adapt=True)
        assert {*sizes} == {0, None}
    assert tally.largest and not tally.findings


def test_graphs_are_compared_with_their_operators(run: VerificationRun) -> None:
    tally = Tally("end_to_end")

    def open_decoder() -> Decoder:
        return Decoder(run.target, engine=CapturedEngine(run.target, None, "traced"))

    check_graphs("plain", open_decoder, PROMPTS, EVERY[1:2], tally)
    assert tally.counts["texts of graphs"] == 3 and not tally.findings
    join = rows.Rows.join

    def join_elsewhere(self: rows.Rows, *args: Any) -> Prefill[int]:
        """Its random numbers go into other memory than the graph's."""
        row = yield from join(self, *args)
        fresh_BT = self.state.own_u_BT.clone()
        self.state.own_u_BT.fill_(0.5)
        self.state.own_u_BT = fresh_BT
        return row

    with mock.patch.object(rows.Rows, "join", join_elsewhere):
        check_graphs("plain", open_decoder, PROMPTS, EVERY[1:2], tally)
    assert tally.findings


def test_rows_of_memory_that_was_freed_are_forgotten(run: VerificationRun) -> None:
    """A later state may be where an earlier one with more rows was."""
    greedy = make_batch(run, "lookup", (GREEDY,))
    recorder = EngineRecorder(greedy.asked * 3, lambda *_: None)
    with recorder:
        for size in (3, 1, 3, 1):
            decoder = make_batch(run, "lookup").decoder
            decoder.generate_batch(PROMPTS[:size], 6, batch_size=size, sampling=GREEDY)
            del decoder
            gc.collect()
    assert len(recorder.requests) == 8
    assert not recorder._rows
