"""Long names in charts, and the share card: nothing is cut, nothing overlaps."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from decode.evaluation import figures
from decode.evaluation.charts import compare_speeds, make_charts
from decode.evaluation.page import make_report
from decode.evaluation.records import append, read_records, read_run, write_run
from decode.evaluation.summary import Summary, summarise
from decode.evaluation.verdict import headline
from tests.measurements import fill_report

LONG = "organisation/DeepSeek-R1-Distill-Qwen-1.5B"
COUNTS = ("three", "five", "seven")


def test_every_category_has_its_own_bar(tmp_path: Path) -> None:
    """Also when names begin alike, or look like numbers. Few prompts have no error bar."""
    folder = fill_report(tmp_path / "o")
    names = [f"tracking_shuffled_objects_{count}_objects" for count in COUNTS]
    rows = [replace(r, category=names[int(r.prompt[1]) % 3]) for r in read_records(folder)]
    charts = {chart.name: chart for chart in make_charts(summarise(read_run(folder), rows), rows)}
    axis = charts["categories"].layout["xaxis"]
    for trace in charts["categories"].traces:
        assert sorted(trace["x"]) == sorted(names) == sorted(axis["tickvals"])
        assert len({*trace["y"]}) == 1  # all prompts have the same τ here
    assert len({*axis["ticktext"]}) == 3 and max(map(len, axis["ticktext"])) <= 24
    assert axis["type"] == charts["speed"].layout["xaxis"]["type"] == "category"
    one = [r for r in rows if r.prompt in ("p0", "p1")]
    charts = {chart.name: chart for chart in make_charts(summarise(read_run(folder), one), one)}
    assert {*charts["categories"].traces[0]["error_y"]["array"]} == {"none"}  # null would be 0


def test_charts_of_few_methods_say_so(tmp_path: Path) -> None:
    folder = fill_report(tmp_path / "o")
    run, rows = read_run(folder), read_records(folder)
    mine = [r for r in rows if r.method == "drafter"]
    run.settings["methods"] = ["plain", *"abcdefg"]
    rows = [r for r in rows if r.method == "plain"]
    rows += [replace(r, method=name) for name in "abcdefg" for r in mine]
    for chart in make_charts(summarise(run, rows), rows):
        shown = chart.name in ("speed", "time")
        assert len(chart.traces) == {"speed": 7, "time": 3, "positions": 12, "tau": 6}[chart.name]
        assert ("The first 6 of 7 methods." in chart.note) != shown


def test_lossy_methods_are_named_in_comparisons(tmp_path: Path) -> None:
    summaries = []
    for name in ("a", "b"):
        folder = fill_report(tmp_path / name)
        rows = read_records(folder)
        if name == "b":
            rows = [replace(r, verifier="lossy_x" * (r.method == "drafter")) for r in rows]
        summaries.append(summarise(read_run(folder), rows))
    traces = compare_speeds(["1", "2"], summaries).traces
    bars = {trace["name"]: [one is not None for one in trace["y"]] for trace in traces}
    assert bars["drafter"] == [True, False] and bars["drafter, lossy_x"] == [False, True]


def test_the_share_card_has_its_size(tmp_path: Path) -> None:
    make_report(fill_report(tmp_path / "o"))
    png = (tmp_path / "o/share.png").read_bytes()
    assert struct.unpack(">II", png[16:24]) == (1200, 630)


def fill_card(folder: Path, target: str, suites: int, method: str, temperature: float) -> Summary:
    """A summary of a busy machine."""
    fill_report(folder, temperature=temperature)
    run, rows = read_run(folder), read_records(folder)
    run.settings |= {"target": target, "methods": ["plain", "lookup", method]}
    run.machine = {"processor": "AMD EPYC 9654 96-Core Processor", "cores": 2}
    names = {"plain": "plain", "lookup": "lookup", "drafter": method}
    verifier = "lossy_top_beta" if "lossy" in method else "token"
    run.suites = [
        {**run.suites[0], "name": f"s{i}", "title": f"SPEED-Bench, inputs of {i}k"}
        for i in range(suites)
    ]
    write_run(folder, run)
    (folder / "records.jsonl").unlink()
    for i in range(suites):
        append(folder, [
            replace(r, suite=f"s{i}", load=9.0, method=names[r.method],
                    verifier="" if r.method == "plain" else verifier)
            for r in rows
        ])  # fmt: skip
    return summarise(run, read_records(folder))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("suites", [1, 15])
@pytest.mark.parametrize(
    ("target", "method"), [("m", "drafter"), (LONG, "specdiff:draft_tokens=40:steps=16:lossy")]
)
def test_the_share_card_says_all(
    target: str,
    method: str,
    suites: int,
    temperature: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "to_png", lambda figure: drawn.append(figure) or b"")
    summary = fill_card(tmp_path / "o", target, suites, method, temperature)
    figures.share_card(summary)
    (figure,) = drawn
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[attr-defined]
    title, where, machine = figure.texts
    (axes,) = figure.axes
    assert headline(summary).endswith("on a busy machine")
    assert title.get_text().replace("\n", " ") == headline(summary)
    count = f"{6 * suites} prompts"
    assert (f"{count} (SPEED-Bench, inputs of 0k)" if suites == 1 else f"{count}, 15 suites") in (
        " ".join(where.get_text().split())
    )
    labels = [label.get_text().replace("\n", "") for label in axes.get_yticklabels()]
    assert labels[-1] == (f"{method},lossy_top_beta" if "lossy" in method else method)
    boxes = [text.get_window_extent(renderer) for text in (title, where, machine)]
    boxes.insert(1, axes.get_tightbbox(renderer))
    assert all(box.x0 >= 0 and box.x1 <= 1200 and box.y0 >= 0 and box.y1 <= 630 for box in boxes)
    assert all(above.y0 >= below.y1 for above, below in zip(boxes, boxes[1:], strict=False))
