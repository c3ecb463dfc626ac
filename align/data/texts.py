"""Text that the target did not write, tokenised as it stands, into a data folder of its own: `text` in that of the own words.

Training imitates the target's distribution at every position of it: reading costs one forward where writing costs one a
token. Documents of several sources are mixed by weight. What is written depends on the sources and settings alone, so a
run that was killed loses the shard in flight and ends in the same state as an undisturbed one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

from align.common.commands import command
from align.common.errors import UserError
from align.common.text import say
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.index import read_samples
from align.data.overlap import Passages, excluded
from align.data.text_sources import OF_COLUMN, Document, HubOptions, documents
from align.folder.tokenizer import text_ids
from align.target.model import Target
from align.writing.template import TargetInfo, first_tokens

SHARD_TOKENS = 1 << 18
"""A shard ends with the document that reaches so many tokens."""
LEAST_TOKENS = 8
"""A shorter piece of a document is left out."""


class SourceRecord(TypedDict):
    """How far a source was read. sha256: of the documents read so far, one after the other."""

    source: str
    documents: int
    tokens: int
    sha256: str
    ended: bool


class TextManifest(TypedDict):
    """What the manifest of such a folder holds. unchecked: benchmarks that could not be had to compare with, and why."""

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
    """Where the text lies: beside the target's own words."""
    return recipe.data_folder / "text"


def read_text_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest. Raises UserError where it is missing or broken."""
    missing = f"no text; {command('align.synthesize')} reads data.text into it"
    return data.read_manifest(folder, TextManifest, missing)


def open_text(recipe: Recipe, target: Target) -> data.ShardSamples:
    """What `read_texts` wrote. Raises UserError for a folder that was not read as this recipe says."""
    folder = text_folder(recipe)
    manifest = read_text_manifest(folder)
    _check_same(folder, manifest, _identity(recipe, target), recipe.data.text)
    return read_samples(folder, target.vocab_size, manifest)


def is_read(recipe: Recipe) -> bool:
    """Whether as much text is there as the recipe asks for, or as its sources have."""
    folder = text_folder(recipe)
    if not (folder / "manifest.json").exists():
        return False
    manifest = read_text_manifest(folder)
    return bool(manifest["tokens"] >= recipe.data.text_tokens or all(s["ended"] for s in manifest["sources"]))


def _identity(recipe: Recipe, target: TargetInfo) -> dict[str, Any]:
    """What a restart must find unchanged."""
    d = recipe.data
    options = {
        "column": d.text_column,
        "split": d.text_split,
        "config": d.text_config,
        "revision": d.text_revision,
    }
    return {
        "target": target.spec,
        "target_sha256": target.hash,
        "length": d.length,
        "mixture": list(d.mixture) or [1.0] * len(d.text),
        "options": options,
        "exclude": list(d.exclude),
    }


def _check_same(
    folder: Path, manifest: dict[str, Any], identity: dict[str, Any], sources: Sequence[str]
) -> None:
    if (read := [s["source"] for s in manifest["sources"]]) != list(sources):
        raise UserError(
            f"{folder}/manifest.json: read from {read}, this recipe says {list(sources)}; give another data.path"
        )
    for key, value in identity.items():
        if key == "target_sha256" and None in (manifest[key], value):  # read where the weights were not
            continue
        if manifest[key] != value and key != "target":  # where it was found does not matter, its hash does
            raise UserError(
                f"{folder}/manifest.json: {key} is {manifest[key]!r}, this recipe says {value!r}; give the keys "
                "that it was read with, or another data.path"
            )


class _Source:
    """One source and how far it is read."""

    def __init__(self, record: SourceRecord, options: HubOptions, left_out: Counter[str]) -> None:
        self.record, self.left_out, self._hash = record, left_out, hashlib.sha256()
        self._new = Counter[str]()
        self._texts: Iterator[Document] = documents(record["source"], options, self._new)

    def skip(self, seen: set[bytes]) -> None:
        """Go to where the record stands. Raises UserError where the documents before it have changed."""
        for _ in range(self.record["documents"]):
            document = next(self._texts, None)
            if document is None:
                break
            seen.add(self._take(document.text))
        self._new.clear()  # counted before
        if self._hash.hexdigest() != self.record["sha256"]:
            raise UserError(
                f"data.text={self.record['source']!r} has changed since it was read; put it back, or give another data.path"
            )

    def _take(self, text: str) -> bytes:
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        self._hash.update(digest)
        return digest[:8]

    def next(self) -> tuple[Document, bytes] | None:
        """The next document and its digest; None after the last one."""
        document = next(self._texts, None)
        self.left_out.update(self._new)
        self._new.clear()
        if document is None:
            self.record["ended"] = True
            return None
        digest = self._take(document.text)
        self.record["documents"] += 1
        self.record["sha256"] = self._hash.hexdigest()
        return document, digest


class _Reader:
    """All sources of a recipe, in a fixed order of documents: the one that is most behind its weight comes next."""

    def __init__(
        self, recipe: Recipe, target: TargetInfo, manifest: dict[str, Any], passages: Passages
    ) -> None:
        self.recipe, self.target, self.manifest, self.passages = recipe, target, manifest, passages
        self.left_out = Counter[str](manifest["left_out"])
        options = HubOptions(**manifest["options"])
        self.sources = [_Source(record, options, self.left_out) for record in manifest["sources"]]
        self.seen: set[bytes] = set()
        for source in self.sources:
            source.skip(self.seen)
        self.first = first_tokens(target)

    def shard(self, most: int) -> list[list[int]]:
        """Pieces of the next documents, up to `SHARD_TOKENS`, or `most` if that is less; none after the last document."""
        found: list[list[int]] = []
        count, limit = 0, min(SHARD_TOKENS, most)
        while count < limit:
            open_ones = [
                (s.record["tokens"] / weight, i)
                for i, (s, weight) in enumerate(zip(self.sources, self.manifest["mixture"], strict=True))
                if not s.record["ended"]
            ]
            if not open_ones:
                break
            source = self.sources[min(open_ones)[1]]
            if (document := source.next()) is None:
                continue
            pieces = self._pieces(*document)
            size = sum(map(len, pieces))
            source.record["tokens"] += size
            count += size
            found += pieces
        return found

    def _pieces(self, document: Document, digest: bytes) -> list[list[int]]:
        """A document as samples of at most a row's length; none where it is left out, which is counted."""
        if digest in self.seen:
            self.left_out["documents that were there before"] += 1
            return []
        self.seen.add(digest)
        if self.passages.met_in(document.text, document.before):
            self.left_out["documents with a passage of data.exclude"] += 1
            return []
        target = self.target
        try:
            tokens = text_ids(target.tokenizer, document.text, target.vocab_size, "a document", verbose=False)
        except UserError:
            self.left_out["documents with a token that the target has not"] += 1
            return []
        step = self.recipe.data.length - len(self.first)
        parts = [tokens[i : i + step] for i in range(0, len(tokens), step)]
        kept = [[*self.first, *part] for part in parts if len(part) >= LEAST_TOKENS]
        if len(kept) < max(len(parts), 1):
            self.left_out[f"pieces of fewer than {LEAST_TOKENS} tokens"] += 1
        return kept


