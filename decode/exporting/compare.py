"""The parity check: an export against its drafter, by contents, draft logits and greedy drafts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from decode.engine.decoder import Decoder
from decode.evaluation.tokenized import tokenize_prompts
from decode.exporting.formats import MAKERS, read_export
from decode.exporting.serving import Snippet
from decode.proposers.block import BlockProposer
from specalign.common.batch import Anchors, Batch
from specalign.common.errors import UserError, in_one_line
from specalign.common.schema import JsonObject
from specalign.formats.block import load_drafter
from specalign.lm.model import Target
from specalign.lm.opening import quiet_loading
from specalign.models.block import BlockDrafter
from specalign.models.target_features import target_features
from specalign.suites.prompt import Prompt

TOLERANCE = 2e-3
"""Of a quantity's root mean square, in fp32: another order of sums stays a hundred times below."""
BLOCKS = 16
"""Blocks that are compared in each text."""


@dataclass
class ExportVerdict:
    """What was found about one export. files_same: the files hold the drafter; None = not checked.
    engine_same: the engine computes the same with them. serve: lines that serve the folder."""

    format: str
    folder: Path
    files_same: bool | None = None
    engine_same: bool = True
    lines: list[str] = field(default_factory=list)
    serve: list[Snippet] = field(default_factory=list)

    def add(self, reader: str, same: bool, line: str, engine: bool = False) -> None:
        """Add a comparison. engine: made with an engine's own code, so that a difference is the
        engine's."""
        if engine:
            self.engine_same &= same
        else:
            self.files_same = same and self.files_same is not False
        self.lines.append(f"{reader}: {line}")

    @property
    def exit_code(self) -> int:
        """1 = other files, 3 = the engine differs; 0 = the same drafter."""
        if self.files_same is False:
            return 1
        return 0 if self.engine_same else 3

    @property
    def conclusion(self) -> str:
        """The last line."""
        if self.files_same is False:
            return "NOT THE SAME DRAFTER"
        if self.engine_same:
            return "THE SAME DRAFTER"
        files = "FILES NOT CHECKED" if self.files_same is None else "FILES MATCH"
        return f"{files}, THE ENGINE DRAFTS DIFFERENTLY"


@dataclass(frozen=True)
class GreedyText:
    """A prompt with the target's greedy output; accepted: drafts in each round."""

    prompt: list[int]
    output: list[int]
    accepted: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def anchors(self) -> list[int]:
        """Where blocks begin: from the prompt's last token on."""
        first = max(1, len(self.prompt) - 1)
        return list(range(first, len(self.tokens)))[:BLOCKS]


def encode_prompts(target: Target, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Prompts as the target's tokens. Raises UserError if it takes none of them."""
    fitting, refused = tokenize_prompts(target, prompts)
    if not fitting:
        raise UserError(f"target {target.spec!r} accepts none of the prompts: {refused[0]}")
    return [tokens for _, tokens in fitting]


def decode_greedily(
    drafter: BlockDrafter, prompts: Sequence[list[int]], length: int = 48, drafts: int | None = None
) -> list[GreedyText]:
    """Greedy outputs by this project's decoder; `drafts`: in each round."""
    decoder = Decoder(drafter.target, BlockProposer(drafter, drafts, tree_nodes=0))
    found = [decoder.generate(tokens, max_new_tokens=length) for tokens in prompts]
    return [GreedyText(p, o.tokens, o.accepted) for p, o in zip(prompts, found, strict=True)]


# ---- contents ----


def find_other_setting(held: Mapping[str, Any], wanted: Mapping[str, Any], within: str = "") -> str:
    """The first key of a config that differs from an export of the drafter; empty = none."""
    for name in sorted((held.keys() | wanted.keys()) - {"dtype", "transformers_version"}):
        a, b = held.get(name, "missing"), wanted.get(name, "missing")
        found = ""
        if isinstance(a, dict) and isinstance(b, dict):
            found = find_other_setting(a, b, f"{within}{name}.")
        elif isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6):
            continue
        elif a != b:
            found = f"config.json: {within}{name} is {a}, expected {b}"
        if found:
            return found
    return ""


