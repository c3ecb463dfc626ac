"""Autoregressive drafters are ordinary language models: their export is the folder itself in the type that is asked for, with a card that
says how it is served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from align.common.checksums import check_checksums
from align.common.claims import scratch
from align.common.errors import UserError, in_one_line
from align.common.hub import model_folder
from align.common.schema import read_config
from align.importing.layouts import RECORD
from align.models.checkpoints.weights import read_weights, weight_files, write_weights
from align.target.loading import load_target
from align.target.model import Target
from align.target.opening import quiet_loading
from decode.drafters.autoregressive import AutoregressiveDrafter, check_vocabulary
from decode.engine.compiled import stock_model
from decode.exporting.engine_reader import assisted
from decode.exporting.folder import bullets, card, check_free, python_text, read_record, unnamed, write_folder
from decode.exporting.ladder import TOLERANCE, distance
from decode.exporting.registry import sglang_line, vllm_line
from decode.exporting.verdict import Decoded, Verdict, decoded

ROUNDED = "weights are rounded to {}, and what is compared is as rounded; --dtype float32 keeps them"
_SKIPPED = ("README.md", RECORD, "checksums.json")
_HUB = ("*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja", "README.md")
"""Of a drafter on the hub."""
_READER = "transformers' AutoModelForCausalLM"
_GENERATION = "generate(assistant_model=…)"
_QUANTISED = "quantization_config"
FORMAT = "draft_model"
DRAFTS = 5


def check_format(names: Iterable[str]) -> None:
    """Raises UserError for another format than `draft_model`, which alone holds such a drafter."""
    for name in names:
        if name != FORMAT:
            raise UserError(
                f"--format {name}: holds block drafters, this one is an ordinary language model; use --format {FORMAT} alone"
            )


def export(drafter: str, target: str, folders: Mapping[str, Path], dtype: str) -> Verdict:
    """Copy the folder, its weights as `dtype`.

    Raises:
        UserError: another format; weights that can't be read.
    """
    check_format(folders)
    ((form, out),) = folders.items()
    source, number = model_folder(drafter, "drafter", _HUB), getattr(torch, dtype)
    check_free(out, form)
    check_checksums(source)
    config, stored = read_config(source), weight_files(source)
    if not stored:
        raise UserError(f"--drafter={drafter}: {source} has no weights")
    kept = _QUANTISED in config  # what is packed has no other type
    tensors = {} if kept else {name: t for file in stored for name, t in read_weights(file).items()}
    lost = any(
        t.is_floating_point() and not torch.equal(t.to(number).to(t.dtype), t) for t in tensors.values()
    )
    notes = unnamed(target)
    if kept:
        notes.append("its weights are quantised and stay as they are, whatever --dtype says")
    elif lost:
        notes.append(ROUNDED.format(dtype))
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
            write_weights({name: _cast(t, number) for name, t in tensors.items()}, part)

    write_folder(out, {"format": form, "target": target}, page, fill)
    return Verdict(form, out, notes=notes, serve=serve(target, str(out)))


def opened(drafter: str, target: Target) -> Target:
    """The drafter as a language model here, in fp32. Raises UserError where its vocabulary is not the target's."""
    trust = target.trust_remote_code
    model = load_target(drafter, "float32", str(target.device), trust_remote_code=trust)
    check_vocabulary(model, target)
    return model


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In storage of its own: tied weights share theirs, which safetensors refuses."""
    return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()


def in_process(
    drafter: str,
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    engine: str,
    folder: Path | None,
) -> Verdict:
    """Compare transformers' assisted generation by an export with the drafter. folder: of the export; None = written anew.

    Raises:
        UserError: another engine, none of which drafts with a language model in this process; an export of something else.
    """
    if engine != "transformers":
        raise UserError(
            f"--engine {engine}: holds block drafters, this one is an ordinary language model; --engine transformers, or a server's URL"
        )
    with scratch("specalign-parity-") as made:
        if folder is None:
            verdict = export(drafter, target.spec, {FORMAT: made / FORMAT}, "bfloat16")
        elif (found := read_record(folder).get("format")) != FORMAT:
            raise UserError(
                f"--export={folder}: is in the format {found!r}, this drafter is exported as {FORMAT!r}"
            )
        else:
            verdict = Verdict(FORMAT, folder)
        verdict.notes.clear()
        compare(verdict, drafter, target, prompts, max_new_tokens)
    return verdict


def compare(
    verdict: Verdict, drafter: str, target: Target, prompts: Sequence[list[int]], max_new_tokens: int
) -> None:
    """Logits over random tokens, of the drafter's weights as the export stores them and of the export's, then whole outputs of
    transformers' assisted generation. Writes into the verdict."""
    try:
        with in_one_line(f"{verdict.folder}: {_READER} can't run it"):
            assistant = _logits(verdict, model_folder(drafter, "drafter", _HUB))
        if verdict.same:
            ours = AutoregressiveDrafter(opened(str(verdict.folder), target), DRAFTS)
            texts = decoded(target, ours, prompts, max_new_tokens)
            with in_one_line(f"{verdict.folder}: {_GENERATION} can't run it"):
                _whole(verdict, stock_model(target), assistant, texts)
    except UserError as error:
        verdict.fail(str(error))


@torch.no_grad()
def _logits(verdict: Verdict, source: Path) -> Any:
    """Compare logits; what transformers opens of the export."""
    from transformers import AutoModelForCausalLM

    quiet_loading()
    config, found = read_config(verdict.folder), list[Tensor]()
    for folder in (source, verdict.folder):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        ).eval()
        if _QUANTISED not in config:
            for weights in model.state_dict().values():
                weights.copy_(_cast(weights, getattr(torch, str(config["dtype"]))))
        words = model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(words, (1, 48), generator=torch.Generator().manual_seed(0))
        found.append(model(ids).logits)
    apart = distance(found[1], found[0])
    same = apart < TOLERANCE
    said = f"the same ({apart:.1e})" if same else f"DIFFERENT by {apart:.2g} of their size"
    verdict.add(_READER, same, f"logits over 48 random tokens: {said}")
    return model


def _whole(verdict: Verdict, model: Any, assistant: Any, texts: Decoded) -> None:
    """Compare whole outputs. model: the target as transformers runs it."""
    # anew: what its own asks for beside (repetition_penalty) is not applied to drafts here
    assistant.to(model.device).generation_config = GenerationConfig(
        num_assistant_tokens=DRAFTS,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,  # draft them all
    )
    written, accepted = list[list[int]](), list[list[int]]()
    for prompt, output in zip(texts.prompts, texts.outputs, strict=True):
        # it drafts before the first token, too; here drafts begin behind it
        first, rest = output[:1], len(output) - 1
        tokens, starts = list[int](), [0]
        if rest > 0:
            tokens, starts = assisted(model, prompt + first, rest, assistant_model=assistant)
        written.append(first + tokens)
        accepted.append([b - a - 1 for a, b in pairwise([len(prompt), *starts[1:]])])
    equal = texts.as_plain(written)
    verdict.add(_GENERATION, equal == len(written), f"{equal} of {len(written)} outputs as plain greedy ones")
    verdict.add(_GENERATION, *texts.alike(accepted, DRAFTS))


def serve(target: str, folder: str) -> list[str]:
    """Lines that serve the folder."""
    return [
        vllm_line("draft_model", target, folder, DRAFTS),
        sglang_line("STANDALONE", target, folder, DRAFTS),
        f"model.generate(**words, assistant_model=AutoModelForCausalLM.from_pretrained({python_text(folder)}))",
    ]
