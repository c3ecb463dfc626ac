"""Every number on the page is one of the records'; several runs on one page; the share card."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from decode.evaluation import statistics as stats
from decode.evaluation.page import compare_runs, make_report
from decode.evaluation.records import read_records, write_replays
from decode.evaluation.replay import split_text
from tests.measurements import fill_report

ROUND = {"seconds": 0.5, "accepted": ["a", "b"], "own": "c", "rejected": ["d"]}


def page_data(text: str) -> dict:
    found = re.search(r'id="report-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_charts_show_what_the_records_say(tmp_path: Path) -> None:
    folder = fill_report(tmp_path / "o")
    write_replays(
        folder,
        [{"title": "s: p", "prompt": "<blink>", "lanes": [{"method": "plain", "rounds": [ROUND]}]}],
    )
    summary, _ = make_report(folder)
    records = read_records(folder)
    text = (folder / "report.html").read_text()
    data = page_data(text)
    charts = {chart["name"]: chart for chart in data["charts"]}
    assert set(charts) == {"speed", "positions", "tau", "time"} and "<blink>" not in text
    plain = stats.times(records, "plain")
    for trace in charts["speed"]["traces"]:
        found = stats.paired_ratio(plain, stats.times(records, trace["name"]))
        assert trace["y"] == [found.value]
        assert trace["error_y"]["array"] == [pytest.approx(found.hi - found.value)]
    by_method = {trace["name"]: trace for trace in charts["positions"]["traces"]}
    mine = [record for record in records if record.method == "drafter"]
    assert by_method["drafter"]["y"] == [one.unconditional for one in stats.acceptance(mine)]
    for trace in charts["tau"]["traces"]:
        counted = stats.counts(records, trace["name"]).values()
        assert trace["y"] == [committed / calls for committed, calls in counted]
    for trace in charts["time"]["traces"]:
        assert len(trace["x"]) == len(trace["y"])
    assert data["replays"][0]["lanes"][0]["rounds"] == [ROUND]
    speedup = summary.overall["drafter"].speedup
    assert f"<b>{speedup.value:.2f}×</b>" in text
    ids = re.findall(r'id="plot-([\w-]+)"', text)
    assert sorted(ids) == sorted(charts) and all(f"plot-{name}" in text for name in charts)


def test_no_character_of_several_tokens_is_lost() -> None:
    target = SimpleNamespace(detokenize=lambda tokens: bytes(tokens).decode(errors="replace"))
    texts = split_text(target, list("né!".encode()))  # type: ignore[arg-type]
    assert texts == ["n", "", "é", "!"]


def test_several_runs_on_one_page(tmp_path: Path) -> None:
    folders = [fill_report(tmp_path / name, gain) for name, gain in (("a", 2.0), ("b", 1.5))]
    text = compare_runs(folders)
    (chart,) = page_data(text)["charts"]
    drafter = next(trace for trace in chart["traces"] if trace["name"] == "drafter")
    assert drafter["x"] == ["a", "b"]
    assert drafter["y"] == [pytest.approx(2.0), pytest.approx(1.5)]
    assert "Settings that differ" in text


def test_the_share_card_has_its_size(tmp_path: Path) -> None:
    make_report(fill_report(tmp_path / "o"))
    png = (tmp_path / "o/share.png").read_bytes()
    assert struct.unpack(">II", png[16:24]) == (1200, 630)


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HOOK = """<script>window.faults = []; onerror = (text) => { faults.push(text) }</script>"""
PROBE = """
onload = () => setTimeout(() => {
  const inner = document.querySelector("iframe").contentWindow;
  const root = inner.document.documentElement;
  const drawn = inner.document.querySelectorAll(".js-plotly-plot").length;
  inner.document.getElementById("play").click();
  const words = inner.document.querySelectorAll(".words span").length;
  const found = { wide: root.scrollWidth, seen: root.clientWidth, drawn, words, faults: inner.faults };
  document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
}, 1500)
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1400])
def test_in_a_browser(width: int, tmp_path: Path) -> None:
    """Phone and desktop: nothing is wider than the window, no script fails, all charts are drawn."""
    folder = fill_report(tmp_path / "o")
    lanes = [{"method": name, "rounds": [ROUND]} for name in ("plain", "drafter")]
    write_replays(folder, [{"title": "s: p", "prompt": "?", "lanes": lanes}])
    make_report(folder)
    text = (folder / "report.html").read_text().replace("<head>", "<head>" + HOOK)
    frame = f'<iframe width="{width}" height="3000" srcdoc="{html.escape(text)}"></iframe>'
    page = tmp_path / "frame.html"
    page.write_text(f'<meta charset="utf-8"><body>{frame}<script>{PROBE}</script></body>')
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000"]
    command = [str(CHROMIUM), *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    found = json.loads(html.unescape(re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)[1]))
    assert found["faults"] == [] and found["wide"] <= found["seen"]
    assert found["drawn"] == 4 and found["words"] > 0