def find_other_tensor(held: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """The first tensor that differs from an export of the drafter; empty = none."""
    for name in sorted(held.keys() | wanted.keys()):
        if name not in held or name not in wanted:
            return f"tensor {name} is {'missing' if name in wanted else 'unexpected'}"
        apart = distance(held[name], wanted[name].to(held[name].dtype))
        if not apart <= 1e-6:
            return f"tensor {name} differs (relative difference {apart:.2g})"
    return ""


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the root mean square; infinite for other shapes."""
    if found.shape != wanted.shape:
        return float("inf")
    found, wanted = found.double().cpu(), wanted.double().cpu()
    size = float(wanted.pow(2).mean().sqrt()) or 1.0
    return float((found - wanted).abs().max()) / size


# ---- networks ----


@torch.no_grad()
def round_weights(network: BlockDrafter, dtype: torch.dtype) -> None:
    """Round to what weights of `dtype` hold."""
    for weight in (*network.parameters(), *network.buffers()):
        if weight.is_floating_point():
            weight.copy_(weight.to(dtype).to(weight.dtype))


@torch.no_grad()
def trace_drafter(drafter: BlockDrafter, text: GreedyText, vocab: Tensor | None = None) -> Tensor:
    """Draft logits (A, K, Vd) of the blocks of a text, by the graph that is trained. vocab: tokens
    to draft over if the drafter has no own ones."""
    device = drafter.norm.weight.device
    ids_1L = torch.tensor([text.tokens], device=device)
    positions_1L = torch.arange(ids_1L.shape[1], device=device)[None]
    batch = Batch(ids_1L, positions_1L, torch.zeros_like(ids_1L), ids_1L >= 0)
    features = target_features(drafter.target, batch, drafter.config)
    index_1A = torch.tensor([text.anchors], device=device)
    valid_1AK = index_1A.new_ones(*index_1A.shape, drafter.config.block_size, dtype=torch.bool)
    anchors = Anchors(index_1A, valid_1AK)
    hidden = drafter(batch, features, anchors)
    logits_AKV = hidden[0].float() @ drafter.head_weight_VdD.float().T
    factors = drafter.markov_factors(batch, anchors, hidden)
    if factors is not None:
        logits_AKV = logits_AKV + factors[0][0].float() @ factors[1].float()
    narrow = vocab is not None and drafter.draft_vocab is None
    return logits_AKV[..., vocab] if narrow else logits_AKV


def open_assistant(folder: Path, model: Any) -> Any:
    """An export in transformers' class. model: the target."""
    quiet_loading()
    # trust_remote_code: if it is not given, transformers asks on the terminal
    network = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return network.eval().to(model.device)


# ---- one export ----


def compare_export(
    drafter: BlockDrafter, verdict: ExportVerdict, texts: Sequence[GreedyText], model: Any = None
) -> None:
    """Compare an export with its drafter, which is rounded as the export is, and add to the
    verdict. `model`: the target in transformers; None = engines are not asked."""
    folder, form = verdict.folder, verdict.format
    try:
        held = read_export(folder)
        matrix = held.tensors.get("fc.weight", held.tensors.get("encoder.fc.weight"))
        if matrix is not None:
            round_weights(drafter, matrix.dtype)
        made = MAKERS[form](drafter)
        other = find_other_setting(held.config, made.config)
        other = other or find_other_tensor(held.tensors, made.tensors)
        line = f"settings and tensors: {f'DIFFERENT: {other}' if other else 'the same'}"
        verdict.add("the files", not other, line)
        with in_one_line(f"{folder}: can't be read as {form}"):
            compare_logits(verdict, drafter, texts, load_drafter(folder, drafter.target))
    except UserError as error:
        verdict.add("the files", False, str(error))
    if model is None or not verdict.files_same:
        return
    try:
        with in_one_line(f"{folder}: the engine can't run it"):
            if form == "transformers":
                assistant = open_assistant(folder, model)
                how = {"assistant_model": assistant, "speculation_type": "dflash"}
                _compare_generate(verdict, texts, model, how)
            if form == "custom_generate":
                how = {"custom_generate": str(folder), "trust_remote_code": True}
                _compare_generate(verdict, texts, model, how)
    except UserError as error:
        verdict.add("the engine", False, str(error), engine=True)


def compare_logits(
    verdict: ExportVerdict,
    drafter: BlockDrafter,
    texts: Sequence[GreedyText],
    restored: BlockDrafter,
) -> None:
    """Add whether the drafter that was read back gives a drafter's logits and greedy drafts."""
    largest, equal, count = 0.0, 0, 0
    for text in texts:
        ours = trace_drafter(drafter, text).cpu()
        theirs = trace_drafter(restored, text, drafter.draft_vocab).cpu()
        apart = distance(theirs, ours)
        if not apart < TOLERANCE:
            verdict.add("read back", False, f"logits DIFFERENT (relative difference {apart:.2g})")
            return
        largest = max(largest, apart)
        equal += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count += ours[..., 0].numel()
    line = f"logits the same ({largest:.1e}), {equal} of {count} greedy drafts equal"
    verdict.add("read back", True, line)  # others are near-ties


def _compare_generate(
    verdict: ExportVerdict, texts: Sequence[GreedyText], model: Any, how: JsonObject
) -> None:
    """Outputs and forward passes of transformers' `generate` with the folder, against ours."""
    passes: list[int] = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    equal = ours = 0
    for text in texts:
        ids, count = torch.tensor([text.prompt], device=model.device), len(text.output)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, **how}
        out = model.generate(ids, do_sample=False, **options)
        equal += out[0, len(text.prompt) :].tolist() == text.output
        ours += 1 + len(text.accepted)
    handle.remove()
    line = f"{equal} of {len(texts)} outputs equal, {len(passes)} forward passes, {ours} here"
    same = equal == len(texts) and len(passes) == ours
    verdict.add("generate", same, line, engine=True)
