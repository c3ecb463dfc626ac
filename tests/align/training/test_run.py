"""Training on the debug target: golden losses, bit-identical resume after a stop, one-line errors."""

import csv
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from align.config.parser import load_recipe
from align.data.synthesis import synthesize
from align.training.base_module import DrafterModule, NonFiniteLoss
from align.training.metrics import HostCopy
from align.training.run import train
from specalign.common.errors import UserError
from specalign.folder.training_record import read_record
from specalign.lm.loading import load_target
from tests.builders import read_metric as losses
from tests.builders import read_weights as weights
from tests.builders import train_debug
from tests.builders import train_debug_block as run

GOLDEN = Path(__file__).parents[2] / "golden"


def equal_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return all(torch.equal(first[name], second[name]) for name in first)


class Stop(Exception):
    """What stands for a kill."""


def stop_at(step: int) -> pytest.MonkeyPatch:
    """Training ends before this step; undo it with `undo`."""
    patch, original = pytest.MonkeyPatch(), DrafterModule.on_train_batch_start

    def stopping(self: DrafterModule, batch: object, index: int) -> None:
        if self.global_step == step:
            raise Stop
        original(self, batch, index)

    patch.setattr(DrafterModule, "on_train_batch_start", stopping)
    return patch


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, debug_data: Path) -> Iterator[DrafterModule]:
    """The recipe as it is."""
    yield run(tmp_path_factory.mktemp("whole"), debug_data)


