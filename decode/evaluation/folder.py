"""The folder of a measurement, which is created, continued or refused, and the settings that it
depends on."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode.evaluation.config import EvalConfig
from decode.evaluation.records import (
    RECORDS,
    RUN,
    SUMMARY,
    Record,
    Run,
    read_records,
    read_run,
    write_run,
)
from specalign.common.checksums import folder_hash
from specalign.common.errors import UserError
from specalign.common.files import check_ordinary, expand_path, sha256_file
from specalign.common.hub import local_path
from specalign.common.provenance import decoding_versions, git_commit, machine
from specalign.common.schema import JsonObject
from specalign.common.text import cut

if TYPE_CHECKING:
    from decode.evaluation.plan import EvalPlan
    from decode.evaluation.tokenized import TokenizedPrompts
    from specalign.lm.model import Target

_OWN = (RECORDS, SUMMARY, "report.png", "report.html", "tuning")


def describe_settings(
    config: EvalConfig,
    plan: EvalPlan,
    target: Target,
    methods: Sequence[str],
    suites: Mapping[str, TokenizedPrompts],
    threads: int,
) -> JsonObject:
    """Everything that a figure depends on."""
    prompts = [(name, prompt.id, ids) for name, pairs in suites.items() for prompt, ids in pairs]
    folders = {kind: local_path(folder) for kind, folder in plan.drafters.items()}
    found = machine()
    return {
        "target": target.spec,
        **({"weights": target.weights} if target.weights else {}),
        **({"date": target.chat.date} if target.chat.date else {}),
        **config.recorded,
        "dtype": target.dtype_name,
        "drafter": dict(plan.drafters),
        "drafter_hash": {kind: folder_hash(folder) for kind, folder in folders.items()},
        "methods": list(methods),
        "corpus_hash": {path: sha256_file(expand_path(path)) for path in plan.corpora},
        "sweep": list(config.sweep.words),
        "tuned": config.tuned,
        "tuning": config.tuning or None,
        "suites": list(suites),
        "prompts_hash": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "target_hash": target.hash,
        "device": str(target.device),
        "threads": threads,
        "processor": found["processor"],
        "versions": decoding_versions(),
        "git_commit": git_commit(),
        "gpu": found.get("gpu") if target.device.type == "cuda" else None,
    }


def choose_date(config: EvalConfig) -> str:
    """The date in prompts whose chat template reads the clock: that of the measurement that is
    continued, else today's."""
    if config.out is not None and config.resume and (config.out / RUN).is_file():
        recorded = read_run(config.out).settings.get("date")
        if isinstance(recorded, str):
            return recorded
    return datetime.date.today().isoformat()


def name_folder(settings: JsonObject) -> str:
    """The default folder's name: suites and a hash of the settings."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return "-".join([*settings["suites"][:3], digest])


def check_out(config: EvalConfig) -> None:
    """Check, before anything is loaded, that `config.out` may hold this measurement, or that its
    own can be continued. One that is to be replaced after tuning is deleted now: if tuning is
    interrupted, it must not look like the new one. Raises UserError: it may not."""
    folder = config.out
    if folder is None:
        return
    check_ordinary(folder / RECORDS)
    if not (folder / RUN).is_file():
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        others = [name for name in names if not name.startswith(".") and name not in _OWN]
        if others:
            raise UserError(
                f"--out={str(folder)!r} holds other files ({cut(others[0], 40)}): choose another "
                "folder"
            )
    elif not config.resume:
        if config.tune:
            _empty(folder)
    else:
        old = read_run(folder).settings
        now = config.recorded | {"git_commit": git_commit()}
        _check_same(folder, {key: old.get(key) for key in now}, now)


def open_folder(folder: Path, run: Run, replace: bool) -> tuple[Run, list[Record]]:
    """The folder's run and records if it holds some under the same settings; else `run`, which is
    written, and no records. Raises UserError: it holds a run under other settings."""
    if replace:
        _empty(folder)
    if (folder / RUN).is_file() or (folder / RECORDS).is_file():
        old = read_run(folder)
        _check_same(folder, old.settings, run.settings)
        return old, read_records(folder, mend=True)
    write_run(folder, run)
    return run, []


def _empty(folder: Path) -> None:
    for name in (RECORDS, RUN, SUMMARY):
        (folder / name).unlink(missing_ok=True)


def _check_same(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    changes = [
        f"{key}: {cut(str(old.get(key)), 40)} there, {cut(str(new.get(key)), 40)} now"
        for key in dict.fromkeys([*new, *old])
        if old.get(key) != new.get(key)
    ]
    if changes:
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise UserError(
            f"--out={str(folder)!r} holds a measurement under other settings "
            f"({'; '.join(changes[:3])}{more}): choose another folder, or --no-resume to replace it"
        )
