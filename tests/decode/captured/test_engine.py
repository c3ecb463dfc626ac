"""The captured engine writes the eager engine's texts: every drafter, setting, batch and bucket; and its sampled text has p's law."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from decode.captured import engine, graph, rows
from decode.captured.engine import CapturedEngine
from decode.captured.graph import Backend, WaitsForDevice, forbid_waiting
from decode.engine.decoder import Decoder
from decode.engine.output import Generation, RoundResult
from decode.engine.pace import Trials
from decode.engine.request import RequestRunner
from decode.proposers.base import Proposer
from decode.proposers.block import BlockProposer
from decode.proposers.diffusion import DiffusionProposer
from decode.speculation.settings import Sampling
from decode.verification import proposals
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.captured_drafters import DRAFTERS, make
from tests.exact_distribution import exact_law
from tests.target_models import tiny_target

slow = partial(pytest.param, marks=pytest.mark.slow)
PROMPTS = [[4, 90, 17, 203, 90, 17], [5], [1, 90, 17, 2, 3, 1, 40, 0, 90], [9, 9, 9, 4, 3]]
EVERYTHING = Sampling(
    temperature=1.3, top_k=20, top_p=0.95, min_p=0.02, presence_penalty=0.4, repetition_penalty=1.2,
    banned=(3, 9), min_new_tokens=6, seed=5,
)  # fmt: skip
SETTINGS = [Sampling(repetition_penalty=1.4), Sampling(temperature=1.0, seed=3)]
SETTINGS += [Sampling(temperature=0.6, top_p=0.9, min_new_tokens=5, seed=4), EVERYTHING]


def compare(
    target: Target,
    proposer: Proposer | None,
    sampling: Sampling,
    backend: Backend = "eager",
    size: int = 3,
    buckets: tuple[int, ...] = (20, 32),
    **options: Any,
) -> None:
    """Requests of different lengths, more than there are rows, over several buckets."""
    limits, given = [16, 9, 14, 11], {"batch_size": size, "sampling": sampling, **options}
    captured = Decoder(target, proposer, engine=CapturedEngine(target, proposer, backend))
    with mock.patch.object(rows, "BUCKETS", buckets):
        found = captured.generate_batch(PROMPTS, limits, **given)
    eager = Decoder(target, None if sampling.greedy else proposer)
    wanted = eager.generate_batch(PROMPTS, limits, **given)
    for one, other in zip(found, wanted, strict=True):
        assert (one.tokens, one.finish, one.text) == (other.tokens, other.finish, other.text)
        assert len(one.tokens) - 1 - sum(one.accepted) in (one.calls, one.calls - 1)


SAMPLED = {"plain": SETTINGS[1:], "lookup": SETTINGS[1:], "autoregressive": [EVERYTHING]}
SAMPLED |= {"taps 8 5": [EVERYTHING], "shared_kv 8 6 without_replacement": [EVERYTHING]}
SAMPLED |= {"ddit 2 confidence": [EVERYTHING]}
"""The others' sampled rounds are checked in tests/contract/test_planted_captured.py."""


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_is_the_eager_engines(target: Target, name: str) -> None:
    proposer = make(target, name)
    for sampling in (SETTINGS[0], *SAMPLED.get(name, [])):
        compare(target, proposer, sampling)


@pytest.mark.parametrize(
    "name",
    ["plain", *map(slow, ["taps 8 5", "shared_kv 8 0", "copy shared_kv 8 5", "ddit 2 confidence"])],
)
def test_a_replayed_trace_writes_the_same(target: Target, name: str) -> None:
    sampling = SETTINGS[0] if name.startswith("copy") else EVERYTHING
    compare(target, make(target, name), sampling, "traced", buckets=(32,))


@pytest.mark.parametrize(
    ("size", "name"), [(1, "taps 8 5"), (8, "shared_kv 0 0"), slow(2, "shared_kv 8 0")]
)
def test_batches_and_ends(target: Target, size: int, name: str) -> None:
    stop, proposer = target.detokenize([90, 17]), make(target, name)
    compare(target, proposer, SETTINGS[0], size=size, stop=[stop])
    compare(target, proposer, SETTINGS[1], size=size)


