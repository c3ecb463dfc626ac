"""The tokenizer of a model's folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from align.common.checksums import CHECKSUMS
from align.common.errors import UserError, in_one_line
from align.common.schema import read_object
from align.common.text import say

_AS_WRITTEN = "TokenizersBackend"


def open_tokenizer(folder: Path | str, **options: Any) -> Any:
    """The tokenizer of a folder in hub layout or a hub id, as transformers opens it. One of a folder that we made out of a GGUF file is
    opened as it was written: transformers would take the class of the architecture's models on the hub, and Qwen2's reads a SentencePiece
    vocabulary as bytes."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    config = Path(folder) / "tokenizer_config.json"
    made = isinstance(folder, Path) and (folder / CHECKSUMS).is_file() and config.is_file()
    written = made and read_object(config).get("tokenizer_class") == _AS_WRITTEN
    opener: Any = PreTrainedTokenizerFast if written else AutoTokenizer
    return opener.from_pretrained(str(folder), **options)


def text_ids(
    tokenizer: Any, text: str, rows: int, where: str, given: str | None = None, **options: Any
) -> list[int]:
    """A text as tokens, with none in front. Tokenizers know more tokens than some models (Gemma 3 1B's one more, an image's).

    Args:
        rows: how many tokens the model has.
        where: what is read, for the message.
        given: what of the text was given; the rest is the chat template's. None: all of it.
        options: of the tokenizer's call.

    Raises:
        UserError: a token that the model has not; whatever the tokenizer raises.
    """
    with in_one_line(f"{where}: its tokenizer can't read a text"):
        ids = list(tokenizer(text, add_special_tokens=False, **options)["input_ids"])
    if beyond := [i for i in ids if i >= rows]:
        name = tokenizer.decode(beyond[:1])
        ours = given is None or name in given or name not in text
        raise UserError(
            f"{where}: its tokenizer knows {name!r} as token {beyond[0]}, its embedding has {rows} rows: "
            + ("leave that out of the text" if ours else "take that out of its chat template")
        )
    return ids


def opening_ids(tokenizer: Any, rows: int, where: str) -> tuple[int, ...]:
    """The tokens that the tokenizer puts in front of every text, usually BOS or nothing. What it puts after a text (T5's EOS) is left
    out.

    Args:
        rows: how many tokens the model has.
        where: what is read, for the message.

    Raises:
        UserError: the model lacks one of these tokens.
    """
    special = {*tokenizer.all_special_ids}
    for probe in chain(("a",), tokenizer.get_vocab()):
        alone = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
        if special.isdisjoint(alone) and alone:
            break
    whole = list(tokenizer(probe)["input_ids"])
    places = range(len(whole) - len(alone) + 1)
    start = next((i for i in places if whole[i : i + len(alone)] == alone), 0)
    for token in whole[:start]:
        _check_row(tokenizer, token, rows, where)
    return tuple(whole[:start])


def first_ids(tokenizer: Any, eos_ids: Sequence[int], rows: int, where: str) -> tuple[int, ...]:
    """The tokens in front of a whole text that a model writes or learns from, at least one: what the tokenizer puts there itself; else BOS,
    or the first token that ends a text, which a note names.

    Raises:
        UserError: there is none of these, or the model, which has `rows` tokens, lacks it.
    """
    opening = opening_ids(tokenizer, rows, where)
    if opening:
        return opening
    bos: int | None = tokenizer.bos_token_id
    if bos is None and not eos_ids:
        raise UserError(f"{where}: its files name no token that begins a text, and none that ends one")
    found = eos_ids[0] if bos is None else bos
    _check_row(tokenizer, found, rows, where)
    _note_first(where, str(tokenizer.convert_ids_to_tokens(found)))
    return (found,)


@cache
def _note_first(where: str, token: str) -> None:
    say(
        f"note: {where}: its tokenizer puts nothing in front of a text; whole texts for training begin with {token!r}, as they need a first "
        "token",
        error=True,
    )


def _check_row(tokenizer: Any, token: int, rows: int, where: str) -> None:
    if token >= rows:
        raise UserError(
            f"{where}: its tokenizer begins a text with {tokenizer.convert_ids_to_tokens(token)!r}, token {token}, its embedding has "
            f"{rows} rows: take bos_token out of tokenizer_config.json"
        )
