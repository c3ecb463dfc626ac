"""Many requests at once: every output is the one alone. Prompts and options, well- and malformed."""

from typing import Any

import pytest
import torch

from decode.engine import loop
from decode.engine.decoder import Decoder
from decode.proposers.block import BlockProposer
from decode.proposers.lookup import CopyingProposer, LookupProposer
from decode.speculation.settings import Sampling
from specalign.common.errors import UserError
from specalign.lm.model import Target
from tests.builders import PROMPT
from tests.builders import block_network as network
from tests.fakes import DRAFTERS, ScriptedDrafter, TableTarget

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6][: 2 + i % 7] + [i] for i in range(9)]
LIMITS = [1, 2, 3, 15, 7, 12, 5, 1, 20]


PROPOSERS = {
    "plain": lambda target: None,
    "lookup": lambda target: LookupProposer(),
    "shared_kv": lambda target: BlockProposer(network(target, "shared_kv"), tree_nodes=None),
    "taps": lambda target: BlockProposer(network(target, "taps"), tree_nodes=None),
    "copies": lambda target: CopyingProposer(BlockProposer(network(target, "shared_kv", 8))),
}


@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 32)), 5])
@pytest.mark.parametrize("kind", PROPOSERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_those_alone(target: Target, size: int, kind: str, temperature: float) -> None:
    """Prompts and limits of many lengths, some over before the first round."""
    decoder = Decoder(target, PROPOSERS[kind](target))
    sampling = [Sampling(temperature, top_k=40, seed=i) for i in range(len(PROMPTS))]
    together = decoder.generate_batch(PROMPTS, LIMITS, batch_size=size, sampling=sampling)
    for prompt, limit, own, out in zip(PROMPTS, LIMITS, sampling, together, strict=True):
        alone = decoder.generate(prompt, max_new_tokens=limit, sampling=own)
        assert out.tokens == alone.tokens and out.finish == alone.finish and out.text == alone.text
        assert (out.drafted, out.accepted) == (alone.drafted, alone.accepted)
        assert out.calls == alone.calls


@pytest.mark.parametrize("kind", DRAFTERS)
def test_ends_of_sequence_and_stop_strings_in_a_batch(kind: str) -> None:
    table = TableTarget(4, seed=1)
    table.eos_ids = (3,)
    law, propose = DRAFTERS[kind]
    decoder = Decoder(table, ScriptedDrafter(law, propose))  # type: ignore[arg-type]
    if kind == "right to left":
        decoder.verifier = "hybrid"
    if kind in ("i.i.d. siblings", "without replacement"):
        decoder.verifier = "traversal"
    prompts = [[i % 3, (i + 1) % 3] for i in range(9)]
    settings = Sampling(1.0, seed=4)
    together = decoder.generate_batch(prompts, 20, batch_size=4, sampling=settings, stop="bb")
    for i, (prompt, out) in enumerate(zip(prompts, together, strict=True)):
        own = Sampling(1.0, seed=4 + i)
        alone = decoder.generate(prompt, max_new_tokens=20, sampling=own, stop="bb")
        assert out.tokens == alone.tokens
    assert {out.finish for out in together} >= {"eos", "stop"}


def test_bad_batches_are_refused(target: Target) -> None:
    decoder = Decoder(target)
    for size in (0, True, 2.0):
        with pytest.raises(UserError, match=f"batch_size={size}"):
            decoder.generate_batch([[1]], batch_size=size)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="max_new_tokens has 1 value for 2 prompts"):
        decoder.generate_batch([[1], [2]], max_new_tokens=[3])
    with pytest.raises(UserError, match="^sampling has 1 value for 2 prompts"):
        decoder.generate_batch([[1], [2]], sampling=[Sampling()])
    with pytest.raises(UserError, match=r"^prompts\[1\]: the prompt is empty$"):
        decoder.generate_batch(["one", " "])
    message, other = {"role": "user", "column": 1}, {"from": "human", "value": "hi"}
    for prompts in ("abc", message, [message], [other], torch.ones(2, 2), 7, None):
        with pytest.raises(UserError, match="takes a list of prompts"):
            decoder.generate_batch(prompts)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the prompt must be text"):
        decoder.generate_batch([[1], []])
    assert decoder.generate_batch([]) == []


def test_a_batch_shares_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    forward = loop.forward_batch

    def counted(running: Any, drafts: Any) -> Any:
        sizes.append(len(running))
        return forward(running, drafts)

    monkeypatch.setattr(loop, "forward_batch", counted)
    decoder = Decoder(TableTarget(4))  # type: ignore[arg-type]
    outs = decoder.generate_batch([[i] for i in range(4)], [3, 6, 4, 3], batch_size=2)
    assert [out.calls for out in outs] == [2, 5, 3, 2] and sizes == [2, 2, 2, 2, 2, 1, 1]


# ---- one request: pairs, prompts, options ----


