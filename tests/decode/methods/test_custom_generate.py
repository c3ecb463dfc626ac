"""`generate` with drafts gives what `generate` gives without them, under every setting that it takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import decode
from align.common.errors import UserError
from align.models.checkpoints.block import save_drafter
from align.target.loading import load_target
from decode.engine.engine import run_together
from decode.engine.processed import ProcessedEngine
from decode.methods.custom_generate import _ours
from decode.speculation.sampling import Sampling
from tests.builders import PROMPT, overfit_block_network
from tests.fakes import Streamer

IDS = torch.tensor([PROMPT])


@pytest.fixture(scope="module")
def model() -> Any:
    return load_target("debug", "float32", "cpu", fast=False).model


@pytest.fixture(scope="module")
def drafter(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(overfit_block_network(load_target("debug", "float32", "cpu"), PROMPT), folder)
    return str(folder)


@pytest.fixture(autouse=True)
def stock(model: Any) -> None:
    model.set_attn_implementation("sdpa")


class NoRepeats(LogitsProcessor):
    """A user's own: the last two tokens may not come again."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.scatter(1, input_ids[:, -2:], -torch.inf)


class EndsAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3},
    "n-grams": {"no_repeat_ngram_size": 2},
    "minimum": {"min_new_tokens": 12, "eos_token_id": [17, 203, 4]},
    "bad words": {"bad_words_ids": [[17], [90, 4]]},
    "ends": {"eos_token_id": list(range(0, 256, 3))},
    "suppressed at the beginning": {"begin_suppress_tokens": list(range(100))},
    "own processor": {"logits_processor": LogitsProcessorList([NoRepeats()])},
    "own criterion": {"stopping_criteria": StoppingCriteriaList([EndsAt(13)])},
    "one token": {"max_new_tokens": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", ["block", "lookup", "plain"])
def test_greedy_outputs_are_generates_own(model: Any, drafter: str, name: str, kind: str) -> None:
    words = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **SETTINGS[name]}
    own = model.generate(IDS, **words)
    chosen = {"block": drafter, "lookup": "lookup", "plain": None}[kind]
    assert torch.equal(
        model.generate(IDS, custom_generate=decode.custom_generate, drafter=chosen, **words), own
    )


def test_drafts_are_accepted_and_the_model_stays_as_it_was(model: Any, drafter: str) -> None:
    model.train().requires_grad_(True)
    before = model.config._attn_implementation
    model.generate(
        IDS, max_new_tokens=8, custom_generate=decode.custom_generate, drafter=drafter, pad_token_id=0
    )
    assert model.config._attn_implementation == before and model.training
    assert all(p.requires_grad for p in model.parameters())
    model.eval().requires_grad_(False)
    with _ours(model) as ours:
        chosen = ours.decoder(drafter, None).drafter
        engine = ProcessedEngine(
            ours.target,
            PROMPT,
            24,
            Sampling(),
            chosen,
            "greedy",
            processors=lambda t, s: s,
            criteria=lambda t, s: False,
            shown=PROMPT,
        )
        run_together([engine])
    assert sum(engine.out.accepted) > 8


def test_a_model_that_is_trained_between_two_calls(model: Any) -> None:
    own = copy.deepcopy(model)
    words: dict[str, Any] = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
    ours = {"custom_generate": decode.custom_generate, "drafter": "lookup", **words}
    before = own.generate(IDS, **ours)
    with torch.no_grad():
        own.model.layers[1].mlp.down_proj.weight.mul_(-3)
    after = own.generate(IDS, **ours)
    assert torch.equal(after, own.generate(IDS, **words)) and not torch.equal(before, after)
    other = copy.deepcopy(own)
    assert torch.equal(other.generate(IDS, **ours), after)


def test_batches_with_padding(model: Any, drafter: str) -> None:
    ids = torch.tensor([[0, 0, *PROMPT], [5, 7, *PROMPT]])
    mask = torch.tensor([[0, 0, *[1] * 6], [1] * 8])
    words: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
    }
    words |= {"repetition_penalty": 1.2, "eos_token_id": list(range(1, 256, 9))}
    own = model.generate(ids, **words)
    ours = model.generate(ids, custom_generate=decode.custom_generate, drafter=drafter, **words)
    assert torch.equal(own, ours)
    wrong = torch.tensor([[*[1] * 6, 0, 0], [1] * 8])
    with pytest.raises(UserError, match="padding_side='left'"):
        model.generate(
            ids, **{**words, "attention_mask": wrong}, custom_generate=decode.custom_generate, drafter=drafter
        )


def test_scores_and_logits(model: Any, drafter: str) -> None:
    words: dict[str, Any] = {
        "max_new_tokens": 10,
        "do_sample": False,
        "pad_token_id": 0,
        "repetition_penalty": 1.3,
    }
    words |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    own = model.generate(IDS, **words)
    ours = model.generate(IDS, custom_generate=decode.custom_generate, drafter=drafter, **words)
    assert torch.equal(own.sequences, ours.sequences) and len(own.scores) == len(ours.scores)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(ours[name]), torch.stack(own[name]), rtol=1e-4, atol=1e-4)


