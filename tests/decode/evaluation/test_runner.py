"""The order of measurement, interrupts, answers of one token."""

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import decode
from decode import eval
from decode.engine.pace import DraftPace, Trials
from decode.evaluation import runner as measure
from decode.evaluation.records import read_records
from decode.speculation.settings import Sampling
from specalign.common.errors import UserError
from specalign.common.terminal import PlainConsole
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt
from tests.measurements import QUIET
from tests.measurements import run_eval as run

pytestmark = pytest.mark.usefixtures("no_plots")


def test_orders_are_balanced_and_seeded() -> None:
    suites = {"s": [(Prompt(str(i), "x"), [1]) for i in range(6)]}

    def plan(methods, seed):
        return [task for (task,) in measure.plan_tasks(suites, methods, 2, seed)]

    tasks = plan(["plain", "lookup", "drafter"], 1)
    assert len(tasks) == 12 and len(Counter(t.order for t in tasks)) == 6
    assert set(Counter(t.order for t in tasks).values()) == {2}
    assert tasks == plan(["plain", "lookup", "drafter"], 1)
    assert [t.order for t in tasks] != [t.order for t in plan(tasks[0].order, 2)]


@pytest.mark.parametrize("batch", [1, 2])
def test_orders_are_balanced_in_each_suite_and_shared_by_a_batch(batch: int) -> None:
    suites = {
        s: [(Prompt(f"{s}{i}", "x", later=("y",)), [1]) for i in range(4 * batch)] for s in "ab"
    }
    groups = measure.plan_tasks(suites, ["plain", "drafter"], 1, 0, batch)
    assert all(len({task.order for task in group}) == 1 for group in groups)
    first = [(g[0].suite, g[0].order[0]) for g in groups if not g[0].follows]
    assert set(Counter(first).values()) == {2} and len(set(first[:2])) == 2
    assert len({method for _, method in first[:2]}) == 2  # also over suites of one prompt


SIZES = {"a": 80, "b": 20}


