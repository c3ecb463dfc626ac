"""What a command lacks is named before it begins. (Before torch is imported: tests/decode/test_early.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.preflight import check_training
from specalign.common.errors import UserErrors


def test_everything_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
