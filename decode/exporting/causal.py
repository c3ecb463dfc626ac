"""Autoregressive drafters are ordinary language models: their export is the folder itself in the type that is asked for, with a card that
says how it is served."""

from __future__ import annotations

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
from align.common.files import write_json
from align.common.hub import model_folder
from align.common.schema import read_config, read_object
from align.importing.kinds import RECORD as DRAFTER_RECORD
from align.importing.layouts import RECORD
from align.models.checkpoints.weights import read_weights, weight_files, write_weights
from align.target.inspection.text_model import embedding_names
from align.target.loading import load_target
from align.target.model import Target
from align.target.opening import quiet_loading
from decode.drafters.autoregressive import AutoregressiveDrafter, check_vocabulary
from decode.engine.compiled import stock_model
from decode.exporting.engine_reader import assisted
from decode.exporting.folder import bullets, card, check_free, read_record, unnamed, write_folder
from decode.exporting.ladder import TOLERANCE, distance, other_tensor
from decode.exporting.registry import UnfitFormat, causal_snippets
from decode.exporting.serving import ServedTarget
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
    """Raises UnfitFormat for another format than `draft_model`, the only one that holds such a drafter."""
    for name in names:
        if name != FORMAT:
            raise UnfitFormat(
                f"--format {name}: holds block drafters, and this one is an autoregressive language model",
                [FORMAT],
            )


def export(
    drafter: str,
    target: str,
    folders: Mapping[str, Path],
    dtype: str,
    served: ServedTarget | None = None,
    repo: str | None = None,
) -> Verdict:
    """Copy the folder, its weights as `dtype`, the head that they hold included.

    Args:
        target: the name that others know the target by. served: as engines open it; default: by that name. repo: where the folder
            is to be uploaded, which its card then names.

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
    tensors = {} if kept else _stored_tensors(stored)
    if holds_head(source, tensors):
        config["tie_word_embeddings"] = False  # engines believe the key and would leave the head out
    lost = any(
        t.is_floating_point() and not torch.equal(t.to(number).to(t.dtype), t) for t in tensors.values()
    )
    notes = unnamed(target)
    if kept:
        notes.append("its weights are quantised and stay as they are, whatever --dtype says")
    elif lost:
        notes.append(ROUNDED.format(dtype))
    title = f"{out.name}: a small language model that drafts for {target}"
    snippets = causal_snippets(served or ServedTarget(target), repo or str(out.absolute()), DRAFTS)
    tags = ("speculative-decoding", "drafter")
    page = card(source, "transformers", target, tags, title, "", snippets) + bullets(notes)

    def fill(part: Path) -> None:
        for path in source.iterdir():
            weights = not kept and (path in stored or path.name.endswith(".index.json"))
            if path.is_file() and path.name not in _SKIPPED and not weights:
                shutil.copyfile(path, part / path.name)
        record = part / DRAFTER_RECORD
        if (
            record.is_file()
        ):  # by the name that the export has for the target: no path of this machine where it is uploaded
            write_json(record, {**read_object(record), "target": target})
        if not kept:
            rest = {k: v for k, v in config.items() if k not in ("torch_dtype", "_name_or_path")}
            write_json(part / "config.json", {**rest, "dtype": dtype})
            write_weights({name: _cast(t, number) for name, t in tensors.items()}, part)

    write_folder(out, {"format": form, "target": target}, page, fill)
    return Verdict(form, out, notes=notes, serve=snippets)


def _stored_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    return {name: tensor for file in files for name, tensor in read_weights(file).items()}


def holds_head(folder: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the tensors of a language model's folder hold an output head that is not its embedding, whatever config.json says."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        embedding, head = embedding_names(model)
    except (OSError, ValueError, StopIteration):  # a class that needs code of its own
        return False
    if head not in tensors:
        return False
    rows = next(
        (t for name, t in tensors.items() if embedding.endswith(name)), None
    )  # some files lack a prefix
    return rows is None or not torch.equal(rows, tensors[head])


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
    verdict: Verdict,
    drafter: str,
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    generate: bool = True,
) -> None:
    """The export's tensors against the drafter's, logits over random tokens, then whole outputs of transformers' assisted
    generation. Writes into the verdict.

    Args:
        generate: whether to compare whole outputs too, which is of the engine and not of the files.
    """
    try:
        source = model_folder(drafter, "drafter", _HUB)
        with in_one_line(f"{verdict.folder}: {_READER} can't run it"):
            _compare_tensors(verdict, source)
            assistant = _compare_logits(verdict, source, target)
        if verdict.same and generate:
            ours = AutoregressiveDrafter(opened(str(verdict.folder), target), DRAFTS)
            texts = decoded(target, ours, prompts, max_new_tokens)
            with in_one_line(f"{verdict.folder}: {_GENERATION} can't run it"):
                _whole(verdict, stock_model(target), assistant, texts)
    except UserError as error:
        verdict.fail(str(error))


def _compare_tensors(verdict: Verdict, source: Path) -> None:
    """Every tensor as it is stored, and the key that says whether the head is one of them."""
    config = read_config(verdict.folder)
    if _QUANTISED in config:
        return
    number = getattr(torch, str(config["dtype"]))
    wanted = {name: _cast(t, number) for name, t in _stored_tensors(weight_files(source)).items()}
    held = _stored_tensors(weight_files(verdict.folder))
    cause = other_tensor(wanted, held)
    if not cause and holds_head(verdict.folder, held) and config.get("tie_word_embeddings", True):
        cause = "config.json: tie_word_embeddings is not false, so engines leave out the head that the tensors hold"
    verdict.add("the files", not cause, f"tensors: {cause or f'the same ({len(held)})'}")


@torch.no_grad()
def _compare_logits(verdict: Verdict, source: Path, target: Target) -> Any:
    """Logits over random tokens, and the head that the drafter was trained with. Returns what transformers opens of the export."""
    from transformers import AutoModelForCausalLM

    quiet_loading()
    config, found = read_config(verdict.folder), list[Tensor]()
    for folder in (source, verdict.folder):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        ).eval()
        if folder is source and (lost := _lost_head(model, source, target)):
            verdict.add(_READER, False, lost)
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


def _lost_head(model: Any, source: Path, target: Target) -> str:
    """Why a drafter trained here is not the one that was trained; empty = it is. Training freezes embedding and head, and where the
    embedding is the target's the head was too."""
    if not (source / DRAFTER_RECORD).is_file():
        return ""
    own = [
        part.weight.detach().float() for part in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    theirs = [weight.detach().float().cpu() for weight in (target.embedding_VD, target.head_weight_VD)]
    alike = [a.shape == b.shape and distance(a, b) < HALF for a, b in zip(own, theirs, strict=True)]
    if not alike[0] or alike[1]:
        return ""
    return (
        f"output head: MISSING: {source} was trained with the head of {target.spec!r}, which is not its embedding, and was saved "
        "without it; train it again"
    )


HALF = 0.05
"""Of a matrix's root mean square: rounding to half precision stays below it."""


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
    line = f"{equal} of {len(written)} outputs as plain greedy ones"
    verdict.add(_GENERATION, equal == len(written), line, by_engine=True)
    same, line = texts.alike(accepted, DRAFTS)
    verdict.add(_GENERATION, same, line, by_engine=True)
