"""The measurements for a GPU run on a CPU: their figures are positive, forced τ is near what was asked for, and texts stay the same."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.gpu import floor, rounds, train
from tools.gpu.forced import expected_tau, find_acceptance, make_wrong, tree_shape


def run(main: Callable[[list[str]], None], folder: Path, words: str = "") -> dict[str, Any]:
    out = folder / "figures.json"
    main(f"--device cpu --shape debug --out {out} {words}".split())
    report = json.loads(out.read_text())
    assert report.pop("device") == "CPU" and report.pop("torch") == torch.__version__
    return report


def numbers_of(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from numbers_of(part)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.slow
def test_floor(tmp_path: Path) -> None:
    report = run(floor.main, tmp_path)
    assert {"launch_us", "sync_us", "upload_us", "bandwidth_gb_s"} < report.keys()
    assert list(report["products"]["debug"]) == [str(rows) for rows in floor.ROWS]
    assert len(report["attention_us"]["debug"]) == len(floor.QUERIES) * len(floor.KEYS)
    assert sum("flex" in us for us in report["attention_us"]["debug"].values()) == 2
    assert min(numbers_of(report)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "engines", "batches", "taus"),
    [(7, "eager,captured", "1,3", "1,2.4,4"), (0, "captured,compiled", "2", "4")],
)
def test_forced_rounds(
    tmp_path: Path,
    nodes: int,
    engines: str,
    batches: str,
    taus: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # in seconds
    words = f"--nodes {nodes} --engines {engines} --batches {batches} --tau {taus} --new-tokens 25"
    rows = run(rounds.main, tmp_path, f"{words} --repeats 1")["rounds"]["debug"]
    assert len(rows) == len(batches.split(",")) * 2 * (1 + len(taus.split(",")))
    found: dict[tuple[int, float], set[float]] = {}
    for row in rows:
        assert row["same_texts"] == row["batch"]
        assert row["measured_tau"] == pytest.approx(row["tau"], rel=0.2), row
        assert row["to_captured_plain"]["median"] > 0 and row["to_own_plain"]["median"] > 0
        assert 0 < row["tokens_per_second"]["min"] <= row["tokens_per_second"]["max"]
        found.setdefault((row["batch"], row["tau"]), set()).add(row["measured_tau"])
    assert all(len(taus) == 1 for taus in found.values())  # of all engines


@pytest.mark.slow
def test_training_step(tmp_path: Path) -> None:
    words = "--steps 1 --peak-tflops 0.5 trainer.anchors=8"
    figures = run(train.main, tmp_path, words)["training"]["debug"]
    assert min(numbers_of(figures)) > 0 and figures["share_of_peak"] < 1
    assert {"products", "attention"} < figures["profiled_ms_by_group"].keys()
    assert figures["positions_per_step"] <= 2 * 8 * 3


def test_acceptance_for_a_tau() -> None:
    for tau in (1.0, 2.4, 4.0, 5.0):
        assert expected_tau(find_acceptance(tau, 4), 4) == pytest.approx(tau)


def test_forced_trees() -> None:
    """Siblings of the first node differ from it and from the right token, spoilt (+1) or not."""
    assert tree_shape(7, 4) == (-1, 0, 1, 2, -1, -1, -1)
    assert tree_shape(2, 4) == (-1, 0)
    assert make_wrong(tree_shape(7, 4), torch.device("cpu")).tolist() == [0, 0, 0, 0, 1, 2, 3]
