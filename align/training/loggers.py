"""Loggers of metrics: metrics.csv, TensorBoard, W&B."""

from __future__ import annotations

import csv
import io
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from align.config.hardware import main_process
from align.config.recipe import Recipe
from align.config.trainer import TrainerConfig
from align.config.wandb_runs import RUN_ID, RUN_ID_FILE, is_offline
from specalign.common.errors import UserError
from specalign.common.files import naming, write_text
from specalign.folder.publishing import published_texts


class MetricsFile:
    """A CSV table with `step` first and the other columns in order of appearance.

    Rows are appended and flushed at once, so that a kill loses none; a new column rewrites the
    file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] | None = None

    def read(self) -> list[dict[str, str]]:
        """All complete rows, without empty cells; a last line that a kill cut short is ignored."""
        if not self.path.is_file():
            return []
        text = self.path.read_text(encoding="utf-8", errors="replace").replace("\0", "")
        complete = text[: text.rfind("\n") + 1]
        try:
            rows = list(csv.DictReader(io.StringIO(complete)))
        except csv.Error as error:
            raise UserError(f"{self.path}: not readable ({error})") from None
        numbered = [row for row in rows if re.fullmatch("[0-9]{1,18}", row.get("step") or "")]
        return [{k: v for k, v in row.items() if k and v} for row in numbered]

    def rewind(self, step: int) -> None:
        """Remove rows after `step`, which a resumed run trains again."""
        rows = [row for row in self.read() if int(row["step"]) <= step]
        if rows:
            self._write(rows)
        else:
            self.path.unlink(missing_ok=True)
            self._columns = None

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Append a row."""
        row = {"step": str(step), **{k: repr(float(v)) for k, v in numbers.items()}}
        if self._columns is None or any(k not in self._columns for k in row):
            self._write([*self.read(), row])
            return
        with naming(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([row.get(c, "") for c in self._columns])

    def _write(self, rows: list[dict[str, str]]) -> None:
        columns = list(dict.fromkeys(["step", *(k for row in rows for k in row)]))
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, buffer.getvalue())
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
        """Recorded in recipe.yaml."""


def find_run_id(folder: Path, fresh: bool) -> str:
    """The W&B id of this folder's run, which is stored there: the agent's, else the folder's, else
    a new one.

    Raises:
        UserError: the folder's file does not contain an id.
    """
    path = folder / RUN_ID_FILE
    agent_id = os.environ.get(RUN_ID)
    if not agent_id and path.is_file() and not fresh:
        stored = path.read_bytes()[:129].decode("utf-8", "replace").strip()
        if stored and not re.fullmatch(r"[\w.-]+", stored, re.ASCII):
            raise UserError(
                f"{path}: not the id of a W&B run; remove it to start another run there"
            )
        if stored:
            return stored
    new_id = agent_id or uuid.uuid4().hex[:8]
    if main_process():
        write_text(path, new_id + "\n")
    return new_id


def log_artifacts(loggers: Sequence[Logger], recipe: Recipe, drafter: Path) -> None:
    """With `trainer.wandb_artifacts`, log the drafter's folder as a model artifact, and validations
    as a table."""
    if not recipe.trainer.wandb_artifacts:
        return
    import wandb

    rows = [
        r for r in MetricsFile(Path(recipe.output) / "metrics.csv").read() if "validation/loss" in r
    ]
    columns = dict.fromkeys(k for r in rows for k in r if k.startswith("validation/"))
    names: list[str | int] = ["step", *columns]
    for logger in loggers:
        if not isinstance(logger, WandbLogger):
            continue
        if rows:
            data = [[float(r[n]) if n in r else None for n in ("step", *columns)] for r in rows]
            logger.experiment.log({"validations": wandb.Table(columns=names, data=data)})
        artifact = wandb.Artifact(
            f"{recipe.name}-drafter", type="model", metadata={"target": recipe.target.name}
        )
        texts = published_texts(drafter, recipe.target.name)
        for file in sorted(path for path in drafter.rglob("*") if path.is_file()):
            name = file.relative_to(drafter).as_posix()
            if name not in texts:
                artifact.add_file(str(file), name=name)
                continue
            with artifact.new_file(name, mode="w", encoding="utf-8") as part:
                part.write(texts[name])
        logger.experiment.log_artifact(artifact)


def build_loggers(options: TrainerConfig, name: str, folder: Path) -> list[Logger]:
    """The loggers of `trainer.logger`; wandb includes metrics.csv.

    Args:
        name: of the run at W&B.
    """
    names = dict.fromkeys(options.logger)
    if "wandb" in names:
        names["csv"] = None
    loggers: list[Logger] = []
    for logger in names:
        if logger == "tensorboard":
            loggers.append(TensorBoardLogger(str(folder), name="tensorboard", version=""))
        elif logger == "wandb":
            loggers.append(_build_wandb(name, folder, fresh=options.resume == "never"))
        else:
            loggers.append(CSVFile(folder))
    return loggers


def _build_wandb(name: str, folder: Path, fresh: bool) -> Logger:
    folder.mkdir(parents=True, exist_ok=True)
    return WandbLogger(
        project=os.environ.get("WANDB_PROJECT") or "align",
        name=name,
        save_dir=str(folder),
        offline=is_offline() and os.environ.get("WANDB_MODE") != "disabled",
        id=find_run_id(folder, fresh),
        resume="allow",
    )
