"""Standalone drafters: what training computes for a block is what decoding computes for it; stages, resume, recipes."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from align.common.errors import UserError
from align.config.parser import load_recipe
from align.config.recipe import DrafterConfig
from align.diffusion.noise import corrupt_blocks, corrupt_suffix
from align.losses.diffusion_losses import masked_cross_entropy
from align.losses.divergences import DIVERGENCES, DraftRows, logit_statistics, row_statistics, target_places
from align.models.ddit import DDiT
from align.models.standalone import DiffusionContext, DiffusionDrafter
from align.models.standalone_checkpoint import open_drafter
from align.target.loading import load_target
from align.target.model import Target
from align.training.diffusion_module import DiffusionDrafterModule
from align.training.makers import make_standalone
from align.training.run import train
from tests.builders import ANCHORS
from tests.builders import DIFFUSION_KINDS as KINDS
from tests.builders import diffusion_drafter as drafter
from tests.builders import packed_batch as batch

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug", dtype="float32", device="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_training_computes_what_decoding_computes(target: Target, kind: str) -> None:
    """Every noisy block of packed rows: the rows of a fresh context that holds its document up to the anchor."""
    made, rows = drafter(target, kind), batch(target)
    generator = torch.Generator().manual_seed(1)
    noisy = corrupt_blocks(rows, ANCHORS, made.graph, made.schedule, [0, 0, 1], generator)
    if made.cached:  # decoding tells σ from the share of masks
        share = (noisy.tokens_t == made.mask_id).double().mean(-1).float()
        noisy = replace(noisy, times=share)
    with torch.no_grad():
        hidden, sigma = made.block_rows(rows, ANCHORS, noisy)
        found = made.target_logits(made.logits(hidden, sigma))
    for b in range(2):
        for a in range(3):
            at = int(ANCHORS.index_BA[b, a])
            start = at - int(rows.positions_BL[b, at])
            context = DiffusionContext(made, 40)
            text = rows.tokens_BL[b, start : at + 1].tolist()
            context.extend(text[:2])
            context.extend(text[2:])
            alone = context.denoise(noisy.tokens_t[b, a])
            torch.testing.assert_close(found[b, a], alone, atol=2e-4, rtol=1e-4)
    assert found.shape[-1] == target.vocab_size


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_goes_back(target: Target, kind: str) -> None:
    made, tokens = drafter(target, kind), [7, 8, 9, 10, 11, 12]
    block = torch.full((3,), made.mask_id)
    context, fresh = DiffusionContext(made, 40), DiffusionContext(made, 40)
    context.extend(tokens)
    context.denoise(block)
    context.keep(4)
    context.extend([20, 21])
    fresh.extend([*tokens[:4], 20, 21])
    assert context.tokens == fresh.tokens
    torch.testing.assert_close(context.denoise(block), fresh.denoise(block), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_committed_tokens_come_along_with_the_block(target: Target, kind: str, monkeypatch: Any) -> None:
    """One pass a draft, however many tokens were committed before it, and it says what a pass for each of them says."""
    made, text = drafter(target, kind), [7, 8, 9, 10, 11, 12, 13, 14, 15]
    block = torch.full((3,), made.mask_id)
    at_once, one_by_one = DiffusionContext(made, 40), DiffusionContext(made, 40)
    for end in (1, 2, 4, 5, 9):
        for token in text[len(one_by_one.tokens) : end]:
            one_by_one.extend([token])
            expected = one_by_one.denoise(block)
        at_once.extend(text[len(at_once.tokens) : end])
        torch.testing.assert_close(at_once.denoise(block), expected, atol=1e-4, rtol=1e-4)
        for _ in range(2):  # nothing is committed meanwhile
            torch.testing.assert_close(at_once.denoise(block), expected, atol=1e-4, rtol=1e-4)
    passes = list[int]()
    inner = made.network.vocab_embed if isinstance(made.network, DDiT) else made.network.model.get_decoder()
    inner.register_forward_hook(lambda _, __, out: passes.append(1))
    at_once.extend([16, 17])
    at_once.denoise(block)
    assert len(passes) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back", [(8,), (5,), (7, 6), (6, 6, 3), (5, 9), (0, 0)])
def test_a_context_that_went_back_drafts_at_once(target: Target, kind: str, back: tuple[int, ...]) -> None:
    """However often it goes back, and with nothing new behind it."""
    made, text = drafter(target, kind), [7, 8, 9, 10, 11, 12, 13, 14, 15]
    block = torch.full((3,), made.mask_id)
    context, fresh = DiffusionContext(made, 40), DiffusionContext(made, 40)
    context.extend(text)
    context.denoise(block)
    for count in back:
        context.keep(count)
    fresh.extend(text[: min(back)])
    torch.testing.assert_close(context.denoise(block), fresh.denoise(block), atol=1e-4, rtol=1e-4)
    context.extend([3])
    fresh.extend([3])
    torch.testing.assert_close(context.denoise(block), fresh.denoise(block), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["masked_lm", "masked_lm, full", "ddit", "ddit, blocks"])
def test_a_context_that_goes_back_to_nothing_has_forgotten(target: Target, kind: str) -> None:
    made = drafter(target, kind)
    block = torch.full((3,), made.mask_id)
    context, fresh = DiffusionContext(made, 40), DiffusionContext(made, 40)
    context.extend([5, 6, 7, 8, 9])
    context.denoise(block)
    context.keep(0)
    torch.testing.assert_close(context.denoise(block), fresh.denoise(block), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 4, 7, 8, 13])
def test_whole_blocks_are_cached_exactly(target: Target, length: int) -> None:
    """A block-causal network: the cache holds whole blocks, and says what a pass over everything says."""
    made = drafter(target, "ddit, blocks")
    text = torch.randint(4, 200, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    block = torch.tensor([made.mask_id, 11, made.mask_id, made.mask_id, made.mask_id])
    context = DiffusionContext(made, 40)
    for token in text:
        context.extend([token])
        found = context.denoise(block)
    assert context.cache is not None and context.cache.length == length // 4 * 4
    torch.testing.assert_close(found, made.target_logits(context._whole(block[None])), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ddit", "masked_lm"])
def test_whole_rows_see_their_own_document_and_no_future_of_clean_tokens(target: Target, kind: str) -> None:
    made, rows = drafter(target, kind), batch(target)
    prefix = torch.full_like(rows.tokens_BL, 4)
    noisy = corrupt_suffix(rows, made.graph, made.schedule, prefix, torch.Generator().manual_seed(0))

    def found(tokens_t: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden, sigma = made.suffix_rows(rows, replace(noisy, tokens_t=tokens_t))
            return made.logits(hidden, sigma)

    base = found(noisy.tokens_t)
    other = noisy.tokens_t.clone()
    other[0, 12:] = 5  # the second document's noisy part: neither the first one nor its own prefix minds
    moved = (found(other) - base).abs().amax(-1) > 1e-6
    assert not moved[0, :9].any() and moved[0, 13:17].any() and not moved[1].any()
    other = noisy.tokens_t.clone()
    other[0, 8] = (
        5  # a later noisy token of the first document: its other noisy ones see it, its clean ones do not
    )
    moved = (found(other) - base).abs().amax(-1) > 1e-6
    # a first token is predicted by nothing of its own document: it is never noisy (a prefix of one at least)
    assert moved[0, 5] and not moved[0, :4].any() and not moved[0, 10:17].any()


def test_statistics_of_logits_are_those_of_rows() -> None:
    """Values and gradients, where the two heads are one."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(9, 6, generator=generator), torch.randn(30, 6, generator=generator)
    text = torch.randn(5, 6, generator=generator)
    places = target_places(text, torch.tensor([3, 7, 29, 0, 11]), lambda h: h @ head.T)
    where = torch.tensor([0, 0, 1, 2, 3, 4, 4, 1, 2])
    names = frozenset(DIVERGENCES)
    grads = []
    for direct in (True, False):
        own = hidden.clone().requires_grad_()
        if direct:
            s = row_statistics(DraftRows(own, where), places, head, None, (9,), names)
        else:
            s = logit_statistics(own @ head.T, where, places, head, names)
        total = sum((i + 1) * getattr(s, n).sum() for i, n in enumerate(["log_q_label", *DIVERGENCES]))
        total.backward()
        grads.append((s, own.grad))
    for name in ("log_q_label", "acceptance", "p_label", "match", "greedy_label", *DIVERGENCES):
        torch.testing.assert_close(getattr(grads[0][0], name), getattr(grads[1][0], name))
    torch.testing.assert_close(grads[0][1], grads[1][1], atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match="unknown divergence 'kl'"):
        logit_statistics(hidden @ head.T, where, places, head, frozenset({"kl"}))


