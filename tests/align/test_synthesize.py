"""What a user gets wrong: one line on stderr that names it, exit code 2, no traceback, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from align import synthesize
from align.config.recipe_files import FOLDER
from align.target.loading import load_target
from tests.loopback_server import Loopback

DEBUG = "recipe=debug_block"

WORDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "nothing": ([], ("command line", "recipe=NAME", "recipe=block", "--help")),
    "no recipe": (["seed=1"], ("recipe=NAME is missing (recipe=block for instance",)),
    "unknown recipe": (["recipe=debug_blok"], ("debug_blok", "did you mean 'debug_block'")),
    "recipe with no name": (["recipe="], ("recipe ''", "debug_block")),
    "a path without .yaml": (["recipe=nowhere/mine"], ("no such file",)),
    "no such file": (["recipe=/nowhere/mine.yaml"], ("/nowhere/mine.yaml", "no such file")),
    "a name too long": (["recipe=" + "a" * 5000], ("can't be read", "File name too long")),
    "unknown user": (["recipe=~nobody_of_that_name/x.yaml"], ("recipe='~nobody", "no such user")),
    "output of an unknown user": (
        [DEBUG, "output=~nobody_of_that_name/x"],
        ("output='~nobody", "no such user"),
    ),
    "unknown key": (
        [DEBUG, "trainer.max_step=3"],
        ("command line", "trainer.max_step", "'trainer.max_steps'"),
    ),
    "unknown group": ([DEBUG, "training.max_steps=3"], ("training.max_steps", "'trainer.max_steps'")),
    "key without its group": ([DEBUG, "max_steps=3"], ("max_steps", "'trainer.max_steps'")),
    "wandb-like unknown key": ([DEBUG, "--objective.wieghting=d_pace"], ("'objective.weighting'",)),
    "a group": ([DEBUG, "trainer=3"], ("trainer=3", "group of keys", "trainer.accumulate", " more)")),
    "no equals sign": ([DEBUG, "seed"], ("'seed' is not key=value",)),
    "spaces around the equals sign": (
        [DEBUG, "trainer.max_steps", "=", "5"],
        ("'trainer.max_steps' is not key=value (write trainer.max_steps=VALUE, without spaces)",),
    ),
    "a dangling option": ([DEBUG, "--seed"], ("'--seed' is not key=value",)),
    "an option and a word": ([DEBUG, "--seed", "trainer.anchors=2"], ("'--seed' is not key=value",)),
    "a short option": ([DEBUG, "-x"], ("'-x' is not key=value",)),
    "unknown key after a plus sign": ([DEBUG, "+sed=1"], ("unknown key 'sed'", "'seed'")),
    "removed key": ([DEBUG, "~seed=1"], ("keys can't be removed", "'seed'")),
    "key twice": ([DEBUG, "seed=1", "seed=2"], ("seed is given twice", "'1'", "'2'")),
    "key twice, once dashed": ([DEBUG, "seed=1", "--seed=1"], ("seed is given twice",)),
    "recipe twice": ([DEBUG, "recipe=smollm2_block"], ("recipe is given twice",)),
    "key twice, once in a group": ([DEBUG, "trainer.anchors=1", "trainer={anchors: 2}"], ("given twice",)),
    "base on the command line": ([DEBUG, "base=smollm2_block"], ("base", "recipe=NAME")),
    "text for an integer": ([DEBUG, "trainer.max_steps=many"], ("trainer.max_steps='many'", "an integer")),
    "fraction for an integer": ([DEBUG, "trainer.max_steps=1.5"], ("trainer.max_steps=1.5", "an integer")),
    "bool for an integer": ([DEBUG, "seed=true"], ("seed=True", "an integer")),
    "nothing for an integer": ([DEBUG, "seed="], ("seed= has no value", "an integer")),
    "endless integer": ([DEBUG, "seed=" + "9" * 5000], ("seed=", "an integer")),
    "bool for a number": ([DEBUG, "trainer.ema=false"], ("trainer.ema=False", "a number")),
    "yes for a bool": ([DEBUG, "drafter.init_from_target=yes"], ("='yes'", "true or false")),
    "number for a list": (
        [DEBUG, "data.answer_temperatures=1"],
        ("data.answer_temperatures=1", "a list of numbers"),
    ),
    "text in a list": ([DEBUG, "trainer.betas=[0.9, b]"], ("trainer.betas[1]='b'", "a number")),
    "list for a mapping": ([DEBUG, "objective.terms=[streak]"], ("objective.terms", "a mapping")),
    "text for a weight": (
        [DEBUG, "objective.terms.streak=much"],
        ("objective.terms.streak='much'", "a number"),
    ),
    "list for text": ([DEBUG, "target={name: [a]}"], ("target.name=['a']", "text")),
    "unknown choice": ([DEBUG, "drafter.context=shared"], ("drafter.context='shared'", "'shared_kv'")),
    "unknown stage": ([DEBUG, "stage=calibration"], ("stage='calibration'", "'calibrate'")),
    "unknown strategy": ([DEBUG, "launch.strategy=deepspeed"], ("launch.strategy='deepspeed'", "deepspeed_")),
    "unknown loss": ([DEBUG, "objective.terms.foward_kl=1"], ("objective.terms.foward_kl", "'forward_kl'")),
    "no loss": ([DEBUG, "objective.terms={}"], ("objective.terms", "at least one loss", "streak")),
    "unknown logger": ([DEBUG, "trainer.logger=wand"], ("trainer.logger", "'wand'", "'wandb'")),
    "unknown device": ([DEBUG, "target.device=gpu"], ("target.device='gpu'", "cuda:N")),
    "negative": ([DEBUG, "trainer.learning_rate=-1e-3"], ("trainer.learning_rate=-0.001", "greater than 0")),
    "zero": ([DEBUG, "trainer.max_steps=0"], ("trainer.max_steps=0", "at least 1")),
    "too large": ([DEBUG, "data.top_p=1.1"], ("data.top_p=1.1", "at most 1")),
    "seed too large": ([DEBUG, "seed=4294967296"], ("seed=4294967296", "at most 4294967295")),
    "nan": ([DEBUG, "trainer.learning_rate=.nan"], ("trainer.learning_rate=nan", "a finite number")),
    "infinite": ([DEBUG, "objective.terms.streak=.inf"], ("objective.terms", "a finite number")),
    "overflow": ([DEBUG, "trainer.learning_rate=1e999"], ("trainer.learning_rate=inf", "a finite number")),
    "negative in a list": (
        [DEBUG, "data.answer_temperatures=[0, -1]"],
        ("data.answer_temperatures", "at least 0"),
    ),
    "empty list": ([DEBUG, "data.answer_temperatures=[]"], ("data.answer_temperatures", "at least one")),
    "one beta": ([DEBUG, "trainer.betas=[0.9]"], ("trainer.betas=[0.9]", "two numbers")),
    "warm-up longer than the run": (
        [DEBUG, "trainer.warmup_steps=13"],
        ("command line: trainer.warmup_steps=13", "trainer.max_steps=12"),
    ),
    "layers that don't match": (
        [DEBUG, "drafter.target_layers=[0, 1]"],
        ("drafter.target_layers=[0, 1]", "drafter.layers=1", "shared_kv"),
    ),
    "no layers": ([DEBUG, "drafter.target_layers=[]", "drafter.context=taps"], ("drafter.target_layers",)),
    "rows that can't be split": (
        [DEBUG, "launch.devices=3"],
        ("trainer.batch_size=2", "multiple", "launch.devices"),
    ),
    "block longer than a row": ([DEBUG, "data.length=8", "drafter.block_size=8"], ("drafter.block_size=8",)),
    "empty target": ([DEBUG, "target.name="], ("target.name must not be empty",)),
    "name with a folder": ([DEBUG, "name=a/b"], ("name='a/b'", "a file name")),
    "control characters": ([DEBUG, "output=a\nb\x00c"], ("output=", "control characters")),
    "bad YAML in a word": ([DEBUG, "trainer.betas=[0.9"], ("command line: trainer.betas", "not valid YAML")),
    "an alias in a word": ([DEBUG, "trainer.betas=*b"], ("trainer.betas", "aliases")),
}

FILES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "empty": ("", ("bad.yaml: is empty",)),
    "comments only": ("# nothing yet\n", ("bad.yaml: is empty",)),
    "a list": ("- a\n- b\n", ("bad.yaml: must hold `key: value` lines",)),
    "a word": ("hello\n", ("bad.yaml: must hold", "one value")),
    "bad syntax": ("trainer: {max_steps: 3\nseed: 1\n", ("bad.yaml: not valid YAML: line 2",)),
    "a tab": ("trainer:\n\tmax_steps: 3\n", ("bad.yaml: not valid YAML: line 2", "'\\t'")),
    "key twice": ("seed: 1\nname: a\nseed: 2\n", ("bad.yaml", "line 3", "'seed' stands twice")),
    "key twice in a group": ("trainer: {max_steps: 1, max_steps: 2}\n", ("'max_steps' stands twice",)),
    "key twice, dotted": ("trainer.anchors: 1\ntrainer: {anchors: 2}\n", ("trainer.anchors is given twice",)),
    "unknown key": ("trainer: {lerning_rate: 1}\n", ("bad.yaml: unknown key", "'trainer.learning_rate'")),
    "unknown group": ("trainr: {max_steps: 1}\n", ("bad.yaml: unknown key 'trainr'",)),
    "key that is no name": ("3: 1\n", ("bad.yaml", "key 3 is not a name")),
    "key that is a list": ("? [a]\n: 1\n", ("bad.yaml", "is not a name")),
    "a group that is a value": ("data: 300\n", ("bad.yaml: data=300", "group of keys")),
    "a number with a comma": (
        "trainer: {learning_rate: '1,5'}\n",
        ("bad.yaml: trainer.learning_rate='1,5'",),
    ),
    "two documents": ("seed: 1\n---\nseed: 2\n", ("bad.yaml: not valid YAML",)),
    "code in a tag": ("seed: !!python/object/apply:os.system ['true']\n", ("bad.yaml", "tags")),
    "a float by tag": ("seed: !!float nonsense\n", ("bad.yaml", "tags")),
    "a list of itself": ("trainer: {betas: &b [*b]}\n", ("bad.yaml", "aliases")),
    "nested too deeply": ("seed: " + "[" * 5000, ("bad.yaml: not valid YAML",)),
    "not UTF-8": (b"name: \xff\xfe\n", ("bad.yaml: is not UTF-8",)),
    "a NUL": (b"name: a\x00b\n", ("bad.yaml: not valid YAML",)),
    "unknown base": ("base: debug_blok\n", ("bad.yaml: base", "did you mean 'debug_block'")),
    "base that is gone": ("base: ./gone.yaml\n", ("bad.yaml: base", "no such file")),
    "base that is a list": ("base: [debug_block]\n", ("bad.yaml: base=['debug_block']",)),
    "base of itself": ("base: ./bad.yaml\n", ("bad.yaml: base leads back to itself",)),
    "impossible value": ("trainer: {anchors: -1}\n", ("bad.yaml: trainer.anchors=-1", "at least 1")),
}


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        synthesize.main(argv)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    check_line(err, words)


def check_line(err: str, words: tuple[str, ...]) -> None:
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    assert len(err) < 2000
    for word in words:
        assert word in err


@pytest.mark.parametrize("case", WORDS)
def test_malformed_words(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, *WORDS[case])


@pytest.mark.parametrize("case", FILES)
def test_malformed_recipe_files(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = FILES[case]
    path = tmp_path / "bad.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    refused(capsys, [f"recipe={path}"], words)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_and_an_unreadable_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # long paths are cut in messages
    Path("folder.yaml").mkdir()
    refused(capsys, ["recipe=./folder.yaml"], ("folder.yaml", "no such file"))
    Path("round.yaml").symlink_to("round.yaml")
    refused(capsys, ["recipe=./round.yaml"], ("round.yaml", "no such file"))


def test_two_bases_that_lead_to_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("base: ./b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: ./a.yaml\n")
    refused(capsys, [f"recipe={tmp_path}/a.yaml"], ("base leads back to itself",))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["recipe=debug_blok"], ("debug_blok", "did you mean 'debug_block'")),
        ([DEBUG, "--trainer.max_step=3"], ("command line: unknown key", "'trainer.max_steps'")),
    ],
    ids=["recipe", "key"],
)
def test_malformed_words_of_a_real_process(argv: list[str], words: tuple[str, ...], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    run = subprocess.run(
        [sys.executable, "-m", "align.synthesize", *argv],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    check_line(run.stderr, words)
    assert not list(tmp_path.iterdir())


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing written that would keep the settings of a first try."""
    with pytest.raises(SystemExit) as stop:
        synthesize.main([DEBUG, f"output={tmp_path}/out", "data.writer=openai:http://127.0.0.1:9"])
    assert stop.value.code == 2
    check_line(capsys.readouterr().err, ("http://127.0.0.1:9/v1/models: no answer", "is the server up?"))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_server_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Loopback(load_target("debug")) as server:
        words = [
            DEBUG,
            f"output={tmp_path}",
            "data.samples=4",
            "data.batch_size=4",
            "data.max_answer_tokens=4",
        ]
        synthesize.main([*words, f"data.writer=openai:{server.url}/v1"])
    said = capsys.readouterr().out
    assert "writes as 'debug', up to 64 requests at once, exact token ids; 100% of its greedy tokens" in said
    assert "align.train" in said and (tmp_path / "data" / "shard-00000.safetensors").is_file()
