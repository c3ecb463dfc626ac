"""The tokenizer of a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from align.common.checksums import CHECKSUMS
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
