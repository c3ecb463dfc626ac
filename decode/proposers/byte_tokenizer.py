"""A tokenizer as a code for bytes, so that two vocabularies can be compared and translated
(decode/proposers/vocabularies.py)."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from specalign.common.errors import UserError

_SPACE = "▁"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def _alphabet() -> dict[str, int]:
    """The characters in which byte-level vocabularies write bytes (GPT-2): printable ones stand for
    themselves, the rest is counted up from U+0100."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


def _flatten(stage: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normaliser or pre-tokenizer, with sequences flattened."""
    if stage is None:
        return []
    inside = stage.get("normalizers", stage.get("pretokenizers"))
    return [stage] if inside is None else [step for part in inside for step in _flatten(part)]


class ByteTokenizer:
    """A tokenizer as a code for bytes: the bytes of every token, and the tokens of given bytes in
    the middle of a text. It does not normalise, adds no prefix and finds no special tokens in text.

    Args:
        tokenizer: a fast tokenizer of transformers, byte-level or SentencePiece (spaces as ▁,
            <0xNN> for bytes).
        whose: drafter or target, for errors.

    Raises:
        UserError: a tokenizer of another kind, such as WordPiece, which loses spaces.
    """

    def __init__(self, tokenizer: Any, whose: str) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"the {whose}'s tokenizer {type(tokenizer).__name__} has no fast version"
            )
        spec = json.loads(backend.to_str())
        model = spec["model"]
        normalizers, splitters = _flatten(spec["normalizer"]), _flatten(spec["pre_tokenizer"])
        kinds = {step["type"] for step in normalizers + splitters}
        spaces = [s for s in normalizers if s["type"] == "Replace" and s["content"] == _SPACE]
        self.byte_level = "ByteLevel" in kinds
        affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        if not (self.byte_level or spaces or "Metaspace" in kinds) or affixes:
            raise UserError(
                f"the {whose}'s tokenizer ({model['type']}) can't spell a text byte by byte:"
                " it must be byte-level or SentencePiece"
            )
        self.prefix = b""
        """The space with which it begins a whole text."""
        for step in normalizers + splitters:
            scheme = step.get(
                "prepend_scheme", "always" if step.get("add_prefix_space") else "never"
            )
            if scheme != "never" or step["type"] == "Prepend":
                self.prefix = b" "
            for key, value in (("prepend_scheme", "never"), ("add_prefix_space", False)):
                if key in step:
                    step[key] = value
        kept = [s for s in normalizers if s in spaces or s["type"] == "ByteLevel"]
        code = {
            "normalizer": {"type": "Sequence", "normalizers": kept} if kept else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitters}
            if splitters
            else None,
            "model": {**model, "dropout": None} if "dropout" in model else model,
        }
        off = {"truncation": None, "padding": None, "post_processor": None}
        self._core = type(backend).from_str(json.dumps(spec | code | off))
        self._core.encode_special_tokens = True
        self.eos, self.bos = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.begins = self.bos is not None and list(tokenizer("")["input_ids"])[:1] == [self.bos]
        """Whether it begins a whole text with a BOS."""
        self._compute_pieces(
            model, {token["id"]: token["special"] for token in spec["added_tokens"]}
        )
        # a BPE's vocabulary is its tokens, whatever their ids; a Unigram's is a list, with scores
        rules = {key: value for key, value in model.items() if not isinstance(value, dict)}
        cut = json.dumps([code | {"model": rules}, sorted(self.ids)], sort_keys=True)
        self.cut = hashlib.sha256(cut.encode()).hexdigest()
        """Equal for tokenizers that split every text in the same way; ids and special tokens may
        differ."""

    def _compute_pieces(self, model: dict[str, Any], added: dict[int, bool]) -> None:
        """Compute the bytes of every token. added: tokens outside the model, and whether they are
        special."""
        vocab: dict[str, int] = self._core.get_vocab(with_added_tokens=True)
        unknown = model.get("unk_token")
        if model.get("unk_id") is not None:  # of a Unigram
            unknown = model["vocab"][model["unk_id"]][0]
        self.specials = {
            name: i for name, i in vocab.items() if added.get(i) or i in (self.eos, self.bos)
        }
        self.ids = {
            name: i for name, i in vocab.items() if name not in self.specials and name != unknown
        }
        self.names = {i: name for name, i in self.specials.items()}
        self.pieces = [b""] * (max(vocab.values()) + 1)
        """The bytes of every token; empty where it stands for no text."""
        alphabet, byte_fallback = _alphabet(), bool(model.get("byte_fallback"))
        as_bytes = set[int]()
        for name, i in self.ids.items():
            if byte_fallback and (found := _BYTE.fullmatch(name)):
                as_bytes.add(i)
                self.pieces[i] = bytes.fromhex(found[1])
            elif not self.byte_level:
                self.pieces[i] = name.replace(_SPACE, " ").encode()
            elif i in added:
                self.pieces[i] = name.encode()
            elif alphabet.keys() >= set(name):
                self.pieces[i] = bytes(alphabet[c] for c in name)
        # among tokens of the same bytes the one written as text, not as <0xNN>, then the lowest id
        preferred = sorted(self.ids.values(), key=lambda i: (i in as_bytes, i), reverse=True)
        self.of = {self.pieces[i]: i for i in preferred}
        """The token of these bytes."""
        self._sorted, self.longest = sorted(self.of), max(map(len, self.of))
        # bytes that are no text, and what the tokenizer changes or leaves out: the text is split
        # there first, because each would otherwise cost another tokenization of all that follows
        odd = (
            "".join(chr(b) for b in range(128) if bytes([b]) not in self.of)
            if self.byte_level
            else _SPACE
        )
        self._odd = re.compile(f"([\udc80-\udcff{re.escape(odd)}])")

    def piece(self, token: int) -> bytes:
        """The bytes of a token; empty for special tokens and for rows of a model without a
        token."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def spell(self, tokens: Sequence[int]) -> bytes:
        """The bytes of all of them."""
        return b"".join(self.piece(token) for token in tokens)

    def continues(self, data: bytes) -> bool:
        """Whether some longer token begins with these bytes."""
        at = bisect_right(self._sorted, data)
        return at < len(self._sorted) and self._sorted[at].startswith(data)

    def encode(self, data: bytes) -> list[int]:
        """The tokens of these bytes: the tokenizer's own where they spell them exactly, else one
        per byte; -1 for a byte without a token."""
        tokens: list[int] = []
        for i, part in enumerate(self._odd.split(data.decode(errors="surrogateescape"))):
            raw, at = part.encode(errors="surrogateescape"), 0
            while at < len(raw):
                own = (
                    ()
                    if i % 2
                    else self._core.encode(raw[at:].decode(), add_special_tokens=False).ids
                )
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
        """Where the text at the end of the tokens begins: after the last special token, at most
        `most` tokens back."""
        start = len(tokens)
        while start > max(0, len(tokens) - most) and self.piece(tokens[start - 1]):
            start -= 1
        return start
