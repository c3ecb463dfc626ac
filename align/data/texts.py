"""Reads text that the target did not write into shards, `text/` in the data folder.

Training imitates the target's distribution at every position of it: reading costs one forward pass
where writing costs one per token. Documents of several sources are mixed by weight. The manifest is
written last, so an interrupted read starts over.
"""

import hashlib
from collections import Counter
from pathlib import Path
from typing import TypedDict

from align.config.recipe import Recipe
from align.data.identity import check_same
from align.data.sources import UNUSED_COLUMN, read_documents
from align.writing.outline import TargetInfo
from align.writing.template import first_tokens
from specalign.common.errors import UserError
from specalign.common.text import say
from specalign.folder.tokenizer import text_ids
from specalign.rows import shards as data
from specalign.rows.shards import FolderFields, Manifest
from specalign.suites.overlap import read_excluded

SHARD_TOKENS = 1 << 18  # a shard ends with the document that reaches this many tokens
LEAST_TOKENS = 8  # shorter pieces of a document are left out
_SETTINGS = ("sources", "target_sha256", "length", "mixture", "options", "exclude")
"""What a restart must find unchanged; of the sources their names."""


class SourceRecord(TypedDict):
    """Reading progress of a source."""

    source: str
    documents: int
    tokens: int
    ended: bool


class TextFields(FolderFields):
    """The fields of a manifest without which no text can be read."""

    sources: list[SourceRecord]


def text_folder(recipe: Recipe) -> Path:
    return recipe.data_folder / "text"


def open_text(recipe: Recipe, target: TargetInfo) -> data.ShardSamples:
    """Opens what `read_texts` wrote. Raises UserError if it was read with other settings."""
    folder = text_folder(recipe)
    manifest = data.read_manifest(folder, TextFields)
    found = {**manifest, "sources": [record["source"] for record in manifest["sources"]]}
    wanted = {**_make_manifest(recipe, target), "sources": list(recipe.data.text)}
    check_same(folder / "manifest.json", found, {key: wanted[key] for key in _SETTINGS})
    return data.read_samples(folder, target.vocab_size, manifest)


def is_read(recipe: Recipe) -> bool:
    """Whether the folder has as much text as the recipe asks for, or as the sources have."""
    folder = text_folder(recipe)
    if not (folder / "manifest.json").exists():
        return False
    manifest = data.read_manifest(folder, TextFields)
    ended = all(source["ended"] for source in manifest["sources"])
    return bool(ended or manifest["tokens"] >= recipe.data.text_tokens)


def _make_manifest(recipe: Recipe, target: TargetInfo) -> Manifest:
    """The manifest of a folder before anything is read."""
    d = recipe.data
    options = ("column", "split", "config", "revision")
    sources = [{"source": name, "documents": 0, "tokens": 0, "ended": False} for name in d.text]
    return {
        "unchecked": {},
        "left_out": {},
        "removed": {},
        "shards": 0,
        "samples": 0,
        "tokens": 0,
        "target": target.spec,
        "target_sha256": target.hash,
        "length": d.length,
        "mixture": list(d.mixture) or [1.0] * len(d.text),
        "options": {name: getattr(d, f"text_{name}") for name in options},
        "exclude": list(d.exclude),
        "sources": sources,
        "sha256": [],
        "finished": False,
    }


