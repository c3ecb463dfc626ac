"""Rows of a data set on the Hub or in the local cache of `datasets`."""

import os
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from specalign.common.errors import UserError
from specalign.common.files import expand_path
from specalign.common.hub import find_commit, hub_reachable, missing
from specalign.common.schema import JsonObject


def is_hub_usable() -> bool:
    """Whether to ask `datasets`: the Hub answers, or HF_HUB_OFFLINE=1 says that the cache has what
    is needed. Otherwise `datasets` would retry for half a minute."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    offline = any(os.environ.get(name, "").lower() in {"1", "true", "yes", "on"} for name in names)
    return offline or hub_reachable()


def hub_table(
    name: str, split: str, config: str | None = None, revision: str | None = None
) -> tuple[list[JsonObject], str]:
    """The rows of a data set on the Hub, or in the local cache, and the commit that they are of
    ("" = unknown). Raises UserError if it can't be read: the reason alone."""
    try:
        table = _load_table(name, split, config, revision)
        files = [Path(file["filename"]) for file in getattr(table, "cache_files", ())]
        return list(_disable_decoding(table)), find_commit(files[0]) if files else ""
    except Exception as error:  # `datasets` raises many kinds
        raise UserError(_reason(error)) from None


def hub_rows(
    name: str,
    split: str,
    config: str | None,
    revision: str | None,
    key: str,
    streaming: bool = False,
) -> Iterator[JsonObject]:
    """The rows of a data set, a Hub id or a folder that `datasets` reads; without access to the Hub,
    from the local cache. Raises UserError if it can't be read.

    Args:
        key: the option that names it (data.prompts), for messages.
        streaming: download only what is read, if the Hub is reachable.
    """
    try:
        yield from _disable_decoding(_load_table(name, split, config, revision, streaming))
    except Exception as error:  # `datasets` raises many kinds
        reason = _reason(error)
        if "Config name is missing" in reason:
            reason += f" ({key}_config)"
        if _is_online(name):
            raise UserError(f"{key}={name!r} can't be read: {reason}") from None
        reason = f"no such file, the Hub is unreachable, and it is not cached: {reason[:300]}"
        raise missing(f"{key}={name!r}", name, reason, files=True) from None


def _is_online(name: str) -> bool:
    return expand_path(name).exists() or hub_reachable()


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:400]


def _load_table(
    name: str, split: str, config: str | None, revision: str | None, streaming: bool = False
) -> Any:
    import datasets  # slow to import
    from huggingface_hub import constants

    online = _is_online(name)
    was_offline = constants.HF_HUB_OFFLINE
    # offline, `datasets` goes to its cache without retrying the Hub for a minute
    constants.HF_HUB_OFFLINE = was_offline or not online
    try:
        return datasets.load_dataset(
            name, config, split=split, revision=revision, streaming=streaming and online
        )
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def _disable_decoding(table: Any) -> Any:
    """The table with images and sound as bytes: no row needs them decoded."""
    for name, feature in (getattr(table, "features", None) or {}).items():
        if is_dataclass(feature) and hasattr(feature, "decode") and not isinstance(feature, type):
            table = table.cast_column(name, replace(feature, decode=False))
    return table
