"""What `generate` was asked for is found behind any functions, and what holds nothing is no input."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

import decode
from decode.systems.generate_call import (
    _changes_nothing,
    arguments_of_generate,
    check_call,
    masks_of,
)
from specalign.common.errors import UserError
from tests.builders import PROMPT
from tests.own_processors import NoRepeats
from tests.target_models import tiny_model

IDS, PROMPTED = torch.tensor([[0, 3, 4], [5, 6, 7]]), torch.tensor([PROMPT])


class Model:
    def generate(self, call: Any, streamer: Any = None, **kwargs: Any) -> Any:
        return call(self)


def test_the_nearest_generate_of_the_model_was_asked() -> None:
    model, other = Model(), Model()
    found = model.generate(
        lambda m: other.generate(
            lambda _: arguments_of_generate(m, inspect.currentframe()), streamer=3
        ),
        streamer=2,
        cache=5,
    )
    assert found["streamer"] == 2 and found["cache"] == 5
    with pytest.raises(UserError, match="^custom_generate: call it through model.generate"):
        arguments_of_generate(model, inspect.currentframe())


@pytest.mark.parametrize(
    "value", [None, {}, [], (), False, {"image": None}, {"image": [torch.ones(0)]}]
)
def test_an_input_that_holds_nothing(value: Any) -> None:
    assert _changes_nothing(None, IDS, "mm_encoder_outputs", value)


@pytest.mark.parametrize("value", [{"image": torch.zeros(1)}, torch.zeros(2, 3), [0], "x", True])
def test_an_input_that_holds_something(value: Any) -> None:
    assert not _changes_nothing(None, IDS, "pixel_values", value)


def test_types_of_tokens_count_where_zeros_change_the_logits() -> None:
    model = tiny_model("gpt2", 260).train()
    assert not _changes_nothing(
        model, IDS, "token_type_ids", torch.zeros_like(IDS)
    )  # it adds the embedding of token 0
    assert model.training and model.config._attn_implementation == "eager"


class QuantizedCache:
    """A name is all that is asked of it."""


def test_quantised_caches_and_texts_without_tokens_are_refused() -> None:
    config, model = GenerationConfig(), SimpleNamespace(config=SimpleNamespace())
    with pytest.raises(UserError, match="^cache_implementation: quantized keys"):
        check_call(model, {}, config, [], {"cache": QuantizedCache()}, IDS)
    with pytest.raises(UserError, match="^input_ids: there is no token"):
        check_call(model, {}, config, [], {"cache": DynamicCache()}, IDS[:, :0])
    with pytest.raises(UserError, match="^streamer: takes one text, not 2"):
        check_call(model, {"streamer": 1}, config, [], {}, IDS)


def test_masks() -> None:
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    many = torch.tensor([[0, 0, 1], [0, 1, 2]]).expand(
        4, 2, 3
    )  # as a model of images and text has them
    assert (
        masks_of(IDS, {"attention_mask": mask, "position_ids": many}).tolist()
        == mask.bool().tolist()
    )
    assert masks_of(IDS, {}).all()
    with pytest.raises(UserError, match="position_ids"):
        masks_of(IDS, {"position_ids": 2 * many})
    with pytest.raises(UserError, match="a text is only padding"):
        masks_of(IDS, {"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])})
    assert masks_of(IDS, {"attention_mask": mask[:1]}).tolist() == mask[:1].bool().tolist() * 2
    for shape in ((2, 9), (3, 3), (2, 1, 2, 3), (3,)):
        with pytest.raises(
            UserError,
            match=rf"^attention_mask .*{re.escape(str(shape))}, but input_ids have \(2, 3\)",
        ):
            masks_of(IDS, {"attention_mask": torch.ones(shape)})
    with pytest.raises(UserError, match=r"^attention_mask \(position_ids\): shape \(1, 9\)"):
        masks_of(IDS, {"position_ids": torch.arange(9)[None]})


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
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: `drafter` takes its place"),
        ({"assistant_early_exit": 1}, "assistant_early_exit: `drafter` takes its place"),
        ({"past_key_values": DynamicCache()}, "past_key_values .*neither read nor filled"),
        ({"token_type_ids": torch.ones_like(PROMPTED)}, "token_type_ids|not used by the model"),
        ({"max_new_tokens": 100000}, "max_length=100006"),
        ({"synced_gpus": True}, "synced_gpus: the number"),
        ({"attention_mask": torch.ones(1, 9, dtype=torch.long)}, "^attention_mask .* shape"),
        ({"drafter": 3}, "drafter=int"),
        ({"drafter": "nowhere/at-all"}, "nowhere/at-all"),
    ],
)
@pytest.mark.usefixtures("stock")
def test_what_it_cannot_honour_is_refused(
    model: Any, drafter: str, words: dict[str, Any], says: str
) -> None:
    given = {"drafter": drafter, "max_new_tokens": 4, "pad_token_id": 0, **words}
    with pytest.raises(
        ValueError, match=says
    ):  # a UserError is one; transformers refuses some first
        model.generate(PROMPTED, custom_generate=decode.custom_generate, **given)


@pytest.mark.usefixtures("stock")
def test_processors_that_remember_their_calls_are_refused(model: Any) -> None:
    synth = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3,
        keys=[1, 2],
        sampling_table_size=64,
        sampling_table_seed=0,
        context_history_size=8,
        device="cpu",
    )
    guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(
        1.5, model, unconditional_ids=torch.tensor([[5, 9]])
    )
    for one in (synth, guide, LogitsProcessorList([guide])):
        with pytest.raises(
            UserError, match="^logits_processor: .* depends on the order of its calls"
        ):
            model.generate(
                PROMPTED,
                max_new_tokens=4,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([NoRepeats(), one]),
                custom_generate=decode.custom_generate,
            )
