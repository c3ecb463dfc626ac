"""Wiring of the loop on the tiny random target: ends, limits, stops, seeds, cache, errors."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decode.engine.decoder import Decoder
from decode.engine.output import Generation, Tree, list_rejected
from decode.engine.request import RequestRunner
from decode.proposers.base import Proposer, Request
from decode.proposers.lookup import LookupProposer
from decode.speculation.proposal import Proposal
from decode.speculation.settings import Sampling
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.builders import run_batch, run_request
from tests.fakes import DRAFTERS, ScriptedDrafter, TableTarget, oracle

K = 3
PROMPT = [4, 90, 17, 203, 90, 17]
VARIED = Sampling(repetition_penalty=1.4)  # the random target repeats itself otherwise


@pytest.fixture(scope="module")
def tiny() -> Target:
    return load_target("debug", dtype="float32", device="cpu")


@pytest.fixture
def target(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """No end of sequence and a long context unless a test sets them."""
    monkeypatch.setattr(tiny, "eos_ids", ())
    monkeypatch.setattr(tiny, "context_limit", 400)
    yield tiny


def plain(target: Target, n: int, sampling: Sampling = VARIED, **options: Any) -> Generation:
    return Decoder(target).generate(PROMPT, max_new_tokens=n, sampling=sampling, **options)


def drafters(script: list[int]) -> dict[str, Proposer]:
    known = PROMPT + script
    return {
        "oracle": ScriptedDrafter("point", oracle(known), K),
        "wrong third": ScriptedDrafter("point", oracle(known, 3), K),
        "wrong second": ScriptedDrafter("point", oracle(known, 2), K),
        "lookup": LookupProposer(K),
        **{kind: ScriptedDrafter(*DRAFTERS[kind], K) for kind in DRAFTERS},
    }


def check_counts(out: Generation) -> None:
    """Every call commits its accepted drafts and at most one token more; what was cut is not counted."""
    assert len(out.drafted) == len(out.accepted) == out.calls
    assert all(0 <= a <= d <= K for a, d in zip(out.accepted, out.drafted, strict=True))
    assert len(out.tokens) - 1 - sum(out.accepted) in (out.calls, out.calls - 1)
    assert out.tau == pytest.approx((len(out.tokens) - 1) / out.calls if out.calls else 0)


def test_plain_greedy_is_what_transformers_generates(target: Target) -> None:
    for penalty in (1.0, 1.4):
        options = {"do_sample": False, "repetition_penalty": penalty, "eos_token_id": None}
        theirs = target.model.generate(torch.tensor([PROMPT]), max_new_tokens=40, **options)
        ours = plain(target, 40, Sampling(repetition_penalty=penalty))
        assert ours.tokens == theirs[0, len(PROMPT) :].tolist()
        assert (ours.calls, ours.tau, ours.finish) == (39, 1.0, "length")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_chosen_drafts_change_no_output(target: Target, penalty: float, temperature: float) -> None:
    """Each position has its own random number."""
    sampling = Sampling(temperature, seed=3, repetition_penalty=penalty)
    expected = plain(target, 40, sampling).tokens
    for name, drafter in drafters(expected).items():
        if drafter.law(sampling) != "point":
            continue
        out = Decoder(target, drafter).generate(PROMPT, max_new_tokens=40, sampling=sampling)
        assert out.tokens == expected, name
        check_counts(out)
        if name == "oracle":
            assert out.tau > K  # everything accepted
            assert sum(out.accepted) == sum(out.drafted)


def test_end_of_sequence_in_a_block(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    script = plain(target, 10).tokens
    ends = [i for i, token in enumerate(script) if token not in script[:i]]
    assert len(ends) > 2 * K
    for end in ends:
        monkeypatch.setattr(target, "eos_ids", (script[end], 259))
        for name, drafter in drafters(script).items():
            out = Decoder(target, drafter).generate(PROMPT, max_new_tokens=30, sampling=VARIED)
            assert out.tokens == script[: end + 1], (name, end)
            assert out.finish == "eos"
            check_counts(out)


@pytest.mark.parametrize("limit", range(1, 2 * K + 3))
def test_length_limit(target: Target, limit: int) -> None:
    script = plain(target, 20).tokens
    for name, drafter in drafters(script).items():
        out = Decoder(target, drafter).generate(PROMPT, max_new_tokens=limit, sampling=VARIED)
        assert out.tokens == script[:limit], name
        assert out.finish == "length" and out.prompt_tokens == len(PROMPT)
        check_counts(out)
        assert all(d <= max(0, limit - 2) for d in out.drafted)
        assert name != "oracle" or out.drafted[:1] in ([], [min(K, limit - 2)])


@pytest.mark.parametrize("room", range(1, 2 * K + 3))
def test_context_limit_in_draft(target: Target, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    script = plain(target, 20).tokens
    monkeypatch.setattr(target, "context_limit", len(PROMPT) + room)
    written: list[int] = []
    forward = target.forward

    def watched(tokens: torch.Tensor, **options: Any) -> Any:
        see_LL = options.get("see_LL")  # the nodes of a tree share positions
        levels = tokens.shape[1] if see_LL is None else int(see_LL.sum(1).max())
        written.append(options["cache"].length + levels)
        return forward(tokens, **options)

    monkeypatch.setattr(target, "forward", watched)
    for name, drafter in drafters(script).items():
        out = Decoder(target, drafter).generate(PROMPT, max_new_tokens=20, sampling=VARIED)
        assert (out.tokens, out.finish) == (script[:room], "context"), name
        sampled = Decoder(target, drafter).generate(PROMPT, 20, temperature=1.0)
        assert (len(sampled.tokens), sampled.finish) == (room, "context"), name
        check_counts(out)
    assert max(written) <= target.context_limit
    both = Decoder(target).generate(PROMPT, max_new_tokens=room, sampling=VARIED)
    assert both.finish == "length"


def test_special_tokens_stop_a_text(target: Target) -> None:
    """Plain and drafted alike; the text leaves them out as always."""
    special = {i: token.content for i, token in target.tokenizer.added_tokens_decoder.items()}
    options: dict[str, Any] = {"max_new_tokens": 200, "temperature": 1.5, "seed": 14}
    full = Decoder(target, None, "gumbel").generate(PROMPT, **options)
    at = next(i for i, token in enumerate(full.tokens) if token in special and i > 3)
    name, before = special[full.tokens[at]], target.detokenize(full.tokens[:at])
    for stop, text in ((name, before), (["never", name], before)):
        for drafter in (None, LookupProposer(K)):
            pieces: list[str] = []
            decoder = Decoder(target, drafter, "gumbel")
            out = decoder.generate(PROMPT, stop=stop, stream=pieces.append, **options)
            assert (out.tokens, out.text, out.finish) == (full.tokens[: at + 1], text, "stop"), stop
            assert "".join(pieces) == text


def test_stop_strings_across_blocks(target: Target) -> None:
    out = plain(target, 24)
    full, script = out.text, out.tokens
    parts = itertools.product(range(0, len(full), 2), (1, 2, 4))
    stops = {full[i : i + n] for i, n in parts if "\ufffd" not in full[i : i + n]}
    assert len(stops) > 10
    for stop in sorted(stops):
        expected = plain(target, 24, stop=stop)
        assert expected.text == full[: full.index(stop)] and expected.finish == "stop"
        assert stop in target.detokenize(expected.tokens)
        assert stop not in target.detokenize(expected.tokens[:-1])
        for name in ("oracle", "wrong third", "guessed"):
            pieces: list[str] = []
            decoder = Decoder(target, drafters(script)[name])
            options = {"stop": [stop, "never"], "stream": pieces.append}
            found = decoder.generate(PROMPT, 24, sampling=VARIED, **options)
            assert (found.tokens, found.text) == (expected.tokens, expected.text), (name, stop)
            assert "".join(pieces) == found.text
            check_counts(found)


def test_the_cache_after_rollbacks_is_that_of_a_fresh_forward(target: Target) -> None:
    script = plain(target, 25).tokens
    for name, drafter in drafters(script).items():
        runner = RequestRunner(target, PROMPT, 25, VARIED, drafter, "greedy")
        out = run_request(runner)
        used, cache = runner.request.tokens, runner.request.cache
        assert used == PROMPT + out.tokens
        fresh = target.new_cache(1, len(used))
        target.forward(torch.tensor([used[:-1]]), cache=fresh, logits=False)
        assert cache.length == len(used) - 1, name
        for layer in range(target.num_layers):
            torch.testing.assert_close(cache.k(layer), fresh.k(layer), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(cache.v(layer), fresh.v(layer), atol=1e-4, rtol=1e-4)


def test_a_drafter_is_shown_the_accepted_path_of_a_tree(target: Target) -> None:
    """The hidden states of the committed tokens, wherever in the tree they stood: first, last, or nowhere."""
    known, turns = PROMPT + plain(target, 30).tokens, itertools.cycle(range(4))

    def branching(request: Request, k: int) -> Proposal:
        """Two branches, one of them the text: the first, the second, neither, or the longer one halfway."""
        at = len(request.tokens)
        right, wrong = [*known[at:], *[0] * 3][:3], [1 + known[at - 1] % 200, 7, 8]
        tokens, parents = [
            ([*right, *wrong], (-1, 0, 1, -1, 3, 4)),
            ([wrong[0], right[0], wrong[1], right[1]], (-1, -1, 0, 1)),
            (wrong, (-1, 0, 1)),
            ([right[0], wrong[0], right[1]], (-1, 0, 0)),
        ][next(turns)]
        return Proposal(torch.tensor(tokens), "point", parents=parents)

    drafter = ScriptedDrafter("point", branching, K)
    out = Decoder(target, drafter).generate(PROMPT, max_new_tokens=30, sampling=VARIED)
    paths = {tuple(tree.path) for tree in out.trees if tree is not None}
    assert PROMPT + out.tokens == known and {(0, 1, 2), (1, 3), (), (0, 2)} <= paths
    shown = torch.cat(drafter.hidden)
    fresh = target.forward(torch.tensor([known[: len(shown)]])).hidden_BLD[0]
    torch.testing.assert_close(shown, fresh, atol=1e-4, rtol=1e-4)


def test_long_prompts_go_in_chunks(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5 + i * 7 % 200 for i in range(49)]
    expected = Decoder(target).generate(prompt, max_new_tokens=10).tokens
    monkeypatch.setattr("decode.engine.request.PREFILL_CHUNK", 16)
    drafter = ScriptedDrafter("point", oracle(prompt + expected), K)
    assert Decoder(target, drafter).generate(prompt, max_new_tokens=10).tokens == expected
    assert drafter.observed[:4] == [16, 16, 16, 1]


@pytest.mark.parametrize("most", [1, 2])
def test_ended_requests_give_their_cache_back(target: Target, most: int) -> None:
    runners = [RequestRunner(target, PROMPT, limit, VARIED, None, "greedy") for limit in (4, 9)]
    run_batch(runners, most)
    assert [len(runner.out.tokens) for runner in runners] == [4, 9]
    assert not any(hasattr(runner, "request") for runner in runners)


def test_figures_of_a_generation() -> None:
    trees = [None, Tree((-1, -1, 0), [0, 2])]
    out = Generation([1, 2, 3, 4, 5, 6], "", 3, "length", 2, [2, 2], trees, [1, 2], seconds=2.5)
    assert out.nodes == [2, 3] and out.tau == 2.5 and out.tokens_per_second == 2.0


def test_times_of_all_rounds_are_added(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances by one whenever it is read."""
    clock = itertools.count(5)
    monkeypatch.setattr("decode.engine.request.perf_counter", lambda: float(next(clock)))
    out = Decoder(target, LookupProposer(3)).generate(PROMPT, 20)
    assert out.calls > 2 and out.trace == []
    assert (out.draft_seconds, out.verify_seconds) == (2.0 * out.calls, 1.0 * out.calls)
    assert (out.prefill_seconds, out.seconds) == (1.0, 4.0 * out.calls + 1)


