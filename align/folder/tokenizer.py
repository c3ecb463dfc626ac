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


def text_ids(tokenizer: Any, text: str, rows: int, where: str, **options: Any) -> list[int]:
    """A text as tokens, with none in front. Tokenizers know more tokens than some models (Gemma 3 1B's one more, an image's).

    Args:
        rows: how many tokens the model has.
        where: what is read, for the message.
        options: of the tokenizer's call.

    Raises:
        UserError: a token that the model has not; whatever the tokenizer raises.
    """
    with in_one_line(f"{where}: its tokenizer can't read a text"):
        ids = list(tokenizer(text, add_special_tokens=False, **options)["input_ids"])
    if beyond := [i for i in ids if i >= rows]:
        raise UserError(
            f"{where}: its tokenizer knows {tokenizer.decode(beyond[:1])!r} as token {beyond[0]}, its embedding has {rows} rows: leave "
            "that out of the text"
        )
    return ids
