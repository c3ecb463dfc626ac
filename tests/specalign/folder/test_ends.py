"""What ends a text is a token's id or several; anything else is one line."""

from __future__ import annotations

from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.folder.ends import check_ends, end_ids, note_settings
from specalign.lm.debug import debug_model


def test_ids_and_what_are_none() -> None:
    assert (
        end_ids(None, "a") == set() and end_ids(0, "a") == {0} and end_ids([2, 7, 2], "a") == {2, 7}
    )
    check_ends({"eos_token_id": [2], "text_config": {"eos_token_id": 3}}, "a")
    for config in (
        {"eos_token_id": "2"},
        {"text_config": {"eos_token_id": [2, -1]}},
        {"eos_token_id": [None]},
    ):
        with pytest.raises(UserError, match="^a: eos_token_id: .* is no token's id"):
            check_ends(config, "a")


@pytest.mark.parametrize(
    ("template", "ends", "token"),
    [
        (None, (0,), "<|im_end|>"),
        (None, (0, 2), None),
        ("{{ raise_exception('no') }}", (0,), None),
        (
            {"default": "{{ messages[-1]['content'] }}\n<|im_start|>", "rag": ""},
            (2,),
            "<|im_start|>",
        ),
    ],
)
def test_a_turns_end_that_ends_no_text_is_named(
    template: Any, ends: tuple[int, ...], token: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, tokenizer = debug_model("Llama")
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.eos_token = None
    note_settings("m", tokenizer, {}, ends, {})
    said = capsys.readouterr().err
    ends_turn = f"note: m: its chat template ends an answer with {token!r}"
    assert (ends_turn in said) == bool(said) == (token is not None)
    tokenizer.chat_template, tokenizer.eos_token = None, "<|im_end|>"
    note_settings("m", tokenizer, {}, range(20), {"num_beams": 4, "top_k": 5, "min_length": 0})
    assert "asks for num_beams=4: not applied here" in capsys.readouterr().err
    note_settings("m", tokenizer, {}, (0, 1), {})
    said = capsys.readouterr().err
    assert said == (
        "note: m: its generation config ends a text at 0, 1, and not at the tokenizer's 2\n"
    )
