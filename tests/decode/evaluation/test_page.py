"""Every number on the page is one of the records'; several runs on one page."""

import html
import json
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest
from plotly.offline import get_plotlyjs

from decode.evaluation import statistics as stats
from decode.evaluation.page import compare_runs, make_report
from decode.evaluation.records import Run, append, read_records, read_run, write_replays, write_run
from decode.evaluation.replay import split_text
from tests.measurements import fill_report, page_data, record

ROUND = {"seconds": 0.5, "tokens": 3, "accepted": ["a", "b"], "own": "c", "rejected": ["d"]}
LAST = {"seconds": 0.6, "tokens": 2, "accepted": ["e", "f"], "own": "", "rejected": []}
"""A round that ends inside its accepted drafts."""


def test_the_charts_show_what_the_records_say(tmp_path: Path) -> None:
    folder = fill_report(tmp_path / "o")
    lanes = [{"method": "plain", "rounds": [ROUND]}]
    write_replays(folder, [{"title": "s: p", "prompt": "<blink>", "lanes": lanes}])
    summary, _ = make_report(folder)
    records = read_records(folder)
    text = (folder / "report.html").read_text()
    data = page_data(text)
    charts = {chart["name"]: chart for chart in data["charts"]}
    assert set(charts) == {"speed", "positions", "tau", "time"} and "<blink>" not in text
    assert "struck through (of a tree, only one branch)" in text
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


def test_the_page_stands_alone_and_is_reproducible(tmp_path: Path) -> None:
    folder = fill_report(tmp_path / "o")
    run = read_run(folder)
    run.command = "<b>\x1b[31m\u202e"
    write_run(folder, run)
    names = ("summary.json", "report.html", "share.png")
    make_report(folder)
    first = [(folder / name).read_bytes() for name in names]
    make_report(folder)
    assert [(folder / name).read_bytes() for name in names] == first
    page = first[1].decode()
    assert first[2].startswith(b"\x89PNG")
    own = page.replace(get_plotlyjs(), "")
    assert not re.search(r"https?:|<script [^>]*src|<link|@import|url\(", own)
    assert "t/&lt;model&gt;" in page and "<model>" not in page
    assert r"&lt;b&gt;\x1b[31m\u202e" in page
    assert "6 of 9" in page and "2.00×" in page


POINTS = {(f"draft_tokens={k}", f"steps={t}"): (k, t) for k in (2, 4) for t in (1, 2)}


