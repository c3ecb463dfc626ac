"""The tokenizer of a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from align.common.checksums import CHECKSUMS
from align.common.errors import UserError, in_one_line
from align.common.schema import read_object

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


def first_id(tokenizer: Any, rows: int, where: str) -> int | None:
    """The token that begins a text; None where the tokenizer names none. Raises UserError for one that a model of so many tokens has
    not."""
    found: int | None = tokenizer.bos_token_id
    if found is not None and found >= rows:
        raise UserError(
            f"{where}: its tokenizer begins a text with {tokenizer.bos_token!r}, token {found}, its embedding has {rows} rows: take bos_token "
            "out of tokenizer_config.json"
        )
    return found
