"""What a command lacks is one line before torch is imported: a mistyped command answers within a second."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.preflight import check_training
from align.training.checkpoints import check_named
from specalign.common.errors import UserError, UserErrors

TRAIN, WRITE = "align.train", "align.synthesize"


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (TRAIN, "recipe=gpt2xl_calib data.write=never", "no data yet, and data.write=never; "),
        (TRAIN, "recipe=debug_block drafter.init=nowhere", "'nowhere': no such folder"),
        (WRITE, "recipe=debug_block --print", None),
    ],
)
def test_torch_is_not_imported(
    tmp_path: Path, module: str, arguments: str, message: str | None
) -> None:
    (tmp_path / "file").write_text("x")
    code = f"""
import sys
from {module} import main
try:
    main({arguments.split()!r})
except SystemExit as stop:
    assert stop.code == {0 if message is None else 2}, stop.code
assert not {{"torch", "transformers", "lightning", "datasets"}} & set(sys.modules)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert message is None or message in run.stderr
    lines = run.stderr.splitlines()
    assert len(lines) <= 1 or all(line.startswith("  - ") for line in lines[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing is made


def test_all_that_is_missing_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specalign.common.hub.hub_reachable", lambda: False)
    monkeypatch.setattr("align.config.hardware.find_spec", lambda name: None)
    words = ["target.name=me/finetune", "drafter.init=lab/drafter", "data.prompts=lab/prompts"]
    words += ["data.text=lab/text", "trainer.logger=csv,wandb", "trainer.resume=no.ckpt"]
    with pytest.raises(UserErrors) as caught:
        recipe = load_recipe(["recipe=adapt", *words, f"output={tmp_path / 'o'}"])
        check_training(recipe, partial(check_named, recipe.trainer.resume))
    for start, end in (
        ("target 'me/finetune'", "hf download me/finetune"),
        ("drafter.init='lab/drafter'", "hf download lab/drafter"),
        ("data.prompts=", "hf download --repo-type dataset lab/prompts"),
        ("data.text=", "hf download --repo-type dataset lab/text"),
        ("trainer.logger=wandb", "not installed (pip install wandb)"),
    ):
        assert [p for p in caught.value.problems if p.startswith(start) and end in p]
    assert len(caught.value.problems) == 6 and str(caught.value).count("\n  - ") == 6


def test_data_are_not_begun_beside_other_things(tmp_path: Path) -> None:
    """A wrong data.path, of a drafter for example, is no place to write to."""
    recipe = load_recipe(
        ["recipe=debug_block", f"output={tmp_path / 'o'}", f"data.path={tmp_path / 'd'}"]
    )
    check_training(recipe)  # nothing there: it will be written
    (tmp_path / "d").mkdir()
    (tmp_path / "d/shard-00000.safetensors").touch()
    check_training(recipe)  # stopped before its manifest
    (tmp_path / "d/config.json").touch()
    with pytest.raises(UserError, match="no data there, but 'config.json'"):
        check_training(recipe)
