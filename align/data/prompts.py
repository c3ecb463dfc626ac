"""Prompts from files of one's own, read as `decode` reads them, or from a hub data set, through `datasets`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from align.common.errors import UserError, in_one_line, nearest
from align.common.files import expanded
from align.common.hub import hub_reachable, is_hub_id, missing
from align.common.tables import PROMPT_COLUMNS, READERS, data_files, kind_of, read_rows, read_text
from align.common.text import plural, printable, say, short


def check_source(source: str | None) -> None:
    """Raises UserError for prompts that can't be there: no such file, or a file of an unknown kind; the hub is not asked."""
    if source is None:
        return
    path = expanded(source)
    known = kind_of(path)
    if not known and path.suffix and path.is_file():
        raise UserError(f"data.prompts={source!r}: unknown kind of file{nearest(path.suffix, READERS)}")
    if path.is_file() and not path.stat().st_size:
        raise UserError(f"data.prompts={source!r} holds no rows")
    one_word = path.parts == (source,)  # as some data sets of the hub are called
    if not path.exists() and (known or not (one_word or is_hub_id(source))):
        raise missing(f"data.prompts={source!r}", source, "no such file", files=True)


def read_prompts(
    source: str, split: str, column: str | None, config: str | None = None, revision: str | None = None
) -> list[str]:
    """The texts in `column` (None: of each row, the first of `PROMPT_COLUMNS` that holds something) of a file or a data set; a list of turns or messages gives its first user text. A text file has a
    prompt a line.

    `config`, `revision`: of a hub data set, also one in a folder, which of its configurations and which branch, tag or commit.

    Raises:
        UserError: file or hub id not found, unreadable, empty, or without that column.
    """
    check_source(source)
    path = expanded(source)
    files = [path] if kind_of(path) is not None else _of_folder(path, source, split, config)
    if files:
        values, columns = _of_files(files, column)
    else:
        values, columns = _of_data_set(source, split, column, config, revision)
    if values is None:
        wanted = f"no column {column!r}{nearest(column or '', columns)}"
        if column is None:
            wanted = f"no prompt among its columns ({', '.join(columns)}){nearest('prompt', PROMPT_COLUMNS)}"
        raise UserError(f"data.prompts={source!r}: {wanted}")
    prompts = [text for text in map(_text, values) if text]
    for text in prompts:
        if printable(text) != text and any(0xD800 <= ord(c) < 0xE000 for c in text):  # which JSON can hold
            raise UserError(f"data.prompts={source!r}: {short(text)} holds half of a surrogate pair")
    if not prompts:
        what = "no prompt" if column is None else f"column {column!r}"
        raise UserError(f"data.prompts={source!r}: {what} holds text")
    if (empty := len(values) - len(prompts)) and not (files and kind_of(files[0]) == ".txt"):
        said = f"{empty} of {plural(len(values), 'row')} hold no prompt and are passed over"
        say(f"note: data.prompts={source!r}: {said}", error=True)
    return prompts


def _of_folder(folder: Path, source: str, split: str, config: str | None) -> list[Path]:
    """The files of a data set in a folder: those that its card names, else those whose names tell; none where they are of kinds
    that we do not read.

    Raises:
        UserError: several configurations and none chosen, one that is not there, or another split than the wanted one.
    """
    if not folder.is_dir() or not re.fullmatch(r"\w+", split):  # `datasets` alone knows train[:100]
        return []
    configs = _configs(folder)
    if not configs:
        files = data_files(folder, (config, split)) or sorted(folder.rglob("*.txt"))
        others = {name for file in files for name in _SPLITS if name in file.name.lower()}
        if others and not any(split in str(file.relative_to(folder)) for file in files):
            raise UserError(f"data.prompts={source!r}: no split {split!r}{nearest(split, others)}")
        return files
    if config is None and len(configs) > 1:
        raise UserError(f"data.prompts={source!r} has {', '.join(configs)}: choose one (data.prompts_config)")
    name = next(iter(configs)) if config is None else config
    if name not in configs:
        raise UserError(f"data.prompts_config={name!r}: unknown{nearest(name, configs)}")
    if split not in configs[name]:
        raise UserError(f"data.prompts_split={split!r}: unknown{nearest(split, configs[name])}")
    found = [file for pattern in configs[name][split] for file in sorted(folder.glob(pattern))]
    return found if all(kind_of(file) for file in found) else []


_SPLITS = ("train", "test", "validation", "valid", "dev")


def _configs(folder: Path) -> dict[str, dict[str, list[str]]]:
    """What the card of a data set says of its files: configuration → split → patterns of names. Nothing without such a card."""
    card = folder / "README.md"
    lines = read_text(card).split("\n") if card.is_file() else []
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return {}
    with in_one_line(str(card)):
        configs = (yaml.safe_load("\n".join(lines[1 : lines.index("---", 1)])) or {}).get("configs", [])
        return {str(c["config_name"]): _patterns(c["data_files"]) for c in configs if "data_files" in c}


def _patterns(files: Any) -> dict[str, list[str]]:
    """`data_files` of a card, in any of its forms: a pattern, several, or either for each split."""
    if isinstance(files, list) and all(isinstance(f, dict) for f in files):
        files = {f["split"]: f["path"] for f in files}
    by_split = files if isinstance(files, dict) else {"train": files}
    found = {str(split): [f] if isinstance(f, str) else list(f) for split, f in by_split.items()}
    for pattern in (p for patterns in found.values() for p in patterns):
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise ValueError(f"data_files: {pattern!r} is outside of the folder")
    return found


def _of_files(files: Sequence[Path], column: str | None) -> tuple[list[object] | None, list[str]]:
    """What each row has in the column, None where none has one; and all columns."""
    rows: list[Any] = []
    for path in files:
        found = read_rows(path)
        for number, row in enumerate(found if kind_of(path) != ".txt" else (), 1):
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}, row {number}: expected an object with a column {column or 'prompt'!r}, found {short(row)}"
                )
        rows += found
    if kind_of(files[0]) == ".txt":
        return rows, []
    columns = list(dict.fromkeys(str(key) for row in rows for key in row))
    if column is None:
        return ([_first(row) for row in rows] if {*columns} & {*PROMPT_COLUMNS} else None), columns
    values = [row.get(column) for row in rows]
    return (values if column in columns else None), columns


def _first(row: Mapping[str, Any]) -> object:
    """What is in the first of `PROMPT_COLUMNS` that holds something."""
    return next((row[column] for column in PROMPT_COLUMNS if row.get(column)), None)


def _of_data_set(
    source: str, split: str, column: str | None, config: str | None, revision: str | None
) -> tuple[list[object] | None, list[str]]:
    if not expanded(source).exists() and not hub_reachable():
        said = "no such file, and the hub does not answer"
        raise missing(f"data.prompts={source!r}", source, said, files=True)
    import datasets

    try:
        table = datasets.load_dataset(source, config, split=split, revision=revision)
        names = list(table.column_names)
        if column is None:
            return ([_first(row) for row in table] if {*names} & {*PROMPT_COLUMNS} else None), names
        return (list(table[column]) if column in names else None), names
    except Exception as error:  # datasets raises many kinds of its own
        why = " ".join(str(error).split())
        if "Config name is missing" in why:
            why += " (data.prompts_config)"
        if "scripts are no longer supported" in why:
            why += "; its converted files: data.prompts_revision=refs/convert/parquet"
        raise UserError(f"data.prompts={source!r} can't be read: {why[:400]}") from None


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
