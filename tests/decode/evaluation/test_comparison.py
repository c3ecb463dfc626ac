"""Recipes side by side: what may be compared, what is measured again, and that the figures are the
records'."""

import copy
from pathlib import Path
from typing import Any

import pytest

from align.config.parser import load_recipe
from align.config.recipe import resolve
from decode.evaluation import comparison, runner
from decode.evaluation.comparison import (
    ComparedRecipe,
    Milestone,
    measure,
    read_candidates,
    render_table,
)
from decode.proposers.block import BlockProposer
from decode.speculation.settings import Sampling
from decode.systems.registry import PLAIN
from specalign.common.errors import UserError
from specalign.common.terminal import PlainConsole
from specalign.formats.block import save_drafter
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt
from specalign.suites.sources import Loaded
from tests.builders import sharp_block_network as network
from tests.measurements import record

PROMPTS = [Prompt("a", "Why is the sky blue?"), Prompt("b", "Count: 1 2 1")]
SUITE = Loaded("mine", "Mine", "", PROMPTS, "here")
SETTINGS = runner.GenerationSettings(Sampling(), 12)
QUIET = PlainConsole(quiet=True)


def candidate(folder: Path, recipe: str) -> ComparedRecipe:
    path = f"recipe=recipes/compare/debug_{recipe}.yaml"
    words = (path, f"output={folder / recipe}", f"name={recipe}")
    return ComparedRecipe(words, resolve(load_recipe([*words, "trainer.milestones=[10, 30]"])))


@pytest.fixture
def pair(target: Target, tmp_path: Path) -> list[Milestone]:
    """Two recipes' milestones with their drafters."""
    found = [candidate(tmp_path, "ours"), candidate(tmp_path, "dflash")]
    kinds = {"context": "shared_kv", "markov_rank": 4}, {"context": "taps"}
    for own, options in zip(found, kinds, strict=True):
        for seed, milestone in enumerate(own.milestones):
            save_drafter(network(target, seed, size=3, layers=1, **options), milestone.folder)  # type: ignore[arg-type]
    return [milestone for own in found for milestone in own.milestones]


def test_every_milestone_decodes_every_prompt_once(
    target: Target, pair: list[Milestone], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the drafter alone, without copies; greedy outputs are plain decoding's; what is there is not run
    again, what changed is."""
    out, ran = tmp_path / "out", []
    out.mkdir()
    whole = runner.run_tasks

    def run(decoders: Any, task: Any, *args: Any) -> Any:
        ran.append(task)
        assert all(
            isinstance(d.drafter, BlockProposer) for name, d in decoders.items() if name != PLAIN
        )
        return whole(decoders, task, *args)

    monkeypatch.setattr(runner, "run_tasks", run)
    records = measure(pair, target, [SUITE], SETTINGS, out, QUIET)
    methods = [PLAIN, "ours@10", "ours@30", "dflash@10", "dflash@30"]
    assert sorted(r.key for r in records) == sorted(
        ("mine", p, m, 0, 1) for p in "ab" for m in methods
    )
    assert all(record.identical for record in records) and len(ran) == 2
    assert {r.key for r in measure(pair, target, [SUITE], SETTINGS, out, QUIET)} == {
        r.key for r in records
    }
    assert len(ran) == 2
    save_drafter(network(target, 9, "taps", size=3, layers=1), pair[3].folder)
    again = measure(pair, target, [SUITE], SETTINGS, out, QUIET)
    assert len(ran) == 4 and sorted(r.key for r in again) == sorted(r.key for r in records)
    with pytest.raises(UserError, match="another max_new_tokens: choose another --out"):
        measure(pair, target, [SUITE], runner.GenerationSettings(Sampling(), 13), out, QUIET)
    rows = [row.split(" | ") for row in render_table(pair, again).splitlines()[2:]]
    assert [row[1] for row in rows] == ["ours", "dflash", "ours", "dflash"]
    own = [r for r in again if r.method == "ours@30"]
    tau = sum(r.committed for r in own) / sum(r.calls for r in own)
    assert rows[2][0] == "| 30" and rows[2][2].startswith(f"{tau:.3f} [")
    assert rows[2][4] == "2/2" and rows[3][3] == ""


def test_the_table_has_the_ratio_of_accepted_tokens(tmp_path: Path) -> None:
    """Eight prompts: τ of 3 with one recipe, 2.05 with the other."""
    records = [
        record(f"{recipe}@20", f"p{i}", 1.0, tokens, calls, [1] * calls, [3] * calls)
        for i in range(8)
        for recipe, calls, tokens in (("ours", 6, 18), ("dflash", 10, 20 + i % 2))
    ]
    milestones = [Milestone(recipe, 20, tmp_path) for recipe in ("ours", "dflash")]
    rows = [row.split(" | ") for row in render_table(milestones, records).splitlines()[2:]]
    assert rows[0][2].startswith("3.000 [") and rows[1][2].startswith("2.050 [")
    assert rows[0][3].startswith(f"{2 / 1.05:.3f} [") and rows[0][5] == "8 |"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 3}, "dflash: seed=3, ours has 0"),
        ({"trainer": {"max_steps": 13}}, "trainer.max_steps=13"),
        ({"name": "ours"}, "recipes need different names"),
        ({"trainer": {"milestones": []}}, "trainer.milestones is empty"),
    ],
)
def test_only_what_is_alike_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    one, other = (candidate(tmp_path, name).values for name in ("ours", "dflash"))
    other = copy.deepcopy(other)
    for key, value in changes.items():
        other[key] = {**other[key], **value} if isinstance(value, dict) else value
    printed = iter((one, other))
    monkeypatch.setattr(comparison, "_run_align", lambda *words, capture: "")
    monkeypatch.setattr(comparison, "parse_yaml", lambda text, where: next(printed))
    with pytest.raises(UserError, match=says):
        read_candidates(["ours", "dflash"], [])
