"""The τ that training expects is the τ that the decoder measures from the same prefixes under token verification.

On text drawn from the target at temperature 1, training's estimate at an anchor averages over nothing but the text;
the decoder draws its own last token, drafts and verdict. Both have the same mean, where the text at the anchor and
after it was drawn (a template was not) and was not cut for its length (near that limit, only texts that ended are whole).
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from align.config.parser import load_recipe
from align.data import packing
from align.data.synthesis import synthesize
from align.losses.distillation import expected_accepted_token
from align.training.base_module import DrafterModule
from align.training.block_module import BlockDrafterModule
from align.training.datamodule import make_batch
from align.training.diffusion_module import DiffusionDrafterModule
from align.training.run import train
from decode.engine.request import RequestRunner
from decode.proposers.block import BlockProposer
from decode.proposers.diffusion import DiffusionProposer
from decode.speculation.settings import Sampling
from specalign.common.batch import Step
from specalign.formats.standalone import open_drafter
from specalign.lm.loading import load_target
from specalign.models.block import BlockDrafter
from specalign.models.standalone import DiffusionDrafter
from specalign.rows import shards as data
from specalign.rows.shards import read_samples
from tests.builders import run_batch


def error_over_texts(values: torch.Tensor, texts: torch.Tensor) -> float:
    """The standard error of a mean over anchors, those of one text taken together."""
    off = values.double() - values.double().mean()
    group = texts.unique(return_inverse=True)[1]
    sums = torch.zeros(int(group.max()) + 1, dtype=off.dtype).index_add_(0, group, off)
    count = len(sums)
    return float((sums.square().sum() * count / (count - 1)).sqrt() / len(off))


@dataclass
class Taus:
    """τ expected by training and measured by the decoder, and the standard error of their difference."""

    expected: float
    measured: float
    error: float
    prefixes: int


@torch.no_grad()
def compare(
    drafter: BlockDrafter | DiffusionDrafter, samples: data.Samples, longest: int, prefixes: int
) -> Taus:
    """Compare at `prefixes` anchors spread over samples written at temperature 1 with answers of at most `longest`
    tokens."""
    target, size = drafter.target, drafter.config.block_size
    recipe, generator = load_recipe(["recipe=debug_block"]), torch.Generator().manual_seed(0)
    module: DrafterModule
    proposer: BlockProposer | DiffusionProposer
    if isinstance(drafter, BlockDrafter):
        module, proposer = BlockDrafterModule(drafter, recipe), BlockProposer(drafter)
    else:
        module, proposer = DiffusionDrafterModule(drafter, recipe), DiffusionProposer(drafter)
    chosen = [i for i in range(len(samples)) if samples.temperature[i] == 1]
    per_sample = -(-prefixes // len(chosen))
    expected, texts, runners = [], [], []
    for i in chosen:
        text = samples[i]
        row = packing.pack(samples.select([i]), len(text), 0)[0]
        batch, anchors = make_batch([row], [i], len(text), size, 0)
        step = Step(batch, anchors)
        s = module.model_step(step, 1.0)
        tau = expected_accepted_token(s.log_q_label, s.p_label, s.acceptance, anchors.valid_BAK)[0]
        place = anchors.index_BA[0] - samples.answer_start[i]
        whole = (module.complete(step)[0] & (place + size + 1 < longest)).nonzero()[:, 0]
        for a in whole[torch.randperm(len(whole), generator=generator)[:per_sample]].tolist():
            prefix = text[: int(anchors.index_BA[0, a])].tolist()
            sampling = Sampling(temperature=1.0, seed=1000 * len(expected))
            runners.append(RequestRunner(target, prefix, size + 2, sampling, proposer, "token"))
            expected.append(float(tau[a]))
            texts.append(i)
        if len(expected) >= prefixes:
            break
    run_batch(runners, 32)
    # without a call the last token was the end of the text: nothing to draft after it
    drafted = [i for i, runner in enumerate(runners) if runner.out.calls]
    m = torch.tensor([float(runners[i].out.accepted[0]) for i in drafted])
    e = torch.tensor(expected)[drafted]
    error = error_over_texts(e - m, torch.tensor(texts)[drafted])  # prefixes of one text overlap
    return Taus(1 + float(e.mean()), 1 + float(m.mean()), error, len(e))


WRITTEN = ["data.samples=200", "data.batch_size=100", "data.answer_temperatures=[1.0]"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts") / "data"
    prompts = folder.with_name("prompts.txt")
    prompts.write_text("".join(f"{i} words\n" for i in range(200)))
    words = [*WRITTEN, f"data.prompts={prompts}"]
    recipe = load_recipe(["recipe=debug_block", *words])
    synthesize(recipe, load_target("debug"), folder, quiet=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["debug_block", "debug_taps", "debug_sedd", "debug_mdlm"])
def test_training_expects_what_decoding_measures(recipe: str, texts: Path, tmp_path: Path) -> None:
    words = [f"recipe={recipe}", f"output={tmp_path}", f"data.path={texts}", *WRITTEN]
    train(load_recipe([*words, "trainer.max_steps=40", "trainer.learning_rate=3e-3"]), quiet=True)
    drafter = open_drafter(tmp_path / "drafter", load_target("debug"))
    taus = compare(drafter, read_samples(texts), 24, 400)
    assert taus.prefixes >= 300 and taus.expected > 1.1, taus
    assert abs(taus.expected - taus.measured) < 3 * taus.error, taus
    assert taus.error < 0.04 * taus.measured, taus
