"""Where metrics go: metrics.csv, TensorBoard, W&B."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from align.common.files import write_atomically
from align.config.recipe import Recipe


class MetricsFile:
    """A CSV table with `step` first and the other columns in order of appearance; wound back to a checkpoint's step when a run
    goes on from there.

    Rows are appended and flushed at once, so a kill loses none; a column that is new makes the file be written again,
    as a whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] | None = None

    def read(self) -> list[dict[str, str]]:
        """All whole rows, without their empty cells; a last line that a kill cut short is left out."""
        if not self.path.is_file():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        rows = [r for r in csv.DictReader(io.StringIO(whole)) if (r.get("step") or "").isdigit()]
        return [{k: v for k, v in row.items() if k and v} for row in rows]

    def rewind(self, step: int) -> None:
        """Keep rows up to `step`: later steps are about to be trained once more."""
        rows = [row for row in self.read() if int(row["step"]) <= step]
        if rows:
            self._write(rows)
        else:
            self.path.unlink(missing_ok=True)
            self._columns = None

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """One row."""
        row = {"step": str(step), **{k: repr(float(v)) for k, v in numbers.items()}}
        if self._columns is None or any(k not in self._columns for k in row):
            self._write([*self.read(), row])
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([row.get(c, "") for c in self._columns])

    def _write(self, rows: list[dict[str, str]]) -> None:
        columns = list(dict.fromkeys(["step", *(k for row in rows for k in row)]))
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.path, lambda part: part.write_text(buffer.getvalue(), encoding="utf-8"))
        self._columns = columns


class CSVFile(Logger):
    """<output>/metrics.csv."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.file = MetricsFile(folder / "metrics.csv")

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.file.add(step or 0, metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """They are in recipe.yaml."""


def _sends_nothing() -> bool:
    """W&B stays offline unless the user has set a key or a mode that goes online."""
    mode = os.environ.get("WANDB_MODE")
    return mode in ("offline", "dryrun", "disabled") or (mode is None and not os.environ.get("WANDB_API_KEY"))


def build_loggers(recipe: Recipe) -> list[Logger]:
    """Those that `trainer.logger` names."""
    folder, found = Path(recipe.output), list[Logger]()
    for name in dict.fromkeys(recipe.trainer.logger):
        if name == "tensorboard":
            found.append(TensorBoardLogger(str(folder), name="tensorboard", version=""))
        elif name == "wandb":
            folder.mkdir(parents=True, exist_ok=True)
            project = os.environ.get("WANDB_PROJECT") or "align"
            found.append(
                WandbLogger(project=project, name=recipe.name, save_dir=str(folder), offline=_sends_nothing())
            )
        else:
            found.append(CSVFile(folder))
    return found
