"""Logs a measurement to Weights & Biases: its figures, the report's charts, and the replays as a table."""

from collections.abc import Sequence
from pathlib import Path

from decode.evaluation.charts import make_charts
from decode.evaluation.records import Record, read_replays
from decode.evaluation.statistics import value_of
from decode.evaluation.summary import Summary


def log_report(project: str, folder: Path, summary: Summary, records: Sequence[Record]) -> None:
    """Log to a new run; offline with WANDB_MODE=offline."""
    import plotly.graph_objects as plotly
    import wandb

    run = wandb.init(project=project, name=folder.name, config=dict(summary.settings))
    for method, figures in summary.overall.items():
        run.summary[f"{method}/speedup"] = value_of(figures.speedup)
        run.summary[f"{method}/tau"] = value_of(figures.tau)
        run.summary[f"{method}/identical"] = figures.identical
        run.summary[f"{method}/score"] = value_of(figures.score)
    run.summary["verdict"] = summary.verdict
    for chart in make_charts(summary, records):
        figure = plotly.Figure(data=chart.traces, layout={**chart.layout, "title": chart.title})
        run.log({f"charts/{chart.name}": figure})
    table = wandb.Table(["prompt", "method", "round", "seconds", "accepted", "own", "rejected"])
    for replay in read_replays(folder):
        for lane in replay["lanes"]:
            for number, one in enumerate(lane["rounds"]):
                texts = ("".join(one["accepted"]), one["own"], "".join(one["rejected"]))
                table.add_data(replay["title"], lane["method"], number, one["seconds"], *texts)
    run.log({"replays": table})
    run.finish()
