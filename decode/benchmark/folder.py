"""The settings that a measurement depends on, and its folder, which is begun, continued or refused."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from align.common.checksums import folder_hash
from align.common.errors import UserError
from align.common.files import check_ordinary, expanded, sha256_file
from align.common.hub import local_path
from align.common.provenance import decoding_versions, git_commit, machine
from align.common.text import cut
from decode.benchmark.config import EvalConfig
from decode.benchmark.plan import Plan
from decode.method_names import PLAIN
from decode.reporting.records import RECORDS, RUN, SUMMARY, Record, Run, read_records, read_run, write_run
from decode.suites.sources import Loaded

if TYPE_CHECKING:
    from decode.engine.decoder import Decoder


def settings_of(
    config: EvalConfig,
    plan: Plan,
    decoders: Mapping[str, Decoder],
    prepared: Sequence[tuple[Loaded, Sequence[tuple[Any, list[int]]]]],
) -> dict[str, Any]:
    """Everything that a figure depends on."""
    import torch

    target = decoders[PLAIN].target
    prompts = [(s.name, prompt.id, tokens) for s, pairs in prepared for prompt, tokens in pairs]
    found = machine()
    return {
        "target": target.spec,
        **({"weights": target.weights} if target.weights else {}),
        **({"date": target.chat.date} if target.chat.date else {}),
        **config.recorded,
        "dtype": target.dtype_name,
        "drafter": dict(plan.drafters),
        "drafter_hash": {role: folder_hash(local_path(folder)) for role, folder in plan.drafters.items()},
        "methods": list(decoders),
        "corpus_hash": {file: sha256_file(expanded(file)) for file in plan.corpora},
        "sweep": config.sweep,
        "tuned": config.tuned,
        "race": config.race or None,
        "suites": [s.name for s, _ in prepared],
        "prompts_hash": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "target_hash": target.hash,
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "processor": found["processor"],
        "versions": decoding_versions(),
        "git_commit": git_commit(),
        "gpu": found.get("gpu") if target.device.type == "cuda" else None,
    }


def date_of(config: EvalConfig) -> str:
    """The date that prompts say where the chat template reads the clock, ISO: that of the measurement that is continued, else today."""
    if config.out is not None and config.resume and (config.out / RUN).is_file():
        recorded = read_run(config.out).settings.get("date")
        if isinstance(recorded, str):
            return recorded
    return datetime.date.today().isoformat()


def folder_name(suites: Sequence[Loaded], settings: dict[str, Any]) -> str:
    short = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return "-".join([*(s.name for s in suites[:3]), short])


def open_folder(folder: Path, run: Run, replace: bool) -> tuple[Run, list[Record]]:
    """The folder's run and records where it holds some under the same settings; else `run` and no records.

    Raises:
        UserError: it holds a run under other settings, or can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if replace:
            _empty(folder)
        if (folder / RUN).is_file() or (folder / RECORDS).is_file():
            old = read_run(folder)
            _check_same(folder, old.settings, run.settings)
            return old, read_records(folder, mend=True)
        write_run(folder, run)
    except OSError as error:
        raise UserError(f"--out={str(folder)!r} can't be written: {error.strerror}") from None
    return run, []


def _empty(folder: Path) -> None:
    for name in (RECORDS, RUN, SUMMARY):
        (folder / name).unlink(missing_ok=True)


_NOT_OURS = {"manifest.json": "training data", "recipe.yaml": "a training run", "config.json": "a model"}


def check_early(config: EvalConfig) -> None:
    """Check, before anything is loaded, that `config.out` may hold a measurement, and that the one that it holds can be continued
    with this config. One that is to be replaced after a race is deleted now, so that it is not mistaken for the new one if the
    race is interrupted.

    Raises:
        UserError: it may not, or can't be continued.
    """
    folder = config.out
    if folder is None:
        return
    for name, what in _NOT_OURS.items():
        if (folder / name).is_file():
            raise UserError(f"--out={str(folder)!r} holds {what} ({name}): take another folder")
    check_ordinary(folder / RECORDS)
    if not (folder / RUN).is_file():
        _check_free(folder)
        return
    if not config.resume:
        if config.tune:
            _empty(folder)
        return
    old = read_run(folder).settings
    now = config.recorded | {"git_commit": git_commit()}
    _check_same(folder, {key: old.get(key) for key in now}, now)


def _check_free(folder: Path) -> None:
    """Raises UserError for a folder that holds other things, naming one that is free."""
    own = (RECORDS, SUMMARY, "report.png", "report.html", "tuning")
    if not folder.is_dir():
        return
    others = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".") and p.name not in own)
    if others:
        free = next(p for n in itertools.count(1) if not (p := folder / f"eval-{n}").exists())
        raise UserError(
            f"--out={str(folder)!r} holds other things ({cut(others[0], 40)}): take another folder, --out {free}"
        )


def _check_same(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    keys = [*new, *(key for key in old if key not in new)]
    other = [
        f"{k}: {cut(str(old.get(k)), 40)} there, {cut(str(new.get(k)), 40)} now"
        for k in keys
        if old.get(k) != new.get(k)
    ]
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        raise UserError(
            f"--out={str(folder)!r} holds a measurement under other settings ({'; '.join(other[:3])}{more}): "
            "take another folder, or --no-resume to replace it"
        )
