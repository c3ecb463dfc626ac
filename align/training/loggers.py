"""Loggers of metrics: metrics.csv, TensorBoard, W&B."""

import csv
import io
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from align.config.hardware import main_process
from align.config.trainer import TrainerConfig
from align.config.wandb_runs import RUN_ID, RUN_ID_FILE, is_offline
from specalign.common.files import naming, write_text


class MetricsFile(Logger):
    """A CSV table with `step` first and the other columns in order of appearance. Rows are flushed
    at once, so that a kill loses none; a new column rewrites the file."""

    name = "metrics"
    version = ""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._columns: list[str] = []

    def read(self) -> list[dict[str, str]]:
        """All complete rows, without empty cells; a last line that a kill cut short is ignored."""
        if not self.path.is_file():
            return []
        text = self.path.read_text(encoding="utf-8")
        rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        return [{k: v for k, v in row.items() if v} for row in rows]

    def rewind(self, step: int) -> None:
        """Remove rows after `step`, which a resumed run trains again."""
        if self.path.exists():
            self._write([row for row in self.read() if int(row["step"]) <= step])

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {"step": str(step), **{k: repr(float(v)) for k, v in metrics.items()}}
        if not row.keys() <= {*self._columns}:
            self._write([*self.read(), row])
            return
        with naming(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([row.get(c, "") for c in self._columns])

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Recorded in recipe.yaml."""

    def _write(self, rows: list[dict[str, str]]) -> None:
        self._columns = list(dict.fromkeys(["step", *(k for row in rows for k in row)]))
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, buffer.getvalue())


def find_run_id(folder: Path, fresh: bool) -> str:
    """The W&B id of this folder's run, which is stored there: the agent's, else the folder's, else
    a new one."""
    path = folder / RUN_ID_FILE
    agent_id = os.environ.get(RUN_ID)
    if not agent_id and path.is_file() and not fresh:
        return path.read_text(encoding="utf-8").strip()
    new_id = agent_id or uuid.uuid4().hex[:8]
    if main_process():
        write_text(path, new_id + "\n")
    return new_id


def build_loggers(options: TrainerConfig, name: str, folder: Path) -> list[Logger]:
    """The loggers of `trainer.logger`; wandb includes metrics.csv. `name`: of the run at W&B."""
    loggers: list[Logger] = []
    if {"csv", "wandb"} & {*options.logger}:
        loggers.append(MetricsFile(folder / "metrics.csv"))
    if "tensorboard" in options.logger:
        loggers.append(TensorBoardLogger(str(folder), name="tensorboard", version=""))
    if "wandb" in options.logger:
        folder.mkdir(parents=True, exist_ok=True)
        wandb_logger = WandbLogger(
            project=os.environ.get("WANDB_PROJECT") or "align",
            name=name,
            save_dir=str(folder),
            offline=is_offline() and os.environ.get("WANDB_MODE") != "disabled",
            id=find_run_id(folder, fresh=options.resume == "never"),
            resume="allow",
        )
        loggers.append(wandb_logger)
    return loggers
