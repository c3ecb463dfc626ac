"""In-domain next to held-out τ, and which prompts are in the training data."""

import json
from pathlib import Path

import pytest

from decode.evaluation.contamination import ASKS, find_overlaps
from decode.evaluation.domains import compare_domains
from decode.evaluation.records import DrafterTraining
from decode.evaluation.statistics import Estimate
from specalign.common.errors import UserError
from specalign.folder.chat import Chat
from specalign.folder.training_record import ExpectedTau, TrainingRecord, save_record
from specalign.lm.model import Target
from specalign.rows import shards as data
from specalign.suites.registry import SUITES
from tests.measurements import run_eval

pytestmark = pytest.mark.usefixtures("no_plots")
CLEAN = "How many legs do three spiders and two beetles have when they all sit together on a wall?"
KNOWN = "Find the sum of all whole numbers from one to ninety that can be divided by seven evenly."
RECORD = TrainingRecord(
    draft_tokens=3,
    expected_tau={"greedy": ExpectedTau(9.5, 0.1, 1234), "sampling": ExpectedTau(8.5, 0.1, 99)},
    **{"samples": 10, "tokens": 500, "prompts": None, "text": ["docs"], "removed": {"math500": 2}},
)


@pytest.fixture
def words(tmp_path: Path, drafter: Path) -> list[object]:
    """Options of a measurement of two suites."""
    rows = {"gsm8k": {"question": CLEAN, "answer": "#### 30"}}
    rows["math500"] = {"problem": KNOWN, "answer": "546"}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    suites = ["--suite", "gsm8k,math500", "--data-dir", tmp_path, "--out", tmp_path / "o"]
    return [*suites, "--drafter", drafter, "--methods", "lookup,drafter"]


def test_contaminated_and_clean_suites(
    tmp_path: Path, words: list[object], drafter: Path, target: Target
) -> None:
    summary, folder = run_eval(*words)
    own, *suites = [row.cells({}) for row in summary.domains]
    assert own[1:] == ["not recorded", "", "same source"]  # a folder of earlier versions
    unknown = "not checked: the drafter's folder records no training data"
    assert [(row[0], row[2], row[3]) for row in suites] == [
        ("gsm8k", "1 prompt", unknown), ("math500", "1 prompt", unknown),
    ]  # fmt: skip

    rows = [{"messages": [{"role": "user", "content": f"Hello! {KNOWN.upper()}"}]}, {"text": "no"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checked, _ = run_eval(*words, "--training-data", tmp_path / "data.jsonl")  # is continued
    assert [row.contamination for row in checked.domains[1:]] == ["0 of 1 prompt", "1 of 1 prompt"]
    assert "NOT HELD OUT: 1 of 1 prompt of MATH-500" in checked.verdict
    assert "GSM8K overlap" not in checked.verdict
    saved = json.loads((folder / "summary.json").read_text())
    assert saved["training"]["overlaps"]["math500"] == {"checked": 1, "found": ["math500-0"]}
    again, _ = run_eval(*words)  # keeps what was checked
    assert again.domains == checked.domains

    tokens = target.tokenizer(KNOWN)["input_ids"]
    for name in ("written", "other"):
        samples = data.from_lists([[1], tokens], [1, 1], [0, 0])
        sha256 = data.write_shard(tmp_path / name, 0, samples)
        manifest = {"shards": 1, "samples": 2, "tokens": 9, "sha256": [sha256], "target": name}
        manifest["target_sha256"] = target.hash if name == "written" else "another"
        data.write_manifest(tmp_path / name, manifest)
    shards, _ = run_eval(*words, "--training-data", tmp_path / "written")
    assert shards.domains == checked.domains
    with pytest.raises(UserError, match="was tokenised for 'other', not for 'debug'"):
        run_eval(*words, "--training-data", tmp_path / "other")
    with pytest.raises(UserError, match="neither a data folder .align.synthesize. nor a file"):
        run_eval(*words, "--training-data", tmp_path / "gone")
    with pytest.raises(UserError, match="--training-data is of a drafter"):
        run_eval(*words[:-1], "lookup", "--training-data", tmp_path / "data.jsonl")

    save_record(drafter, Chat(), RECORD)
    recorded, _ = run_eval(*words)
    (drafter / "specalign.json").unlink()
    row = recorded.domains[0]
    assert row.tau == Estimate(9.5, pytest.approx(9.304), pytest.approx(9.696), 1234)
    where = "in-domain: training's held-out rows, 3 draft tokens"
    assert row.cells({})[:3] == [where, "9.50 [9.30, 9.70]", "1,234 positions"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 0}, 9.5),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0}, 8.5),
        ({"temperature": 1.0, "top_p": 0.9}, None),
        ({"temperature": 1.0, "top_k": 5}, None),
        ({"temperature": 0.7}, None),
    ],
)
def test_estimates_are_of_the_sampling(settings: dict[str, float], expected: float | None) -> None:
    own, *_ = compare_domains(DrafterTraining("drafter", RECORD), settings, {})
    assert (None if own.tau is None else own.tau.value) == expected


def test_decontaminated_text_is_shown_by_suite() -> None:
    training = DrafterTraining("drafter", RECORD)
    _, *rows = compare_domains(training, {"temperature": 0}, {"gsm8k": None, "math500": None})
    unchecked = "not checked (--training-data PATH)"
    cut = f"other text: 2 documents removed; generated text: {unchecked}"
    assert [row.contamination for row in rows] == [unchecked, cut]


def test_what_this_project_asks_is_no_overlap() -> None:
    rows = {
        "bbh": {"input": "not ( True ) is", "target": "False"},
        "mmlu_pro": {"question": "Which?", "options": ["x", "y"]},
        "gsm8k": {"question": CLEAN, "answer": "#### 30"},
        "mbpp": {"prompt": "Square it.", "test_list": ["assert f(3) == 9"]},
        "humaneval": {"task_id": "a/1", "prompt": "from typing import List\n\n\ndef f(x):\n"},
        "livecodebench": {"question_content": "Square it."}
        | dict.fromkeys(("public_test_cases", "private_test_cases"), "[]"),
    }
    prompts = {name: SUITES[name].read(row, 0) for name, row in rows.items()}
    suites = {name: [(prompt, [1])] for name, prompt in prompts.items() if prompt}
    texts = [f"Square it. {ask} python from typing import List def g(y):" for ask in ASKS]
    assert not any(one.found for one in find_overlaps(suites, texts).values())
    found = find_overlaps(suites, [f"Well: {CLEAN}"])
    assert [name for name, one in found.items() if one.found] == ["gsm8k"]
    assert all(any(ask in str(one.content) for one in prompts.values() if one) for ask in ASKS)
