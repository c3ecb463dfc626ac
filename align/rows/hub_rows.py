"""Rows of a data set on the hub, or in the local cache of `datasets`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from typing import Any

from align.common.errors import UserError
from align.common.files import expanded
from align.common.hub import hub_reachable, missing


def is_hub_usable() -> bool:
    """Whether to ask `datasets` at once: the hub answers, or HF_HUB_OFFLINE=1 says that the local
    cache has what is needed. Without either, `datasets` tries each data set for half a minute."""
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
) -> Iterator[dict[str, Any]]:
    """The rows of a data set, as `datasets` loads it. Without the hub (HF_HUB_OFFLINE=1, or it does
    not answer) it comes out of the local cache.

    Args:
        name: a hub id, or a folder that `datasets` reads.
        key: the option that names it (data.prompts), for messages; "" = the reason alone.
        streaming: where the hub answers, download only what is read.

    Raises:
        UserError: it can't be read.
    """
    import datasets

    online = expanded(name).exists() or hub_reachable()
    options: dict[str, Any] = {"split": split}
    if revision is not None:
        options["revision"] = revision
    if streaming:
        options["streaming"] = online
    try:
        with nullcontext() if online else _offline():
            table = datasets.load_dataset(name, config, **options)
        yield from _undecoded(table)
    except Exception as error:  # datasets raises many kinds of its own
        why = " ".join(str(error).split()) or type(error).__name__
        if "Config name is missing" in why and key:
            why += f" ({key}_config)"
        if "scripts are no longer supported" in why and key:
            why += f"; its converted files: {key}_revision=refs/convert/parquet"
        if not online:
            why = f"no such file or folder, the hub does not answer, and the cache of datasets does not hold it: {why[:300]}"
            if key:
                raise missing(f"{key}={name!r}", name, why, files=True) from None
        raise UserError(f"{key}={name!r} can't be read: {why[:400]}" if key else why[:400]) from None


@contextmanager
def _offline() -> Iterator[None]:
    """As with HF_HUB_OFFLINE=1: `datasets` goes to its cache at once, and does not try the hub for
    a minute."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _undecoded(table: Any) -> Any:
    """The table with images and sound as bytes: decoding them takes packages, and no row needs
    them."""
    for name, feature in (getattr(table, "features", None) or {}).items():
        if is_dataclass(feature) and hasattr(feature, "decode") and not isinstance(feature, type):
            table = table.cast_column(name, replace(feature, decode=False))
    return table
