"""What random tiny models cannot show: a real target's own logits, with its ties and its confidence. Skipped where it has
not been fetched (`make quickstart` fetches it)."""

from __future__ import annotations

import pytest

import decode
from decode import Decoder, Sampling
from decode.engine.decoder import prompt_tokens
from decode.systems.drafter_folders import DEFAULT_DRAFTER
from specalign.common.hub import cache_folder
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.lm.names import DEFAULT_TARGET

QUESTIONS = (
    "Why is the sky blue?",
    "Say yes.",
    "Write a short poem about the sea.",
    "What is 12 times 11? Think step by step.",
    "List three colours.",
    "Translate 'good morning' into French.",
    "Count from one to twenty.",
)


@pytest.fixture(scope="module")
def target() -> Target:
    if not any((cache_folder() / "targets").glob("SmolLM2-135M-Instruct*")):
        pytest.skip("the real target is not here")
    return load_target(DEFAULT_TARGET, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    return [prompt_tokens(target, question) for question in QUESTIONS]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batches_say_what_each_request_says_alone(
    target: Target, prompts: list[list[int]], temperature: float
) -> None:
    """Requests that end at different times, of which more wait than run."""
    decoder = decode.load(target, DEFAULT_DRAFTER, copying=True)
    limits = [20, 3, 12, 1, 16, 7, 24]
    sampling = [Sampling(temperature, seed=i) for i in range(len(prompts))]
    alone = [
        decoder.generate(p, max_new_tokens=n, sampling=s).tokens
        for p, n, s in zip(prompts, limits, sampling, strict=True)
    ]
    for size in (3, 32):
        together = decoder.generate_batch(
            prompts, batch_size=size, max_new_tokens=limits, sampling=sampling
        )
        assert [out.tokens for out in together] == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_new_tokens": 30},
        {"banned": (28, 30, 253, 339), "min_new_tokens": 20},
    ],
)
def test_processors_with_drafts_and_without(
    target: Target, prompts: list[list[int]], settings: dict[str, float]
) -> None:
    """Greedy, and coupled at temperature 1: the penalties look at each node's own prefix."""
    for sampling in (Sampling(**settings), Sampling(1.0, min_p=0.05, seed=0, **settings)):  # type: ignore[arg-type]
        verifier = "auto" if sampling.greedy else "gumbel"
        for prompt in prompts[:3]:
            plain = Decoder(target, None, verifier).generate(
                prompt, max_new_tokens=32, sampling=sampling
            )
            drafted = decode.load(
                target, DEFAULT_DRAFTER, verifier, copying=True, tree_nodes=5
            ).generate(prompt, max_new_tokens=32, sampling=sampling)
            assert drafted.tokens == plain.tokens
            assert not set(plain.tokens) & set(sampling.banned)
            assert len(plain.tokens) >= sampling.min_new_tokens
