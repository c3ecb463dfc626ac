"""What the module of standalone drafters computes from a step: noise, losses, bound; each option where it acts."""

from pathlib import Path

import pytest
import torch

from align.config.parser import load_recipe
from align.losses.diffusion_losses import masked_cross_entropy, score_entropy
from align.makers.standalone import make_standalone
from align.training.diffusion_module import DiffusionDrafterModule
from specalign.common.batch import Corrupted, Step
from specalign.diffusion.schedules import Geometric
from specalign.formats.standalone import open_drafter
from specalign.lm.model import Target
from specalign.models.standalone import DiffusionDrafter
from tests.builders import ANCHORS, read_metric, train_debug
from tests.builders import packed_batch as batch


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


def test_losses_near_the_end_of_time(target: Target, tmp_path: Path) -> None:
    """fp32 from times in fp32, against the same times in fp64 throughout."""
    own = module(target, tmp_path, "stage=finetune")
    own.drafter.schedule = schedule = Geometric()
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


@pytest.mark.slow
def test_stages_follow_each_other(tmp_path: Path, debug_data: Path, target: Target) -> None:
    """Each starts from the one before: its first validation is the last one's."""
    words = ("trainer.validate_first=true", "trainer.max_steps=6")
    init: tuple[str, ...] = ()
    before = None
    for stage in ("pretrain", "finetune", "calibrate"):
        output = tmp_path / stage
        train_debug("debug_sedd", output, debug_data, *words, f"stage={stage}", *init)
        bounds = read_metric(output, "validation/bound")
        assert len(bounds) >= 2
        if before is not None:
            assert bounds[0] == pytest.approx(before, rel=1e-5)
        before = bounds[-1]
        init = (f"drafter.init={output / 'drafter'}",)
    loaded = open_drafter(tmp_path / "calibrate/drafter", target)
    assert isinstance(loaded, DiffusionDrafter) and loaded.config.block_size == 4
