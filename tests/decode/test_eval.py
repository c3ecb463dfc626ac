"""The eval command on the debug target: records, identity, interleaving, resuming, exit codes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import decode
from align.common.errors import UserError
from align.config.recipe import DrafterConfig
from align.models.block_checkpoint import save_drafter
from align.target.model import Target
from align.training.makers import from_target
from decode import eval
from decode.benchmark import baseline
from decode.benchmark import runner as measure
from decode.engine.output import Tree
from decode.reporting.records import Divergence, read_records, read_run
from decode.speculation.sampling import Sampling
from decode.suites import registry as chosen
from decode.suites.prompt import Prompt, Suite
from tests.builders import QUIET
from tests.builders import run_eval as run

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module")
def drafter(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = DrafterConfig(block_size=3, layers=1, markov_rank=0)
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(from_target(target, options, None), folder, dtype=torch.float32)
    return folder


def test_the_methods_side_by_side(prompts: Path, drafter: Path, tmp_path: Path) -> None:
    summary, folder = run("--prompts", prompts, "--drafter", drafter, "--out", tmp_path / "o", "--repeats", 2)
    records = read_records(folder)
    assert Counter(r.method for r in records) == dict.fromkeys(("plain", "lookup", "drafter", "combined"), 6)
    assert {r.repeat for r in records} == {0, 1} and len({r.key for r in records}) == 24
    for record in records:
        assert record.identical is True and record.divergence is None
        assert record.new_tokens == len(record.tokens) == record.committed + 1 <= 12
        assert record.calls == len(record.accepted) == len(record.drafted)
        assert sum(record.accepted) <= record.committed <= sum(record.accepted) + record.calls
        assert record.tau == pytest.approx(record.committed / record.calls)
        assert record.prefill_seconds > 0 and record.seconds > 0
    assert all(r.tau == 1 and not any(r.drafted) for r in records if r.method == "plain")
    for method in ("plain", "lookup", "drafter", "combined"):
        figures = summary["suites"]["mine"][method]
        assert {"speedup", "speedup_lo", "speedup_hi", "tau", "tau_macro", "tokens_per_s"} <= figures.keys()
        assert figures["prompts"] == figures["identical"] == 3 and figures["bugs"] == 0
    assert summary["suites"]["mine"]["plain"]["speedup"] == 1.0
    assert {"settings", "machine", "versions", "target_hash", "drafter_hash", "git_commit"} <= summary.keys()
    assert summary["drafter_hash"] and len(summary["target_hash"]) == 64
    assert {p.name for p in folder.iterdir()} == {
        "records.jsonl", "run.json", "summary.json", "report.html", "report.png",
    }  # fmt: skip
    assert json.loads((folder / "summary.json").read_text())["verdict"] == summary["verdict"]


def test_sampling_has_no_identity_and_repeats_draw_anew(prompts: Path, drafter: Path, tmp_path: Path) -> None:
    summary, folder = run(
        "--prompts",
        prompts,
        "--drafter",
        drafter,
        "--out",
        tmp_path / "o",
        "--temperature",
        1,
        "--repeats",
        2,
    )
    records = read_records(folder)
    assert all(r.identical is None and r.divergence is None for r in records)
    figures = summary["suites"]["mine"]["drafter"]
    assert figures["identical"] is None and figures["speedup"] is not None
    plain = {(r.prompt, r.repeat): r.tokens for r in records if r.method == "plain"}
    assert all(plain[prompt, 0] != plain[prompt, 1] for prompt in "123")


def test_orders_are_balanced_and_seeded() -> None:
    suites = [("s", [(Prompt(str(i), "x"), [1]) for i in range(6)])]
    tasks = measure.plan(suites, ["plain", "lookup", "drafter"], 2, seed=1)
    assert len(tasks) == 12 and len(Counter(t.order for t in tasks)) == 6
    assert set(Counter(t.order for t in tasks).values()) == {2}
    assert tasks == measure.plan(suites, ["plain", "lookup", "drafter"], 2, seed=1)
    assert [t.order for t in tasks] != [t.order for t in measure.plan(suites, tasks[0].order, 2, seed=2)]


def test_every_beginning_is_spread_over_every_suite() -> None:
    suites = [(s, [(Prompt(f"{s}{i}", "x"), [1]) for i in range(n)]) for s, n in (("a", 80), ("b", 20))]
    tasks = measure.plan(suites, ["plain", "lookup"], 1, seed=1)
    assert len({t.prompt.id for t in tasks}) == 100
    for done in (10, 25, 50):
        assert sum(t.suite == "b" for t in tasks[:done]) == pytest.approx(done / 5, abs=1)
        of_a = [
            int(t.prompt.id[1:]) // 20 for t in tasks[:done] if t.suite == "a"
        ]  # four categories in blocks
        assert max(Counter(of_a).values()) - min(Counter(of_a).values()) <= 3


def test_another_corpus_is_another_measurement(prompts: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "c.txt"
    corpus.write_text("one two three")
    words = ("--prompts", prompts, "--out", tmp_path / "o", "--methods", f"retrieval:corpus={corpus}")
    run(*words)
    run(*words)
    corpus.write_text("three two one")
    with pytest.raises(UserError, match="holds a measurement under other settings .corpus_hash"):
        run(*words)


class Interrupted(Exception):
    pass


def test_an_interrupt_loses_the_task_in_hand_alone(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--prompts", prompts, "--out", tmp_path / "o", "--methods", "plain,lookup")
    whole = measure.run_task
    real: list[measure.Task] = []

    def breaks(decoders: Any, task: measure.Task, *rest: Any) -> Any:
        if len(real) == 2:
            raise Interrupted
        real.append(task)
        return whole(decoders, task, *rest)

    monkeypatch.setattr(measure, "run_task", breaks)
    with pytest.raises(Interrupted):
        run(*arguments)
    before = read_records(tmp_path / "o")
    assert len(before) == 4
    with open(tmp_path / "o/records.jsonl", "a") as file:  # and a line torn by a kill
        file.write('{"suite": "mi')
    monkeypatch.setattr(measure, "run_task", whole)
    summary, folder = run(*arguments)
    after = read_records(folder)
    assert after[:4] == before and len(after) == 6 and summary["records"] == 6
    again, _ = run(*arguments)  # nothing left to do
    assert read_records(folder) == after and again["suites"] == summary["suites"]
    run(*arguments, "--no-resume")
    assert [r.tokens for r in read_records(folder)] == [r.tokens for r in after]
    assert read_records(folder) != after  # measured anew


def test_a_changed_output_ends_with_exit_code_1(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(
        target: Target,
        prompt: list[int],
        plain: list[int],
        other: list[int],
        drafted: list[int],
        accepted: list[int],
        trees: list[Tree | None],
        **more: Any,
    ) -> Divergence | None:
        return Divergence(3, 5, 6, "BUG", 1.5, 0.001) if any(drafted) else None

    monkeypatch.setattr(measure, "examine", examine)
    with pytest.raises(SystemExit) as stop:
        eval.main([*QUIET, "--prompts", str(prompts), "--out", str(tmp_path / "o"), "--methods", "lookup"])
    assert stop.value.code == 1
    output = capsys.readouterr().out
    assert "OUTPUT CHANGED" in " ".join(output.split()) and "BUG" in output
    assert 'class="bug"' in (tmp_path / "o/report.html").read_text()


def test_the_command_prints_table_sources_verdict_and_what_is_next(
    prompts: Path, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eval.main([*QUIET, "--prompts", str(prompts), "--out", str(tmp_path / "o"), "--drafter", str(drafter)])
    output = " ".join(capsys.readouterr().out.split())
    for part in (
        "tokens/s",
        "τ",
        "3/3",
        "mine: 3 prompts from",
        "identical to plain",
        "report.html",
        "Next:",
        "3/3 rounds",
    ):
        assert part in output, part


def test_limit_and_builtin_suite_and_default_methods(tmp_path: Path) -> None:
    summary, _ = run("--limit", 4, "--out", tmp_path / "o")
    assert list(summary["overall"]) == ["plain", "lookup"]
    assert [s["prompts"] for s in summary["sources"]] == [4] and summary["settings"]["suites"] == ["builtin"]


def test_a_group_leaves_out_what_no_source_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from align.common.errors import UserError
    from decode.suites.sources import Loaded

    def load_suite(suite: Suite, data_dir: Path | None) -> Loaded:
        if suite.name != "gsm8k":
            raise UserError(f"suite {suite.name!r} can't be had")
        return Loaded("gsm8k", "GSM8K", "math", [Prompt("1", "How many?")], "here")

    monkeypatch.setattr(chosen, "load_suite", load_suite)
    summary, _ = run("--suite", "math", "--out", tmp_path / "o", "--methods", "plain")
    assert list(summary["suites"]) == ["gsm8k"] and len(summary["skipped"]) == 3
    with pytest.raises(UserError, match="math500"):
        run("--suite", "gsm8k,math500", "--out", tmp_path / "p")


def test_prompts_longer_than_the_context_are_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("x" * 600 + "\nShort.\n")
    summary, _ = run("--prompts", path, "--out", tmp_path / "o", "--methods", "plain")
    assert summary["overall"]["plain"]["prompts"] == 1
    assert "context" in summary["skipped"][0] and summary["skipped"][0].startswith("p: 1 prompt")


def test_an_answer_of_one_token_has_no_decoding(target: Target) -> None:
    decoder = decode.load(target, None)
    task = measure.Task("s", Prompt("1", "x"), (5, 6), 0, ("plain",))
    (record,) = measure.run_task({"plain": decoder}, task, measure.Settings(Sampling(), 1))
    assert (record.calls, record.committed, record.tau, record.tokens_per_s) == (0, 0, None, 0.0)


def test_plain_decoding_against_transformers(target: Target) -> None:
    found = baseline.against_transformers(
        decode.load(target, None), [target.chat_tokens("Say one one one.")], max_new_tokens=8, repeats=1
    )
    assert found["identical"] is True and found["plain_tokens_per_s"] > 0 and found["prompts"] == 1
    assert found["ratio"] == pytest.approx(found["plain_tokens_per_s"] / found["transformers_tokens_per_s"])
    assert baseline.against_transformers(decode.load(target, None), [[]])["error"]


def test_the_resolved_settings_are_kept(prompts: Path, tmp_path: Path) -> None:
    _, folder = run(
        "--prompts", prompts, "--out", tmp_path / "o", "--methods", "plain", "--seed", 3, "--limit", 1
    )
    settings = read_run(folder).settings
    assert (settings["seed"], settings["limit"], settings["dtype"], settings["device"]) == (
        3,
        1,
        "float32",
        "cpu",
    )
    assert settings["threads"] == torch.get_num_threads()


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_lossy_verifier_is_marked_everywhere(
    temperature: int, prompts: Path, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every record, in the summary, the table, the verdict and the page; the exact methods beside it are not."""
    arguments = ["--prompts", prompts, "--drafter", drafter, "--temperature", temperature]
    arguments += ["--verifier", "lossy_top_beta", "--out", tmp_path / "o"]
    eval.main([*QUIET, *map(str, arguments)])  # no exit code 1: a difference was asked for
    records = read_records(tmp_path / "o")
    for record in records:
        assert record.lossy == (record.method in ("drafter", "combined"))
        assert (record.verifier == "lossy_top_beta") == record.lossy
        assert record.divergence is None
    changed = [r for r in records if r.lossy and r.identical is False]
    assert bool(changed) == (temperature == 0)
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert [m for m, f in summary["overall"].items() if f["lossy"]] == ["drafter", "combined"]
    assert "NOT LOSSLESS: drafter was verified by lossy_top_beta" in summary["verdict"]
    page = (tmp_path / "o/report.html").read_text()
    assert "Not lossless, by the verifier that was asked for: drafter (lossy_top_beta)" in page
    assert "drafter, lossy_top_beta" in page and "drafter, lossy_top_beta" in capsys.readouterr().out
    exact, folder = run(
        "--prompts", prompts, "--drafter", drafter, "--verifier", "auto", "--out", tmp_path / "e"
    )
    assert not any(f["lossy"] for f in exact["overall"].values()) and "LOSSY" not in exact["verdict"]
    assert {r.verifier for r in read_records(folder)} == {"", "greedy"}


def test_a_verifier_that_does_not_fit_is_refused(prompts: Path, drafter: Path, tmp_path: Path) -> None:
    for name, line in (("greedi", "unknown verifier 'greedi'"), ("greedy", "exact only at temperature 0")):
        with pytest.raises(UserError, match=line):
            run(
                "--prompts",
                prompts,
                "--drafter",
                drafter,
                "--temperature",
                1,
                "--verifier",
                name,
                "--out",
                tmp_path,
            )
