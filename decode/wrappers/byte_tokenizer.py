"""A tokenizer as a code for bytes, so that two vocabularies can be compared and translated (decode/wrappers/vocabularies.py)."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from align.common.errors import UserError

_SPACE = "▁"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def _alphabet() -> dict[str, int]:
    """The characters in which byte-level vocabularies write bytes (GPT-2): printable ones stand for themselves, the rest
    is counted up from U+0100."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


def _steps(stage: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normaliser or pre-tokenizer, with sequences flattened."""
    if stage is None:
        return []
    inside = stage.get("normalizers", stage.get("pretokenizers"))
    return [stage] if inside is None else [step for part in inside for step in _steps(part)]


class ByteTokenizer:
    """A tokenizer as a code for bytes: the bytes of every token, and the tokens of given bytes in the middle of a text. It does
    not normalise, adds no prefix and finds no special tokens in text.

    Args:
        tokenizer: a fast tokenizer of transformers, byte-level or SentencePiece (spaces as ▁, <0xNN> for bytes).
        whose: drafter or target, for errors.

    Raises:
        UserError: a tokenizer of another kind, such as WordPiece, which loses spaces.
    """

    def __init__(self, tokenizer: Any, whose: str) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(f"the {whose}'s tokenizer {type(tokenizer).__name__} has no fast version")
        spec = json.loads(backend.to_str())
        model = spec["model"]
        before, cuts = _steps(spec["normalizer"]), _steps(spec["pre_tokenizer"])
        kinds = {step["type"] for step in before + cuts}
        spaces = [s for s in before if s["type"] == "Replace" and s["content"] == _SPACE]
        self.byte_level = "ByteLevel" in kinds
        affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        if not (self.byte_level or spaces or "Metaspace" in kinds) or affixes:
            raise UserError(
                f"the {whose}'s tokenizer ({model['type']}) can't spell a text byte by byte:"
                " it must be byte-level or SentencePiece"
            )
        self.prefix = b""
        """The space with which it begins a whole text."""
        for step in before + cuts:
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
            if scheme != "never" or step["type"] == "Prepend":
                self.prefix = b" "
            step |= {"prepend_scheme": "never"} if "prepend_scheme" in step else {}
            step |= {"add_prefix_space": False} if "add_prefix_space" in step else {}
        kept = [s for s in before if s in spaces or s["type"] == "ByteLevel"]
        code = {
            "normalizer": {"type": "Sequence", "normalizers": kept} if kept else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts} if cuts else None,
            "model": {**model, "dropout": None} if "dropout" in model else model,
        }
        off = {"truncation": None, "padding": None, "post_processor": None}
        self._core = type(backend).from_str(json.dumps(spec | code | off))
        self._core.encode_special_tokens = True
        self.eos, self.bos = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.begins = self.bos is not None and list(tokenizer("")["input_ids"])[:1] == [self.bos]
        """Whether it begins a whole text with a BOS."""
        self._spell_out(model, {token["id"]: token["special"] for token in spec["added_tokens"]})
        # a BPE's vocabulary is its tokens, whatever their ids; a Unigram's is a list, with scores
        rules = {key: value for key, value in model.items() if not isinstance(value, dict)}
        cut = json.dumps([code | {"model": rules}, sorted(self.ids)], sort_keys=True)
        self.cut = hashlib.sha256(cut.encode()).hexdigest()
        """Equal for tokenizers that split every text in the same way; ids and special tokens may differ."""

    def _spell_out(self, model: dict[str, Any], added: dict[int, bool]) -> None:
        """Compute the bytes of every token. added: tokens outside the model, and whether they are special."""
        vocab: dict[str, int] = self._core.get_vocab(with_added_tokens=True)
        unknown = model.get("unk_token")
        if model.get("unk_id") is not None:  # of a Unigram
            unknown = model["vocab"][model["unk_id"]][0]
        self.specials = {name: i for name, i in vocab.items() if added.get(i) or i in (self.eos, self.bos)}
        self.ids = {name: i for name, i in vocab.items() if name not in self.specials and name != unknown}
        self.names = {i: name for name, i in self.specials.items()}
        self.pieces = [b""] * (max(vocab.values()) + 1)
        """The bytes of every token; empty where it stands for no text."""
        self.of: dict[bytes, int] = {}
        """The token of these bytes; among several the one written as text, not as <0xNN>."""
        alphabet, in_bytes = _alphabet(), bool(model.get("byte_fallback"))
        ordered = sorted((in_bytes and bool(_BYTE.fullmatch(name)), i, name) for name, i in self.ids.items())
        for is_byte, i, name in ordered:
            if is_byte:
                piece = bytes([int(name[3:5], 16)])
            elif not self.byte_level:
                piece = name.replace(_SPACE, " ").encode()
            elif i in added:
                piece = name.encode()
            else:
                piece = bytes(alphabet[c] for c in name) if alphabet.keys() >= set(name) else b""
            self.pieces[i] = piece
            self.of.setdefault(piece, i)
        self._sorted, self.longest = sorted(self.of), max(map(len, self.of))
        # bytes that are no text, and what the tokenizer changes or leaves out: the text is split there first, because each
        # would otherwise cost another tokenization of all that follows
        odd = "".join(chr(b) for b in range(128) if bytes([b]) not in self.of) if self.byte_level else _SPACE
        self._odd = re.compile(f"([\udc80-\udcff{re.escape(odd)}])")

    def piece(self, token: int) -> bytes:
        """The bytes of a token; empty for special tokens and for rows of a model without a token."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def spell(self, tokens: Sequence[int]) -> bytes:
        """The bytes of all of them."""
        return b"".join(self.piece(token) for token in tokens)

    def continues(self, data: bytes) -> bool:
        """Whether some longer token begins with these bytes."""
        at = bisect_right(self._sorted, data)
        return at < len(self._sorted) and self._sorted[at].startswith(data)

    def encode(self, data: bytes) -> list[int]:
        """The tokens of these bytes: the tokenizer's own where they spell them exactly, else one per byte; -1 for a byte
        without a token."""
        tokens: list[int] = []
        for i, part in enumerate(self._odd.split(data.decode(errors="surrogateescape"))):
            raw, at = part.encode(errors="surrogateescape"), 0
            while at < len(raw):
                own = () if i % 2 else self._core.encode(raw[at:].decode(), add_special_tokens=False).ids
                for token in own:
                    piece = self.piece(token)
                    if not piece or not raw.startswith(piece, at):
                        break
                    tokens.append(token)
                    at += len(piece)
                while at < len(raw):  # to the next character
                    tokens.append(self.of.get(raw[at : at + 1], -1))
                    at += 1
                    if at < len(raw) and raw[at] & 0xC0 != 0x80:
                        break
        return tokens

    def text_start(self, tokens: Sequence[int], most: int) -> int:
        """Where the text at the end of the tokens begins: after the last special token, at most `most` tokens back."""
        start = len(tokens)
        while start > max(0, len(tokens) - most) and self.piece(tokens[start - 1]):
            start -= 1
        return start
