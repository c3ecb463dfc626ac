"""Chooses the files of a data set in a folder: by its card, else by their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load

from specalign.common.errors import UserError, in_one_line, nearest
from specalign.common.text import say
from specalign.rows.splits import NoSplit, belongs_to, is_unclear, names_phrase, split_of
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
    """The files of one configuration and split, all of the first kind of `READERS` that is there
    (Hub folders often hold a data set twice). A note names the others. Raises UserError for an
    unclear or missing configuration, NoSplit for a missing split."""
    files = [file for file in visible_files(folder) if kind_of(file)]
    if not files:
        return []
    chosen = choose_files(folder, files, split, config, key, one_kind=True)
    others = [file for file in files if file not in chosen]
    if others:
        listed = _list_names(folder, others)
        hint = "" if key.startswith("--") else f" ({key}_split)"
        say(f"note: {key}={str(folder)!r}: skipped: {listed}{hint}", error=True)
    return chosen


def choose_files(
    folder: Path,
    files: Sequence[Path],
    split: str,
    config: str | None,
    key: str,
    one_kind: bool = False,
) -> list[Path]:
    """Of these files of a folder those of one configuration and split; `one_kind`: only those of
    the first kind of `READERS` that is there. A note names those that count as train because
    nothing tells. Raises as `table_files`."""
    patterns = _choose_config(folder, config, key)
    if patterns and split not in patterns and None not in patterns:
        raise UserError(f"{key}_split={split!r}: unknown{nearest(split, map(str, patterns))}")
    if split in patterns:
        chosen = _match_split(folder, files, patterns, split)
        return _one_kind(chosen) if one_kind else chosen
    if patterns:
        files = _match(folder, files, patterns[None])
    elif config is not None:
        files = [file for file in files if names_phrase(file.relative_to(folder), config)]
        if not files:
            raise UserError(f"{key}_config={config!r}: no file of {folder} has it in its name")
    where = f"{key}={str(folder)!r}"
    chosen = _choose_by_name(folder, files, split, where)
    chosen = _one_kind(chosen) if one_kind else chosen
    unclear = [file for file in chosen if is_unclear(file.relative_to(folder), split)]
    if unclear:
        note = f"no clear split in the name of {_list_names(folder, unclear)}: counted as {split}"
        hint = "" if key.startswith("--") else f" ({key}_split)"
        say(f"note: {where}: {note}{hint}", error=True)
    return chosen


def _choose_by_name(folder: Path, files: Sequence[Path], split: str, where: str) -> list[Path]:
    chosen = [file for file in files if belongs_to(file.relative_to(folder), split)]
    if not chosen and len(files) == 1 and names_phrase(Path(files[0].name), split):
        chosen = list(files)  # train_test.jsonl
    if not chosen and files:
        raise _no_split(where, folder, files, split)
    return chosen


def _no_split(where: str, folder: Path, files: Sequence[Path], split: str) -> NoSplit:
    splits = {split_of(file.relative_to(folder)) or "train" for file in files}
    return NoSplit(f"{where}: no split {split!r}{nearest(split, splits)}")


def _list_names(folder: Path, files: Sequence[Path]) -> str:
    names = [file.relative_to(folder).as_posix() for file in files]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def suite_files(folder: Path, split: str, config: str | None, where: str) -> list[Path]:
    """The files of a benchmark's local copy. A copy may be partial: without a name that matches the
    configuration or the split, files that name none are used. Raises NoSplit if all name others."""
    files = [file for file in visible_files(folder) if kind_of(file) not in (None, ".txt")]
    named = [f for f in files if config and names_phrase(f.relative_to(folder), config)]
    files = named or files
    chosen = [file for file in files if belongs_to(file.relative_to(folder), split)]
    chosen = chosen or [file for file in files if split_of(file.relative_to(folder)) is None]
    if files and not chosen:
        raise _no_split(where, folder, files, split)
    return _one_kind(chosen)


def _one_kind(files: Sequence[Path]) -> list[Path]:
    """The files of the first kind of `READERS` that is there."""
    by_kind = [[file for file in files if kind_of(file) == kind] for kind in READERS]
    return next((same for same in by_kind if same), [])


def _match_split(folder: Path, files: Sequence[Path], patterns: Patterns, split: str) -> list[Path]:
    """The files that the card lists for a split, without those of a wide pattern that the card or
    their name gives to another split."""
    others = {f for s in patterns if s != split for f in _match(folder, files, patterns[s])}
    matches = _match(folder, files, patterns[split])
    matches = [file for file in matches if file not in others] or matches
    named = {file: split_of(file.relative_to(folder)) for file in matches}
    if split in named.values():
        matches = [file for file in matches if named[file] in (split, None)]
    return matches


def _match(folder: Path, files: Sequence[Path], patterns: Sequence[str]) -> list[Path]:
    patterns = [f"{pattern}/*" if pattern.endswith("**") else pattern for pattern in patterns]
    matches = {file for pattern in patterns for file in folder.glob(pattern)}
    return [file for file in files if file in matches]


Patterns = dict[str | None, list[str]]
"""File name patterns by split; None = the card names no split."""


def _choose_config(folder: Path, config: str | None, key: str) -> Patterns:
    """The patterns of a configuration in the data set's card; empty without a card."""
    configs = _read_card(folder / "README.md")
    if not configs:
        return {}
    if config is None and len(configs) > 1:
        listed = ", ".join(configs)
        raise UserError(f"{key}={str(folder)!r} has {listed}: choose one ({key}_config)")
    name = next(iter(configs)) if config is None else config
    if name not in configs:
        raise UserError(f"{key}_config={name!r}: unknown{nearest(name, configs)}")
    return configs[name]


def _read_card(card: Path) -> dict[str, Patterns]:
    """The `data_files` of each configuration in a card's metadata."""
    if not card.is_file():
        return {}
    configs: dict[str, Patterns] = {}
    with in_one_line(str(card)):
        for entry in (metadata_load(card) or {}).get("configs", []):
            files = entry.get("data_files")
            if files is None and entry.get("data_dir"):
                files = f"{entry['data_dir']}/**"
            if files is not None:
                configs[str(entry["config_name"])] = _read_patterns(files)
    return configs


def _read_patterns(files: object) -> Patterns:
    """`data_files` in any form: a pattern, several, or either for each split."""
    by_split: list[tuple[str | None, Any]] = [(None, files)]
    if isinstance(files, dict):
        by_split = [*files.items()]
    elif isinstance(files, list) and all(isinstance(entry, dict) for entry in files):
        by_split = [(entry["split"], entry["path"]) for entry in files]
    found: Patterns = {}
    for split, value in by_split:
        patterns = [value] if isinstance(value, str) else value
        if any(Path(p).is_absolute() or ".." in Path(p).parts for p in patterns):
            raise ValueError(f"data_files: {patterns} is outside of the folder")
        found.setdefault(split, []).extend(patterns)
    return found
