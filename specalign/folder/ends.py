"""What a model's files say of end-of-text tokens and of changes to generated text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specalign.common.errors import UserError
from specalign.common.text import say, short

_CHANGES = (
    "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens",
    "bad_words_ids", "sequence_bias", "min_length", "min_new_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "exponential_decay_length_penalty", "guidance_scale", "num_beams",
)  # fmt: skip
"""Keys of a generation_config.json that change even greedy text, unless they are None, 0 or 1."""


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


def note_settings(
    spec: str, of_tokenizer: int | None, ends: Sequence[int], generation: Mapping[str, Any]
) -> None:
    """Report where text continues after the tokenizer's end token, as in transformers' `generate`,
    and settings with which `generate` would write other text even greedily.

    Args:
        generation: the generation config, without defaults.
    """
    if ends and of_tokenizer is not None and of_tokenizer not in ends:
        listed = ", ".join(map(str, ends[:8])) + ", …" * (len(ends) > 8)
        say(
            f"note: {spec}: its generation config ends a text at {listed}, and not at the "
            f"tokenizer's {of_tokenizer}",
            error=True,
        )
    values = {key: generation.get(key) for key in _CHANGES}
    found = [f"{k}={short(v, 40)}" for k, v in values.items() if v not in (None, 0, 1)]
    if found:
        say(
            f"note: {spec}: its generation config asks for {', '.join(found)}: not applied here, "
            "where p is the model's own; transformers' `generate` applies it",
            error=True,
        )
