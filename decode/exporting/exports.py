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
    decode_greedily,
    encode_prompts,
    round_weights,
)
from decode.exporting.formats import check_free, make_export, write_card, write_export
from decode.exporting.serving import serve
from specalign.common.hub import hub_id, local_path, model_folder, opening_name
from specalign.formats.block import FILES, load_drafter
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt


def export_drafter(
    drafter: str,
    target: Target,
    folders: Mapping[str, Path],
    dtype: str = "bfloat16",
    prompts: Sequence[Prompt] = (),
) -> list[ExportVerdict]:
    """Write a drafter in each format into its folder (`folders`: format → folder), and compare over
    the prompts. Raises UserError if a format can't hold the drafter or a folder holds something
    else; then nothing is written.

    Args:
        drafter: folder or hub id. target: in fp32: networks are compared, not roundings. dtype: of
            the written weights.
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
    for form in folders:  # refuse before anything is written
        make_export(form, network)
    source = model_folder(drafter, "drafter", FILES)
    verdicts = []
    for form, out in folders.items():
        lines = serve(form, network.config, target, out.name)
        card = write_card(form, source, known, out.name, lines)
        write_export(form, network, out, stored, card)
        lines = serve(form, network.config, target, str(out.absolute()))
        verdicts.append(ExportVerdict(form, out, serve=lines))
    if prompts:
        texts = decode_greedily(network, encode_prompts(target, prompts))
        model = stock_model(target)
        for verdict in verdicts:
            compare_export(network, verdict, texts, model)
    return verdicts
