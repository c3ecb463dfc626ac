"""`draft_model`: an autoregressive drafter is an ordinary language model; its export is its folder
in the requested dtype."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from decode.exporting.compare import (
    GreedyText,
    Stages,
    compare_stages,
    find_other_setting,
    find_other_tensor,
)
from decode.exporting.folder import Exported, check_free, note_target, write_card, write_folder
from decode.exporting.serving import (
    ServedTarget,
    Snippet,
    python_text,
    sglang_line,
    transformers_script,
    vllm_line,
)
from decode.exporting.verdict import Verdict
from decode.proposers.autoregressive import check_vocabulary
from specalign.common.checksums import check_checksums
from specalign.common.errors import UserError, in_one_line
from specalign.common.files import write_json
from specalign.common.hub import model_folder
from specalign.common.schema import read_config, read_object
from specalign.formats.kinds import RECORD as DRAFTER_RECORD
from specalign.formats.layouts import RECORD
from specalign.formats.weights import read_weights, weight_files, write_weights
from specalign.lm.inspection.text_model import embedding_names
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.lm.opening import quiet_loading

FORMAT = "draft_model"
DRAFTS = 5
"""Drafts per round in the lines that serve it."""
ROUNDED = "weights are rounded to {}, and the comparison is with the rounded ones; --dtype float32 keeps them"
_QUANTISED = "quantization_config"
_SKIPPED = ("README.md", RECORD, "checksums.json")
_HUB = ("*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja", "README.md")


def check_format(names: Iterable[str]) -> None:
    """Raises UserError for a format of block drafters."""
    for name in names:
        if name != FORMAT:
            raise UserError(
                f"--format {name}: holds block drafters, and this one is an autoregressive "
                "language model; it "
                f"fits --format {FORMAT}"
            )


def make_draft_model(source: Path, dtype: str) -> Exported:
    """What an export of a language model's folder holds; without tensors if they are quantised and
    copied as they are.

    Raises:
        UserError: no weights, or unreadable ones.
    """
    config, files = read_config(source), weight_files(source)
    if not files:
        raise UserError(f"drafter {source}: no weights")
    if _QUANTISED in config:
        return Exported(
            config, {}, ["its weights are quantised and stay as they are, whatever --dtype says"]
        )
    tensors = _read_tensors(source)
    if has_own_head(source, tensors):
        config["tie_word_embeddings"] = False  # engines follow the key and would ignore the head
    config = {k: v for k, v in config.items() if k not in ("torch_dtype", "_name_or_path")}
    stored = {name: _cast(tensor, dtype) for name, tensor in tensors.items()}
    exact = all(torch.equal(stored[name].to(t.dtype), t) for name, t in tensors.items())
    return Exported({**config, "dtype": dtype}, stored, [] if exact else [ROUNDED.format(dtype)])


def has_own_head(folder: Path, tensors: dict[str, Tensor]) -> bool:
    """Whether a language model's tensors hold an output head that is not its embedding, whatever
    config.json says."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        embedding, head = embedding_names(model)
    except (OSError, ValueError, StopIteration):  # a class with custom code
        return False
    if head not in tensors:
        return False
    # some files lack a prefix
    rows = next((t for name, t in tensors.items() if embedding.endswith(name)), None)
    return rows is None or not torch.equal(rows, tensors[head])


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in weight_files(folder) for name, t in read_weights(file).items()}


def _cast(tensor: Tensor, dtype: str) -> Tensor:
    """A copy: tied weights share their storage, which safetensors refuses."""
    number = getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype
    return tensor.to(number, copy=True).contiguous()


def export_draft_model(
    drafter: str, target: str, out: Path, dtype: str, served: ServedTarget, repo: str | None = None
) -> Verdict:
    """Write the folder.

    Args:
        target: the name that others know the target by. served: the target in the printed lines.
            repo: where the folder is to be uploaded, for its card.

    Raises:
        UserError: unreadable weights, a folder of something else.
    """
    source = model_folder(drafter, "drafter", _HUB)
    check_free(out, FORMAT)
    check_checksums(source)
    made = make_draft_model(source, dtype)
    notes = note_target(target) + made.notes
    snippets = serve_draft_model(served, repo or str(out.absolute()))
    title = f"{out.name}: a small language model that drafts for {target}"
    tags = ("speculative-decoding", "drafter")
    page = write_card(source, "transformers", target, tags, title, snippets, notes)

    def fill(part: Path) -> None:
        replaced = weight_files(source) if made.tensors else []
        for path in source.iterdir():
            index = bool(made.tensors) and path.name.endswith(".index.json")
            if path.is_file() and path.name not in _SKIPPED and path not in replaced and not index:
                shutil.copyfile(path, part / path.name)
        record = part / DRAFTER_RECORD
        if record.is_file():  # by the target's public name
            write_json(record, {**read_object(record), "target": target})
        if made.tensors:
            write_json(part / "config.json", made.config)
            write_weights(made.tensors, part)

    write_folder(out, {"format": FORMAT, "target": target}, page, fill)
    return Verdict(FORMAT, out, notes=notes, serve=snippets)


def serve_draft_model(target: ServedTarget, folder: str) -> list[Snippet]:
    """Lines that serve an autoregressive drafter's folder."""
    assistant = f"assistant = AutoModelForCausalLM.from_pretrained({python_text(folder)})"
    return [
        vllm_line(FORMAT, target, folder, DRAFTS),
        sglang_line("STANDALONE", target, folder, DRAFTS),
        transformers_script(target, assistant, "assistant_model=assistant"),
    ]


def open_draft_model(drafter: str, target: Target) -> Target:
    """The drafter as a language model in fp32. Raises UserError if its vocabulary is not the
    target's."""
    trust = target.trust_remote_code
    model = load_target(drafter, "float32", str(target.device), trust_remote_code=trust)
    check_vocabulary(model, target)
    return model


def compare_draft_model(
    verdict: Verdict, drafter: str, target: Target, texts: list[GreedyText]
) -> None:
    """Compare an export's config and tensors, then its layers and greedy tokens in transformers.
    Adds to the verdict."""
    folder = verdict.folder
    try:
        source = model_folder(drafter, "drafter", _HUB)
        open_draft_model(str(folder), target)
        config = read_config(folder)
        made = make_draft_model(source, str(config.get("dtype", "float32")))
        other = find_other_setting(config, made.config)
        if made.tensors:
            other = other or find_other_tensor(_read_tensors(folder), made.tensors)
        verdict.add_contents(other)
        with in_one_line(f"{folder}: transformers can't run it"):
            ours, theirs = (_Traced(path, made) for path in (source, folder))
            compare_stages(verdict, "transformers", texts, ours.trace, theirs.trace)
    except UserError as error:
        verdict.add("the files", False, str(error))


class _Traced:
    """A language model in transformers, in fp32 with weights as they are stored."""

    def __init__(self, folder: Path, made: Exported) -> None:
        quiet_loading()
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        )
        if made.tensors:
            for weights in model.state_dict().values():
                weights.copy_(_cast(weights, str(made.config["dtype"])))
        self.model = model.eval()

    @torch.no_grad()
    def trace(self, text: GreedyText) -> Stages:
        out = self.model(torch.tensor([text.tokens]), output_hidden_states=True)
        stages = {f"layer {i}": states for i, states in enumerate(out.hidden_states)}
        return stages | {"draft logits": out.logits}