@pytest.fixture
def endless(target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """No end of sequence, and a long context."""
    monkeypatch.setattr(target, "eos_ids", ())
    monkeypatch.setattr(target, "context_limit", 400)
    return target


def test_a_pair_that_would_change_the_output_is_refused(endless: Target) -> None:
    with pytest.raises(UserError, match="exact verifiers: point_mass"):
        Decoder(endless, LookupProposer(), "token").generate(PROMPT, sampling=Sampling(1.0))
    with pytest.raises(UserError, match="exact verifiers: point_mass, self_selection, token"):
        decoder = Decoder(endless, ScriptedDrafter(*DRAFTERS["independent"]), "greedy")
        decoder.verifier_for(Sampling(1.0))
    assert Decoder(endless, verifier="token").verifier_for(Sampling(1.0)) == "token"


def test_prompts_of_every_kind(endless: Target) -> None:
    decoder = Decoder(endless)
    text = decoder.generate("hello", max_new_tokens=5)
    messages = decoder.generate([{"role": "user", "content": "hello"}], max_new_tokens=5)
    silent = [{"role": "system", "content": ""}, {"role": "user", "content": "hello"}]
    count = len(endless.chat_tokens(silent))
    assert decoder.generate(silent, max_new_tokens=1).prompt_tokens == count
    tokens = decoder.generate(endless.chat_tokens("hello"), max_new_tokens=5)
    raw = decoder.generate("hello", max_new_tokens=5, raw=True)
    assert text.tokens == messages.tokens == tokens.tokens
    for prompt in ("hello", {"prompt": "hello"}):
        assert decoder.generate_batch([prompt], max_new_tokens=5)[0].tokens == text.tokens
    assert decoder.generate("hello", 5).tokens == text.tokens
    assert decoder.generate_batch(["hello"], 5)[0].tokens == text.tokens
    assert "".join(decoder.stream("hello", 5)) == text.text
    assert raw.prompt_tokens == len(endless.text_tokens("hello")) < text.prompt_tokens


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ("", "^the prompt is empty"),
        (["one", "two"], "generate_batch takes several"),
        ([1, 260], "token 260 is not"),
        ([5] * 400, "400 tokens: the target's context of 400 leaves no room"),
    ],
)
def test_malformed_prompts(endless: Target, prompt: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        Decoder(endless).generate(prompt)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"stop": ""}, "non-empty strings"),
        ({"temprature": 0.7}, "unknown option 'temprature' .did you mean 'temperature'"),
        ({"temperature": -1}, "temperature=-1"),
        ({"banned": [3, 260]}, "banned: token 260 is not within 0..259"),
        ({"min_new_tokens": 3, "max_new_tokens": 2}, "=3: more than max_new_tokens=2"),
        ({"temperature": 1, "sampling": Sampling()}, "pass a decode.Sampling, or its fields"),
    ],
)
def test_malformed_options(endless: Target, options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        Decoder(endless).generate(PROMPT, **options)


def test_sampling_by_its_fields(endless: Target) -> None:
    decoder, expected = Decoder(endless), Sampling(1.0, seed=4)
    assert len(decoder.generate(PROMPT, 2, banned=[259], min_new_tokens=2).tokens) == 2
    named = decoder.generate(PROMPT, max_new_tokens=8, temperature=1.0, seed=4)
    assert named.tokens == decoder.generate(PROMPT, max_new_tokens=8, sampling=expected).tokens
    batch = decoder.generate_batch([PROMPT, PROMPT], max_new_tokens=8, temperature=1.0, seed=4)
    assert batch[0].tokens == named.tokens != batch[1].tokens  # which has seed 5
    last = decoder.generate_batch([PROMPT, PROMPT], 1, temperature=1.0, seed=2**63 - 1)
    assert [out.seed for out in last] == [2**63 - 1, 0]
    with pytest.raises(UserError, match="unknown option 'stream'"):
        decoder.generate_batch([PROMPT], stream=print)
    with pytest.raises(UserError, match="either a list of Sampling or seed=…, not both"):
        decoder.generate_batch([PROMPT], sampling=[Sampling()], seed=4)


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"sampling": Sampling(1.0)}])
def test_a_new_seed_unless_one_is_given(endless: Target, sampling: dict[str, Any]) -> None:
    decoder = Decoder(endless)
    outs = [decoder.generate(PROMPT, max_new_tokens=12, **sampling) for _ in range(3)]
    assert len({out.seed for out in outs}) == len({out.text for out in outs}) == 3
    batch = decoder.generate_batch([PROMPT, PROMPT], max_new_tokens=12, **sampling)
    assert batch[0].seed != batch[1].seed and batch[0].text != batch[1].text
    for out in (*outs, *batch):
        again = decoder.generate(PROMPT, max_new_tokens=12, temperature=1.0, seed=out.seed)
        assert again.tokens == out.tokens and again.seed == out.seed
    settings = [Sampling(1.0), Sampling(1.0, seed=7)]
    each = decoder.generate_batch([PROMPT] * 2, max_new_tokens=12, sampling=settings)
    assert each[1].seed == 7 != each[0].seed
    assert decoder.generate(PROMPT, max_new_tokens=2).seed is None
