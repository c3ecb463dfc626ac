"""A training run from its recipe to the saved drafter: target, data, drafter, training, saving."""

import logging
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

import lightning
import torch

from align.config import hardware
from align.config.hardware import main_process
from align.config.recipe import Recipe
from align.config.recipe_files import save_run_record
from align.data.supply import Supply, open_supply
from align.outputs.served import StateServer
from align.training import checkpoints, strategies
from align.training.base_module import Drafter, DrafterModule, Interrupted
from align.training.build import MODULES, conditioning, draft_vocab, make_drafter, save_trained
from align.training.callbacks import CheckpointCallback, MilestoneCallback, ProgressLogger
from align.training.checkpoints import Checkpoint
from align.training.datamodule import RowsModule
from align.training.loggers import MetricsFile, build_loggers
from align.training.store_outputs import count_text_rows
from specalign.common.claims import Claim
from specalign.common.commands import command
from specalign.common.errors import UserError
from specalign.common.hub import DEFAULT_TARGET
from specalign.common.text import say
from specalign.folder.chat import Chat
from specalign.lm.loading import load_target
from specalign.lm.model import Target


def run_command(recipe: Recipe, argv: Sequence[str]) -> int:
    """`align.train`: claim the folders and train. Returns the exit code."""
    try:
        with ExitStack() as claims:
            if main_process():
                claims.enter_context(Claim(Path(recipe.output), "output"))
                if recipe.trainer.features_gb:
                    claims.enter_context(Claim(recipe.features_folder, "trainer.features_path"))
            train(recipe, argv=argv)
        return 0
    except Interrupted as stop:
        if not main_process():  # it stopped with the others: not a crash to its launcher
            return 0
        say(str(stop), error=True)
        return 130


def train(recipe: Recipe, quiet: bool = False, argv: Sequence[str] | None = None) -> DrafterModule:
    """Run a recipe to its end and save the drafter to <output>/drafter. The step itself is
    `DrafterModule.training_step`. Raises UserError: wrong input. NonFiniteLoss, Interrupted:
    training stopped early."""
    quiet = quiet or not main_process()
    if recipe.target.parallel == "fsdp":  # sharded later
        options = {**recipe.target_options, "device": "cpu", "fast": False}
    else:
        options = {**recipe.target_options, "device": hardware.target_device(recipe)}
        if recipe.trainer.compile_target:  # which can't look into our kernels
            options["fast"] = False
    target = load_target(recipe.target.name, **options)
    served = None  # a server runs the target
    if recipe.trainer.features_server is not None:
        served = StateServer(recipe, target, conditioning(recipe.drafter, target), quiet)
    drafter, supply, resume = _open(recipe, target, quiet)
    layers = None if served is None else served.layers
    if layers is not None and recipe.drafter.kind == "block":  # others are saved from its layers
        layers.free()
    if recipe.trainer.compile_target:  # the data are written by now
        target.compile_layers()
    text_rows = count_text_rows(recipe)
    if resume is not None:
        kind = strategies.checkpoint_kind(recipe)
        checkpoints.check_same_run(resume, recipe, drafter.config.to_dict(), kind)
        text_rows = resume.seal.schedule.get("text_rows", text_rows)

    stream, block_size = supply.stream(recipe, text_rows), drafter.config.block_size
    module = MODULES[recipe.drafter.kind](drafter, recipe, text_rows, layers)
    held_out, exact = supply.validation, supply.exact
    rows = RowsModule(recipe, stream, held_out, block_size, exact, module.prepare_step, served)
    if main_process():
        save_run_record(recipe, argv)
    if not quiet:
        say(supply.line(recipe), error=True)
        if resume is not None:
            steps = f"{resume.seal.step} of {recipe.trainer.max_steps} steps"
            say(f"resuming from {resume.path}, {steps}", error=True)

    milestones = MilestoneCallback(
        module, lambda steps, name: save_trained(module, supply, steps, name)
    )
    with served or nullcontext():
        trainer = fit(module, rows, resume, quiet, milestones)
    if trainer.is_global_zero:
        folder = save_trained(module, supply, trainer.global_step)
        if not quiet:
            _suggest_commands(recipe, folder)
    return module


