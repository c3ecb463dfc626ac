"""What a run leaves beside its results: the resolved recipe, versions, commit and command, to repeat it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from align.common.errors import UserError
from align.common.files import write_atomically
from align.common.provenance import training_versions
from align.common.strict_yaml import dump_yaml
from align.config.recipe import Recipe, resolve


def save_run_record(recipe: Recipe, folder: Path, argv: Sequence[str] | None = None) -> None:
    """Write recipe.yaml (resolved: recipe=PATH runs it again) and versions.json into the run's folder.

    Args:
        argv: the words of the command line; default: this process's own.

    Raises:
        UserError: the folder can't be written.
    """
    record = {**training_versions(), "argv": list(sys.argv[1:] if argv is None else argv)}
    plain, versions_text = dump_yaml(resolve(recipe)), json.dumps(record, indent=2) + "\n"
    try:
        write_atomically(folder / "recipe.yaml", lambda part: part.write_text(plain, encoding="utf-8"))
        write_atomically(
            folder / "versions.json", lambda part: part.write_text(versions_text, encoding="utf-8")
        )
    except OSError as error:
        raise UserError(f"output={folder}: can't be written ({error.strerror or error})") from None
