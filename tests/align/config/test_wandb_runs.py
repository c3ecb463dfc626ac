"""W&B's trials: a folder each, shared text; nothing is sent without credentials or without being asked."""

from pathlib import Path

import pytest

from align.config import wandb_runs
from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.config.wandb_runs import is_offline

ONE = {"WANDB_RUN_ID": "r1"}
BOTH = {"WANDB_SWEEP_ID": "s1", **ONE}


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*wandb_runs.TRIAL_VARIABLES, "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def recipe(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *words: str) -> Recipe:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return load_recipe(["recipe=debug_block", *words])


@pytest.mark.parametrize(
    ("variables", "words", "output", "data"),
    [
        ({}, ["trainer.logger=wandb"], "runs/debug_block", None),
        (BOTH, [], "runs/debug_block/s1/r1", "runs/debug_block/data"),
        (BOTH, ["output=here"], "here/s1/r1", "here/data"),
        (BOTH, ["output=here/s1/r1"], "here/s1/r1", None),
        (BOTH, ["data.path=there"], "runs/debug_block/s1/r1", "there"),
        (ONE, ["trainer.logger=wandb"], "runs/debug_block/r1", "runs/debug_block/data"),
        (ONE, [], "runs/debug_block", None),
        ({"WANDB_RUN_ID": ""}, ["trainer.logger=wandb"], "runs/debug_block", None),
    ],
)
def test_every_trial_has_its_own_folder(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    words: list[str],
    output: str,
    data: str | None,
) -> None:
    found = recipe(monkeypatch, variables, *words)
    assert (found.output, found.data.path) == (output, data)


def test_trials_share_the_text_of_equal_data_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(*words: str) -> str:
        found = recipe(monkeypatch, BOTH, *words)
        assert found.data_folder.parent == Path("runs/debug_block")
        return found.data_folder.name

    same = folder("trainer.learning_rate=1e-5", "data.length=128", "data.write=never")
    assert folder() == same == "data"
    differ = ("data.samples=60", "seed=1", "data={system: Be brief.}", "data.template_kwargs.a=1")
    assert len({"data", *(folder(word) for word in differ)}) == 5
    assert folder("data.samples=60", "trainer.learning_rate=1e-5") == folder("data.samples=60")


def test_a_run_is_resumed_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb-run-id").write_text("r1\n")
    words = ("trainer.logger=wandb", f"output={tmp_path}")
    assert recipe(monkeypatch, {"WANDB_RUN_ID": "r1"}, *words).output == str(tmp_path)
    assert recipe(monkeypatch, {"WANDB_RUN_ID": "r2"}, *words).output == str(tmp_path / "r2")


@pytest.mark.parametrize(
    ("variables", "offline"),
    [
        ({}, True),
        ({"WANDB_API_KEY": "k"}, False),
        ({"WANDB_SWEEP_ID": "s"}, False),  # who starts `wandb agent` asks for it
        ({"WANDB_SWEEP_ID": "s", "WANDB_MODE": "offline"}, True),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "dryrun"}, True),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, True),
        ({"WANDB_MODE": "online"}, False),
    ],
)
def test_runs_are_sent_where_the_user_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], offline: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_offline() is offline
