"""The tokens that end a text, and what else changes one, as a model's files name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from align.common.bounded import bounded
from align.common.errors import UserError
from align.common.text import say, short

_KEY = "eos_token_id"
_CHANGES = (
    "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "min_length",
    "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "guidance_scale", "num_beams",
)  # fmt: skip
"""What of a generation_config.json changes the most probable token, and does nothing with these values:"""
_NOTHING = (None, 0, 1)
_MARK = "\u2402ANSWER\u2402"


def end_ids(value: Any, where: str) -> set[int]:
    """A token's id or a list of ids as a set; None is none. `where`: what says so, for the message.

    Raises:
        UserError: it is neither, or an id is negative.
    """
    if value is None:
        return set()
    found = value if isinstance(value, list | tuple) else [value]
    for i in found:
        if type(i) is not int or i < 0:
            raise UserError(f"{where}: {_KEY}: {short(i, 40)} is no token's id (a whole number from 0 on)")
    return set(found)


def check_ends(config: dict[str, Any], where: str) -> None:
    """Raises UserError where a config.json or generation_config.json names an end that is no token's id."""
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        end_ids(values.get(_KEY), where)


def note_ends(spec: str, ends: Sequence[int], of_tokenizer: int | None) -> None:
    """A line where a text goes on behind the token with which the tokenizer ends one: so it does in transformers' `generate`."""
    if ends and of_tokenizer is not None and of_tokenizer not in ends:
        named = ", ".join(map(str, ends[:8])) + ", …" * (len(ends) > 8)
        say(
            f"note: {spec}: its generation config ends a text at {named}, and not at the tokenizer's {of_tokenizer}",
            error=True,
        )


def note_turn(spec: str, tokenizer: Any, kwargs: Mapping[str, Any], ends: Sequence[int]) -> None:
    """A note if the chat template ends an answer with a special token that does not end a text: the model would go on behind its turn."""
    if not getattr(tokenizer, "chat_template", None):
        return
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _MARK}]
    with suppress(Exception), bounded("its chat template"):  # one that takes no such talk
        text: str = tokenizer.apply_chat_template(talk, tokenize=False, **kwargs)
        ids = tokenizer(text.partition(_MARK)[2].lstrip(), add_special_tokens=False)["input_ids"][:1]
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        if ends and ids and ids[0] in special - {*ends}:
            token = tokenizer.convert_ids_to_tokens(ids[0])
            say(
                f"note: {spec}: its chat template ends an answer with {token!r}, where its generation config does not end a text: answers run on "
                f"(--stop {token!r} ends them)",
                error=True,
            )


def note_changes(spec: str, generation: dict[str, Any]) -> None:
    """A line where transformers' `generate` would write other text even greedily: what is measured and drafted for is the model's own p."""
    found = [f"{k}={short(v, 40)}" for k in _CHANGES if (v := generation.get(k)) not in _NOTHING]
    if found:
        say(
            f"note: {spec}: its generation config asks for {', '.join(found)}: not applied here, where p is the model's own; transformers' `generate` "
            "applies it",
            error=True,
        )