def test_a_fresh_ddit_begins_at_log_of_the_vocabulary(target: Target) -> None:
    made = make_standalone(target, DrafterConfig(block_size=3, **KINDS["ddit"]))  # type: ignore[arg-type]
    rows = batch(target)
    noisy = corrupt_blocks(
        rows, ANCHORS, made.graph, made.schedule, [0, 0, 1], torch.Generator().manual_seed(0)
    )
    hidden, sigma = made.block_rows(rows, ANCHORS, noisy)
    f = made.logits(hidden, sigma)
    masked = noisy.tokens_t == made.mask_id
    loss = masked_cross_entropy(f, noisy.tokens_t, noisy.tokens_0, made.mask_id, noisy.valid)
    torch.testing.assert_close(loss[masked], torch.full_like(loss[masked], math.log(target.vocab_size)))


# ---- training ----


def run(output: Path, data: Path, *words: str) -> DiffusionDrafterModule:
    recipe = load_recipe([*words, f"output={output}", f"data.path={data}"])
    return train(recipe, quiet=True)  # type: ignore[return-value]


def column(output: Path, name: str) -> list[float]:
    with (output / "metrics.csv").open(newline="") as file:
        return [float(r[name]) for r in csv.DictReader(file) if r.get(name)]


@pytest.mark.parametrize("recipe", ["debug_sedd", "debug_mdlm"])
def test_golden_losses(recipe: str, tmp_path: Path, debug_data: Path) -> None:
    run(tmp_path, debug_data, f"recipe={recipe}")
    golden = json.loads((GOLDEN / f"{recipe}.json").read_text())["losses"]
    assert column(tmp_path, "train/loss") == pytest.approx(golden, rel=2e-4)


