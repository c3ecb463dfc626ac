"""Reads text that the target did not write into shards, `text/` in the data folder.

Training imitates the target's distribution at every position of it: reading costs one forward pass
where writing costs one per token. Documents of several sources are mixed by weight. The result
depends on sources and settings alone, so a killed run loses only the unfinished shard.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any, TypedDict

from align.common.commands import command
from align.common.errors import UserError
from align.common.text import say
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.index import ShardFolder, read_samples
from align.data.overlap import Passages, read_excluded
from align.data.text_sources import Document, HubOptions, read_documents
from align.folder.tokenizer import text_ids
from align.target.model import Target
from align.writing.template import Told, first_tokens

SHARD_TOKENS = 1 << 18
"""A shard ends with the document that reaches this many tokens."""
LEAST_TOKENS = 8
"""Shorter pieces of a document are left out."""


class SourceRecord(TypedDict):
    """How far a source was read. sha256: of the hashes of the documents read so far."""

    source: str
    documents: int
    tokens: int
    sha256: str
    ended: bool


class TextManifest(TypedDict):
    """The manifest. unchecked: benchmarks that were unavailable for decontamination, and why."""

    target: str
    target_sha256: str | None
    length: int
    mixture: list[float]
    options: dict[str, str | None]
    exclude: list[str]
    unchecked: dict[str, str]
    sources: list[SourceRecord]
    left_out: dict[str, int]
    shards: int
    samples: int
    tokens: int
    sha256: list[str]
    finished: bool


def text_folder(recipe: Recipe) -> Path:
    return recipe.data_folder / "text"


def read_text_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest. Raises UserError if it is missing or broken."""
    missing = f"no text; {command('align.synthesize')} reads data.text into it"
    return data.read_manifest(folder, TextManifest, missing)


def open_text(recipe: Recipe, target: Target) -> data.ShardSamples:
    """What `read_texts` wrote. Raises UserError if it was read with other settings."""
    folder = text_folder(recipe)
    manifest = read_text_manifest(folder)
    _check_same(folder, manifest, _fresh_manifest(recipe, target))
    return read_samples(folder, target.vocab_size, manifest)


def is_read(recipe: Recipe) -> bool:
    """Whether the folder has as much text as the recipe asks for, or as the sources have."""
    folder = text_folder(recipe)
    return (folder / "manifest.json").exists() and _is_complete(recipe, read_text_manifest(folder))


def _is_complete(recipe: Recipe, manifest: dict[str, Any]) -> bool:
    ended = all(source["ended"] for source in manifest["sources"])
    return bool(ended or manifest["tokens"] >= recipe.data.text_tokens)


_SETTINGS = ("target_sha256", "length", "mixture", "options", "exclude")
"""What a restart must find unchanged."""


def _fresh_manifest(recipe: Recipe, target: Told) -> dict[str, Any]:
    d = recipe.data
    empty = hashlib.sha256().hexdigest()
    return {
        "unchecked": {},
        "left_out": {},
        "shards": 0,
        "samples": 0,
        "tokens": 0,
        "target": target.spec,
        "target_sha256": target.hash,
        "length": d.length,
        "mixture": list(d.mixture) or [1.0] * len(d.text),
        "options": {
            "column": d.text_column,
            "split": d.text_split,
            "config": d.text_config,
            "revision": d.text_revision,
        },
        "exclude": list(d.exclude),
        "sources": [
            {"source": source, "documents": 0, "tokens": 0, "sha256": empty, "ended": False}
            for source in d.text
        ],
        "sha256": [],
        "finished": False,
    }


def _check_same(folder: Path, manifest: dict[str, Any], fresh: dict[str, Any]) -> None:
    sources = [[record["source"] for record in m["sources"]] for m in (manifest, fresh)]
    if sources[0] != sources[1]:
        raise UserError(
            f"{folder}/manifest.json: read from {sources[0]}, this recipe says {sources[1]}; "
            "give another data.path"
        )
    for key in _SETTINGS:
        if key == "target_sha256" and None in (manifest[key], fresh[key]):
            continue  # the weights are not on this machine
        if manifest[key] != fresh[key]:
            raise UserError(
                f"{folder}/manifest.json: {key} is {manifest[key]!r}, this recipe says "
                f"{fresh[key]!r}; give the keys that it was read with, or another data.path"
            )


class _Source:
    """One source and how far it is read."""

    def __init__(self, record: SourceRecord, options: HubOptions, left_out: Counter[str]) -> None:
        self.record, self.left_out, self._hash = record, left_out, hashlib.sha256()
        self._new = Counter[str]()
        self._documents = read_documents(record["source"], options, self._new)

    def skip(self, seen: set[bytes]) -> None:
        """Skip the documents that were read before. Raises UserError if they have changed."""
        for _ in range(self.record["documents"]):
            document = next(self._documents, None)
            if document is None:
                break
            seen.add(self._add_hash(document.text))
        self._new.clear()  # counted before
        if self._hash.hexdigest() != self.record["sha256"]:
            raise UserError(
                f"data.text={self.record['source']!r} has changed since it was read; restore it, or "
                "give another data.path"
            )

    def _add_hash(self, text: str) -> bytes:
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        self._hash.update(digest)
        return digest[:8]

    def next(self) -> tuple[Document, bytes] | None:
        """The next document and its hash; None after the last one."""
        document = next(self._documents, None)
        self.left_out.update(self._new)
        self._new.clear()
        if document is None:
            self.record["ended"] = True
            return None
        digest = self._add_hash(document.text)
        self.record["documents"] += 1
        self.record["sha256"] = self._hash.hexdigest()
        return document, digest