def check_golden(recipe: str, output: Path) -> None:
    """A refactor keeps every loss. The tolerance is for other processors' rounding; here they are equal to the bit."""
    golden = json.loads((GOLDEN / f"{recipe}.json").read_text())["losses"]
    assert losses(output) == pytest.approx(golden, rel=2e-4)
    if recipe != "debug_sedd":  # whose embedding is its own
        (saved,) = output.glob("checkpoints/step-12.ckpt")
        names = torch.load(saved, weights_only=True)["state_dict"]
        assert names and not any("embed" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize("recipe", ["debug_sedd", "debug_mdlm", "debug_autoregressive"])
def test_golden_losses(recipe: str, tmp_path: Path, debug_data: Path) -> None:
    train_debug(recipe, tmp_path, debug_data)
    check_golden(recipe, tmp_path)


def test_losses_card_and_record(whole: DrafterModule, debug_data: Path) -> None:
    """The card says what the run did."""
    output = Path(whole.recipe.output)
    check_golden("debug_block", output)
    card = (output / "drafter" / "README.md").read_text()
    assert str(output) not in card and str(debug_data) not in card  # cards are published
    assert f"{whole.progress.tokens_seen:,} text tokens seen" in card
    saved = read_record(str(output / "drafter"))
    assert saved is not None and (record := saved.training) is not None
    assert set(record.expected_tau) == {"greedy", "sampling"}
    for kind, one in record.expected_tau.items():
        assert one.tau == whole.validation_numbers[f"tau_{kind}"]
        assert f"| {one.tau:.3f} ± {one.standard_error:.3f} (" in card
        assert f"{one.positions:,} positions" in card
    assert f"{record.samples:,} samples, {record.tokens:,} tokens" in card
    versions = json.loads((output / "versions.json").read_text())
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    again = load_recipe([f"recipe={output / 'recipe.yaml'}"])
    assert again.trainer == load_recipe(["recipe=debug_block"]).trainer


def test_sums_that_are_read_late_are_read_before_they_are_needed(
    whole: DrafterModule, tmp_path: Path, debug_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's sums are read during the next micro-batch: metrics, weights and resumed runs are the same, and no
    checkpoint is saved after a loss that is not finite."""
    now, late = Path(whole.recipe.output), tmp_path / "late"
    reading = DrafterModule.read_progress

    def count_late(self: DrafterModule, step: object, *sums: torch.Tensor) -> None:
        own, self.read_progress = self.read_progress, lambda: None  # type: ignore[method-assign]
        reading(self)
        count(self, step, *sums)  # type: ignore[arg-type]
        self.read_progress = own  # type: ignore[method-assign]

    count = DrafterModule._count
    monkeypatch.setattr(DrafterModule, "_count", count_late)
    module = run(late, debug_data)
    assert losses(late) == losses(now)
    assert equal_weights(now, late)
    module._unread = HostCopy(torch.full((7,), torch.nan)), 12
    with pytest.raises(NonFiniteLoss, match="the loss at step 12 is not finite"):
        module.on_save_checkpoint({})


RESUMED = [
    ("debug_block", "trainer.keep_features_gb=0"),
    ("debug_block", "trainer.keep_features_gb=1e-4 trainer.optimizer=muon"),  # rows are 9 kB
    ("debug_block", "trainer.keep_features_gb=1"),
    ("debug_sedd", "stage=pretrain"),
    ("debug_mdlm", "stage=calibrate"),
]
"""With none, some and all of the target's views kept; of every module."""


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "more"), RESUMED)
def test_resume_is_identical(tmp_path: Path, debug_data: Path, recipe: str, more: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = ("trainer.ema=0.9", "trainer.checkpoint_every=4", *more.split())
    one = train_debug(recipe, whole, debug_data, *words)
    patch = stop_at(7)  # three steps after the last checkpoint: they are lost and done again
    with pytest.raises(Stop):
        train_debug(recipe, parts, debug_data, *words)
    patch.undo()
    two = train_debug(recipe, parts, debug_data, *words)
    assert equal_weights(whole, parts)
    assert all(torch.equal(one.ema.shadow[n], two.ema.shadow[n]) for n in one.ema.shadow)
    assert one.validation_numbers == two.validation_numbers
    for name in ("positions", "tokens_seen"):
        assert getattr(one.progress, name) == getattr(two.progress, name)
    assert losses(parts)[-8:] == losses(whole)[-8:]


# within the text, and within the own words, between two shards
@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 9])
def test_text_then_own_words(tmp_path: Path, at: int) -> None:
    """One command from nothing, stopped and gone on with: the weights of one that found all of its data."""
    (tmp_path / "text.txt").write_text("".join(f"line {i} of the text\n" for i in range(90)))
    (tmp_path / "prompts.txt").write_text("".join(f"{i} words\n" for i in range(20)))
    words = ["recipe=debug_block", f"data.text=[{tmp_path}/text.txt]", "data.exclude=[]"]
    words += [f"data.prompts={tmp_path}/prompts.txt", "data.samples=20"]
    words += ["data.batch_size=5", "data.length=48", "trainer.checkpoint_every=2"]
    words += ["data.max_answer_tokens=12", "trainer.validate_every=12"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    recipe = load_recipe([*words, f"output={whole}"])
    synthesize(recipe, load_target("debug"), recipe.data_folder, quiet=True)
    train(recipe, quiet=True)
    patch = stop_at(at)
    with pytest.raises(Stop):
        train(load_recipe([*words, f"output={parts}"]), quiet=True)
    patch.undo()
    train(load_recipe([*words, f"output={parts}"]), quiet=True)
    assert equal_weights(whole, parts)
    assert losses(whole)[-4:] == losses(parts)[-4:]
    assert "for 50% of the steps |" in (whole / "drafter" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["debug_block", "debug_autoregressive"])
def test_a_target_in_bf16(tmp_path: Path, recipe: str) -> None:
    """What machines with fast bf16 do by themselves: before the first step, and whether views are kept or not."""
    (tmp_path / "prompts.txt").write_text("".join(f"{i} words\n" for i in range(20)))
    common = [f"recipe={recipe}", "target.dtype=bfloat16", f"data.path={tmp_path / 'data'}"]
    common += [f"data.prompts={tmp_path}/prompts.txt"]
    common += ["data.samples=20", "data.max_answer_tokens=8", "data.length=48"]
    synthesize(
        load_recipe(common), load_target("debug", dtype="bfloat16"), tmp_path / "data", quiet=True
    )
    found = []
    for kept in ("1e-4", "1"):
        words = [*common, f"output={tmp_path / kept}", f"trainer.keep_features_gb={kept}"]
        words += ["trainer.max_steps=4", "trainer.warmup_steps=1", "trainer.validate_first=true"]
        train(load_recipe(words), quiet=True)
        found.append(losses(tmp_path / kept))
    assert len(found[0]) == 4 and found[0] == found[1]


def test_a_beginning_that_is_done_again_is_reported_once(tmp_path: Path, debug_data: Path) -> None:
    """A run that was killed before its first checkpoint, and one that hears a signal before its first step."""
    words = ["recipe=debug_block", f"output={tmp_path}", f"data.path={debug_data}"]
    words += ["trainer.max_steps=1", "trainer.warmup_steps=0", "trainer.validate_first=true"]
    recipe = load_recipe(words)
    (tmp_path / "metrics.csv").write_text("step,validation/loss\n0,1.5\n")

    def signalled(*hook: object) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DrafterModule, "configure_optimizers", signalled)
        train(recipe, quiet=True)
    signal.signal(signal.SIGINT, before)  # which Lightning left ignored
    train(recipe, quiet=True)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["0", "1", "1"]