def _open(recipe: Recipe, target: Target, quiet: bool) -> tuple[Drafter, Supply, Checkpoint | None]:
    """The drafter, its data, and the checkpoint to resume from. What can fail without data comes
    first: generating them may take hours."""
    options, folder = recipe.drafter, Path(recipe.output) / "checkpoints"
    resume = checkpoints.find_resume(folder, recipe.trainer.resume, target.hash)
    # a new block drafter drafts over the data's most frequent tokens
    needs_data = options.kind == "block" and options.init is None
    if needs_data:
        conditioning(options, target)
    else:
        drafter = make_drafter(target, options, None, recipe.seed)
    supply = open_supply(recipe, target, quiet)
    if needs_data:
        vocab = draft_vocab(recipe, target, supply, resume)
        drafter = make_drafter(target, options, vocab, recipe.seed)
    return drafter, supply, resume


def fit(
    module: DrafterModule,
    rows: RowsModule,
    resume: Checkpoint | None,
    quiet: bool = False,
    callback: lightning.Callback | None = None,
) -> lightning.Trainer:
    """Train, resuming from a checkpoint of the same run; sets `module.final_weights`, the weights
    to save. `callback` runs after each step, before it is saved. Raises Interrupted, NonFiniteLoss:
    training stopped early. KeyboardInterrupt: a signal outside of the steps."""
    recipe, t = module.recipe, module.recipe.trainer
    max_steps = t.max_steps
    if resume is not None and t.max_minutes and resume.seal.seconds >= 60 * t.max_minutes:
        max_steps = resume.seal.step
    step = -1 if resume is None else resume.seal.step
    if main_process():
        folder = Path(recipe.output) / "checkpoints"
        checkpoints.clear_parts(folder)
        if resume is None:
            checkpoints.set_aside(folder)
        MetricsFile(folder.with_name("metrics.csv")).rewind(step)
    rows.start = max(step, 0)
    trainer = build_trainer(module, max_steps, quiet, callback)
    try:
        path = None if resume is None else str(resume.path)
        is_one_file = strategies.is_one_file(recipe.launch.strategy)
        trainer.fit(module, rows, ckpt_path=path, weights_only=is_one_file)
    except SystemExit as stop:  # Lightning's answer to a signal before or after the steps
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    if not module.final_weights:  # the checkpoint was the end of the run
        module.copy_final_weights()
    return trainer


def build_trainer(
    module: DrafterModule,
    max_steps: int,
    quiet: bool = False,
    callback: lightning.Callback | None = None,
) -> lightning.Trainer:
    """Lightning's Trainer. Raises UserError: fp32 training with a target in half precision."""
    recipe, t = module.recipe, module.recipe.trainer
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)  # hides banners
    warnings.filterwarnings("ignore", module="lightning")
    device, output = hardware.accelerator(recipe), Path(recipe.output)
    half_target = module.drafter.target.dtype != torch.float32
    if t.precision == "fp32" and half_target:
        raise UserError("trainer.precision=fp32 needs a target in fp32: add target.dtype=float32")
    is_mixed = t.precision == "bf16" or half_target
    if device == "gpu" and is_mixed:
        torch.set_float32_matmul_precision("high")  # TF32 for the remaining fp32 products
    callbacks = [
        ProgressLogger(module, quiet or not main_process()),
        *([] if callback is None else [callback]),
        CheckpointCallback(module),
    ]
    return lightning.Trainer(
        accelerator=device,
        devices=hardware.devices(recipe),
        num_nodes=recipe.launch.num_nodes,
        strategy=strategies.build_strategy(recipe, device),
        plugins=strategies.build_plugins(recipe.launch.strategy),
        precision="bf16-mixed" if is_mixed else "32-true",  # weights and optimizer: always fp32
        max_steps=max_steps,
        accumulate_grad_batches=t.accumulate,
        gradient_clip_val=t.gradient_clip or None,
        val_check_interval=t.validate_every * t.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1 if t.validate_first else 0,
        use_distributed_sampler=False,
        logger=build_loggers(t, recipe.name, output),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,
        callbacks=callbacks,
        default_root_dir=recipe.output,
    )


def _suggest_commands(recipe: Recipe, folder: Path) -> None:
    target = [] if recipe.target.name == DEFAULT_TARGET else ["--target", recipe.target.name]
    chat = Chat(recipe.data.template_kwargs, recipe.data.system)
    options = [*target, "--drafter", str(folder), *chat.arguments]
    say(f"the drafter is saved in {folder}; next:")
    say(f"  {command('decode.eval', '--suite', 'builtin', *options)}")
    say(f'  {command("decode.generate", *options)} "your prompt"')