class _Reader:
    """All sources of a recipe: the one that is furthest behind its weight comes next."""

    def __init__(self, recipe: Recipe, target: Told, manifest: dict[str, Any], passages: Passages) -> None:
        self.target, self.passages = target, passages
        self.left_out = Counter[str](manifest["left_out"])
        self.first = first_tokens(target)
        self.piece_length = recipe.data.length - len(self.first)
        self.mixture: list[float] = manifest["mixture"]
        options = HubOptions(**manifest["options"])
        self.sources = [_Source(r, options, self.left_out) for r in manifest["sources"]]
        self.seen: set[bytes] = set()
        for source in self.sources:
            source.skip(self.seen)

    def read_shard(self, limit: int) -> list[list[int]]:
        """Pieces of the next documents, `limit` tokens or a little more; none after the last."""
        found: list[list[int]] = []
        count = 0
        while count < limit:
            behind = [
                (source.record["tokens"] / weight, i)
                for i, (source, weight) in enumerate(zip(self.sources, self.mixture, strict=True))
                if not source.record["ended"]
            ]
            if not behind:
                break
            source = self.sources[min(behind)[1]]
            document = source.next()
            if document is not None:
                pieces = self._tokenize(*document)
                size = sum(map(len, pieces))
                source.record["tokens"] += size
                count += size
                found += pieces
        return found

    def _tokenize(self, document: Document, digest: bytes) -> list[list[int]]:
        """A document as samples of at most a row's length; none if it is left out."""
        if digest in self.seen:
            self.left_out["documents that were there before"] += 1
            return []
        self.seen.add(digest)
        if self.passages.occur_in(document.text, document.before):
            self.left_out["documents with a passage of data.exclude"] += 1
            return []
        target = self.target
        try:
            tokens = text_ids(target.tokenizer, document.text, target.vocab_size, "a document", verbose=False)
        except UserError:
            self.left_out["documents with a token that the target has not"] += 1
            return []
        step = self.piece_length
        parts = [tokens[i : i + step] for i in range(0, len(tokens), step)]
        pieces = [[*self.first, *part] for part in parts if len(part) >= LEAST_TOKENS]
        if len(pieces) < max(len(parts), 1):
            self.left_out[f"pieces of fewer than {LEAST_TOKENS} tokens"] += 1
        return pieces


def read_texts(recipe: Recipe, target: Told, quiet: bool = False) -> dict[str, Any]:
    """Read `data.text` up to `data.text_tokens` tokens into `text_folder`, resuming from what is
    there; returns the manifest.

    Raises:
        UserError: a folder that was read with other settings, a source that can't be read or has
            changed, or no text.
    """
    d, folder = recipe.data, text_folder(recipe)
    manifest = _resume(folder, _fresh_manifest(recipe, target))
    if _is_complete(recipe, manifest):
        return manifest
    passages, manifest["unchecked"] = read_excluded(d.exclude)
    if manifest["unchecked"] and not quiet:
        names = ", ".join(manifest["unchecked"])
        say(f"warning: data.text is not compared with {names}: unavailable here", error=True)
    reader = _Reader(recipe, target, manifest, passages)
    while not _is_complete(recipe, manifest):
        pieces = reader.read_shard(min(SHARD_TOKENS, d.text_tokens - manifest["tokens"]))
        manifest["left_out"] = dict(sorted(reader.left_out.items()))
        if pieces:
            samples = data.from_lists(pieces, [1] * len(pieces), [data.NOT_WRITTEN] * len(pieces))
            manifest["sha256"].append(data.write_shard(folder, manifest["shards"], samples))
            manifest["shards"] += 1
            manifest["samples"] += len(samples)
            manifest["tokens"] += samples.token_count
        manifest["finished"] = manifest["tokens"] >= d.text_tokens
        data.write_manifest(folder, manifest)
    left_out = _list_left_out(manifest)
    if not manifest["samples"]:
        (folder / "manifest.json").unlink()  # or the folder would count as read
        raise UserError(f"data.text={list(d.text)}: no text in it ({left_out} left out)")
    if not quiet:
        sources = ", ".join(f"{s['source']} {s['tokens']}" for s in manifest["sources"])
        of = f" ({sources})" if len(manifest["sources"]) > 1 else ""
        say(f"{manifest['tokens']} tokens of text in {folder}{of}; left out: {left_out}")
    return manifest


def _list_left_out(manifest: dict[str, Any]) -> str:
    left_out = manifest["left_out"]
    return ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "nothing"


def _resume(folder: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """The folder's manifest if its shards are intact, else a fresh one."""
    if not (folder / "manifest.json").exists():
        return fresh
    manifest = read_text_manifest(folder)
    _check_same(folder, manifest, fresh)
    try:
        list(ShardFolder(folder, manifest))  # reads and checks all
    except UserError as error:
        say(f"read again from the beginning: {error}", error=True)
        return fresh
    return manifest