def read_texts(recipe: Recipe, target: TargetInfo, quiet: bool = False) -> dict[str, Any]:
    """Read `recipe.data.text` up to `data.text_tokens` tokens into `text_folder`, going on from what is there; returns the
    manifest.

    Raises:
        UserError: a folder that was read with other settings, a source that can't be read or has changed, or no text.
    """
    d, folder = recipe.data, text_folder(recipe)
    identity = _identity(recipe, target)
    manifest = _resume(folder, identity, d.text)
    if manifest["tokens"] >= d.text_tokens or all(s["ended"] for s in manifest["sources"]):
        return manifest
    passages, manifest["unchecked"] = excluded(d.exclude)
    if manifest["unchecked"] and not quiet:
        names = ", ".join(manifest["unchecked"])
        say(f"warning: data.text is not compared with {names}, which can't be had here", error=True)
    reader = _Reader(recipe, target, manifest, passages)
    while manifest["tokens"] < d.text_tokens and not all(s["ended"] for s in manifest["sources"]):
        pieces = reader.shard(d.text_tokens - manifest["tokens"])
        manifest["left_out"] = dict(sorted(reader.left_out.items()))
        if pieces:
            samples = data.from_lists(pieces, [1] * len(pieces), [data.NOT_WRITTEN] * len(pieces))
            manifest["sha256"].append(data.write_shard(folder, manifest["shards"], samples))
            manifest["shards"] += 1
            manifest["samples"] += len(samples)
            manifest["tokens"] += samples.token_count
        manifest["finished"] = manifest["tokens"] >= d.text_tokens
        data.write_manifest(folder, manifest)
    if not manifest["samples"]:
        (folder / "manifest.json").unlink()  # else the folder would count as one that was read
        raise UserError(f"data.text={list(d.text)}: no text in it ({_counts(manifest)} left out)")
    if not quiet:
        each = ", ".join(f"{s['source']} {s['tokens']}" for s in manifest["sources"])
        of = f" ({each})" if len(manifest["sources"]) > 1 else ""
        say(f"{manifest['tokens']} tokens of text in {folder}{of}; left out: {_counts(manifest)}")
    return manifest


def _counts(manifest: dict[str, Any]) -> str:
    left_out = manifest["left_out"]
    counts = ", ".join(f"{count} {what}" for what, count in left_out.items()) or "nothing"
    has_columns = any(what.startswith(OF_COLUMN) for what in left_out)
    return f"{counts} (data.text_column chooses the column)" if has_columns else counts


def _resume(folder: Path, identity: dict[str, Any], sources: list[str]) -> dict[str, Any]:
    """The manifest to go on from: the folder's own, where its shards are whole, else a fresh one."""
    fresh: dict[str, Any] = {"unchecked": {}, "left_out": {}, "shards": 0, "samples": 0, "tokens": 0}
    empty = hashlib.sha256().hexdigest()
    records = [{"source": s, "documents": 0, "tokens": 0, "sha256": empty, "ended": False} for s in sources]
    fresh |= identity | {"sources": records, "sha256": [], "finished": False}
    if not (folder / "manifest.json").exists():
        return fresh
    manifest = read_text_manifest(folder)
    _check_same(folder, manifest, identity, sources)
    for number in range(manifest["shards"]):
        try:
            data.read_shard(data.shard_path(folder, number), data.sha256_of(manifest, number))
        except UserError as error:
            say(f"read again from the beginning: {error}", error=True)
            return fresh
    return manifest
