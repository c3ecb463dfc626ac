"""A measurement: what it runs and leaves out, its folder, its baseline."""

import datetime
from pathlib import Path

import pytest

import decode
from decode import eval
from decode.evaluation import session
from decode.evaluation.plan import make_plan
from decode.evaluation.records import append, read_records, read_run
from decode.evaluation.tokenized import tokenize_suites
from specalign.common.errors import UserError
from specalign.common.terminal import PlainConsole
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from specalign.suites.prompt import Prompt
from specalign.suites.sources import Loaded
from tests.builders import switching_target
from tests.measurements import QUIET, fill_report, record, run_eval
from tests.target_models import save_target

pytestmark = pytest.mark.usefixtures("no_plots")


def test_long_prompts_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.txt"
    path.write_text("x" * 600 + "\nShort.\n")
    config = eval.read_config(
        [*QUIET, "--prompts", str(path), "--out", str(tmp_path / "o"), "--methods", "plain"]
    )
    summary, _ = eval.evaluate(config, PlainConsole(wide=True))
    assert capsys.readouterr().out.count("skipped: p: 1 of 2 prompts can't be used") == 1
    assert summary.overall["plain"].prompts == 1
    assert "context" in summary.run.skipped[0]


def test_tools_that_the_template_ignores_are_reported(target: Target) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    content = Conversation(({"role": "user", "content": "A"},), (tool,))
    suites = [
        Loaded(name, name, "tools", [Prompt("1", one), Prompt("2", one)], "here")
        for name, one in (("tools", content), ("others", "A"))
    ]
    _, (line,) = tokenize_suites(target, suites)
    assert line.startswith("declared tools (tools): the chat template of target 'debug' does not")


def test_a_resumed_run_keeps_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the target's chat template reads the clock."""
    target = switching_target()
    template = target.tokenizer.chat_template
    target.tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + template
    save_target(target, tmp_path / "T")
    words = [w if w != "debug" else str(tmp_path / "T") for w in QUIET]
    (tmp_path / "p.txt").write_text("Short.\n")
    words += ["--prompts", str(tmp_path / "p.txt"), "--out", str(tmp_path / "o")]
    words += ["--methods", "plain"]
    found = []
    for day in (1, 2):

        class Day(datetime.date):
            @classmethod
            def today(cls, day: int = day) -> datetime.date:
                return cls(2026, 12, day)

        monkeypatch.setattr(session.datetime, "date", Day)
        eval.evaluate(eval.read_config(words), PlainConsole(wide=True))
        found.append(read_run(tmp_path / "o").settings)
    assert found[0]["date"] == "2026-12-01" and found[0] == found[1]


def test_another_corpus_is_another_measurement(prompts: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "c.txt"
    corpus.write_text("one two three")
    words: tuple[object, ...] = ("--prompts", prompts, "--out", tmp_path / "o")
    words += ("--methods", f"retrieval:corpus={corpus}")
    run_eval(*words)
    run_eval(*words)
    corpus.write_text("three two one")
    with pytest.raises(UserError, match="contains a measurement with other settings .corpus_hash"):
        run_eval(*words)


def test_later_records_of_the_same_generation_count(tmp_path: Path) -> None:
    folder = fill_report(tmp_path / "o")
    append(folder, [record("plain", "p0", 99.0, 20, 20)])
    records = read_records(folder)
    assert len(records) == 18 and records[0].seconds == 99.0


def test_the_drafters_that_figures_depend_on() -> None:
    words = ["--target", "debug", "--drafter", "autoregressive=debug"]
    plan, _ = make_plan(eval.read_config([*words, "--methods", "lookup"]), print)
    assert (list(plan.methods), plan.drafters) == (["plain", "lookup"], {})
    plan, left_out = make_plan(eval.read_config([*words, "--methods", "all"]), print)
    assert plan.drafters == {"autoregressive": "debug"}
    assert any("block" in line for line in left_out)
    plan, _ = make_plan(eval.read_config([*words, "--verifier", "token"]), print)
    assert list(plan.methods) == ["plain", "lookup", "drafter", "combined"]
    assert plan.methods["drafter"].verifier == "token" and plan.methods["lookup"].verifier == "auto"


def test_plain_decoding_time_against_transformers(target: Target) -> None:
    decoder, prompt = decode.load(target, None), target.chat_tokens("Say one one one.")
    found = session.time_against_transformers(decoder, prompt, max_new_tokens=8, repeats=1)
    assert found["identical"] is True and found["plain_tokens_per_s"] > 0
    speeds = found["plain_tokens_per_s"], found["transformers_tokens_per_s"]
    assert found["ratio"] == pytest.approx(speeds[0] / speeds[1])
    assert 10_000 < found["parameters"] < 10**6
    assert found["ratios"] == [pytest.approx(found["ratio"], rel=1e-3)]
    assert session.time_against_transformers(decoder, [])["error"]