def test_a_trace_records_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    table, prompt = TableTarget(4, seed=1), [0, 1]
    script = Decoder(table).generate(prompt, 16).tokens  # type: ignore[arg-type]
    clock = itertools.count(5)
    monkeypatch.setattr("decode.engine.request.perf_counter", lambda: float(next(clock)))
    drafter = ScriptedDrafter("point", oracle(prompt + script, 3), K)
    out = Decoder(table, drafter).generate(prompt, 16, trace=True)  # type: ignore[arg-type]
    assert out.tokens == script and len(out.trace) == out.calls > 3
    assert [one.seconds for one in out.trace] == [3.0 + 4 * i for i in range(out.calls)]
    assert [one.accepted for one in out.trace] == out.accepted
    ends = list(itertools.accumulate((one.committed for one in out.trace), initial=1))
    assert ends[-1] == 16 and all(one.committed - one.accepted in (0, 1) for one in out.trace)
    counts = [d - a for d, a in zip(out.drafted, out.accepted, strict=True)]
    assert [len(one.rejected) for one in out.trace] == counts and sum(counts) > 3


@pytest.mark.parametrize(
    ("parents", "path", "rejected"),
    [
        (None, [], (10, 11, 12, 13)),
        (None, [0], (11, 12, 13)),
        (None, [0, 1, 2, 3], ()),
        ((-1, 0, 0, 1), [0], (11, 13)),
        ((-1, -1, 0, 1), [], (10, 12)),
        ((-1, -1, 0, 1), [1], (13,)),
    ],
)
def test_rejected_drafts_are_those_that_would_have_come_next(
    parents: tuple[int, ...] | None, path: list[int], rejected: tuple[int, ...]
) -> None:
    proposal = Proposal(torch.tensor([10, 11, 12, 13]), "point", parents=parents)
    assert list_rejected(proposal.tokens_K.tolist(), proposal.tree, path) == rejected
