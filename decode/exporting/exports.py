"""Export a block drafter to one or several formats, and check each export on its target, also in an
engine of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from decode.engine.stock import stock_model
from decode.exporting.compare import (
    ExportVerdict,
    compare_export,
    decode_prompts,
    round_weights,
)
from decode.exporting.folder import check_free, write_card
from decode.exporting.formats import make_export, write_export
from decode.exporting.serving import serve
from specalign.common.hub import hub_id, local_path, model_folder, opening_name
from specalign.formats.block import FILES, load_drafter
from specalign.formats.gguf import check_vocabulary
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt


def export_drafter(
    drafter: str,
    target: Target,
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
        drafter: folder or hub id. target: in fp32: networks are compared, not roundings. dtype: of
            the written weights. vocabulary: the target's GGUF file, for `gguf`.
    """
    for form, out in folders.items():
        check_free(out, form)
    network = load_drafter(drafter, target)
    # a folder may hold a finetuned model, whatever name the drafter was trained under
    given = hub_id(target.spec) or local_path(target.spec).is_dir()
    known = opening_name(target.spec if given else network.config.target)
    network.config = replace(network.config, target=known)
    stored = getattr(torch, dtype)
    round_weights(network, stored)
    if vocabulary is None and target.spec.endswith(".gguf"):
        vocabulary = Path(target.spec)
    for form in folders:  # refuse before anything is written
        made = make_export(form, network)
        if form == "gguf":
            check_vocabulary(made, vocabulary)
    source = model_folder(drafter, "drafter", FILES)
    verdicts = []
    for form, out in folders.items():
        lines = serve(form, network.config, target, out.name, vocabulary)
        card = write_card(form, source, known, out.name, lines)
        write_export(form, network, out, stored, card, vocabulary)
        lines = serve(form, network.config, target, str(out.absolute()), vocabulary)
        verdicts.append(ExportVerdict(form, out, serve=lines))
    if prompts:
        texts, model = decode_prompts(target, prompts, max_new_tokens), stock_model(target)
        for verdict in verdicts:
            compare_export(network, verdict, texts, model)
    return verdicts
