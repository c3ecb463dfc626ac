"""What ends a text is a token's id or several; anything else is one line."""

from __future__ import annotations

from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.folder.ends import check_ends, end_ids, note_ends, note_turn
from specalign.lm.debug import debug_model


def test_ids_and_what_are_none(capsys: pytest.CaptureFixture[str]) -> None:
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
    for ends, own in (((2, 3), 3), ((), 3), ((2,), None)):
        note_ends("m", ends, own)
    assert capsys.readouterr().err == ""
    note_ends("m", range(20), 30)
    assert (
        "note: m: its generation config ends a text at 0, 1, 2, 3, 4, 5, 6, 7, …, and not at the tokenizer's 30"
        in capsys.readouterr().err
    )


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
    note_turn("m", tokenizer, {}, ends)
    said = capsys.readouterr().err
    assert (f"note: m: its chat template ends an answer with {token!r}" in said) == (
        token is not None
    )
    assert bool(said) == (token is not None)
    tokenizer.chat_template = None
    note_turn("m", tokenizer, {}, ends)
    assert not capsys.readouterr().err
