"""Export a drafter to one or several formats, and check each export, also in an engine of this
process, on its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from decode.engine.stock import stock_model
from decode.exporting import compare, draft_model, folder, formats
from decode.exporting.compare import ExportVerdict
from decode.exporting.serving import ServedTarget, find_served_target, serve_block
from specalign.common.claims import scratch
from specalign.common.errors import UserError
from specalign.common.hub import hub_id, local_path, model_folder, opening_name
from specalign.formats.block import load_drafter
from specalign.formats.gguf import check_vocabulary
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.suites.prompt import Prompt
from specalign.suites.registry import prompts_of

STANDALONE = (
    "a standalone diffusion drafter is decoded by this project only; for other engines train with "
    "drafter.kind=block and drafter.context=taps"
)


@dataclass(frozen=True)
class DrafterPair:
    """A drafter with its target. drafter: folder or hub id; role: its kind; target: as
    `load_target` takes it."""

    drafter: str
    role: str
    target: str
    device: str = "auto"
    trust_remote_code: bool = False

    def open_target(self) -> Target:
        """In fp32: networks are compared, not roundings."""
        trust = self.trust_remote_code
        return load_target(self.target, "float32", self.device, trust_remote_code=trust)


@dataclass(frozen=True)
class ExportOptions:
    """dtype: of the written weights. limit: built-in prompts to compare over; 0 = no comparison.
    vocabulary: the target's GGUF file, for `gguf`."""

    dtype: str = "bfloat16"
    limit: int = 4
    max_new_tokens: int = 48
    vocabulary: Path | None = None


def export_drafter(
    pair: DrafterPair, folders: Mapping[str, Path], options: ExportOptions
) -> list[ExportVerdict]:
    """Write a drafter in each format into its folder (`folders`: format → folder), and compare.
    Raises UnfitFormat if a format can't hold the drafter, UserError if a folder holds something
    else; then nothing is written."""
    for name, out in folders.items():
        folder.check_free(out, name)
    if pair.role == "diffusion":
        raise formats.UnfitFormat(f"--format {next(iter(folders))}: {STANDALONE}", [])
    if pair.role == "autoregressive":
        draft_model.check_format(folders)
        served, name = find_served_target(pair.target, pair.device), opening_name(pair.target)
        out = folders[draft_model.FORMAT]
        verdict = draft_model.export_draft_model(pair.drafter, name, out, options.dtype, served)
        if options.limit:
            draft_model.compare_draft_model(verdict, pair.drafter, pair.open_target())
        return [verdict]
    network = load_drafter(pair.drafter, pair.open_target())
    verdicts = _write_exports(pair, network, folders, options)
    if options.limit:
        suites, _ = prompts_of("builtin", limit=options.limit)
        prompts = [prompt for suite in suites for prompt in suite.prompts]
        texts = compare.decode_prompts(network.target, prompts, options.max_new_tokens)
        model = stock_model(network.target)
        for verdict in verdicts:
            compare.compare_export(network, verdict, texts, model)
    return verdicts


def _write_exports(
    pair: DrafterPair, network: BlockDrafter, folders: Mapping[str, Path], options: ExportOptions
) -> list[ExportVerdict]:
    # a folder may hold a finetuned model, whatever name the drafter was trained under
    given = hub_id(pair.target) or local_path(pair.target).is_dir()
    known = opening_name(pair.target if given else network.config.target)
    network.config = replace(network.config, target=known)
    dtype = getattr(torch, options.dtype)
    rounded = round_weights(network, dtype)
    vocabulary = options.vocabulary
    if vocabulary is None and pair.target.endswith(".gguf"):
        vocabulary = Path(pair.target)
    for name in folders:  # refuse before anything is written
        made = formats.make_export(name, network)
        if name == "gguf":
            check_vocabulary(made, vocabulary)
    served = find_served_target(pair.target, pair.device, vocabulary)
    source = model_folder(pair.drafter, "drafter", ["config.json", "README.md"])
    verdicts = []
    for name, out in folders.items():
        lines = serve_block(name, network.config, served, out.name)
        card = formats.write_block_card(name, source, network, out.name, lines)
        notes = formats.write_export(name, network, out, dtype, card, vocabulary)
        notes += [draft_model.ROUNDED.format(options.dtype)] if rounded else []
        lines = serve_block(name, network.config, served, str(out.absolute()))
        verdicts.append(ExportVerdict(name, out, notes=notes, serve=lines))
    return verdicts


@torch.no_grad()
def round_weights(network: BlockDrafter, dtype: torch.dtype) -> bool:
    """Round to what weights of `dtype` hold; whether that changed any."""
    changed = False
    for weights in (*network.parameters(), *network.buffers()):
        if weights.is_floating_point():
            rounded = weights.to(dtype).to(weights.dtype)
            changed |= not torch.equal(rounded, weights)
            weights.copy_(rounded)
    return changed


# ---- decode.parity ----


def check_transformers(
    pair: DrafterPair, prompts: Sequence[Prompt], max_new_tokens: int, export: Path | None = None
) -> ExportVerdict:
    """Compare transformers' own class with the drafter. `export`: a folder in its format; None = a
    fresh one in bf16. Raises UserError for an export in another format, or a drafter that the
    format can't hold."""
    causal = pair.role == "autoregressive"
    form = draft_model.FORMAT if causal else "transformers"
    if export is not None and (found := folder.read_format(export)) != form:
        raise UserError(
            f"--export={export}: is in the format {found!r}, transformers reads {form!r}"
        )
    target = pair.open_target()
    with scratch("specalign-parity-") as place:
        if causal:
            out, served = place / form, ServedTarget(pair.target)
            if export is None:
                draft_model.export_draft_model(pair.drafter, pair.target, out, "bfloat16", served)
            verdict = ExportVerdict(form, export or out)
            draft_model.compare_draft_model(verdict, pair.drafter, target)
            return verdict
        network = load_drafter(pair.drafter, target)
        formats.make_export(form, network)
        verdict = prepare_export(network, form, export, place)
        texts = compare.decode_prompts(target, prompts, max_new_tokens)
        compare.compare_export(network, verdict, texts, stock_model(target))
    return verdict


def prepare_export(
    network: BlockDrafter, form: str, export: Path | None, place: Path
) -> ExportVerdict:
    """Round the drafter as the export is stored; without one, write a fresh one in bf16 into
    `place`."""
    if export is None:
        round_weights(network, torch.bfloat16)
        formats.write_export(form, network, place / form, torch.bfloat16, "")
        return ExportVerdict(form, place / form)
    tensors = formats.read_export(form, export).tensors
    matrix = tensors.get("fc.weight", tensors.get("encoder.fc.weight"))
    if matrix is None:
        raise UserError(f"--export={export}: misses the tensor 'fc.weight'")
    round_weights(network, matrix.dtype)
    return ExportVerdict(form, export)