@pytest.mark.parametrize("recipe", ["debug_sedd", "debug_mdlm"])
@pytest.mark.parametrize("stage", ["pretrain", "calibrate"])
def test_resume_is_bit_identical(recipe: str, stage: str, tmp_path: Path, debug_data: Path) -> None:
    words = (f"recipe={recipe}", f"stage={stage}", "trainer.ema=0.9", "trainer.checkpoint_every=4")
    whole = run(tmp_path / "whole", debug_data, *words)
    original = DiffusionDrafterModule.on_train_batch_start

    class Stop(Exception):
        pass

    def stop_at_7(self: DiffusionDrafterModule, step: object, index: int) -> None:
        if self.global_step == 7:
            raise Stop
        original(self, step, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiffusionDrafterModule, "on_train_batch_start", stop_at_7)
        with pytest.raises(Stop):
            run(tmp_path / "parts", debug_data, *words)
    parts = run(tmp_path / "parts", debug_data, *words)
    for name, weight in whole.final_weights.items():
        assert torch.equal(weight, parts.final_weights[name]), name
    for side in ("whole", "parts"):
        assert (tmp_path / side / "drafter" / "drafter.json").is_file()
    one, two = (load_file(str(tmp_path / s / "drafter/model.safetensors")) for s in ("whole", "parts"))
    assert all(torch.equal(one[k], two[k]) for k in one)


