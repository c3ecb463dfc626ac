"""What a command lacks is one line before torch is imported: a mistyped command answers within a second."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.preflight import check_training
from specalign.common.errors import UserErrors

TRAIN, WRITE = "align.train", "align.synthesize"


CHILD = """
import contextlib, importlib, io, json, sys
for module, words in json.loads(sys.argv[1]):
    err, code = io.StringIO(), 0
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            importlib.import_module(module).main(words)
        except SystemExit as stop:
            code = stop.code
    heavy = sorted({"torch", "transformers", "lightning", "datasets"} & set(sys.modules))
    print(json.dumps([code, err.getvalue(), heavy]))
"""


def test_torch_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    cases = [
        (TRAIN, "recipe=gpt2xl_calib data.write=never", "no data yet, and data.write=never; "),
        (TRAIN, "recipe=debug_block drafter.init=nowhere", "'nowhere': no such folder"),
        (WRITE, "recipe=debug_block data.text=no/such/folder", "data.text='no/such/folder'"),
        (WRITE, "recipe=debug_block output=file", "output=file/data: can't be written"),
        (WRITE, "recipe=debug_block --print", ""),
    ]
    asked = json.dumps(
        [(module, [*words.split(), "target.device=cpu"]) for module, words, _ in cases]
    )
    command = [sys.executable, "-c", CHILD, asked]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == len(cases), run.stderr
    for (module, words, message), (code, said, heavy) in zip(cases, found, strict=True):
        assert code == (2 if message else 0) and message in said, (module, words, said)
        assert not heavy, (module, words, heavy)
        lines = said.splitlines()
        assert len(lines) <= 1 or all(line.startswith("  - ") for line in lines[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing is made


def test_all_that_is_missing_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specalign.common.hub.hub_reachable", lambda: False)
    monkeypatch.setattr("align.config.hardware.find_spec", lambda name: None)
    words = [
        "target.name=me/finetune",
        "drafter.init=lab/drafter",
        "data.prompts=lab/prompts",
        "data.text=lab/text",
    ]
    more = ["trainer.logger=csv,wandb", f"output={tmp_path / 'o'}"]
    with pytest.raises(UserErrors) as caught:
        recipe = load_recipe(["recipe=adapt", *words, *more])
        check_training(recipe)
    problems = caught.value.problems
    assert [
        p
        for p in problems
        if "hf download me/finetune" in p and p.startswith("target 'me/finetune'")
    ]
    assert [
        p
        for p in problems
        if p.startswith("drafter.init='lab/drafter'") and p.endswith("hf download lab/drafter")
    ]
    for kind, name in (("prompts", "lab/prompts"), ("text", "lab/text")):
        (line,) = [p for p in problems if p.startswith(f"data.{kind}=")]
        assert line.endswith(f"hf download --repo-type dataset {name}")
    assert [p for p in problems if "not installed (pip install" in p and "wandb" in p]
    assert len(problems) == 5 and str(caught.value).count("\n  - ") == 5


def test_a_device_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """Lines are added to it while training runs; a pipe would be waited for."""
    name = "metrics.csv"
    (tmp_path / name).symlink_to("/dev/null")
    with pytest.raises(OSError, match=f"is not a regular file.*{name}"):
        check_training(load_recipe(["recipe=debug_block", f"output={tmp_path}"]))
