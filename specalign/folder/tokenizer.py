"""The tokenizer of a model's folder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specalign.common.checksums import CHECKSUMS
from specalign.common.errors import UserError, in_one_line
from specalign.common.schema import read_object
from specalign.common.text import say_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_tokenizer(folder: Path | str, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder in Hub layout or a Hub id. One that we converted from a GGUF file
    is opened as written: for its architecture transformers may choose another class (Qwen2's reads
    a SentencePiece vocabulary as bytes)."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    config = Path(folder) / "tokenizer_config.json"
    converted = isinstance(folder, Path) and (folder / CHECKSUMS).is_file() and config.is_file()
    if converted and read_object(config).get("tokenizer_class") == "TokenizersBackend":
        return PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
    return AutoTokenizer.from_pretrained(str(folder), **options)


def text_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, rows: int, where: str, **options: Any
) -> list[int]:
    """The tokens of a text without opening tokens. Raises UserError for a token that the model,
    which has `rows` tokens, lacks (Gemma 3 1B lacks its tokenizer's for images), and for what the
    tokenizer raises."""
    with in_one_line(f"{where}: its tokenizer can't read a text"):
        ids = list(tokenizer(text, add_special_tokens=False, **options)["input_ids"])
    return _check_rows(tokenizer, ids, rows, where)


def opening_ids(tokenizer: PreTrainedTokenizerBase, rows: int, where: str) -> tuple[int, ...]:
    """The tokens that the tokenizer puts before every text, usually BOS or nothing. Raises
    UserError if the model, which has `rows` tokens, lacks one of them."""
    special = {*tokenizer.all_special_ids}
    for probe in chain(("a",), tokenizer.get_vocab()):
        bare = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
        if bare and special.isdisjoint(bare):
            break
    full = list(tokenizer(probe)["input_ids"])
    places = range(len(full) - len(bare) + 1)
    start = next((i for i in places if full[i : i + len(bare)] == bare), 0)
    return tuple(_check_rows(tokenizer, full[:start], rows, where))


def first_ids(
    tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int], rows: int, where: str
) -> tuple[int, ...]:
    """The tokens before a whole text for training, at least one: the tokenizer's opening tokens,
    else BOS, else the first end-of-text token; a note names the latter two. Raises UserError if
    there is none, or the model lacks it."""
    opening = opening_ids(tokenizer, rows, where)
    if opening:
        return opening
    first = next((i for i in (tokenizer.bos_token_id, *eos_ids) if i is not None), None)
    if first is None:
        raise UserError(
            f"{where}: its files define neither a beginning-of-text nor an end-of-text token"
        )
    _check_rows(tokenizer, [first], rows, where)
    say_once(
        f"note: {where}: the tokenizer adds no BOS token; training documents start with "
        f"{tokenizer.convert_ids_to_tokens(first)!r} instead"
    )
    return (first,)


def _check_rows(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], rows: int, where: str
) -> list[int]:
    beyond = next((i for i in ids if i >= rows), None)
    if beyond is None:
        return ids
    raise UserError(
        f"{where}: its tokenizer maps {tokenizer.decode([beyond])!r} to token {beyond}, but its "
        f"embedding has {rows} rows: remove it from text, chat template and tokenizer_config.json"
    )
