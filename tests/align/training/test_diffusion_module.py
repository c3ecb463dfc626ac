"""What the module of standalone drafters computes from a step: noise, losses, bound; each option where it acts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from align.config.parser import load_recipe
from align.losses.diffusion_losses import masked_cross_entropy, score_entropy
from align.makers.standalone import make_standalone
from align.training.diffusion_module import DiffusionDrafterModule
from align.training.run import train
from specalign.common.batch import Corrupted, Step
from specalign.diffusion.schedules import Geometric
from specalign.formats.standalone import open_drafter
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.models.standalone import DiffusionDrafter
from tests.builders import ANCHORS, read_metric, read_weights
from tests.builders import packed_batch as batch


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug", dtype="float32", device="cpu")


def module(
    target: Target, tmp_path: Path, *words: str, recipe: str = "debug_sedd"
) -> DiffusionDrafterModule:
    common = (f"recipe={recipe}", f"output={tmp_path}", "drafter.block_size=3", "drafter.dropout=0")
    read = load_recipe([*common, *words])
    made = make_standalone(target, read.drafter)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for p in made.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    found = DiffusionDrafterModule(made, read)
    found._count = lambda *_: None  # type: ignore[method-assign]
    return found


def step(target: Target, first: int = 0) -> Step:
    return Step(batch(target), ANCHORS, 1.0, "", (0, 1), (first, first + 1))


def test_the_bound_is_the_nelbo_whatever_is_trained_by(target: Target, tmp_path: Path) -> None:
    own = module(target, tmp_path, "stage=finetune", "objective.diffusion=score_entropy")
    noisy = own.noise(step(target), training=False)
    at = own.loss_mask(noisy)
    assert bool((noisy.importance != 1).any())  # validation counts masks
    with torch.no_grad():
        loss, bound = own.losses(step(target), noisy)
        hidden, sigma = own.drafter.block_rows(batch(target), ANCHORS, noisy)
        f = own.drafter.logits(hidden[at], sigma[at])
    times = noisy.times[..., None].expand(at.shape)[at].double()
    weight = noisy.importance[..., None].expand(at.shape)[at] * own.drafter.schedule.weight(times)
    nelbo = weight * masked_cross_entropy(f, noisy.tokens_0[at], own.drafter.mask_id)
    entropy = weight * score_entropy(f, noisy.tokens_0[at], own.drafter.mask_id)
    torch.testing.assert_close(bound[at].double(), nelbo, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss[at].double(), entropy, rtol=1e-4, atol=1e-5)
    assert float((loss - bound).abs().max()) > 1e-3


@pytest.mark.parametrize("schedule", [Geometric()], ids=str)
def test_losses_near_the_end_of_time(target: Target, tmp_path: Path, schedule: Geometric) -> None:
    """fp32 from times in fp32, against the same times in fp64 throughout."""
    own = module(target, tmp_path, "stage=finetune")
    own.drafter.schedule = schedule
    tokens = torch.randint(0, 200, (1, 8, 3), generator=torch.Generator().manual_seed(1))
    times = torch.linspace(0.93, 1.0, 8)[None]
    masked, valid = torch.full_like(tokens, own.drafter.mask_id), torch.ones_like(tokens).bool()
    noisy = Corrupted(masked, tokens, times, valid, torch.ones(1, 8))
    f = torch.randn(24, own.drafter.network.vocab_size, generator=torch.Generator().manual_seed(0))
    found = own.diffusion(f, noisy, torch.arange(24))
    t = times[..., None].expand(1, 8, 3).reshape(-1).double()
    expected = score_entropy(f.double(), tokens.flatten(), own.drafter.mask_id)
    expected = schedule.weight(t) * expected
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 1e-6
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.0)


GOLDEN = Path(__file__).parents[2] / "golden"


def run(output: Path, data: Path, *words: str) -> DiffusionDrafterModule:
    recipe = load_recipe([*words, f"output={output}", f"data.path={data}"])
    return train(recipe, quiet=True)  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", ["debug_sedd", "debug_mdlm"])
def test_golden_losses(recipe: str, tmp_path: Path, debug_data: Path) -> None:
    run(tmp_path, debug_data, f"recipe={recipe}")
    golden = json.loads((GOLDEN / f"{recipe}.json").read_text())["losses"]
    assert read_metric(tmp_path) == pytest.approx(golden, rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "stage"), [("debug_sedd", "pretrain"), ("debug_mdlm", "calibrate")]
)
def test_resume_is_identical(recipe: str, stage: str, tmp_path: Path, debug_data: Path) -> None:
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
    one, two = read_weights(tmp_path / "whole"), read_weights(tmp_path / "parts")
    assert all(torch.equal(one[k], two[k]) for k in one)


@pytest.mark.slow
def test_stages_follow_each_other(tmp_path: Path, debug_data: Path, target: Target) -> None:
    """Each starts from the one before: its first validation is the last one's."""
    words = ("recipe=debug_sedd", "trainer.validate_first=true", "trainer.max_steps=6")
    init: tuple[str, ...] = ()
    before = None
    for stage in ("pretrain", "finetune", "calibrate"):
        run(tmp_path / stage, debug_data, *words, f"stage={stage}", *init)
        bounds = read_metric(tmp_path / stage, "validation/bound")
        assert len(bounds) >= 2
        if before is not None:
            assert bounds[0] == pytest.approx(before, rel=1e-5)
        before = bounds[-1]
        init = (f"drafter.init={tmp_path / stage / 'drafter'}",)
    loaded = open_drafter(tmp_path / "calibrate/drafter", target)
    assert isinstance(loaded, DiffusionDrafter) and loaded.config.block_size == 4