def test_every_beginning_is_spread_over_every_suite() -> None:
    suites = {s: [(Prompt(f"{s}{i}", "x"), [1]) for i in range(n)] for s, n in SIZES.items()}
    tasks = [task for (task,) in measure.plan_tasks(suites, ["plain", "lookup"], 1, seed=1)]
    assert len({t.prompt.id for t in tasks}) == 100
    for done in (10, 25, 50):
        assert sum(t.suite == "b" for t in tasks[:done]) == pytest.approx(done / 5, abs=1)
        # four categories in blocks
        of_a = [int(t.prompt.id[1:]) // 20 for t in tasks[:done] if t.suite == "a"]
        assert max(Counter(of_a).values()) - min(Counter(of_a).values()) <= 3


def test_single_prompts_draft_always(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """τ is the drafter's own, and does not depend on the clock; batches adapt, as they do in use,
    and begin to before they are timed."""
    asked: list[int] = []
    untimed: list[bool] = []
    timed = measure.run_tasks

    def run_tasks(*words: Any) -> Any:
        untimed.append(bool(asked))
        return timed(*words)

    monkeypatch.setattr(measure, "run_tasks", run_tasks)
    monkeypatch.setattr(DraftPace, "of", lambda *key: asked.append(key[1]) or Trials())
    words = ("--prompts", prompts, "--methods", "plain,lookup", "--batch-size")
    for size, adapts in (("1", False), ("2", True)):
        untimed.clear()
        run(*words, size, "--out", tmp_path / size)
        assert bool(asked) is adapts and untimed.pop(0) is adapts


class Interrupted(Exception):
    pass


def test_an_interrupt_loses_the_task_in_hand_alone(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--prompts", prompts, "--out", tmp_path / "o", "--methods", "plain,lookup")
    whole = measure.run_tasks
    real: list[measure.Task] = []
    next_prompts: list[str] = []

    def breaks(decoders: Any, tasks: list[measure.Task], *rest: Any) -> Any:
        if len(real) == 2:
            next_prompts.append(tasks[0].prompt.id)
            raise Interrupted
        real.append(tasks[0])
        return whole(decoders, tasks, *rest)

    monkeypatch.setattr(measure, "run_tasks", breaks)
    with pytest.raises(Interrupted):
        run(*arguments)
    before = read_records(tmp_path / "o")
    assert len(before) == 4
    # and a kill while the third task was written: one whole line of it, one torn
    line = json.dumps(asdict(replace(before[-1], prompt=next_prompts[0])))
    with open(tmp_path / "o/records.jsonl", "a") as file:
        file.write(line + '\n{"suite": "mi')
    monkeypatch.setattr(measure, "run_tasks", whole)
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
    settings = measure.GenerationSettings(Sampling(), 1)
    (record,) = measure.run_tasks({"plain": decoder}, [task], settings)
    assert (record.calls, record.committed, record.tau, record.tokens_per_s) == (0, 0, None, 0.0)


def test_sampled_prompts_and_repeats_have_their_own_seeds(target: Target) -> None:
    decoders = {"plain": decode.load(target, None)}
    settings = measure.GenerationSettings(Sampling(1.0, seed=0), 8)

    def sample(suite: str, prompt: str, repeat: int) -> list[int]:
        task = measure.Task(suite, Prompt(prompt, "x"), (5, 6), repeat, ("plain",))
        return measure.run_tasks(decoders, [task], settings)[0].tokens

    found = [sample(*key) for key in (("s", "1", 0), ("s", "2", 0), ("t", "1", 0), ("s", "1", 1))]
    assert len({tuple(tokens) for tokens in found}) == 4 and sample("s", "1", 0) == found[0]


def test_prompts_are_grouped_by_batches_and_later_turns_follow() -> None:
    talk = Prompt("t", "one", later=("two", "three"))
    suites = {"s": [(talk, [1]), (Prompt("u", "x"), [1]), (Prompt("v", "x"), [1])]}
    groups = measure.plan_tasks(suites, ["plain"], 1, seed=0, batch=2)
    assert sum(len(group) for group in groups) == 5
    assert all(len({task.suite for task in group}) == 1 for group in groups)
    turns = [task for group in groups for task in group if task.prompt.id.startswith("t")]
    assert [task.prompt.id for task in turns] == ["t", "t#2", "t#3"]
    assert turns[2].follows == ("t", "t#2") and not turns[2].tokens
    assert [m["content"] for m in turns[2].prompt.content] == ["one", "two", "three"]


def test_second_turns_batches_and_replays(tmp_path: Path) -> None:
    words = ["--suite", "mtbench", "--data-dir", copy_of_mtbench(tmp_path), "--batch-size", "1,2"]
    words += ["--methods", "plain,lookup", "--out", tmp_path / "o"]
    summary, folder = run(*words)
    records = read_records(folder)
    assert {(r.prompt, r.batch) for r in records} == {
        (f"mtbench-{i}{turn}", size) for i in (1, 2) for turn in ("", "#2") for size in (1, 2)
    }
    assert summary.overall["plain"].prompts == 4 and set(summary.batches) == {1, 2}
    by_turn = {r.prompt: r.prompt_tokens for r in records if r.method == "plain" and r.batch == 1}
    first = next(r for r in records if (r.prompt, r.method) == ("mtbench-1", "plain"))
    assert by_turn["mtbench-1#2"] > by_turn["mtbench-1"] + len(first.tokens) - 1
    (replay,) = json.loads((folder / "replays.json").read_text())
    for lane in replay["lanes"]:
        text = "".join("".join(r["accepted"]) + r["own"] for r in lane["rounds"])
        assert text == decode.load("debug", None).target.detokenize(first.tokens)
        assert sum(r["tokens"] for r in lane["rounds"]) == len(first.tokens)
        seconds = [r["seconds"] for r in lane["rounds"]]
        assert seconds == sorted(seconds)
    again, _ = run(*words)
    assert read_records(folder) == records and again.records == summary.records


def test_batch_sizes_without_enough_prompts_are_skipped(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--prompts", prompts, "--methods", "plain,lookup", "--out", tmp_path / "o")
    config = eval.read_config([*QUIET, *map(str, words), "--batch-size", "4,2,1"])
    summary, folder = eval.evaluate(config, PlainConsole(wide=True))
    line = "mine: batch size 4 needs 4 prompts, not 3"
    assert capsys.readouterr().out.count(f"skipped: {line}") == 1 and line in summary.run.skipped
    assert set(summary.batches) == {2, 1} and summary.batch == 2
    assert "UNFINISHED" not in summary.verdict
    assert "At batch size 2, only full batches are timed: 2 of 3 prompts." in summary.verdict
    assert "batch size 1, only" not in summary.verdict and summary.overall["plain"].prompts == 3
    records = read_records(folder)
    assert Counter(r.batch for r in records) == {2: 6, 1: 6}
    orders = {(r.batch, r.prompt, r.method): r.position for r in records}
    kept = [
        line for line in (folder / "records.jsonl").read_text().splitlines() if '"batch": 2' in line
    ]
    (folder / "records.jsonl").write_text("\n".join(kept) + "\n")
    eval.evaluate(config, PlainConsole(quiet=True))
    again = read_records(folder)
    assert {(r.batch, r.prompt, r.method): r.position for r in again} == orders
    with pytest.raises(UserError, match="--batch-size: mine: batch size 4 needs 4 prompts"):
        run(*words[:-1], tmp_path / "other", "--batch-size", "4")


def test_turns_that_never_fit_are_counted_once(tmp_path: Path) -> None:
    summary, _ = run(
        "--suite", "mtbench", "--data-dir", copy_of_mtbench(tmp_path, "x" * 600), "--methods",
        "plain,lookup", "--temperature", 1, "--repeats", 4, "--out", tmp_path / "o",
    )  # fmt: skip
    assert [line.split(": ")[1] for line in summary.run.skipped] == ["mtbench-1#2", "mtbench-2#2"]
    assert summary.run.suites[0]["prompts"] == 2 and "UNFINISHED" not in summary.verdict


def copy_of_mtbench(folder: Path, second: str = "And again?") -> Path:
    rows = [
        {"question_id": i, "category": "writing", "turns": [f"Say {i} one one.", second]}
        for i in (1, 2)
    ]
    (folder / "mtbench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_answers_are_scored_alike(tmp_path: Path) -> None:
    rows = [{"question": f"{i} + {i}?", "answer": f"so #### {2 * i}"} for i in range(1, 4)]
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--suite", "gsm8k", "--data-dir", tmp_path, "--methods", "plain,lookup"]
    summary, folder = run(*words, "--out", tmp_path / "o")
    assert all(record.score is not None for record in read_records(folder))
    found = summary.suites["gsm8k"]["lookup"]
    assert found.score == summary.suites["gsm8k"]["plain"].score
    assert found.score_difference.value == 0.0
    assert "Scores of plain decoding and lookup are equal on 1 suite." in summary.verdict
