"""Chooses the files of a data set in a folder: by its card or their names, as `datasets` does."""

from collections.abc import Sequence
from pathlib import Path

from specalign.common.errors import UserError, nearest
from specalign.common.text import say
from specalign.rows.splits import NoSplit, belongs_to, names_phrase, split_of
from specalign.rows.tables import READERS, kind_of

_METADATA = ("dataset_infos.json", "dataset_info.json", "state.json")


def visible_files(folder: Path) -> list[Path]:
    """All files below a folder in the order of their names, without hidden ones and metadata."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [
        path
        for path in files
        if path.name not in _METADATA
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def table_files(folder: Path, split: str, config: str | None, key: str) -> list[Path]:
    """The files of one configuration and split, all of one kind. A note names the others. Raises
    UserError for an unclear or missing configuration, NoSplit for a missing split."""
    files = [file for file in visible_files(folder) if kind_of(file)]
    if not files:
        return []
    from datasets import load_dataset_builder  # slow to import

    where = f"{key}={str(folder)!r}"
    try:
        by_split = load_dataset_builder(str(folder.absolute()), config).config.data_files or {}
    except Exception as error:  # `datasets` raises many kinds
        reason = " ".join(str(error).split())[:400]
        hint = f" ({key}_config)" if "onfig" in reason else ""
        raise UserError(f"{where} can't be read: {reason}{hint}") from None
    if split not in by_split:
        raise NoSplit(f"{where}: no split {split!r}{nearest(split, map(str, by_split))}")
    chosen = [Path(file) for file in by_split[split]]
    others = {file.absolute() for file in files} - {*chosen}
    if others:
        names = sorted(file.relative_to(folder.absolute()).as_posix() for file in others)
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        hint = "" if key.startswith("--") else f" ({key}_split)"
        say(f"note: {where}: skipped: {listed}{hint}", error=True)
    return chosen


def suite_files(folder: Path, split: str, config: str | None, where: str) -> list[Path]:
    """The files of a benchmark's local copy. A copy may be partial: without a name that matches the
    configuration or the split, files that name none are used. Raises NoSplit if all name others."""
    files = [file for file in visible_files(folder) if kind_of(file) not in (None, ".txt")]
    named = [f for f in files if config and names_phrase(f.relative_to(folder), config)]
    files = named or files
    chosen = [file for file in files if belongs_to(file.relative_to(folder), split)]
    chosen = chosen or [file for file in files if split_of(file.relative_to(folder)) is None]
    if files and not chosen:
        splits = {split_of(file.relative_to(folder)) or "train" for file in files}
        raise NoSplit(f"{where}: no split {split!r}{nearest(split, splits)}")
    return _one_kind(chosen)


def _one_kind(files: Sequence[Path]) -> list[Path]:
    """The files of the first kind of `READERS` that is there."""
    by_kind = [[file for file in files if kind_of(file) == kind] for kind in READERS]
    return next((same for same in by_kind if same), [])