@pytest.mark.parametrize("recipe", ["debug_sedd", "debug_mdlm"])
def test_stages_follow_each_other(recipe: str, tmp_path: Path, debug_data: Path, target: Target) -> None:
    """Each starts from the one before: its first validation is the last one's, but for bf16-free files' rounding (none)."""
    words = (f"recipe={recipe}", "trainer.validate_first=true", "trainer.max_steps=6")
    init: tuple[str, ...] = ()
    before = None
    for stage in ("pretrain", "finetune", "calibrate"):
        run(tmp_path / stage, debug_data, *words, f"stage={stage}", *init)
        bounds = column(tmp_path / stage, "validation/bound")
        assert len(bounds) >= 2
        if before is not None:
            assert bounds[0] == pytest.approx(before, rel=1e-5)
        before = bounds[-1]
        init = (f"drafter.init={tmp_path / stage / 'drafter'}",)
    loaded = open_drafter(tmp_path / "calibrate/drafter", target)
    assert isinstance(loaded, DiffusionDrafter) and loaded.config.block_size == 4
    card = (tmp_path / "calibrate/drafter/README.md").read_text()
    assert "standalone diffusion drafter" in card and "nats a" in card


def test_the_strength_of_distillation_rises(tmp_path: Path, debug_data: Path) -> None:
    """λ over its warm-up, and 0 in the other stages; a λ of 0 is the diffusion loss alone."""
    recipe = load_recipe(
        [
            "recipe=debug_sedd",
            "objective.distillation=3",
            "objective.distillation_warmup=4",
            f"output={tmp_path}",
        ]
    )
    module = DiffusionDrafterModule(make_standalone(load_target("debug"), recipe.drafter), recipe)
    found = []
    for step in range(6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DiffusionDrafterModule, "global_step", step)
            found.append(module.strength())
    assert found == [0.75, 1.5, 2.25, 3.0, 3.0, 3.0]
    run(tmp_path / "none", debug_data, "recipe=debug_sedd", "objective.distillation=0")
    run(tmp_path / "fine", debug_data, "recipe=debug_sedd", "stage=finetune")
    assert column(tmp_path / "none", "train/loss") == column(tmp_path / "fine", "train/loss")


def test_samples_on_request(tmp_path: Path, debug_data: Path) -> None:
    run(tmp_path, debug_data, "recipe=debug_sedd", "trainer.show_samples=2")
    text = (tmp_path / "samples.txt").read_text()
    assert text.count("--- step 6\n") == text.count("--- step 12\n") == 2


def test_uniform_noise(tmp_path: Path, debug_data: Path) -> None:
    run(tmp_path, debug_data, "recipe=debug_sedd", "stage=finetune", "drafter.graph=uniform")
    losses = column(tmp_path, "train/loss")
    assert len(losses) == 12 and all(math.isfinite(x) for x in losses)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["stage=finetune"], "stage=finetune: drafter.kind=block is calibrated"),
        (["drafter.kind=masked_lm", "drafter.graph=uniform"], "undoes the mask"),
        (["drafter.kind=ddit", "drafter.heads=3"], "drafter.hidden_size=256 must be a multiple"),
        (["drafter.kind=ddit", "objective.block_lengths=[1,1]"], "objective.block_lengths has 2 entries"),
        (["drafter.kind=ddit", "drafter.lora_rank=4"], "drafter.lora_rank needs drafter.kind=masked_lm"),
        (["drafter.kind=ddit", "drafter.graph=uniform"], "no one-step q to calibrate"),
        (["drafter.kind=ddit", "drafter.graph=uniform", "objective.times=count"], "count counts masks"),
    ],
)
def test_impossible_recipes(words: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        load_recipe(["recipe=debug_block", *words])