def test_a_streamer_gets_prompt_and_tokens(model: Any, drafter: str) -> None:
    streamer = Streamer()
    words: dict[str, Any] = {"max_new_tokens": 10, "pad_token_id": 0, "streamer": streamer}
    out = model.generate(IDS, custom_generate=decode.custom_generate, drafter=drafter, **words)
    assert streamer.ended and streamer.tokens == out[0].tolist()


@pytest.mark.slow
def test_sampled_outputs_follow_the_processed_law(model: Any, drafter: str) -> None:
    """Counts of the first three tokens against their exact law, temperature, top-k and a user's processor applied."""
    config: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 3,
        "max_new_tokens": 3,
        "pad_token_id": 0,
    }
    config |= {"logits_processor": LogitsProcessorList([NoRepeats()]), "eos_token_id": None}
    torch.manual_seed(0)
    draws = 300
    words: dict[str, Any] = {"custom_generate": decode.custom_generate, "drafter": drafter, **config}
    out = torch.cat([model.generate(IDS, **words)[:, IDS.shape[1] :] for _ in range(draws)])
    law = _law(model, PROMPT, 3)
    counts: dict[tuple[int, ...], int] = {}
    for row in out.tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    assert counts.keys() <= law.keys()
    chi = sum((counts.get(k, 0) - draws * p) ** 2 / (draws * p) for k, p in law.items() if draws * p > 5)
    cells = sum(draws * p > 5 for p in law.values())
    assert chi < cells + 4 * (2 * cells) ** 0.5, (chi, cells)
    torch.manual_seed(0)
    assert torch.equal(model.generate(IDS, **words)[:, IDS.shape[1] :], out[:1])
    rows = model.generate(IDS, num_return_sequences=8, **words)
    assert len(rows.unique(dim=0)) > 2


def _law(model: Any, text: list[int], steps: int) -> dict[tuple[int, ...], float]:
    if steps == 0:
        return {(): 1.0}
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[:, -1]
    logits = NoRepeats()(torch.tensor([text]), logits)[0] / 0.7
    best = logits.topk(3)
    found: dict[tuple[int, ...], float] = {}
    for token, p in zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True):
        for rest, q in _law(model, [*text, token], steps - 1).items():
            found[(token, *rest)] = p * q
    return found


def test_the_random_state(model: Any, drafter: str) -> None:
    """One seed gives one text, at a model's first call too, which opens the drafter; coupled to noise, it is the decoder's."""
    options: dict[str, Any] = {"custom_generate": decode.custom_generate, "max_new_tokens": 12}
    options |= {"drafter": drafter, "method": "block:verifier=gumbel"}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    copy.deepcopy(model).generate(IDS, do_sample=False, **options)
    assert torch.equal(torch.get_rng_state(), before)  # as generate leaves it
    seed = int(torch.randint(2**62, ()))
    options |= {"do_sample": True, "temperature": 0.7, "top_k": 9}
    decoder = decode.load(load_target("debug", "float32", "cpu"), drafter, method=options["method"])
    own = decoder.generate(PROMPT, max_new_tokens=12, temperature=0.7, top_k=9, seed=seed).tokens
    for one in (first := copy.deepcopy(model), first):
        torch.manual_seed(3)
        assert one.generate(IDS, **options)[0, len(PROMPT) :].tolist() == own


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha: drafts are"),
        ({"dola_layers": "low"}, "dola_layers: drafts are"),
        ({"force_words_ids": [[7]]}, "force_words_ids: drafts are"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"position_ids": 3 * torch.arange(6)[None]}, "position_ids"),
        ({"token_type_ids": torch.ones_like(IDS)}, "token_type_ids|not used by the model"),
        ({"max_new_tokens": 100000}, "max_length=100006"),
        ({"drafter": 3}, "drafter=int"),
        ({"drafter": "nowhere/at-all"}, "nowhere/at-all"),
    ],
)
def test_what_it_cannot_honour_is_refused(model: Any, drafter: str, words: dict[str, Any], says: str) -> None:
    given = {"drafter": drafter, "max_new_tokens": 4, "pad_token_id": 0, **words}
    with pytest.raises(ValueError, match=says):  # a UserError is one; transformers refuses some first
        model.generate(IDS, custom_generate=decode.custom_generate, **given)


def test_ended_rows_are_padded_as_generate_pads_them(model: Any, drafter: str) -> None:
    ids, words = torch.tensor([PROMPT, [5, 7, 9, 1, 3, 2]]), {"max_new_tokens": 12, "do_sample": False}
    eos = model.generate(ids, pad_token_id=0, **words)[0, -6].item()
    own = model.generate(ids, eos_token_id=eos, **words)
    assert torch.equal(
        own,
        model.generate(
            ids, eos_token_id=eos, custom_generate=decode.custom_generate, drafter=drafter, **words
        ),
    )
