"""What follows from other keys: the kind's section, what a recipe leaves to the user, warm-up and first batch of small runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from align.config.parser import load_recipe
from specalign.common.errors import UserError
from tests.builders import write_recipe as write


def problem(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(words)
    return str(caught.value)


def folder(path: Path, config: dict[str, object], record: dict[str, object] | None = None) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if record is not None:
        (path / "drafter.json").write_text(json.dumps(record))
    return f"drafter.init={path}"


ADAPT = ("recipe=adapt", "target.name=debug")


def test_adapt_takes_the_kind_of_the_drafter_that_it_starts_from(tmp_path: Path) -> None:
    def adapt(name: str, config: dict[str, object], *record: dict[str, object]) -> Any:
        return load_recipe([*ADAPT, folder(tmp_path / name, config, *record)])

    taps = adapt("a", {"architectures": ["DFlashDraftModel"]})
    assert (taps.drafter.kind, taps.drafter.context) == ("block", "taps")
    assert taps.trainer.max_steps == 600
    masked = adapt("b", {"architectures": ["AdaptedMaskedLM"]}, {"block_size": 5})
    assert (masked.drafter.kind, masked.drafter.lora_rank) == ("masked_lm", 16)
    assert (masked.drafter.block_size, masked.objective.diffusion) == (5, "masked_nll")
    ddit = adapt("c", {"model_type": "mdlm"})
    assert (ddit.drafter.kind, ddit.drafter.lora_rank) == ("ddit", 0)
    causal = adapt("d", {"architectures": ["LlamaForCausalLM"]})
    assert (causal.drafter.kind, causal.objective.weighting) == ("autoregressive", "uniform")
    shipped = load_recipe(ADAPT).drafter
    assert (shipped.context, shipped.init) == ("shared_kv", "pretrained/smollm2-135m-block")


def test_sections_of_unknown_kinds_and_a_kind_without_a_drafter(tmp_path: Path) -> None:
    bad = write(tmp_path, "bad.yaml", "kinds: {tabs: {seed: 1}}\n")
    assert problem(bad) == "bad.yaml: kinds: unknown kind 'tabs' (did you mean 'taps'?)"
    assert "name a drafter there" in problem("recipe=debug_block", "drafter.kind=auto")


def test_a_recipe_without_a_model_names_all_that_it_needs() -> None:
    assert problem("recipe=block").startswith(
        "command line: recipe=block needs target.name=… (target.name: hub id"
    )
    both = problem("recipe=variable_prefix")
    assert "recipe=variable_prefix needs target.name=… and drafter.init=…" in both
    assert "unknown key 'max_steps'" in problem("recipe=block", "max_steps=3")


def test_the_warm_up_and_the_first_batch_fit_a_small_run() -> None:
    few = load_recipe(
        ["recipe=block", "target.name=debug", "trainer.max_steps=10", "data.samples=8"]
    )
    assert (few.trainer.warmup_steps, few.data.batch_size) == (3, 8)
    assert load_recipe(["recipe=debug_block", "trainer.max_steps=1"]).trainer.warmup_steps == 0
    many = load_recipe(
        ["recipe=block", "target.name=debug", "trainer.max_steps=9999", "data.samples=9999"]
    )
    assert (many.trainer.warmup_steps, many.data.batch_size) == (50, 128)