def fill_sweep(folder: Path) -> Path:
    """Two suites, two categories, batches of one and two, four points of a sweep; no two alike."""
    folder.mkdir()
    methods = {f"specdiff:{a}:{b}": point for (a, b), point in POINTS.items()}
    settings = {
        "target": "t/m", "methods": ["plain", *methods], "temperature": 0.0, "max_new_tokens": 20,
        "dtype": "float32", "seed": 0, "repeats": 2, "warmup": 1, "threads": 2, "batch_sizes": [1, 2],
        "sweep": ["draft_tokens=2,4", "steps=1,2"], "execute_code": None,
    }  # fmt: skip
    sources = [
        {"name": n, "title": n.upper(), "group": "chat", "prompts": 6, "source": n, "metric": ""}
        for n in "sz"
    ]
    write_run(folder, Run(settings, sources))
    rows = []
    for i in range(12):
        for size, repeat, (method, (k, t)) in product(
            (1, 2), (0, 1), {"plain": (0, 0), **methods}.items()
        ):
            where = {"suite": "sz"[i // 6], "category": "xy"[i % 2], "group": f"p{i - i % size}"}
            where |= {"repeat": repeat, "batch": size, "identical": True}
            slow = (1 + 0.1 * i + 0.05 * repeat) * (1.5 if size == 2 else 1)
            if method == "plain":
                counts = (20, 20, [0] * 20, [0] * 20)
            else:
                rounds = 3 + i % 4
                accepted = [(i + j + k) % (k + 1) for j in range(rounds)]
                counts = (rounds + sum(accepted), rounds, accepted, [k] * rounds)
            seconds = slow if method == "plain" else slow * (1 + i % 3) / (k - 0.3 * t)
            parts = {"draft_seconds": 0.1 * t * slow / k, "verify_seconds": 0.2 * slow} if k else {}
            rows.append(record(method, f"p{i}", seconds, *counts, **where, **parts))
    append(folder, rows)
    return folder


def time_per_token(rows: list[dict], method: str, whole: bool = False) -> dict[tuple, float]:
    """By the prompts that were decoded together: the mean over repeats of seconds per token."""
    units: dict[tuple, dict[int, list[dict]]] = {}
    for row in rows:
        if row["method"] == method:
            repeats = units.setdefault((row["suite"], row["group"]), {})
            repeats.setdefault(row["repeat"], []).append(row)

    def per_token(unit: list[dict]) -> float:
        seconds = max(one["seconds"] + whole * one["prefill_seconds"] for one in unit)
        return seconds / sum(one["committed"] + whole for one in unit)

    return {key: mean(map(per_token, repeats.values())) for key, repeats in units.items()}


def expected(rows: list[dict], method: str) -> dict[str, str]:
    """A method's figures from the lines of records.jsonl alone, as the page writes them."""
    mine = [row for row in rows if row["method"] == method]
    rounds = sum(row["calls"] for row in mine)
    units = {(r["suite"], r["group"], r["repeat"]): [] for r in mine}
    for row in mine:
        units[row["suite"], row["group"], row["repeat"]].append(row["seconds"])
    plain, own = time_per_token(rows, "plain"), time_per_token(rows, method)
    plain_whole, whole = (time_per_token(rows, name, True) for name in ("plain", method))
    by_prompt: dict[tuple, list[int]] = {}
    for row in mine:
        sums = by_prompt.setdefault((row["suite"], row["prompt"]), [0, 0])
        sums[0] += row["committed"]
        sums[1] += row["calls"]
    drafted = [(d, a) for r in mine for d, a in zip(r["drafted"], r["accepted"], strict=True)]
    shares = []
    for k in (1, 2, 4, 8):
        at = [a >= k for d, a in drafted if d >= k]
        shares += [f"{sum(at) / len(at):.2f}"] if at else []
    ms = [1000 * sum(r[f"{part}_seconds"] for r in mine) / rounds for part in ("draft", "verify")]
    return {
        "tokens/s": f"{sum(r['committed'] for r in mine) / sum(map(max, units.values())):.1f}",
        "speed-up [95%]": f"{sum(plain.values()) / sum(own.values()):.2f}×",
        "with prefill": f"{sum(plain_whole.values()) / sum(whole.values()):.2f}×",
        "τ [95%]": f"{sum(r['committed'] for r in mine) / rounds:.2f}",
        "τ macro": f"{sum(c / n for c, n in by_prompt.values()) / len(by_prompt):.2f}",
        "accepted at 1, 2, 4, 8": " ".join(shares),
        "draft + verify, ms per round": f"{ms[0]:.1f} + {ms[1]:.1f}",
        "identical": f"{len(by_prompt)}/{len(by_prompt)}",
        "prompts": str(len(by_prompt)),
    }


def test_tables_and_the_charts_of_categories_batches_and_sweeps(tmp_path: Path) -> None:
    """Recomputed from the file of records, with arithmetic of the test's own."""
    folder = fill_sweep(tmp_path / "o")
    make_report(folder)
    text = (folder / "report.html").read_text()
    everything = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    first = [row for row in everything if row["batch"] == 1]
    tables = [
        [re.findall("<t[hd]>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", table)]
        for table in re.findall("<table>(.*?)</table>", text, re.DOTALL)
    ]
    overview, figures, *_, batches = tables[:4]
    assert len(figures) == 1 + 3 * 5
    for row in figures[1:]:
        shown = dict(zip(figures[0], row, strict=True))
        rows = [one for one in first if shown["suite"] in (one["suite"].upper(), "all")]
        wanted = expected(rows, shown["method"])
        if shown["method"] == "plain":
            wanted = {
                name: wanted[name] for name in ("tokens/s", "τ macro", "identical", "prompts")
            }
        for name, value in wanted.items():
            assert shown[name].partition(" [")[0] == value, (shown["suite"], shown["method"], name)
    for row in overview[2:]:
        shown = dict(zip(overview[0], row, strict=True))
        for suite in "sz":
            wanted = expected([one for one in first if one["suite"] == suite], shown["method"])
            assert shown[suite.upper()] == wanted["speed-up [95%]"]
    assert batches[0][0] == "batch" and len(batches) == 1 + 2 * 5
    charts = {chart["name"]: chart for chart in page_data(text)["charts"]}
    lines = {trace["name"]: trace for trace in charts["batches"]["traces"]}
    for size, method, speed, gain, tau, _ in batches[1:]:
        wanted = expected([one for one in everything if one["batch"] == int(size)], method)
        assert speed == wanted["tokens/s"] and tau == wanted["τ [95%]"]
        assert method == "plain" or gain.partition(" [")[0] == wanted["speed-up [95%]"]
        assert lines[method]["x"] == [1, 2]
        assert f"{lines[method]['y'][int(size) - 1]:.1f}" == speed
    assert charts["categories"]["traces"][0]["x"] == ["x", "y"]
    for trace in charts["categories"]["traces"]:
        for name, value, above, below in zip(
            trace["x"], trace["y"], *(trace["error_y"][k] for k in ("array", "arrayminus")), strict=True
        ):  # fmt: skip
            rows = [one for one in first if one["category"] == name]
            assert f"{value:.2f}" == expected(rows, trace["name"])["τ [95%]"]
            own = [r for r in read_records(folder) if r.batch == 1 and r.category == name]
            interval = stats.tau(stats.counts(own, trace["name"]))
            assert (value + above, value - below) == pytest.approx((interval.hi, interval.lo))
    (heat,) = charts["sweep-0"]["traces"]
    for a, b in POINTS:
        row, column = heat["y"].index(a), heat["x"].index(b)
        wanted = expected(first, f"specdiff:{a}:{b}")["speed-up [95%]"]
        assert f"{heat['z'][row][column]:.2f}×" == wanted
        assert heat["text"][row][column] == wanted.removesuffix("×")
    time = {trace["name"]: trace for trace in charts["time"]["traces"]}
    for i, method in enumerate(time["drafting"]["y"]):
        parts = [f"{time[name]['x'][i]:.1f}" for name in ("drafting", "target and verification")]
        assert " + ".join(parts) == expected(first, method)["draft + verify, ms per round"]
        mine = [one for one in first if one["method"] == method]
        whole = 1000 * sum(r["seconds"] for r in mine) / sum(r["calls"] for r in mine)
        assert sum(trace["x"][i] for trace in time.values()) == pytest.approx(whole)


def test_no_character_of_several_tokens_is_lost() -> None:
    target = SimpleNamespace(detokenize=lambda tokens: bytes(tokens).decode(errors="replace"))
    texts = split_text(target, list("né!".encode()))  # type: ignore[arg-type]
    assert texts == ["n", "", "é", "!"]


def test_several_runs_on_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [fill_report(tmp_path / name, gain) for name, gain in (("a", 2.0), ("b", 1.5))]
    text = compare_runs(folders)
    (chart,) = page_data(text)["charts"]
    drafter = next(trace for trace in chart["traces"] if trace["name"] == "drafter")
    assert drafter["x"] == ["a", "b"]
    assert drafter["y"] == [pytest.approx(2.0), pytest.approx(1.5)]
    assert "Settings that differ" in text and "not comparable" not in chart["note"]
    run = read_run(folders[1])
    run.settings["prompts_hash"] = "other"
    write_run(folders[1], run)
    monkeypatch.chdir(tmp_path / "a")
    text = compare_runs([Path("."), Path("../b")])
    (chart,) = page_data(text)["charts"]
    assert chart["traces"][0]["x"] == ["a", "b"]
    assert "measured different prompts: their speed-ups are not comparable" in chart["note"]


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HOOK = """<script>window.faults = []; onerror = (text) => { faults.push(text) }</script>"""
PROBE = """
onload = () => setTimeout(() => {
  const inner = document.querySelector("iframe").contentWindow;
  const root = inner.document.documentElement;
  const drawn = inner.document.querySelectorAll(".js-plotly-plot").length;
  const words = inner.document.querySelectorAll(".words span").length;
  const count = inner.document.querySelector(".count").textContent;
  const found = { count, wide: root.scrollWidth, seen: root.clientWidth, drawn, words, faults: inner.faults };
  inner.document.getElementById("play").click();
  document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
}, 1500)
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1400])
def test_in_a_browser(width: int, tmp_path: Path) -> None:
    """Phone and desktop: nothing is wider than the window, no script fails, all charts are drawn."""
    folder = fill_report(tmp_path / "o")
    lanes = [{"method": name, "rounds": [ROUND, LAST]} for name in ("plain", "drafter")]
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
    assert found["count"] == "5 tokens, 2 forward passes"
