"""W&B runs and sweeps: a folder for each trial, a shared one for their text, parameters that no argument holds."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from align.common.errors import UserError
from align.common.files import read_text
from align.common.strict_yaml import parse_yaml
from align.common.text import cut, short
from align.config.recipe import GROUPS, Recipe, keys

RUN_ID = "WANDB_RUN_ID"
SWEEP_ID = "WANDB_SWEEP_ID"
PARAMETER_FILE = "WANDB_SWEEP_PARAM_PATH"
"""The environment variables that `wandb agent` sets for each trial."""
RUN_ID_FILE = "wandb-run-id"
"""The file of an output folder that stores the id of its W&B run."""
TRIAL_VARIABLES = (RUN_ID, SWEEP_ID, PARAMETER_FILE)

_OFFLINE = ("offline", "dryrun", "disabled")
_ONLY_TRAINING = (
    "path", "write", "follow", "follow_after", "length", "validation_fraction", "text_share", "concurrency",
    "server_check", "reply_seconds", "retry_seconds",
)  # fmt: skip
"""Keys of `data` that change no written text."""
_OF_TARGET = ("name", "revision", "dtype", "trust_remote_code")


def trial_ids(recipe: Recipe) -> list[str]:
    """Return the sweep id and the run id of the trial that this process runs; [] outside of W&B's sweeps and runs.

    Raises:
        UserError: an id that W&B does not allow either.
    """
    if not os.environ.get(SWEEP_ID) and "wandb" not in recipe.trainer.logger:
        return []
    found = []
    for name in (SWEEP_ID, RUN_ID):
        value = os.environ.get(name)
        if not value:
            continue
        if value in (".", "..") or not re.fullmatch(r"[^/\\#?%:\0]{1,128}", value):
            raise UserError(f"{name}={short(value)} is no W&B id (at most 128 characters, none of /\\#?%:)")
        found.append(value)
    return found


def separate_trial(recipe: Recipe, typed: Collection[str]) -> None:
    """Give a W&B trial its own output folder, and the text folder that trials with equal data settings share.

    Trials of one sweep run one command, so without this each would replace the last one's drafter. Written
    text stays outside of the trial's folder, because writing it costs more than training.

    Args:
        recipe: changed in place: `output`, and `data.path` where it has none.
        typed: the dotted keys of the command line, among them those that the sweep changes.
    """
    ids = trial_ids(recipe)
    output = Path(recipe.output)
    if not ids or output.parts[-len(ids) :] == tuple(ids):  # a trial's own recipe.yaml
        return
    stored = output / RUN_ID_FILE
    if len(ids) == 1 and stored.is_file() and stored.read_bytes().strip() == ids[0].encode():
        return  # that run, begun in this folder and resumed by its id
    if recipe.data.path is None:
        recipe.data.path = str(output / text_folder_name(recipe, typed))
    recipe.output = str(output.joinpath(*ids))


def text_folder_name(recipe: Recipe, typed: Collection[str]) -> str:
    """Name the folder of the text: `data`, or `data-HASH` where `typed` holds keys on which the text depends."""
    settings = _text_settings(recipe)
    if not any(key in settings or key.startswith("data.template_kwargs.") for key in typed):
        return "data"
    text = json.dumps(settings, sort_keys=True)
    return f"data-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _text_settings(recipe: Recipe) -> dict[str, Any]:
    """The keys on which the written text depends, with their values."""
    data = {f"data.{k}": v for k, v in asdict(recipe.data).items() if k not in _ONLY_TRAINING}
    target = {f"target.{k}": v for k, v in asdict(recipe.target).items() if k in _OF_TARGET}
    return {**data, **target, "seed": recipe.seed}


def trial_note(recipe: Recipe) -> str | None:
    """Return one line that says where a W&B trial writes; None outside of W&B's sweeps and runs."""
    ids = trial_ids(recipe)
    if not ids:
        return None
    return f"note: W&B run {'/'.join(ids)} writes into {recipe.output}; its text is in {recipe.data_folder}"


def unsent_parameters(given: Collection[str]) -> dict[str, Any]:
    """Return the trial's parameters that the command line lacks, as the agent stored them.

    `${args_no_boolean_flags}` leaves out what is false, and a command without `${args}` leaves out everything.
    Names that are no keys are ignored: a script around this command may use them.

    Args:
        given: the keys of the command line.

    Raises:
        UserError: the agent's file can't be read.
    """
    path = os.environ.get(PARAMETER_FILE)
    if not path or not os.environ.get(SWEEP_ID) or not Path(path).is_file():
        return {}
    content = parse_yaml(read_text(Path(path)), path)
    found: dict[str, Any] = {}
    for name, entry in content.items() if isinstance(content, dict) else ():
        if not isinstance(entry, dict) or "value" not in entry or name in given:
            continue
        value = entry["value"]
        if name in GROUPS and isinstance(value, dict):
            found |= {f"{name}.{k}": v for k, v in value.items()}
        else:
            found[name] = value
    known = {*keys(), "recipe"}
    return {
        k: v for k, v in found.items() if (k in known or k.rpartition(".")[0] in known) and k not in given
    }


def is_offline() -> bool:
    """Whether W&B stores runs here alone.

    It sends them where the user has set a mode that sends, an API key, or started `wandb agent`.
    """
    mode = os.environ.get("WANDB_MODE")
    if mode is not None:
        return mode in _OFFLINE
    return not os.environ.get("WANDB_API_KEY") and not os.environ.get(SWEEP_ID)


def check_login(recipe: Recipe) -> None:
    """Check that a run which W&B sends has credentials, before any work. W&B itself would ask at the terminal.

    Raises:
        UserError: there are none.
    """
    if "wandb" not in recipe.trainer.logger or is_offline():
        return
    import wandb
    from wandb.errors import Error

    if wandb.setup().settings.mode in _OFFLINE:  # `wandb offline`
        return
    try:
        logged_in = wandb.login(prompt=False, verify=True)
    except (Error, ValueError) as error:
        reason = cut(" ".join(str(error).split()), 200)
        raise UserError(f"trainer.logger=wandb: {reason} (WANDB_MODE=offline sends nothing)") from None
    if not logged_in:
        raise UserError(
            "trainer.logger=wandb: W&B has no credentials here (`wandb login` or WANDB_API_KEY; WANDB_MODE=offline sends nothing)"
        )
