"""The record of a run in its output folder: resolved recipe, versions and command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from align.config.recipe import Recipe, resolve
from align.config.recipe_files import flatten_all
from specalign.common.errors import UserError
from specalign.common.files import read_text, write_json, write_text
from specalign.common.provenance import training_versions
from specalign.common.strict_yaml import dump_yaml, parse_yaml
from specalign.common.text import short

_CHANGEABLE = (
    "name", "output", "launch", "target.name", "target.device", "target.revision", "target.trust_remote_code",
    "data.path", "data.write", "data.prompts_column", "data.max_prompt_tokens",
    "trainer.max_steps", "trainer.max_minutes", "trainer.warmup_steps", "trainer.resume",
    "trainer.validate_first", "trainer.validate_every", "trainer.validation_rows", "trainer.checkpoint_every",
    "trainer.keep_checkpoints", "trainer.keep_features_gb", "trainer.features_gb", "trainer.features_path",
    "trainer.logger", "trainer.log_every", "trainer.milestones", "stage", "drafter.train",
)  # fmt: skip
"""Keys that may change when a run resumes: where and how far it runs and what it reports.
Checkpoints check their target and the last two."""


def save_run_record(recipe: Recipe, argv: Sequence[str] | None = None) -> None:
    """Write recipe.yaml (recipe=PATH repeats the run) and versions.json into the output folder."""
    folder = Path(recipe.output)
    record = {**training_versions(), "argv": list(sys.argv[1:] if argv is None else argv)}
    write_text(folder / "recipe.yaml", dump_yaml(resolve(recipe)))
    write_json(folder / "versions.json", record)


def check_record(recipe: Recipe) -> None:
    """Raises UserError if the run that `trainer.resume=auto` resumes started with other keys,
    except `_CHANGEABLE`, or its record can't be read."""
    output = Path(recipe.output)
    path = output / "recipe.yaml"
    has_run = path.is_file() and any((output / "checkpoints").glob("step-*.ckpt"))
    if recipe.trainer.resume != "auto" or not has_run:
        return
    record = parse_yaml(read_text(path), str(path))
    before = flatten_all(record if isinstance(record, dict) else {}, str(path))
    changes = [
        f"{key}={short(before[key], 40)} there, {short(value, 40)} now"
        for key, value in flatten_all(resolve(recipe), str(path)).items()
        if not {key, key.partition(".")[0]} & {*_CHANGEABLE} and before.get(key, value) != value
    ]
    if changes:
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise UserError(
            f"output={output} holds a run with other keys ({'; '.join(changes[:3])}{more}): give "
            "the same keys to resume it, trainer.resume=never to start over, or another output"
        )