@pytest.mark.slow
def test_milestones_are_the_drafter_after_so_many_tokens(tmp_path: Path, debug_data: Path) -> None:
    """Of the step that reached them, its average where there is one; a run that is cut in two saves the same."""
    words = ["trainer.max_steps=6", "trainer.checkpoint_every=2", "trainer.ema=0.5"]
    words += ["trainer.warmup_steps=1", "trainer.min_learning_rate_ratio=1"]
    module = run(tmp_path / "half", debug_data, "trainer.max_steps=3", *words[1:])
    half = module.progress.tokens_seen
    milestones = f"trainer.milestones=[{half}, {half + 1}, 9999999]"
    whole = run(tmp_path / "whole", debug_data, *words, milestones)
    there = {path.name for path in (tmp_path / "whole" / "milestones").iterdir()}
    assert there == {str(half), str(half + 1)} and whole.progress.tokens_seen > half
    patch = stop_at(3)
    with pytest.raises(Stop):
        run(tmp_path / "cut", debug_data, *words, milestones)
    patch.undo()
    run(tmp_path / "cut", debug_data, *words, milestones)

    def equal(one: str, other: str) -> bool:
        files = (tmp_path / folder / "model.safetensors" for folder in (one, other))
        first, second = map(load_file, files)
        return all(torch.equal(value, second[name]) for name, value in first.items())

    assert equal("half/drafter", f"whole/milestones/{half}")
    assert equal(f"cut/milestones/{half + 1}", f"whole/milestones/{half + 1}")
    assert equal("cut/drafter", "whole/drafter")
    assert not equal("whole/drafter", f"whole/milestones/{half}")


@pytest.mark.slow
def test_a_confidence_head_is_added_to_a_drafter(tmp_path: Path, debug_data: Path) -> None:
    """It starts at 1/2 everywhere and comes to foretell; every other weight of the saved drafter is the same."""
    run(tmp_path / "first", debug_data)
    words = [f"drafter.init={tmp_path / 'first' / 'drafter'}", "drafter.train=confidence_head"]
    words += ["drafter.confidence_head=true", "objective.terms={confidence: 1.0}"]
    words += ["trainer.learning_rate=0.05", "trainer.validate_first=true", "trainer.max_steps=24"]
    run(tmp_path / "second", debug_data, *words)
    before, after = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert set(after) - set(before) == {"confidence.out.weight", "confidence.out.bias"}
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert bool(after["confidence.out.weight"].any())
    validated = losses(tmp_path / "second", "validation/loss")
    assert validated[-1] < 0.95 * validated[0]


def test_a_run_resumes_with_the_row_after_the_last_one(
    tmp_path: Path, debug_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    step = DrafterModule.on_train_batch_start

    def record(module: DrafterModule, batch: Any, index: int) -> None:
        read.extend(batch.places)
        step(module, batch, index)

    monkeypatch.setattr(DrafterModule, "on_train_batch_start", record)
    run(tmp_path, debug_data, "trainer.max_steps=2", "trainer.batch_size=4")
    checkpoint = tmp_path / "checkpoints" / "step-2.ckpt"
    words = ["recipe=debug_block", f"output={tmp_path}", f"data.path={debug_data}"]
    words += ["trainer.max_steps=3", f"trainer.resume={checkpoint}"]
    train(load_recipe([*words, "trainer.batch_size=4"]), quiet=True)
    assert read == [*range(12)]
    with pytest.raises(UserError, match="saved with trainer.batch_size=4, not 2; use"):
        train(load_recipe([*words, "trainer.batch_size=2"]), quiet=True)
