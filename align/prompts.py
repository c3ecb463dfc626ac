"""Prompts from a data set: a hub id, a JSONL or a Parquet file, through `datasets`."""

from __future__ import annotations

from pathlib import Path

from align.errors import UserError, nearest
from align.hub import hub_reachable

_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def read_prompts(
    source: str, split: str, column: str, config: str | None = None, revision: str | None = None
) -> list[str]:
    """The texts in `column` of the data set; a list of turns or messages gives its first user text.

    `config`, `revision`: of a hub data set, which of its configurations and which branch, tag or commit.

    Raises:
        UserError: file or hub id not found, unreadable, empty, or without that column.
    """
    import datasets

    path = Path(source).expanduser()
    loader = _LOADERS.get(path.suffix)
    if loader is None and path.suffix and path.exists():
        raise UserError(f"data.prompts={source!r}: unknown kind of file{nearest(path.suffix, _LOADERS)}")
    if loader is not None and not path.is_file():
        raise UserError(f"data.prompts={source!r}: no such file")
    if loader is None and not path.exists() and not hub_reachable():
        raise UserError(f"data.prompts={source!r}: no such file, and the hub does not answer")
    try:
        if loader is not None:
            table = datasets.load_dataset(loader, data_files=str(path), split="train")
        else:
            table = datasets.load_dataset(source, config, split=split, revision=revision)
    except Exception as error:  # datasets raises many kinds of its own
        why = " ".join(str(error).split())
        if "Config name is missing" in why:
            why += " (data.prompts_config)"
        if "scripts are no longer supported" in why:
            why += "; its converted files: data.prompts_revision=refs/convert/parquet"
        raise UserError(f"data.prompts={source!r} can't be read: {why[:400]}") from None
    if column not in table.column_names:
        raise UserError(f"data.prompts={source!r}: no column {column!r}{nearest(column, table.column_names)}")
    prompts = [text for text in (_text(value) for value in table[column]) if text]
    if not prompts:
        raise UserError(f"data.prompts={source!r}: column {column!r} holds no text")
    return prompts


def _text(value: object) -> str:
    if isinstance(value, list) and value:
        value = next(
            (
                v
                for v in value
                if not isinstance(v, dict) or v.get("role", v.get("from")) in ("user", "human")
            ),
            value[0],
        )
    if isinstance(value, dict):
        value = value.get("content", value.get("value", ""))
    return value.strip() if isinstance(value, str) else ""
