"""`generate` with drafts gives what `generate` gives without them, under every setting that it takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.ao.quantization import quantize_dynamic
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

import decode
from decode.engine.engine import run_together
from decode.engine.processed import ProcessedEngine
from decode.speculation.sampling import Sampling
from decode.systems.custom_generate import _as_target
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from tests.builders import PROMPT
from tests.fakes import Streamer
from tests.own_processors import EndsAt, NoRepeats, RowEnds, Sure
from tests.target_wrappers import tiny_wrapper

IDS = torch.tensor([PROMPT])
pytestmark = pytest.mark.usefixtures("stock")

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
    "a longer criterion of one's own": {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(40)])
    },
    "one token": {"max_new_tokens": 1},
    "states that are not returned": {"output_hidden_states": True},
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


def test_methods_that_are_not_generates_own_are_said(
    model: Any, drafter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lossy verifier once, by a note; one that would run another model is refused before that is made."""
    words: dict[str, Any] = {
        "max_new_tokens": 2,
        "pad_token_id": 0,
        "custom_generate": decode.custom_generate,
    }
    for method, notes in (
        ("block:verifier=lossy_typical", 1),
        ("block:verifier=gumbel", 0),
        ("block", 0),
    ):
        for _ in range(2):
            model.generate(IDS, **words, drafter=drafter, method=method)
        said = capsys.readouterr().err
        assert (
            said.count(f"note: method={method}: lossy_typical does not keep")
            == notes
            == said.count("note")
        )
    with pytest.raises(UserError, match="^method=compiled: .* use decode.load$"):
        model.generate(IDS, **words, method="compiled")
    assert capsys.readouterr().err == ""


def test_drafts_are_accepted_and_the_model_stays_as_it_was(model: Any, drafter: str) -> None:
    model.train().requires_grad_(True)
    before = model.config._attn_implementation
    model.generate(
        IDS,
        max_new_tokens=8,
        custom_generate=decode.custom_generate,
        drafter=drafter,
        pad_token_id=0,
    )
    assert model.config._attn_implementation == before and model.training
    assert all(p.requires_grad for p in model.parameters())
    model.eval().requires_grad_(False)
    with _as_target(model) as ours:
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
            ids,
            **{**words, "attention_mask": wrong},
            custom_generate=decode.custom_generate,
            drafter=drafter,
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
        torch.testing.assert_close(
            torch.stack(ours[name]), torch.stack(own[name]), rtol=1e-4, atol=1e-4
        )


def test_a_streamer_gets_prompt_and_tokens(model: Any, drafter: str) -> None:
    streamer = Streamer()
    words: dict[str, Any] = {"max_new_tokens": 10, "pad_token_id": 0, "streamer": streamer}
    out = model.generate(IDS, custom_generate=decode.custom_generate, drafter=drafter, **words)
    assert streamer.ended and streamer.tokens == out[0].tolist()


@pytest.mark.slow
def test_sampled_outputs_follow_the_processed_law(model: Any, drafter: str) -> None:
    """Counts of the first three tokens against their exact law, temperature, top-k and a user's processor
    applied."""
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
    words: dict[str, Any] = {
        "custom_generate": decode.custom_generate,
        "drafter": drafter,
        **config,
    }
    out = torch.cat([model.generate(IDS, **words)[:, IDS.shape[1] :] for _ in range(draws)])
    law = _law(model, PROMPT, 3)
    counts: dict[tuple[int, ...], int] = {}
    for row in out.tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    assert counts.keys() <= law.keys()
    chi = sum(
        (counts.get(k, 0) - draws * p) ** 2 / (draws * p) for k, p in law.items() if draws * p > 5
    )
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
    """One seed gives one text, at a model's first call too, which opens the drafter; coupled to noise, it is
    the decoder's."""
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


def _offloaded(model: Any) -> Any:
    """As accelerate leaves a model whose weights lie elsewhere until a call reads them."""
    model.model.layers[1].mlp.up_proj.to("meta")
    return model


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.double(), "its weights are float64; float32, bfloat16 and float16 are run"),
        (lambda m: quantize_dynamic(m, {torch.nn.Linear}), "q_proj is quantised by torch.ao"),
        (lambda m: quantize_dynamic(m, {"lm_head"}), "lm_head is quantised by torch.ao"),
        (_offloaded, "^model.layers.1.mlp.up_proj.weight is offloaded: load the model without"),
    ],
    ids=["float64", "int8", "int8 head", "offloaded"],
)
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization")
def test_models_that_it_cannot_run_exactly(
    model: Any, change: Callable[[Any], Any], says: str
) -> None:
    """Also where the model was opened before."""
    words: dict[str, Any] = {"custom_generate": decode.custom_generate, "drafter": "lookup"}
    words |= {"max_new_tokens": 4, "pad_token_id": 0}
    other = copy.deepcopy(model)
    other.generate(IDS, **words)
    with pytest.raises(UserError, match=says) as refused:
        change(other).generate(IDS, **words)
    assert "\n" not in str(refused.value)


def test_a_row_that_no_token_ends_is_written_on(model: Any, drafter: str) -> None:
    """`generate` pads behind an end of text alone: behind a criterion it writes on until the last text has
    ended."""
    ids, mask = (
        torch.tensor([[0, 0, *PROMPT], [5, 7, *PROMPT]]),
        torch.tensor([[0, 0, *[1] * 6], [1] * 8]),
    )
    words: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0}
    words |= {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    for criteria in ([RowEnds(10)], [RowEnds(10), Sure()]):
        for ends in ({}, {"eos_token_id": 250}):
            own, ours = (
                model.generate(
                    ids, stopping_criteria=StoppingCriteriaList(criteria), **words, **ends, **more
                )
                for more in ({}, {"custom_generate": decode.custom_generate, "drafter": drafter})
            )
            assert torch.equal(own.sequences, ours.sequences), (criteria, ends)
            assert len(own.scores) == len(ours.scores)
            assert criteria[1:] == [] or own.sequences.shape[1] < 20  # the scores end something


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_text_for_a_model_of_images_and_text(kind: str) -> None:
    """A batch, with padding, and with the types of its tokens, as such a model's processor writes them."""
    model, ids = tiny_wrapper(kind), torch.tensor([[0, 0, *PROMPT * 2], [5, 7, *PROMPT * 2]])
    types = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids"
    words: dict[str, Any] = {types: torch.zeros_like(ids), "attention_mask": (ids > 0).long()}
    words |= {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    own = model.generate(ids, **words)
    ours: dict[str, Any] = {"custom_generate": decode.custom_generate, "drafter": "lookup"}
    assert torch.equal(own, model.generate(ids, **words, **ours))
    with pytest.raises(UserError, match=f"{types}: only tokens and attention_mask"):
        model.generate(ids, **{**words, types: torch.ones_like(ids)}, **ours)
