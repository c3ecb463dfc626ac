"""The order of measurement, interrupts, answers of one token."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import decode
from decode.evaluation import runner as measure
from decode.evaluation.records import read_records
from decode.speculation.sampling import Sampling
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt
from tests.measurements import run_eval as run

pytestmark = pytest.mark.usefixtures("no_plots")


def test_orders_are_balanced_and_seeded() -> None:
    suites = {"s": [(Prompt(str(i), "x"), [1]) for i in range(6)]}
    tasks = measure.plan_tasks(suites, ["plain", "lookup", "drafter"], 2, seed=1)
    assert len(tasks) == 12 and len(Counter(t.order for t in tasks)) == 6
    assert set(Counter(t.order for t in tasks).values()) == {2}
    assert tasks == measure.plan_tasks(suites, ["plain", "lookup", "drafter"], 2, seed=1)
    assert [t.order for t in tasks] != [
        t.order for t in measure.plan_tasks(suites, tasks[0].order, 2, seed=2)
    ]


def test_every_beginning_is_spread_over_every_suite() -> None:
    suites = {
        s: [(Prompt(f"{s}{i}", "x"), [1]) for i in range(n)] for s, n in (("a", 80), ("b", 20))
    }
    tasks = measure.plan_tasks(suites, ["plain", "lookup"], 1, seed=1)
    assert len({t.prompt.id for t in tasks}) == 100
    for done in (10, 25, 50):
        assert sum(t.suite == "b" for t in tasks[:done]) == pytest.approx(done / 5, abs=1)
        of_a = [
            int(t.prompt.id[1:]) // 20 for t in tasks[:done] if t.suite == "a"
        ]  # four categories in blocks
        assert max(Counter(of_a).values()) - min(Counter(of_a).values()) <= 3


class Interrupted(Exception):
    pass


def test_an_interrupt_loses_the_task_in_hand_alone(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--prompts", prompts, "--out", tmp_path / "o", "--methods", "plain,lookup")
    whole = measure.run_task
    real: list[measure.Task] = []
    next_prompts: list[str] = []

    def breaks(decoders: Any, task: measure.Task, *rest: Any) -> Any:
        if len(real) == 2:
            next_prompts.append(task.prompt.id)
            raise Interrupted
        real.append(task)
        return whole(decoders, task, *rest)

    monkeypatch.setattr(measure, "run_task", breaks)
    with pytest.raises(Interrupted):
        run(*arguments)
    before = read_records(tmp_path / "o")
    assert len(before) == 4
    # and a kill while the third task was written: one whole line of it, one torn
    line = json.dumps(asdict(replace(before[-1], prompt=next_prompts[0])))
    with open(tmp_path / "o/records.jsonl", "a") as file:
        file.write(line + '\n{"suite": "mi')
    monkeypatch.setattr(measure, "run_task", whole)
    summary, folder = run(*arguments)
    after = read_records(folder)
    assert after[:4] == before and len(after) == 6 and summary.records == 6
    assert len((folder / "records.jsonl").read_text().splitlines()) == 6  # no line twice
    again, _ = run(*arguments)  # nothing left to do
    assert read_records(folder) == after and again.suites == summary.suites
    run(*arguments, "--no-resume")
    assert [r.tokens for r in read_records(folder)] == [r.tokens for r in after]
    assert read_records(folder) != after  # measured anew


def test_an_answer_of_one_token_has_no_decoding(target: Target) -> None:
    decoder = decode.load(target, None)
    task = measure.Task("s", Prompt("1", "x"), (5, 6), 0, ("plain",))
    (record,) = measure.run_task(
        {"plain": decoder}, task, measure.GenerationSettings(Sampling(), 1)
    )
    assert (record.calls, record.committed, record.tau, record.tokens_per_s) == (0, 0, None, 0.0)
