"""W&B runs and sweeps: a folder for each trial, shared folders for their text, and parameters from
the agent's file."""

import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from align.config.recipe import GROUPS, Recipe, keys
from specalign.common.files import read_text
from specalign.common.schema import JsonObject
from specalign.common.strict_yaml import parse_yaml

RUN_ID = "WANDB_RUN_ID"
SWEEP_ID = "WANDB_SWEEP_ID"
PARAMETER_FILE = "WANDB_SWEEP_PARAM_PATH"
"""Environment variables that `wandb agent` sets for each trial."""
TRIAL_VARIABLES = (RUN_ID, SWEEP_ID, PARAMETER_FILE)
RUN_ID_FILE = "wandb-run-id"  # the file of an output folder with the id of its W&B run

_OFFLINE = ("offline", "dryrun", "disabled")
_TRAINING_ONLY = (
    "path", "write", "length", "validation_fraction", "text_share", "concurrency",
    "reply_seconds",
)  # fmt: skip
"""Keys of `data` that do not change generated text."""
_TARGET_KEYS = ("name", "revision", "dtype", "trust_remote_code")


def separate_trial(recipe: Recipe, typed: Collection[str]) -> None:
    """Give a W&B trial its own output folder, and a text folder shared by trials with equal data
    settings: all trials of a sweep run one command, and generating text costs more than training.
    `typed`: the dotted keys of the command line, which include those that the sweep changes."""
    ids: list[str] = []
    if os.environ.get(SWEEP_ID) or "wandb" in recipe.trainer.logger:
        ids = [os.environ[name] for name in (SWEEP_ID, RUN_ID) if os.environ.get(name)]
    output = Path(recipe.output)
    if not ids or output.parts[-len(ids) :] == tuple(ids):  # a trial's own recipe.yaml
        return
    id_file = output / RUN_ID_FILE
    if len(ids) == 1 and id_file.is_file() and id_file.read_bytes().strip() == ids[0].encode():
        return  # this folder's run, resumed by its id
    if recipe.data.path is None:
        recipe.data.path = str(output / text_folder_name(recipe, typed))
    recipe.output = str(output.joinpath(*ids))


def text_folder_name(recipe: Recipe, typed: Collection[str]) -> str:
    """`data`, or `data-HASH` if `typed` holds keys on which the text depends."""
    settings: JsonObject = {"seed": recipe.seed}
    settings |= {f"data.{k}": v for k, v in asdict(recipe.data).items() if k not in _TRAINING_ONLY}
    settings |= {f"target.{k}": v for k, v in asdict(recipe.target).items() if k in _TARGET_KEYS}
    if not any(key in settings or key.startswith("data.template_kwargs.") for key in typed):
        return "data"
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"data-{digest[:8]}"


def read_agent_parameters(given: Collection[str]) -> JsonObject:
    """The trial's parameters in the agent's file that the command line, with the keys `given`,
    lacks: `${args_no_boolean_flags}` omits false values, a command without `${args}` all. Other
    names than keys are for a script around this command. Raises UserError: an unreadable file."""
    path = os.environ.get(PARAMETER_FILE)
    if not path or not os.environ.get(SWEEP_ID) or not Path(path).is_file():
        return {}
    content = parse_yaml(read_text(Path(path)), path)
    parameters: JsonObject = {}
    for name, entry in content.items() if isinstance(content, dict) else ():
        if not isinstance(entry, dict) or "value" not in entry or name in given:
            continue
        value = entry["value"]
        if name in GROUPS and isinstance(value, dict):
            parameters |= {f"{name}.{k}": v for k, v in value.items()}
        else:
            parameters[name] = value
    known = {*keys(), "recipe"}
    return {
        name: value
        for name, value in parameters.items()
        if name not in given and (name in known or name.rpartition(".")[0] in known)
    }


def is_offline() -> bool:
    """Whether W&B stores runs on this machine only: without an online mode, an API key or `wandb
    agent`."""
    mode = os.environ.get("WANDB_MODE")
    if mode is not None:
        return mode in _OFFLINE
    return not os.environ.get("WANDB_API_KEY") and not os.environ.get(SWEEP_ID)
