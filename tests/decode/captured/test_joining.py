"""Requests join between rounds, and their prompts are read in chunks while others run: in both engines."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from decode.captured.engine import CapturedEngine
from decode.engine import loop, request
from decode.engine.decoder import Decoder
from decode.engine.request import RequestRunner
from decode.speculation.settings import Sampling
from specalign.lm.model import Target
from tests.captured_drafters import DRAFTERS, make

CHUNK = 8
SAMPLED = Sampling(temperature=0.9, presence_penalty=0.4, repetition_penalty=1.2, min_new_tokens=4)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "PREFILL_CHUNK", CHUNK)


def prompt(length: int) -> list[int]:
    return [4 + (i * 37 + length * 11) % 220 for i in range(length)]


FAST = ["plain", "lookup", "taps 8 5", "copy shared_kv 8 5", "autoregressive", "ddit 2 confidence"]
FAST += ["ddit_full 2 left_to_right", "masked_lm 2 left_to_right"]
ENGINES = [pytest.param(True, x, marks=[pytest.mark.slow] * (x not in FAST)) for x in DRAFTERS]
ENGINES += [(False, "plain"), (False, "taps 8 5")]


@pytest.mark.parametrize(("captured", "name"), ENGINES)
def test_a_request_among_others_is_what_it_is_alone(
    target: Target, captured: bool, name: str
) -> None:
    """More requests than rows; prompts of up to four chunks join while another request runs. Equal
    accepted drafts: the drafter has read the same, too."""
    prompts = [prompt(length) for length in (6, 3, 29, 1)]
    limits = [12, 4, 5, 6]
    proposer = make(target, name)
    engine = CapturedEngine(target, proposer) if captured else None
    decoder = Decoder(target, proposer, engine=engine)
    settings = [replace(SAMPLED, seed=i) for i in range(len(prompts))]
    found = decoder.generate_batch(prompts, limits, batch_size=2, sampling=settings)
    assert engine is None or [key[0].seed for key in engine._rows] == [None]
    for out, *given, sampling in zip(found, prompts, limits, settings, strict=True):
        alone = decoder.generate(*given, sampling=sampling)
        assert (out.tokens, out.accepted) == (alone.tokens, alone.accepted)


def unread_and_written(
    target: Target, lengths: list[int], captured: bool
) -> list[tuple[tuple[int, ...], int]]:
    """At each pause: unread tokens of each prompt, and tokens that the first request has written."""
    sampling = Sampling(repetition_penalty=1.4)
    runners = [RequestRunner(target, prompt(n), 20, sampling, None, "greedy") for n in lengths]
    engine = CapturedEngine(target, None) if captured else loop.EagerEngine()
    with torch.no_grad():
        return [
            (tuple(one.unread for one in runners), len(runners[0].out.tokens))
            for _ in engine.run_rounds(runners, len(runners))
        ]


@pytest.mark.parametrize("captured", [False, True])
def test_running_requests_have_a_round_between_two_chunks(target: Target, captured: bool) -> None:
    seen = dict(unread_and_written(target, [6, 45], captured))
    assert list(seen) == [(0, left) for left in (45, 37, 29, 21, 13, 5, 0)]
    written = list(seen.values())[:-1]
    assert written == list(range(written[0], written[0] + len(written)))


@pytest.mark.parametrize("captured", [False, True])
def test_short_prompts_share_a_chunk_and_long_ones_are_not_cut_to_fill_it(
    target: Target, captured: bool
) -> None:
    seen = dict(unread_and_written(target, [3, 4, 2, 16, 1], captured))
    left = [(0, 0, 2, 16, 1), (0, 0, 0, 16, 1), (0, 0, 0, 8, 1), (0, 0, 0, 0, 1), (0, 0, 0, 0, 0)]
    assert list(seen) == left


def test_closed_streams_leave_their_rows(target: Target) -> None:
    engine = CapturedEngine(target, None)
    decoder = Decoder(target, None, engine=engine)
    kept = []
    for _ in range(3):
        with decoder.stream(prompt(6), 20) as stream:
            next(stream)
        kept += [*engine._rows.values()]
    assert len(kept) == 3 and len({*kept}) == 1


@pytest.mark.slow
def test_threads_share_a_decoder(target: Target) -> None:
    """Their drafters read the outputs of layers, by hooks of the one model."""
    decoder = Decoder(target, make(target, "taps 8 5"))

    def run(length: int) -> tuple[list[int], list[int]]:
        out = decoder.generate(prompt(length), 8)
        return out.tokens, out.accepted

    wanted = [*map(run, range(6, 10))]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(run, range(6, 10))] == wanted