def test_settings_of_each_request(target: Target) -> None:
    settings = [SETTINGS[1], SETTINGS[0], EVERYTHING, SETTINGS[1]]
    proposer = make(target, "shared_kv 8 0")
    used = CapturedEngine(target, proposer)
    captured = Decoder(target, proposer, engine=used)
    found = captured.generate_batch(PROMPTS, 12, sampling=settings, batch_size=2)
    wanted = Decoder(target, proposer).generate_batch(PROMPTS, 12, sampling=settings, batch_size=2)
    assert [x.tokens for x in found] == [x.tokens for x in wanted]
    assert [key[0].greedy for key in used._rows] == [True, False]  # two sets are kept


def test_memory_keeps_its_addresses(target: Target) -> None:
    proposer = make(target, "taps 8 5")
    used = CapturedEngine(target, proposer)
    decoder = Decoder(target, proposer, engine=used)
    texts, addresses = [], []
    for _ in range(2):
        texts += [x.tokens for x in decoder.generate_batch(PROMPTS, 12, batch_size=2)]
        [opened] = used._rows.values()
        drafting: Any = opened.drafting
        held = [*vars(opened.state).values(), *vars(drafting).values()]
        addresses.append([t.data_ptr() for t in held if isinstance(t, Tensor)])
        addresses[-1] += [slab.keys.data_ptr() for slab in opened.state.cache.slabs]
    assert addresses[0] == addresses[1]
    assert texts[:4] == texts[4:]


