"""Export a drafter to one or several formats, and check exports, also in an engine of this process,
on its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from decode.engine.stock import stock_model
from decode.exporting.compare import (
    ExportVerdict,
    compare_export,
    decode_prompts,
    round_weights,
)
from decode.exporting.folder import check_free, read_format, write_card
from decode.exporting.formats import Source, make_export, write_export
from decode.exporting.serving import find_served_target, serve
from specalign.common.errors import UserError
from specalign.common.hub import hub_id, local_path, model_folder, opening_name
from specalign.formats.block import load_drafter
from specalign.formats.causal import CausalFolder
from specalign.formats.gguf import check_vocabulary
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt

STANDALONE = (
    "a standalone diffusion drafter is decoded by this project only; for other engines train with "
    "drafter.kind=block and drafter.context=taps"
)
_HUB = ("*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja", "README.md")


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

    def open_drafter(self, target: Target) -> Source:
        """Under the name that others know its target by. Raises UserError for a drafter that no
        engine runs."""
        if self.role == "diffusion":
            raise UserError(f"--drafter={self.drafter}: {STANDALONE}")
        if self.role == "autoregressive":
            folder = model_folder(self.drafter, "drafter", _HUB)
            return CausalFolder(folder, opening_name(self.target))
        network = load_drafter(self.drafter, target)
        # a folder may hold a finetuned model, whatever name the drafter was trained under
        given = hub_id(self.target) or local_path(self.target).is_dir()
        known = opening_name(self.target if given else network.config.target)
        network.config = replace(network.config, target=known)
        return network


def export_drafter(
    pair: DrafterPair,
    folders: Mapping[str, Path],
    dtype: str = "bfloat16",
    prompts: Sequence[Prompt] = (),
    max_new_tokens: int = 48,
    vocabulary: Path | None = None,
) -> list[ExportVerdict]:
    """Write a drafter in each format into its folder (`folders`: format → folder), and compare over
    the prompts. Raises UserError if a format can't hold the drafter or a folder holds something
    else; then nothing is written.

    Args:
        dtype: of the written weights. vocabulary: the target's GGUF file, for `gguf`.
    """
    for form, out in folders.items():
        check_free(out, form)
    target = pair.open_target()
    source, stored = pair.open_drafter(target), getattr(torch, dtype)
    notes = round_weights(source, stored)
    if vocabulary is None and pair.target.endswith(".gguf"):
        vocabulary = Path(pair.target)
    for form in folders:  # refuse before anything is written
        made = make_export(form, source)
        if form == "gguf":
            check_vocabulary(made, vocabulary)
    served = find_served_target(target, vocabulary)
    config = None if isinstance(source, CausalFolder) else source.config
    name = source.target if isinstance(source, CausalFolder) else source.config.target
    folder = model_folder(pair.drafter, "drafter", _HUB)
    verdicts = []
    for form, out in folders.items():
        card = write_card(form, folder, name, out.name, serve(form, config, served, out.name))
        found = notes + write_export(form, source, out, stored, card, vocabulary)
        lines = serve(form, config, served, str(out.absolute()))
        verdicts.append(ExportVerdict(form, out, notes=found, serve=lines))
    if prompts:
        _compare(source, verdicts, target, prompts, max_new_tokens)
    return verdicts


def check_export(
    pair: DrafterPair, folder: Path, prompts: Sequence[Prompt], max_new_tokens: int
) -> ExportVerdict:
    """Compare an export with its drafter. Raises UserError for a folder that is no export."""
    verdict = ExportVerdict(read_format(folder), folder)
    target = pair.open_target()
    _compare(pair.open_drafter(target), [verdict], target, prompts, max_new_tokens)
    return verdict


def _compare(
    source: Source,
    verdicts: Sequence[ExportVerdict],
    target: Target,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
) -> None:
    causal = isinstance(source, CausalFolder)  # compared by its contents
    texts = [] if causal else decode_prompts(target, prompts, max_new_tokens)
    model = None if causal else stock_model(target)
    for verdict in verdicts:
        compare_export(source, verdict, target, texts, model)