class _TextReader:
    """Reads all sources of a manifest: the one that is furthest behind its weight comes next."""

    def __init__(self, recipe: Recipe, target: TargetInfo, manifest: Manifest) -> None:
        self.target = target
        self.records: list[SourceRecord] = manifest["sources"]
        self.mixture: list[float] = manifest["mixture"]
        self.passages, manifest["unchecked"] = read_excluded(recipe.data.exclude)
        self.removed: dict[str, int] = dict.fromkeys(self.passages.owners, 0)
        manifest["removed"] = self.removed
        self.first = first_tokens(target)
        self.piece_length = recipe.data.length - len(self.first)
        self.seen = set[bytes]()
        self.left_out = Counter[str]()
        self.documents = [read_documents(s, recipe.data, self.left_out) for s in recipe.data.text]

    def read_shard(self, limit: int) -> data.Samples:
        """The next documents, `limit` tokens or a little more; nothing after the last one."""
        pieces: list[list[int]] = []
        count = 0
        while count < limit:
            unread = [i for i, record in enumerate(self.records) if not record["ended"]]
            if not unread:
                break
            number = min(unread, key=lambda i: self.records[i]["tokens"] / self.mixture[i])
            record = self.records[number]
            document = next(self.documents[number], None)
            if document is None:
                record["ended"] = True
                continue
            read = self._tokenize(document)
            size = sum(map(len, read))
            record["documents"] += 1
            record["tokens"] += size
            count += size
            pieces += read
        return data.from_lists(pieces, [1] * len(pieces), [data.NOT_WRITTEN] * len(pieces))

    def _tokenize(self, document: str) -> list[list[int]]:
        """A document as samples of at most a row's length; none if it is left out."""
        digest = hashlib.sha256(document.encode(errors="surrogatepass")).digest()[:8]
        if digest in self.seen:
            self.left_out["documents that were there before"] += 1
            return []
        self.seen.add(digest)
        if found := self.passages.find_in(document):
            self.left_out["documents that contain a passage of data.exclude"] += 1
            for name in found:
                self.removed[name] += 1
            return []
        tokenizer, size = self.target.tokenizer, self.target.vocab_size
        try:
            tokens = text_ids(tokenizer, document, size, "a document", verbose=False)
        except UserError:
            self.left_out["documents that the target can't tokenize"] += 1
            return []
        step = self.piece_length
        parts = [tokens[i : i + step] for i in range(0, len(tokens), step)]
        pieces = [[*self.first, *part] for part in parts if len(part) >= LEAST_TOKENS]
        if len(pieces) < max(len(parts), 1):
            self.left_out[f"pieces of fewer than {LEAST_TOKENS} tokens"] += 1
        return pieces


def read_texts(recipe: Recipe, target: TargetInfo, quiet: bool = False) -> Manifest:
    """Read `data.text` up to `data.text_tokens` tokens into `text_folder` unless it has them;
    returns the manifest. Raises UserError: a folder that was read with other settings, a source
    that can't be read, or no text."""
    wanted, folder = recipe.data.text_tokens, text_folder(recipe)
    if (folder / "manifest.json").exists():
        open_text(recipe, target)
        if is_read(recipe):
            return data.read_manifest(folder, TextFields)
    manifest = _make_manifest(recipe, target)
    reader = _TextReader(recipe, target, manifest)
    if manifest["unchecked"] and not quiet:
        names = ", ".join(manifest["unchecked"])
        say(f"warning: data.text is not checked against {names}: unavailable here", error=True)
    while manifest["tokens"] < wanted:
        samples = reader.read_shard(min(SHARD_TOKENS, wanted - manifest["tokens"]))
        if not len(samples):
            break
        manifest["sha256"].append(data.write_shard(folder, manifest["shards"], samples))
        manifest["shards"] += 1
        manifest["samples"] += len(samples)
        manifest["tokens"] += len(samples.tokens)
    manifest["left_out"] = dict(sorted((+reader.left_out).items()))
    counts = [f"{count} {reason}" for reason, count in manifest["left_out"].items()]
    left_out = ", ".join(counts) or "nothing"
    if not manifest["samples"]:
        raise UserError(f"data.text={list(recipe.data.text)}: no text in it (skipped: {left_out})")
    manifest["finished"] = manifest["tokens"] >= wanted
    data.write_manifest(folder, manifest)  # last: text without it is read again
    if not quiet:
        sources = ", ".join(f"{s['source']} {s['tokens']}" for s in manifest["sources"])
        hint = " (data.text_column chooses the column)" if UNUSED_COLUMN in left_out else ""
        described = f"{manifest['tokens']} tokens of text in {folder} ({sources})"
        say(f"{described}; skipped: {left_out}{hint}")
    return manifest
