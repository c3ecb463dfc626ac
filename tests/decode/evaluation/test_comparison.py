"""Recipes side by side: what may be compared, what is measured again, and that the figures are the
records'."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from align.config.parser import load_recipe
from align.config.recipe import resolve
from decode.evaluation import comparison, runner
from decode.evaluation.comparison import ComparedRecipe, measure, read_candidates
from decode.evaluation.learning import points, table
from decode.proposers.block import BlockProposer
from decode.speculation.sampling import Sampling
from decode.systems.parsing import read_method
from decode.systems.registry import PLAIN
from specalign.common.errors import UserError
from specalign.common.terminal import PlainConsole
from specalign.formats.block import save_drafter
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt
from specalign.suites.sources import Loaded
from tests.builders import sharp_block_network as network

SUITE = Loaded(
    "mine", "Mine", "", [Prompt("a", "Why is the sky blue?"), Prompt("b", "Count: 1 2 1")], "here"
)
SETTINGS = runner.GenerationSettings(Sampling(), 12)
QUIET = PlainConsole(quiet=True)


def candidate(folder: Path, recipe: str) -> ComparedRecipe:
    words = (
        f"recipe=recipes/compare/debug_{recipe}.yaml",
        f"output={folder / recipe}",
        f"name={recipe}",
    )
    return ComparedRecipe(words, resolve(load_recipe([*words, "trainer.milestones=[10, 30]"])))


@pytest.fixture
def pair(target: Target, tmp_path: Path) -> list[ComparedRecipe]:
    """Two recipes with drafters at both milestones."""
    found = [candidate(tmp_path, "ours"), candidate(tmp_path, "dflash")]
    for own, options in zip(
        found, ({"context": "shared_kv", "markov_rank": 4}, {"context": "taps"}), strict=True
    ):
        for seed, milestone in enumerate(own.milestones):
            save_drafter(network(target, seed, size=3, layers=1, **options), own.folder(milestone))  # type: ignore[arg-type]
    return found


def test_every_milestone_decodes_every_prompt_once(
    target: Target, pair: list[ComparedRecipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the drafter alone, without copies; greedy outputs are plain decoding's; what is there is not run
    again, what changed is."""
    out, ran = tmp_path / "out", []
    whole = runner.run_task_batch

    def run(decoders: Any, tasks: Any, *args: Any) -> Any:
        ran.extend(tasks)
        assert all(
            isinstance(d.drafter, BlockProposer) for name, d in decoders.items() if name != PLAIN
        )
        return whole(decoders, tasks, *args)

    monkeypatch.setattr(runner, "run_task_batch", run)
    records = measure(pair, target, [SUITE], SETTINGS, out, QUIET)
    methods = [PLAIN, "ours@10", "ours@30", "dflash@10", "dflash@30"]
    assert sorted(r.key for r in records) == sorted(
        ("mine", p, m, 0) for p in "ab" for m in methods
    )
    assert all(record.identical for record in records) and len(ran) == 2
    assert {r.key for r in measure(pair, target, [SUITE], SETTINGS, out, QUIET)} == {
        r.key for r in records
    }
    assert len(ran) == 2
    save_drafter(
        network(target, 9, "taps", size=3, layers=1), pair[1].folder(pair[1].milestones[1])
    )
    again = measure(pair, target, [SUITE], SETTINGS, out, QUIET)
    assert len(ran) == 4 and sorted(r.key for r in again) == sorted(r.key for r in records)
    with pytest.raises(UserError, match="another max_new_tokens: choose another --out"):
        measure(pair, target, [SUITE], runner.GenerationSettings(Sampling(), 13), out, QUIET)
    found = points([m for c in pair for m in c.milestones], again)
    own = [r for r in again if r.method == "ours@30"]
    assert found[1].tau.value == sum(r.committed for r in own) / sum(r.calls for r in own)
    assert found[1].identical == "2/2" and found[3].ratio is None
    sizes = {c.name: c.parameters for c in pair}
    assert sizes["ours"] == sum(
        p.numel()
        for p in network(target, 0, "shared_kv", size=3, layers=1, markov_rank=4).parameters()
    )
    assert len(table(found, sizes).splitlines()) == 2 + 4


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
    one, other = (
        candidate(tmp_path, "ours").values,
        copy.deepcopy(candidate(tmp_path, "dflash").values),
    )
    for key, value in changes.items():
        other[key] = {**other[key], **value} if isinstance(value, dict) else value
    printed = iter((one, other))
    monkeypatch.setattr(comparison, "_run_align", lambda *words, capture: "")
    monkeypatch.setattr(comparison, "parse_yaml", lambda text, where: next(printed))
    with pytest.raises(UserError, match=says):
        read_candidates(["ours", "dflash"], [])


def test_a_method_of_other_drafters_is_refused_before_training(tmp_path: Path) -> None:
    found = [candidate(tmp_path, "ours")]
    for method, says in (
        ("plain", "--method plain can't use the block drafter that ours trains"),
        ("specdiff", "--method specdiff can't use"),
    ):
        with pytest.raises(UserError, match=says):
            comparison.check_method(read_method(method), found)
    comparison.check_method(read_method("block_tree:tree_nodes=3"), found)


def test_prompts_decoded_together_give_the_same_records(
    target: Target, pair: list[ComparedRecipe], tmp_path: Path
) -> None:
    """But for the times; by the method that is asked for, which the folder then holds."""
    settings = runner.GenerationSettings(Sampling(1.0, seed=5), 12)
    method = "block:draft_tokens=2"
    alone = measure(pair, target, [SUITE], settings, tmp_path / "alone", QUIET, method)
    together = measure(pair, target, [SUITE], settings, tmp_path / "b", QUIET, method, batch=8)
    assert [r.key for r in alone] == [r.key for r in together]
    for one, other in zip(alone, together, strict=True):
        for name in ("tokens", "accepted", "drafted", "nodes", "verifier", "position", "finish"):
            assert getattr(one, name) == getattr(other, name), name
    assert max(max(r.drafted) for r in alone if r.method != PLAIN) == 2
    with pytest.raises(UserError, match="another method: choose another --out"):
        measure(pair, target, [SUITE], settings, tmp_path / "alone", QUIET)
