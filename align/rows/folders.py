"""The files of a data set in a folder: those that its card names, else those whose names tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from align.common.errors import UserError, in_one_line, nearest
from align.common.files import read_text
from align.common.text import say
from align.rows.splits import NoSplit, files_of_split, names_phrase, split_of
from align.rows.tables import READERS, kind_of

_ABOUT = ("dataset_infos.json", "dataset_info.json", "state.json")
"""Files of a hub folder that describe the data."""


def visible_files(folder: Path) -> list[Path]:
    """All files below a folder in the order of their names, without hidden ones and those that
    describe the data."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in _ABOUT and not _is_hidden(path.relative_to(folder))
    ]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def table_files(folder: Path, split: str, config: str | None, key: str) -> list[Path]:
    """The files of one configuration and split, of one kind: the first of `READERS` that is there,
    because hub folders often hold a set twice. What is left out is told in a note. None where the
    folder has no file of these kinds.

    Args:
        key: of the command's option (data.prompts), for messages.

    Raises:
        UserError: several configurations and none chosen, one that is not there, or another split
            than the wanted one.
    """
    where = f"{key}={str(folder)!r}"
    files = choose_files(folder, [f for f in visible_files(folder) if kind_of(f)], split, config, key)
    for kind in READERS:
        same = [file for file in files if kind_of(file) == kind]
        if same and len(same) < len(files):
            others = sorted({str(kind_of(file)) for file in files} - {kind})
            say(
                f"note: {where}: reads its {kind} files; {len(files) - len(same)} of other kinds ({', '.join(others)}) are left out",
                error=True,
            )
        if same:
            return same
    return []


def suite_files(folder: Path, split: str, config: str | None, where: str) -> list[Path]:
    """The files of a benchmark's local copy, where names tell; a copy may be a part, so that
    without such names all are taken.

    Raises:
        NoSplit: the names tell of other splits alone.
    """
    files = [file for file in visible_files(folder) if kind_of(file) and kind_of(file) != ".txt"]
    of_config = [file for file in files if config and names_phrase(file.relative_to(folder), config)]
    files = of_config or files
    unnamed = [file for file in files if split_of(file.relative_to(folder)) is None]
    try:
        files = files_of_split(folder, files, split, where)[0]
    except NoSplit:
        if not unnamed:
            raise
        files = unnamed
    return next((same for kind in READERS if (same := [f for f in files if kind_of(f) == kind])), [])


def choose_files(folder: Path, files: Sequence[Path], split: str, config: str | None, key: str) -> list[Path]:
    """Of these files of the folder those of a configuration and a split; raises as `table_files`
    does. A card may say what no name tells; where it names no split, names do."""
    where, configs, note = f"{key}={str(folder)!r}", card_configs(folder), ""
    if not files:
        return []
    if configs:
        patterns = _of_config(configs, config, where, key)
        if None in patterns:
            chosen, note = files_of_split(folder, _matching(folder, files, patterns[None]), split, where)
        elif split in patterns:
            chosen, note = _of_card(folder, files, patterns, split), ""
        else:
            raise UserError(f"{key}_split={split!r}: unknown{nearest(split, map(str, patterns))}")
    else:
        if config is not None:
            files = [file for file in files if names_phrase(file.relative_to(folder), config)]
            if not files:
                raise UserError(f"{key}_config={config!r}: no file of {folder} has it in its name")
        chosen, note = files_of_split(folder, files, split, where)
    if note:
        say(f"note: {where}: {note} ({key}_split)", error=True)
    return chosen


def _matching(folder: Path, files: Sequence[Path], patterns: Sequence[str]) -> list[Path]:
    patterns = [f"{pattern}/*" if pattern.endswith("**") else pattern for pattern in patterns]
    matched = {file for pattern in patterns for file in folder.glob(pattern)}
    return [file for file in files if file in matched]


def _of_card(folder: Path, files: Sequence[Path], patterns: Patterns, split: str) -> list[Path]:
    """The files of a split that the card names. A wide pattern may match files of other splits too:
    those that the card gives to another split, or that name another one while some name this one,
    are left out."""
    chosen = _matching(folder, files, patterns[split])
    others = {f for name in patterns if name != split for f in _matching(folder, files, patterns[name])}
    chosen = [file for file in chosen if file not in others] or chosen
    named = {file: split_of(file.relative_to(folder)) for file in chosen}
    if split in named.values():
        chosen = [file for file in chosen if named[file] in (split, None)]
    return chosen


Patterns = dict[str | None, list[str]]
"""Patterns of names by split; None = the card names no split."""


def _of_config(configs: dict[str, Patterns], config: str | None, where: str, key: str) -> Patterns:
    if config is None and len(configs) > 1:
        raise UserError(f"{where} has {', '.join(configs)}: choose one ({key}_config)")
    name = next(iter(configs)) if config is None else config
    if name not in configs:
        raise UserError(f"{key}_config={name!r}: unknown{nearest(name, configs)}")
    return configs[name]


def card_configs(folder: Path) -> dict[str, Patterns]:
    """What the card of a data set says of its files, by configuration. Nothing without such a
    card."""
    card = folder / "README.md"
    lines = read_text(card).split("\n") if card.is_file() else []
    if not lines or lines[0].strip() != "---" or "---" not in [line.strip() for line in lines[1:]]:
        return {}
    end = [line.strip() for line in lines].index("---", 1)
    with in_one_line(str(card)):
        configs = (yaml.safe_load("\n".join(lines[1:end])) or {}).get("configs", [])
        found = {}
        for entry in configs:
            files = entry.get("data_files", f"{entry['data_dir']}/**" if entry.get("data_dir") else None)
            if files is not None:
                found[str(entry["config_name"])] = _patterns(files)
        return found


def _patterns(files: Any) -> Patterns:
    """`data_files` of a card, in any of its forms: a pattern, several, or either for each split."""
    if isinstance(files, list) and all(isinstance(f, dict) for f in files):
        pairs: list[tuple[str | None, Any]] = [(str(f["split"]), f["path"]) for f in files]
    elif isinstance(files, dict):
        pairs = [(str(split), f) for split, f in files.items()]
    else:
        pairs = [(None, files)]
    found: Patterns = {}
    for split, patterns in pairs:
        found.setdefault(split, []).extend([patterns] if isinstance(patterns, str) else patterns)
    for pattern in (p for patterns in found.values() for p in patterns):
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise ValueError(f"data_files: {pattern!r} is outside of the folder")
    return found
