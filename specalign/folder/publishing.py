"""Texts of a folder as they are uploaded: without the paths of this machine."""

from __future__ import annotations

import json
from pathlib import Path

from specalign.common.files import expand_path
from specalign.common.hub import hub_id, local_path
from specalign.common.text import markdown_text

_TEXTS = (".md", ".json", ".py", ".yaml")
_MOST = 1 << 22
"""Bytes of a file that is looked at: a tokenizer's tables are longer, and hold no paths."""


def opening_name(target: str) -> str:
    """The name that opens a target from any folder: a Hub id, or an absolute path."""
    if hub_id(target):
        return hub_id(target)
    return str(local_path(target).absolute()) if local_path(target).exists() else target


def plain_name(target: str) -> str:
    """The public name of a target: its Hub id, or the last part of its path."""
    return hub_id(target) or Path(target).name


def published_texts(folder: Path, target: str) -> dict[str, str]:
    """The small texts that contain the target's path, with its public name instead, by file."""
    place = local_path(target)
    if hub_id(target) == target or not (place.exists() or Path(target).is_absolute()):
        return {}
    paths = {str(place.absolute()), str(place.resolve()), str(expand_path(target)), target}
    spelled = {
        form for path in paths for form in (path, markdown_text(path), json.dumps(path)[1:-1])
    }
    longest_first = sorted((path for path in spelled if "/" in path), key=len, reverse=True)
    found: dict[str, str] = {}
    for file in sorted(folder.rglob("*")):
        if file.suffix not in _TEXTS or not file.is_file() or file.stat().st_size > _MOST:
            continue
        before = file.read_text(encoding="utf-8", errors="replace")
        text = before
        for path in longest_first:
            text = text.replace(path, plain_name(target))
        if text != before:
            found[file.relative_to(folder).as_posix()] = text
    return found
