"""Command lines as people and W&B's agents write them; the agent's own code makes those of every macro."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from align.config.arguments import read_arguments
from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.config.wandb_runs import TRIAL_VARIABLES
from specalign.common.errors import UserError

wandb_agent = pytest.importorskip("wandb.wandb_agent")

MACROS = (
    "args", "args_no_hyphens", "args_no_equals", "args_no_boolean_flags", "args_json", "args_json_file",
    "args_append_hydra", "args_override_hydra",
)  # fmt: skip
TRIALS: dict[str, dict[str, Any]] = {
    "dotted": {"trainer.learning_rate": 1e-05, "trainer.max_steps": 20, "objective.weighting": "uniform"},
    "whole floats": {"trainer.batch_size": 6.0, "trainer.max_steps": 1e3, "seed": 7.0, "drafter.target_layers": [1.0]},
    "yes, no and none": {"launch.offload": False, "drafter.init_from_target": True, "trainer.max_minutes": None, "data.prompts": None},
    "none for a template": {"data.template_kwargs.mode": None, "data.template_kwargs.depth": 2},
    "text for a template": {"data.template_kwargs.mode": "yes", "data.template_kwargs.day": "a=b", "seed": 3},
    "text like an argument": {"data.system": "trainer.batch_size=9", "seed": 3},
    "nested": {"trainer": {"learning_rate": 1e-05, "max_steps": 20.0, "max_minutes": None}, "seed": 3},
    "nested twice": {"objective": {"terms": {"forward_kl": 1.0, "streak": 0.5}}, "drafter": {"init_from_target": True}},
    "mapping and lists": {"objective.terms": {"streak": 2}, "trainer.betas": [0.8, 0.99], "data.answer_temperatures": [0.0, 1]},
    "texts": {"data.system": "a=b, 'c' \"d\": {e}", "output": "runs/a b", "data.prompt_openings": ["it's", "two words", "a\nb", "ä☃"]},
    "negative and text in notation": {"trainer.learning_rate": "1e-4", "data.reply_seconds": 1.5},
}  # fmt: skip


def agents_command(
    macro: str, trial: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Arguments after `align.train` that wandb's agent would start the trial with; its environment becomes ours."""
    for name in (*TRIAL_VARIABLES, "WANDB_DIR"):
        monkeypatch.setenv(name, "replaced by the agent")
    monkeypatch.setenv("WANDB_DIR", str(folder))
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **options: Any) -> None:
            started.append(command)

    monkeypatch.setattr(wandb_agent, "AgentProcess", Process)
    agent = wandb_agent.Agent(api=None, queue=None)
    module = ["${env}", "${interpreter}", "-m", "align.train", "recipe=debug_block"]
    agent._sweep_command = [*module, f"${{{macro}}}"]
    args = {key: {"value": value} for key, value in trial.items()}
    agent._command_run({"type": "run", "run_id": "trial1", "program": "", "args": args})
    command = started[0]
    assert command[:4] == ["/usr/bin/env", "python", "-m", "align.train"]
    return command[4:]


def value_of(recipe: Recipe, key: str) -> Any:
    if key.startswith("data.template_kwargs."):
        return recipe.data.template_kwargs.get(key.rpartition(".")[2])
    found: Any = recipe
    for name in key.split("."):
        found = getattr(found, name)
    return found


@pytest.fixture(scope="module")
def plain() -> Recipe:
    return load_recipe(["recipe=debug_block"])


PAIRS = [
    pytest.param(
        macro, TRIALS[name], id=f"{name}-{macro}", marks=[pytest.mark.slow] * ((i + j) % 2)
    )
    for (i, macro), (j, name) in product(enumerate(MACROS), enumerate(TRIALS))
]


@pytest.mark.parametrize(("macro", "trial"), PAIRS)
def test_every_form_of_an_agents_command_line_gives_the_trials_values(
    macro: str,
    trial: dict[str, Any],
    plain: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = agents_command(macro, trial, tmp_path, monkeypatch)
    recipe = load_recipe(words)
    flat: dict[str, Any] = {}
    for key, value in trial.items():
        if isinstance(value, dict) and key != "objective.terms":
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    for key, value in flat.items():
        found = value_of(recipe, key)
        wanted = str(Path(value, "sweep1", "trial1")) if key == "output" else value
        wanted = 1e-4 if wanted == "1e-4" else wanted
        assert found == wanted
        default = value_of(plain, key)
        assert default is None or type(found) is type(default)


def test_parameters_without_a_macro(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = {"trainer": {"learning_rate": 1e-05, "max_steps": 4}, "seed": 3, "note": "x"}
    agents_command("args", trial, tmp_path, monkeypatch)
    recipe = load_recipe(["recipe=debug_block", "trainer.max_steps=9"])
    assert (recipe.trainer.learning_rate, recipe.trainer.max_steps, recipe.seed) == (1e-05, 9, 3)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--launch.offload", "seed=3"], {"launch.offload": "true", "seed": "3"}),
        (["--launch.offload", "--seed", "-3"], {"launch.offload": "true", "seed": "-3"}),
        (["--data.system", "trainer.batch_size=9"], {"data.system": "trainer.batch_size=9"}),
        (["--data.template_kwargs.mode", "yes"], {"data.template_kwargs.mode": "yes"}),
        (["--data.template_kwargs.a", "--seed=3"], {"data.template_kwargs.a": "true", "seed": "3"}),
        (["+seed=3", "++trainer.anchors=4"], {"seed": "3", "trainer.anchors": "4"}),
        (['{"seed": 3, "trainer": {"anchors": 4}}'], {"seed": "3", "trainer": '{"anchors": 4}'}),
    ],
)
def test_forms_of_an_argument(words: list[str], given: dict[str, str]) -> None:
    assert read_arguments(words, ()) == given


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["launch.offload"], "'launch.offload' is not key=value (write launch.offload=VALUE"),
        (["--seed"], "'--seed' is not key=value"),
        (["--launch.offload", "maybe"], "'maybe' is not key=value"),
        (["{seed: 1}"], "not readable JSON"),
        (['{"seed": 1}', "seed=2"], "seed is given twice"),
        (["debug_block"], "did you mean 'recipe=debug_block'"),
    ],
)
def test_what_is_no_argument_is_one_line(words: list[str], says: str) -> None:
    with pytest.raises(UserError) as error:
        read_arguments(words, ("debug_block",))
    assert says in str(error.value) and "\n" not in str(error.value)
