"""Rows of a data set on the Hub or in the local cache of `datasets`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Any

from specalign.common.errors import UserError
from specalign.common.files import expand_path
from specalign.common.hub import hub_reachable, missing
from specalign.common.schema import JsonObject


def is_hub_usable() -> bool:
    """Whether to ask `datasets`: the Hub answers, or HF_HUB_OFFLINE=1 says that the cache has what
    is needed. Otherwise `datasets` would retry for half a minute."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    offline = any(os.environ.get(name, "").lower() in {"1", "true", "yes", "on"} for name in names)
    return offline or hub_reachable()


def hub_rows(
    name: str,
    split: str,
    config: str | None = None,
    revision: str | None = None,
    key: str = "",
    streaming: bool = False,
    file: str | None = None,
) -> Iterator[JsonObject]:
    """The rows of a data set, a Hub id or a folder that `datasets` reads; without access to the Hub,
    from the local cache. Raises UserError if it can't be read.

    Args:
        key: the option that names it (data.prompts), for messages; "" = the reason alone.
        streaming: download only what is read, if the Hub is reachable.
        file: the only data file to read.
    """
    import datasets  # slow to import
    from huggingface_hub import constants

    online = expand_path(name).exists() or hub_reachable()
    was_offline = constants.HF_HUB_OFFLINE
    # offline, `datasets` goes to its cache without retrying the Hub for a minute
    constants.HF_HUB_OFFLINE = was_offline or not online
    try:
        try:
            files = {} if file is None else {"data_files": {split: file}}
            table = datasets.load_dataset(
                name,
                config,
                split=split,
                revision=revision,
                streaming=streaming and online,
                **files,
            )
        finally:
            constants.HF_HUB_OFFLINE = was_offline
        yield from _disable_decoding(table)
    except Exception as error:  # `datasets` raises many kinds
        reason = (" ".join(str(error).split()) or type(error).__name__)[:400]
        if not key:
            raise UserError(reason) from None
        if "Config name is missing" in reason:
            reason += f" ({key}_config)"
        if online:
            raise UserError(f"{key}={name!r} can't be read: {reason}") from None
        reason = f"no such file, the Hub is unreachable, and it is not cached: {reason[:300]}"
        raise missing(f"{key}={name!r}", name, reason, files=True) from None


def _disable_decoding(table: Any) -> Any:
    """The table with images and sound as bytes: no row needs them decoded."""
    for name, feature in (getattr(table, "features", None) or {}).items():
        if is_dataclass(feature) and hasattr(feature, "decode") and not isinstance(feature, type):
            table = table.cast_column(name, replace(feature, decode=False))
    return table
