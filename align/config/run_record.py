"""What a run leaves beside its results: the resolved recipe, versions, commit and command, to repeat it and to go on with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from align.common.errors import UserError
from align.common.files import read_text, write_json, write_text
from align.common.provenance import training_versions
from align.common.strict_yaml import dump_yaml, parse_yaml
from align.common.text import short
from align.config.recipe import Recipe, resolve

_FREE = (
    "name", "output", "launch", "target.name", "target.device", "target.revision", "target.trust_remote_code",
    "data.path", "data.write", "data.prompts_column", "data.max_prompt_tokens",
    "trainer.max_steps", "trainer.max_minutes", "trainer.warmup_steps", "trainer.resume", "trainer.show_samples",
    "trainer.validate_first", "trainer.validate_every", "trainer.validation_rows", "trainer.checkpoint_every",
    "trainer.keep_checkpoints", "trainer.keep_features_gb", "trainer.features_gb", "trainer.features_path", "trainer.features_writer",
    "trainer.logger", "trainer.wandb_artifacts", "trainer.log_every", "trainer.milestones",
    "stage", "drafter.train", "data.follow",
)  # fmt: skip
"""What a run may go on with that it did not begin with: where and how far it runs and what it reports. Checkpoints and data know
their target themselves; the last three are compared with the checkpoint (`align.training.checkpoints.check_same_run`)."""


def save_run_record(recipe: Recipe, folder: Path, argv: Sequence[str] | None = None) -> None:
    """Write recipe.yaml (resolved: recipe=PATH runs it again) and versions.json into the run's folder.

    Args:
        argv: the words of the command line; default: this process's own.

    Raises:
        UserError: the folder can't be written.
    """
    record = {**training_versions(), "argv": list(sys.argv[1:] if argv is None else argv)}
    plain = dump_yaml(resolve(recipe))
    try:
        write_text(folder / "recipe.yaml", plain)
        write_json(folder / "versions.json", record)
    except OSError as error:
        raise UserError(f"output={folder}: can't be written ({error.strerror or error})") from None


def check_record(recipe: Recipe) -> None:
    """Whether the run that `trainer.resume=auto` goes on with began with the same keys, those aside that change no weight.

    Raises:
        UserError: it began with others, or its record can't be read.
    """
    output = Path(recipe.output)
    path = output / "recipe.yaml"
    begun = any((output / "checkpoints").glob("step-*.ckpt")) and path.is_file()
    if recipe.trainer.resume != "auto" or not begun:
        return
    record = parse_yaml(read_text(path), str(path))
    before, now = _flat(record if isinstance(record, dict) else {}), _flat(resolve(recipe))
    other = [
        f"{key}={short(before[key], 40)} there, {short(value, 40)} now"
        for key, value in now.items()
        # a key that an older version did not know has no value there
        if before.get(key, value) != value and key not in _FREE and key.partition(".")[0] not in _FREE
    ]
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        raise UserError(
            f"output={output} holds a run with other keys ({'; '.join(other[:3])}{more}): give them as there to go on, "
            "trainer.resume=never to train anew, or another output"
        )


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Groups opened into dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return found
