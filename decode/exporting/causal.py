"""Autoregressive drafters are ordinary language models: their export is the folder itself in the type that is asked for, with a card that
says how it is served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from align.common.checksums import check_checksums
from align.common.errors import UserError, in_one_line
from align.common.hub import model_folder
from align.common.schema import read_config
from align.importing.layouts import RECORD
from align.models.checkpoints.weights import read_weights, weight_files, write_weights
from align.target.opening import quiet_loading
from decode.exporting.folder import bullets, card, check_free, python_text, unnamed, write_folder
from decode.exporting.ladder import TOLERANCE, distance
from decode.exporting.registry import sglang_line, vllm_line
from decode.exporting.verdict import Verdict

_SKIPPED = ("README.md", RECORD, "checksums.json")
_HUB = ("*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja", "README.md")
"""Of a drafter on the hub."""
_READER = "transformers' AutoModelForCausalLM"
DRAFTS = 5


def export(
    drafter: str, target: str, folders: Mapping[str, Path], dtype: str, compared: bool = True
) -> Verdict:
    """Copy the folder, its weights as `dtype`, and compare what transformers reads there with what it reads in the drafter's own.

    Raises:
        UserError: another format than `draft_model`, which alone holds such a drafter; weights that can't be read.
    """
    for name in folders:
        if name != "draft_model":
            raise UserError(
                f"--format {name}: holds block drafters, this one is an ordinary language model; use --format draft_model alone"
            )
    ((form, out),) = folders.items()
    source, number = model_folder(drafter, "drafter", _HUB), getattr(torch, dtype)
    check_free(out, form)
    check_checksums(source)
    config, stored = read_config(source), weight_files(source)
    if not stored:
        raise UserError(f"--drafter={drafter}: {source} has no weights")
    kept = "quantization_config" in config  # what is packed has no other type
    tensors = {} if kept else {name: t for file in stored for name, t in read_weights(file).items()}
    lost = any(
        t.is_floating_point() and not torch.equal(t.to(number).to(t.dtype), t) for t in tensors.values()
    )
    notes = unnamed(target)
    if kept:
        notes.append("its weights are quantised and stay as they are, whatever --dtype says")
    elif lost:
        notes.append(f"weights are rounded to {dtype}, and compared as rounded; --dtype float32 keeps them")
    title = f"{out.name}: a small language model that drafts for {target}"
    tags, lead = ("speculative-decoding", "drafter"), "FOLDER is where this page lies:"
    page = card(source, "transformers", target, tags, title, lead, serve(target, "FOLDER")) + bullets(notes)

    def fill(part: Path) -> None:
        for path in source.iterdir():
            weights = not kept and (path in stored or path.name.endswith(".index.json"))
            if path.is_file() and path.name not in _SKIPPED and not weights:
                shutil.copyfile(path, part / path.name)
        if not kept:
            rest = {k: v for k, v in config.items() if k != "torch_dtype"}
            (part / "config.json").write_text(json.dumps({**rest, "dtype": dtype}, indent=2) + "\n")
            write_weights({name: _cast(t, number).contiguous() for name, t in tensors.items()}, part)

    write_folder(out, {"format": form, "target": target}, page, fill)
    verdict = Verdict(form, out, notes=notes, serve=serve(target, str(out)))
    if compared:
        _compare(verdict, source, None if kept else number)
    return verdict


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@torch.no_grad()
def _compare(verdict: Verdict, source: Path, dtype: torch.dtype | None) -> None:
    """Logits over random tokens, of the drafter's weights as rounded and of the export's. Writes into the verdict."""
    from transformers import AutoModelForCausalLM

    quiet_loading()
    try:
        with in_one_line(f"{verdict.folder}: {_READER} can't run it"):
            found = list[Tensor]()
            for folder in (source, verdict.folder):
                model = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, trust_remote_code=False
                ).eval()
                if dtype is not None:
                    for weights in model.state_dict().values():
                        weights.copy_(_cast(weights, dtype))
                words = model.get_input_embeddings().weight.shape[0]
                ids = torch.randint(words, (1, 48), generator=torch.Generator().manual_seed(0))
                found.append(model(ids).logits)
    except UserError as error:
        verdict.fail(str(error))
        return
    apart = distance(found[1], found[0])
    same = apart < TOLERANCE
    said = f"the same ({apart:.1e})" if same else f"DIFFERENT by {apart:.2g} of their size"
    verdict.add(_READER, same, f"logits over 48 random tokens: {said}")


def serve(target: str, folder: str) -> list[str]:
    """Lines that serve the folder."""
    return [
        vllm_line("draft_model", target, folder, DRAFTS),
        sglang_line("STANDALONE", target, folder, DRAFTS),
        f"model.generate(**words, assistant_model=AutoModelForCausalLM.from_pretrained({python_text(folder)}))",
    ]