@pytest.mark.parametrize("name", ["plain", "taps 8 5", "copy autoregressive", "ddit 2 confidence"])
def test_memory_is_free_at_once(target: Target, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches and drafting sessions of requests that end, and an engine's rows: without the garbage collector, which does
    not know how large they are."""
    held, free = list[Any](), RequestRunner.free

    def free_and_note(runner: RequestRunner) -> None:
        parts = [runner.request.cache, runner.session]
        held.extend(weakref.ref(part) for part in parts if part is not None)
        free(runner)

    monkeypatch.setattr(RequestRunner, "free", free_and_note)
    proposer = make(target, name)
    captured = CapturedEngine(target, proposer)
    gc.disable()
    try:
        Decoder(target, proposer).generate_batch(PROMPTS, 8, batch_size=2)
        Decoder(target, proposer, engine=captured).generate_batch(PROMPTS, 8, batch_size=2)
        held += [weakref.ref(opened.state.cache) for opened in captured._rows.values()]
        captured._rows.clear()
        assert len(held) > len(PROMPTS)
        assert not [part for part in held if part() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        ("shared_kv 8 0", "token"), ("shared_kv 8 3 without_replacement", "recursive"),
        ("taps 0 3 iid", "traversal"), ("ddit 2 confidence", "hybrid"), ("copy taps 8 2", "auto"),
        slow("plain", "auto"), slow("taps 8 0", "block"), slow("taps 0 0", "point_mass"),
        slow("taps 8 3", "auto"), slow("autoregressive", "auto"), slow("taps 0 3 iid", "k_seq"),
        slow("ddit 2 left_to_right", "auto"), slow("copy shared_kv 8 0", "token"),
    ],
)  # fmt: skip
def test_the_joint_law(target: Target, name: str, verifier: str) -> None:
    """Of the first tokens, over everything that may be drawn, each random number once."""
    sampling, prompt, length = Sampling(1.0, top_k=2), [4, 90, 4, 90], 3
    proposer = make(target, name)
    if isinstance(proposer, BlockProposer | DiffusionProposer):
        proposer.draft_tokens = 2
    decoder = Decoder(target, proposer, verifier, CapturedEngine(target, proposer))

    def run() -> tuple[int, ...]:
        return tuple(decoder.generate(prompt, max_new_tokens=length, sampling=sampling).tokens)

    run()  # captures
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, tokens in proposals.every_outcome(run, 4000):
        found[tokens] += weight
    law = exact_law(target, prompt, length, sampling)
    assert sum(abs(found[x] - law.get(x, 0.0)) for x in {*found, *law}) / 2 < 1e-4


OWN_DRAFTS = [(x, "auto", 0) for x in DRAFTERS if x != "plain" and "copy" not in x]
OWN_DRAFTS += [("taps 8 5", "auto", 4), ("shared_kv 8 0", "point_mass", 0)]
OWN_DRAFTS += [("autoregressive small", "auto", 0)]


@pytest.mark.parametrize(("name", "verifier", "window"), OWN_DRAFTS)
def test_drafts_and_counts_are_the_eager_engines(
    target: Target, name: str, verifier: str, window: int
) -> None:
    """Both draw with the same numbers. window: tokens that a target's layers see; 0 = all."""
    if window:
        target = tiny_target("mistral", sliding_window=window)
        target.eos_ids = (7, 30)
    proposer, found = make(target, name), []
    banned = tuple(i for i in range(260) if i not in (40, 90, 7))
    few = Sampling(0.8, 0.95, presence_penalty=0.5, banned=banned, min_new_tokens=6, seed=3)
    settings = few, Sampling(presence_penalty=0.7, banned=(*banned, 7))
    for used in (None, CapturedEngine(target, proposer)):
        decoder = Decoder(target, proposer, verifier, engine=used)
        outs: list[Generation] = []
        for sampling in settings:
            outs += decoder.generate_batch(PROMPTS[:2], 12, sampling=sampling, trace=True)
        # where nothing else is left the eager engine drafts banned tokens
        rejected = [[one.rejected for one in x.trace[:-1]] for x in outs]
        counts = [(x.drafted, x.accepted, x.trees[:-1]) for x in outs]
        found.append([[x.tokens for x in outs], counts, rejected])
    assert all(sum(accepted) for _, accepted, _ in counts[:2]) and any(map(any, rejected))
    assert found[1] == found[0]


def test_what_waits_for_the_device_is_refused() -> None:
    x = torch.arange(4.0)
    waits: list[Callable[[], object]] = [
        lambda: float(x.sum()), lambda: x.nonzero(), lambda: x[x > 1], lambda: x.unique(),
        lambda: x.masked_select(x > 1), lambda: bool((x > 1).any()),
        lambda: x.index_put_((x > 1,), x[:2]), lambda: torch.equal(x, x),
        lambda: x.to("meta"),
    ]  # fmt: skip
    with forbid_waiting(x.device):
        for wait in waits:
            with pytest.raises(WaitsForDevice):
                wait()
        x[1:3] = x.cumsum(0)[x.argsort()][1:3]


def test_compiled_layers_stay_compiled() -> None:
    """A capture looks for waits under a dispatch mode, where dynamo would give up what it compiled."""
    calls: list[int] = []

    def count(module: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append(1)
            return module(*args)

        return run

    target = load_target("debug", dtype="float32", device="cpu", fast=False)
    target.layers[1].compile(backend=count, dynamic=False)
    captured = Decoder(target, engine=CapturedEngine(target, None))
    out = captured.generate(PROMPTS[0], 8)
    calls.clear()
    assert captured.generate(PROMPTS[0], 8).tokens == out.tokens
    assert len(calls) > out.calls  # and the prompt


def test_layers_are_compiled_for_graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, **options: lambda x: 1 - call(x))
    layer, x = torch.nn.Identity(), torch.ones(1)
    with graph.compiled_layers([layer]):
        assert layer(x) == 0
    assert layer(x) == 1


@pytest.mark.parametrize("name", [slow("taps 8 5"), slow("copy shared_kv 8 5")])
def test_compiled_rounds_write_the_same(
    target: Target, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # in seconds
    compare(target, make(target, name), SETTINGS[0], "compiled", buckets=(32,))


@pytest.mark.parametrize(
    ("name", "verifier", "note"),
    [
        ("ddit 2 random", "auto", "order=random"),
        ("shared_kv 8 0", "lossy_typical", "verifier 'lossy_typical'"),
        ("copy ddit 2 confidence", "auto", "copying next to drawn drafts that branch or have"),
        ("copy taps 0 3 iid", "recursive", "copying next to drawn drafts that branch or have"),
        ("taps 0 3 iid", "point_mass", "siblings='iid' with verifier 'point_mass'"),
    ],
)
def test_what_is_not_supported_falls_back(
    target: Target, name: str, verifier: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(engine, "say_once", notes.append)
    proposer, settings = make(target, name), [Sampling(1.0, seed=0), Sampling(0.5, seed=0)]
    captured = Decoder(target, proposer, verifier, CapturedEngine(target, proposer))
    outs = Decoder(target, proposer, verifier).generate_batch(PROMPTS[:2], 8, sampling=settings)
    found = captured.generate_batch(PROMPTS[:2], 8, sampling=settings)
    assert [x.tokens for x in found] == [x.tokens for x in outs]
    assert notes and note in notes[0]


def test_refused_captures_fall_back(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Callable[[], None]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    notes: list[str] = []
    monkeypatch.setattr(engine, "say_once", notes.append)
    monkeypatch.setitem(graph._ON_CPU, "eager", refuse)  # type: ignore[arg-type]
    captured = Decoder(target, engine=CapturedEngine(target, None))
    assert captured.generate(PROMPTS[0], 8).tokens == Decoder(target).generate(PROMPTS[0], 8).tokens
    assert "not permitted when stream is capturing" in notes[0]


def test_rows_that_do_not_fit_fall_back(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is for the longest request, in all rows: the eager engine may have enough. Nothing holds what was allocated."""
    made, notes = list[Any](), list[str]()
    original = rows.Rows.run

    def run(self: rows.Rows, longest: int, skip: bool = False) -> Any:
        made.append(weakref.ref(self.state.cache))
        if self.state.shape.rows == 2:
            raise torch.OutOfMemoryError
        return original(self, longest, skip)

    def note(text: str) -> None:
        notes.append(text)
        assert not [cache for cache in made if cache() is not None]

    monkeypatch.setattr(rows.Rows, "run", run)
    monkeypatch.setattr(engine, "say_once", note)
    captured = Decoder(target, engine=CapturedEngine(target, None))
    captured.generate(PROMPTS[0], 8)
    found = captured.generate_batch(PROMPTS[:2], 8)
    assert [x.tokens for x in found] == [
        x.tokens for x in Decoder(target).generate_batch(PROMPTS[:2], 8)
    ]
    assert "not enough memory for 2 rows of 16 tokens; using engine=eager" in notes[0]


def test_two_streams_of_one_decoder_do_not_mix(target: Target) -> None:
    proposer = make(target, "taps 8 0")
    decoder = Decoder(target, proposer, engine=CapturedEngine(target, proposer))
    wanted = [decoder.generate(prompt, 16).tokens for prompt in PROMPTS[:2]]
    first, second = (decoder.stream(prompt, 16) for prompt in PROMPTS[:2])
    next(first)
    for _ in second:
        next(first, None)
    for _ in first:
        pass
    assert [first.output.tokens, second.output.tokens] == wanted


def test_a_request_that_ends_at_once_leaves_nothing_behind(target: Target) -> None:
    proposer = make(target, "taps 8 0")
    decoder = Decoder(target, proposer, engine=CapturedEngine(target, proposer))
    alone = decoder.generate(PROMPTS[0], 16)
    [_, after] = decoder.generate_batch([PROMPTS[2], PROMPTS[0]], [1, 16], batch_size=1)
    assert (after.tokens, after.accepted) == (alone.tokens, alone.accepted)


def note_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """The texts before rounds, and what the rounds drafted."""
    noted: list[tuple[list[int], list[int]]] = []
    original = RequestRunner.commit_result

    def commit(self: RequestRunner, result: RoundResult, chain: bool) -> None:
        noted.append(([*self.prompt, *self.out.tokens], result.drafts))
        original(self, result, chain)

    monkeypatch.setattr(RequestRunner, "commit_result", commit)
    return noted


@pytest.mark.parametrize(
    "name",
    ["autoregressive", "copy autoregressive", "ddit 2 confidence", "masked_lm 2 left_to_right"],
)
def test_drafters_catch_up_after_rounds_without_drafts(
    target: Target, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They draft what they draft after the same text as a prompt; after too many rounds, nothing until requests that joined
    since then are alone."""
    proposer, noted = make(target, name), note_drafts(monkeypatch)
    paced = Decoder(target, proposer, engine=CapturedEngine(target, proposer, paced=True))

    def choose(trials: Trials, _: bool) -> int | None:
        trials.rounds += 1
        return 0 if trials.rounds % 14 else None

    with monkeypatch.context() as patched:
        patched.setattr(Trials, "choose", choose)
        patched.setattr(rows, "MOST_UNREAD", 12)
        paced.generate_batch(PROMPTS, [30, 30, 30, 32], batch_size=3)
        last = PROMPTS[3]
        assert {text[: len(last)] == last for text, drafts in noted if drafts} == {True}
        noted.clear()
        patched.setattr(rows, "MOST_UNREAD", 13)
        paced.generate_batch(PROMPTS, 32, batch_size=3)
    drafting = [one for one in noted if len(one[1]) >= 3]  # less than that near the end
    assert len(drafting) >= 4 and len(noted) > 3 * len(drafting)
    alone = Decoder(target, proposer, engine=CapturedEngine(target, proposer))
    again = note_drafts(monkeypatch)
    for one in drafting:
        again.clear()
        alone.generate(one[0][:-1], 9)
        assert again[0] == one
