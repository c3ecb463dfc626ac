"""A causal language model as the drafter: same output, honest q, a context that goes back exactly."""

from dataclasses import replace

import pytest
import torch

from decode import Decoder, Sampling
from decode.proposers.autoregressive import AutoregressiveProposer
from decode.speculation.proposal import Proposal
from decode.speculation.sampling import probs
from specalign.common.errors import UserError
from specalign.lm.model import Target
from tests.builders import PROMPTS, watched
from tests.builders import smaller_model as smaller
from tests.fakes import LETTERS, SETTINGS, TableTarget
from tests.tokenizers import byte_level


@pytest.fixture(scope="module")
def model(target: Target) -> Target:
    return smaller(target)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.8, top_k=20, repetition_penalty=1.3, min_new_tokens=9, banned=(9,))],
)
def test_q_is_what_tokens_are_drawn_from(target: Target, model: Target, sampling: Sampling) -> None:
    """After rejections too: every row of q equals that of one fresh forward over the text and the drafts before it."""
    seen: list[tuple[list[int], Proposal]] = []
    rejected = accepted = 0
    for seed in range(3):
        drafter = watched(AutoregressiveProposer(model), seen)
        out = Decoder(target, drafter).generate(
            PROMPTS[0], max_new_tokens=24, sampling=replace(sampling, seed=seed)
        )
        rejected += sum(out.drafted) - sum(out.accepted)
        accepted += sum(out.accepted)
    assert rejected > 10 and accepted > 10
    for text, proposal in seen:
        assert proposal.law == "causal" and proposal.q is not None
        row = [*text, *proposal.tokens_K.tolist()]
        logits = model.forward(torch.tensor([row])).logits_BLV
        assert logits is not None
        for k, found in enumerate(proposal.q.dense(260)):
            before, done = row[: len(text) + k], len(text) + k - len(PROMPTS[0])
            barred = {9, *target.eos_ids} if done < sampling.min_new_tokens else {*sampling.banned}
            values = logits[0, len(text) + k - 1].clone()
            for token in set(before) if sampling.repetition_penalty != 1 else ():
                values[token] *= sampling.repetition_penalty ** (-1 if values[token] > 0 else 1)
            values[list(barred if sampling.banned else ())] = -torch.inf
            plain = Sampling(sampling.temperature, top_k=sampling.top_k)
            torch.testing.assert_close(found, probs(values, plain), atol=1e-5, rtol=1e-3)
            assert float(found[row[len(text) + k]]) > 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_drafter_that_is_the_target_is_always_right(setting: str) -> None:
    """q = p, penalties included; under Gumbel coupling the very tokens."""
    target = TableTarget(6, seed=4)
    for verifier in ("token", "block", "gumbel"):
        for seed in range(5):
            decoder = Decoder(target, AutoregressiveProposer(target, 4), verifier)  # type: ignore[arg-type]
            sampling = replace(SETTINGS[setting], seed=seed)
            out = decoder.generate(LETTERS, max_new_tokens=21, sampling=sampling)
            assert out.accepted == out.drafted
            if verifier == "gumbel":
                plain = Decoder(target, None, "gumbel")  # type: ignore[arg-type]
                wanted = plain.generate(LETTERS, max_new_tokens=21, sampling=sampling)
                assert out.tokens == wanted.tokens


def test_models_of_one_tokenizer_may_differ_in_unused_rows(target: Target) -> None:
    plain = Decoder(target).generate(PROMPTS[0], max_new_tokens=16)
    for rows in (256, 300):
        other = smaller(target, vocab_size=rows)
        out = Decoder(target, AutoregressiveProposer(other)).generate(PROMPTS[0], max_new_tokens=16)
        assert out.tokens == plain.tokens and sum(out.accepted) > 2
    other.tokenizer = byte_level()
    with pytest.raises(UserError, match="300, target 'debug' 260; pass --drafter-tokenizer"):
        Decoder(target, AutoregressiveProposer(other)).generate(PROMPTS[0], max_new_tokens=9)
