"""A rounding tie is called one, a bug is not: on a target whose rounding is known, and on a real forward."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import decode
from decode.engine.decoder import Decoder
from decode.engine.output import Tree
from decode.evaluation.divergence import BUG, TIE, dtype_limit, explain_divergence, replay
from decode.evaluation.records import Divergence
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from tests.target_models import some_text, tiny_target

PROMPT = [5, 6, 7]


@dataclass
class Output:
    logits_BLV: torch.Tensor | None
    hidden_BLD: torch.Tensor


class Cache:
    length = 0

    def keep(self, start: int, offsets: list[int]) -> None:
        self.length = start + len(offsets)


class NoisyTarget:
    """Token t+1 follows t, token t+2 almost as probable (by `gap`); over several tokens at once it gains
    `noise`.
    """

    device, dtype, model = torch.device("cpu"), torch.float32, torch.nn.Module()

    def __init__(self, gap: float, noise: float) -> None:
        self.gap, self.noise = gap, noise

    def new_cache(self, batch: int, capacity: int) -> Cache:
        self.capacity = capacity
        return Cache()

    def forward(
        self, tokens_BL: torch.Tensor, *, cache: Cache, see_LL: None = None, logits: bool = True
    ) -> Output:
        assert cache.length + tokens_BL.shape[1] <= self.capacity
        cache.length += tokens_BL.shape[1]
        logits_BLV = torch.zeros(1, tokens_BL.shape[1], 64)
        logits_BLV.scatter_(2, (tokens_BL[..., None] + 1) % 64, 10.0)
        gain = self.noise if tokens_BL.shape[1] > 1 else 0.0
        logits_BLV.scatter_(2, (tokens_BL[..., None] + 2) % 64, 10.0 - self.gap + gain)
        return Output(logits_BLV, logits_BLV)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def judge(target: Any, *rest: Any) -> Divergence:
    found = explain_divergence(target, *rest)
    assert found is not None
    return found


def test_a_method_that_runs_the_target_another_way_is_replayed_so() -> None:
    """Compiled, say, which rounds otherwise one token at a time too."""

    class Otherwise(NoisyTarget):
        def forward(self, tokens_BL: torch.Tensor, **more: Any) -> Output:
            out = super().forward(tokens_BL, **more)
            assert out.logits_BLV is not None
            index, more_BL1 = (tokens_BL[..., None] + 2) % 64, torch.full((1, 1, 1), 1.5 * self.gap)
            out.logits_BLV.scatter_add_(2, index, more_BL1.expand(index.shape))
            return out

    plain: Any = NoisyTarget(1e-5, 0)
    other: Any = Otherwise(1e-5, 0)
    calls = [0] * 3, [0] * 3
    found = explain_divergence(plain, PROMPT, [8, 9, 10, 11], [8, 9, 11, 13], *calls, others=other)
    assert found is not None and found.kind == TIE and found.reproduced
    assert judge(plain, PROMPT, [8, 9, 10, 11], [8, 9, 11, 13], *calls).kind == BUG


def judge_noise(gap: float, noise: float) -> Divergence:
    outputs = [8, 9, 10, 11], [8, 9, 11, 12]
    return judge(NoisyTarget(gap, noise), PROMPT, *outputs, [1, 1], [1, 1])


def test_a_gap_that_the_measured_rounding_closes_is_a_tie() -> None:
    found = judge_noise(1e-5, 3e-5)
    assert found.kind == TIE and found.index == 2 and found.reproduced and found.top2
    assert found.gap == pytest.approx(1e-5, rel=0.1) and found.bound >= found.gap


def test_a_gap_without_rounding_is_a_bug() -> None:
    assert judge_noise(1e-5, 0).kind == judge_noise(1e-2, 3e-5).kind == BUG


def test_a_difference_too_large_for_the_dtype_is_a_bug() -> None:
    """The wide forward itself is wrong: Δ closes the gap, but no rounding is that large, however small the gap is."""
    for gap in (0.5, 1e-5):
        found = judge_noise(gap, 2.0)
        assert found.kind == BUG and found.reproduced and found.gap <= found.bound


def test_a_token_that_the_replay_does_not_choose_is_a_bug() -> None:
    """Within the bound, but a correct run of the same widths keeps plain decoding's token."""
    found = judge_noise(1e-5, 0.9e-5)
    assert found.kind == BUG and not found.reproduced and found.gap <= found.bound


