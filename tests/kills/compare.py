"""What a folder holds, as values that two runs of the same command have in common: all but what depends on the clock."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_TIMES = re.compile(
    r"seconds|per_s(econd)?$|speedup|(draft|verify)_(ms|share)$|^load$|started|^baseline$|^load|^plain_spread$|^verdict$|^git_commit$"
)
"""Keys whose values depend on the clock, or on what is committed meanwhile."""


def contents(folder: Path) -> dict[str, Any]:
    """Relative path of each file → what of it is the same whenever it is made. A folder that is empty counts too."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            if not any(path.iterdir()):
                found[name + "/"] = "an empty folder"
        elif "tensorboard" in name:  # each start has a file of its own
            found["tensorboard"] = "some files"
        elif path.name.startswith("outputs-"):  # which rows share a file is left to when they were written
            if path.suffix == ".json":
                _add_rows(found.setdefault(str(Path(name).parent / "rows"), {}), path)
            elif not path.with_suffix(".json").exists():
                found[name] = "a shard without its seal"
        else:
            found[name] = _read(path)
    return found


def _add_rows(rows: dict[str, Any], seal: Path) -> None:
    """Rows of stored outputs, by what they are of."""
    tensors = load_file(seal.with_suffix(".safetensors"))
    for i, key in enumerate(json.loads(seal.read_text())["rows"]):
        own = {n.partition(".")[2]: timeless(t) for n, t in tensors.items() if n.startswith(f"{i}.")}
        rows[str(key)] = own if str(key) not in rows else "stored twice"


def _read(path: Path) -> Any:
    reader = next((read for end, read in _READERS.items() if path.name.endswith(end)), None)
    try:
        return _hash(path.read_bytes()) if reader is None else reader(path)
    except Exception as error:  # whatever it is, it is no such file
        return f"can't be read: {type(error).__name__}: {error}"


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _json(path: Path) -> Any:
    return timeless(json.loads(path.read_text()))


def _seal(path: Path) -> Any:
    """Without hashes and sizes: a checkpoint holds seconds, and Python's random state, whose words are shorter or longer."""
    value = _json(path)
    del value["seal_sha256"]
    return {**value, "sizes": sorted(value["sizes"]), "sha256": sorted(value["sha256"])}


def _checkpoint(path: Path) -> Any:
    """Without the states of Python's and numpy's own generators, which nobody seeds or asks."""
    value = torch.load(path, weights_only=True)
    for name in ("python", "numpy"):
        del value["calibrate"]["rng"][name]
    return timeless(value)


def _table(path: Path) -> Any:
    with path.open(newline="") as file:
        return [
            timeless({key.partition("/")[2] or key: v for key, v in row.items()})
            for row in csv.DictReader(file)
        ]


def _database(path: Path) -> Any:
    with closing(sqlite3.connect(path)) as database:  # an open one keeps its disk from being unmounted
        return list(database.iterdump())


def _card(path: Path) -> str:
    return re.sub(r"[\d.]+ minutes|commit [^|]*", "", path.read_text())


def timeless(value: Any) -> Any:
    """A value without what depends on the clock, its tensors as type, shape and hash."""
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
        return str(value.dtype), tuple(value.shape), _hash(raw.numpy().tobytes())
    if isinstance(value, Mapping):
        return {str(k): timeless(v) for k, v in value.items() if not _TIMES.search(str(k))}
    if isinstance(value, list | tuple):
        return [timeless(v) for v in value]
    return value


_READERS: dict[str, Callable[[Path], Any]] = {
    ".ckpt": _checkpoint,
    "records.jsonl": lambda path: [timeless(json.loads(line)) for line in path.read_text().splitlines()],
    "metrics.csv": _table,
    "README.md": _card,
    ".sqlite": _database,
    # without the times at which its shards were written
    "index.safetensors": lambda path: timeless({k: v for k, v in load_file(path).items() if k != "states"}),
    **{f"step-{i}.json": _seal for i in range(10)},
    "verdict.md": lambda path: path.read_text().splitlines()[0],
    **dict.fromkeys(("log.txt", "advice.md", "advice.json", "plan.json"), lambda path: "some text"),
    "report.html": lambda path: "a page",
    "report.png": lambda path: "a picture",
    ".json": _json,
}  # fmt: skip


def torn(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """What a stopped command has left that is no whole file, or a shard or checkpoint other than the undisturbed run's; or nothing."""
    for name, value in found.items():
        if str(value).startswith("can't be read"):
            return f"{name}: {value}"
        once = name in expected and re.search(r"/(shard|step)-\d+\.", name)
        if once and (said := difference(expected[name], value, name)):
            return said
    return ""


def difference(expected: Any, found: Any, where: str = "") -> str:
    """The first difference between two values, or nothing."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if missing := sorted(expected.keys() - found.keys()):
            return f"{where}: {missing[0]} is missing"
        if more := sorted(found.keys() - expected.keys()):
            return f"{where}: {more[0]} is left over"
        pairs = [(f"{where}/{key}", expected[key], found[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return f"{where}: {len(found)} entries, not {len(expected)}"
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(expected, found, strict=True))]
    else:
        same = expected == found or (expected != expected and found != found)
        return "" if same else f"{where}: {str(found)[:160]}, not {str(expected)[:160]}"
    return next((said for name, a, b in pairs if (said := difference(a, b, name))), "")
