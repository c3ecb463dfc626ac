"""What a model's files say of end-of-text tokens and of changes to generated text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from specalign.common.errors import UserError
from specalign.common.text import say, short

_CHANGES = (
    *("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens"),
    *("bad_words_ids", "sequence_bias", "min_length", "min_new_tokens", "forced_bos_token_id"),
    *("forced_eos_token_id", "exponential_decay_length_penalty", "guidance_scale", "num_beams"),
)
"""Keys of a generation_config.json that change even greedy text, unless they are None, 0 or 1."""
_MARK = "\u2402ANSWER\u2402"


def end_ids(value: Any, where: str) -> set[int]:
    """An `eos_token_id` as a set; None is empty. `where`: for the message.

    Raises:
        UserError: it is neither an id nor a list of ids.
    """
    if value is None:
        return set()
    ids = value if isinstance(value, list | tuple) else [value]
    for i in ids:
        if type(i) is not int or i < 0:
            raise UserError(
                f"{where}: eos_token_id: {short(i, 40)} is no token's id (a whole number from 0 on)"
            )
    return set(ids)


def check_ends(config: dict[str, Any], where: str) -> None:
    """Raises UserError if a config.json or generation_config.json names an end that is no token
    id."""
    text_config = config.get("text_config")
    for values in (config, text_config if isinstance(text_config, dict) else {}):
        end_ids(values.get("eos_token_id"), where)


def note_ends(spec: str, ends: Sequence[int], of_tokenizer: int | None) -> None:
    """Report that text continues after the tokenizer's end token, as in transformers'
    `generate`."""
    if ends and of_tokenizer is not None and of_tokenizer not in ends:
        listed = ", ".join(map(str, ends[:8])) + ", …" * (len(ends) > 8)
        say(
            f"note: {spec}: its generation config ends a text at {listed}, and not at the "
            "tokenizer's "
            f"{of_tokenizer}",
            error=True,
        )


def note_turn(spec: str, tokenizer: Any, kwargs: Mapping[str, Any], ends: Sequence[int]) -> None:
    """Report that the chat template ends an answer with a special token that does not end a text:
    the model would continue after its turn."""
    if not getattr(tokenizer, "chat_template", None):
        return
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _MARK}]
    with suppress(Exception):  # it may refuse these messages
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        after = text.partition(_MARK)[2].lstrip()
        ids = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        if ends and ids and ids[0] in special - {*ends}:
            token = tokenizer.convert_ids_to_tokens(ids[0])
            say(
                f"note: {spec}: its chat template ends an answer with {token!r}, where its "
                "generation "
                f"config does not end a text: answers run on (--stop {token!r} ends them)",
                error=True,
            )


def note_changes(spec: str, generation: dict[str, Any]) -> None:
    """Report settings with which transformers' `generate` would write other text even greedily."""
    values = {key: generation.get(key) for key in _CHANGES}
    found = [f"{k}={short(v, 40)}" for k, v in values.items() if v not in (None, 0, 1)]
    if found:
        say(
            f"note: {spec}: its generation config asks for {', '.join(found)}: not applied here, "
            "where "
            "p is the model's own; transformers' `generate` applies it",
            error=True,
        )