def test_one_output_that_goes_on_is_a_bug() -> None:
    found = judge(NoisyTarget(0, 0), PROMPT, [8, 9], [8, 9, 10], [1], [1])
    assert (found.kind, found.index, found.plain_token, found.token) == (BUG, 2, None, 10)
    assert judge(NoisyTarget(0, 0), PROMPT, [8, 9, 10], [8, 9], [1], [0]).plain_token == 10


def test_the_first_token_comes_from_the_same_prefill() -> None:
    assert judge(NoisyTarget(1e-5, 3e-5), PROMPT, [9, 10], [8, 9], [1], [0]).kind == BUG


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug")


def test_replay_of_a_real_target_is_the_decoders_own_path(target: Target) -> None:
    prompt = target.chat_tokens("Count to ten, ten, ten, ten.")
    output = decode.load(target, "lookup").generate(prompt, max_new_tokens=30)
    for index in range(len(output.tokens)):
        z_V = replay(target, prompt, output.tokens, index, output.drafted, output.accepted)
        assert int(z_V.argmax()) == output.tokens[index]
    with pytest.raises(ValueError, match="after the last call"):
        replay(target, prompt, output.tokens, 400, output.drafted, output.accepted)


def test_a_corrupted_output_is_a_bug(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "eos_ids", ())  # a random target may say it anywhere
    prompt = target.chat_tokens("Why is the sky blue?")
    plain = decode.load(target, None).generate(prompt, max_new_tokens=12).tokens
    broken = [*plain[:5], (plain[5] + 1) % 200, *plain[6:]]
    found = judge(target, prompt, plain, broken, [2] * 6, [1] * 6)
    assert found.kind == BUG and found.index == 5


CALLS = [2] * 12, [1] * 12, ()
"""Two drafts a call, the second one rejected."""
TREES = [2] * 12, [1] * 12, [Tree((-1, -1), [1])] * 12
"""The second one of two siblings is accepted."""


def next_expert(states: Any, chosen: Any, weights: Any) -> Any:
    return states, (chosen + 2) % 4, weights


def other_states(states: Any, chosen: Any, weights: Any) -> Any:
    return 2 * states, chosen, weights


def part(target: Target, prompt: list[int], plain: list[int], calls: Any) -> list[int]:
    """The text up to a token that those calls choose otherwise, after several of them."""
    for index in range(5, 24):
        token = int(replay(target, prompt, plain, index, *calls).argmax())
        if token != plain[index]:
            return [*plain[:index], token]
    raise AssertionError("no token differs")


@pytest.mark.parametrize("calls", [CALLS, TREES])
def test_a_routers_other_choice_is_a_tie_and_another_state_a_bug(calls: Any) -> None:
    """MiniMax runs accepted tokens once more after rejected drafts, in front of the next ones or in a call before."""
    target = tiny_target("mixtral")
    target.eos_ids = ()  # a random target may end anywhere
    prompt = some_text(target, 20)[0].tolist()
    plain = Decoder(target).generate(prompt, max_new_tokens=24).tokens
    experts = [m for name, m in target.model.named_modules() if name.endswith(".experts")]
    for planted, judged in ((next_expert, TIE), (other_states, BUG)):

        def hook(_: Any, given: Any, planted: Any = planted) -> Any:
            return planted(*given) if 1 < len(given[0]) < 6 else None

        hooks = [module.register_forward_pre_hook(hook) for module in experts]
        texts = prompt, plain, part(target, prompt, plain, calls)
        found = explain_divergence(target, *texts, *calls)
        as_eval_asks = explain_divergence(target, *texts, *calls, others=target)
        for each in hooks:
            each.remove()
        assert found == as_eval_asks and found is not None
        assert found.kind == judged and found.reproduced and found.bound is not None
        assert found.bound > dtype_limit(target.dtype, torch.tensor(30.0))
