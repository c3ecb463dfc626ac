"""The parity check: an export against its drafter, by contents, draft logits and greedy drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from decode.engine.decoder import Decoder
from decode.evaluation.tokenized import tokenize_prompts
from decode.exporting.custom_generate import run_generate
from decode.exporting.registry import FORMATS
from decode.exporting.verdict import ExportVerdict
from decode.proposers.block import BlockProposer
from specalign.common.batch import Anchors, Batch
from specalign.common.errors import UserError, in_one_line
from specalign.common.schema import read_config
from specalign.lm.model import Target
from specalign.lm.opening import quiet_loading
from specalign.models.block import BlockDrafter
from specalign.models.target_features import target_features
from specalign.suites.prompt import Prompt

TOLERANCE = 2e-3
"""Of a quantity's root mean square, in fp32: another order of sums stays a hundred times below."""
BLOCKS = 16
"""Blocks that are compared in each text."""


@dataclass(frozen=True)
class GreedyText:
    """A prompt with the target's greedy output."""

    prompt: list[int]
    output: list[int]

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
        raise UserError(f"target {target.spec!r} takes none of the prompts: {refused[0]}")
    return [tokens for _, tokens in fitting]


def decode_texts(
    target: Target, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[GreedyText]:
    """Plain greedy outputs."""
    decoder = Decoder(target)
    return [
        GreedyText(p, decoder.generate(p, max_new_tokens=max_new_tokens).tokens) for p in prompts
    ]


# ---- contents ----


def find_other_setting(held: Mapping[str, Any], wanted: Mapping[str, Any], within: str = "") -> str:
    """The first key of a config that differs from an export of the drafter; empty = none."""
    for name in sorted((held.keys() | wanted.keys()) - {"dtype", "transformers_version"}):
        a, b = held.get(name, "missing"), wanted.get(name, "missing")
        if isinstance(a, dict) and isinstance(b, dict):
            if found := find_other_setting(a, b, f"{within}{name}."):
                return found
        elif a != b and not (
            isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6)
        ):
            return f"config.json: {within}{name} is {a}, in an export of this drafter {b}"
    return ""


def find_other_tensor(held: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """The first tensor that differs from an export of the drafter; empty = none."""
    for name in sorted(held.keys() | wanted.keys()):
        if name not in held or name not in wanted:
            return f"tensor {name} is {'missing' if name in wanted else 'not of this drafter'}"
        apart = distance(held[name], wanted[name].to(held[name].dtype))
        if not apart <= 1e-6:
            return f"tensor {name} differs by {apart:.2g} of its size"
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
def trace_drafter(drafter: BlockDrafter, text: GreedyText, vocab: Tensor | None = None) -> Tensor:
    """Draft logits (A, K, Vd) of the blocks of a text, by the graph that is trained. vocab: tokens
    to draft over if the drafter has no own ones."""
    device = drafter.norm.weight.device
    ids_1L = torch.tensor([text.tokens], device=device)
    positions_1L = torch.arange(ids_1L.shape[1], device=device)[None]
    batch = Batch(
        ids_1L, positions_1L, torch.zeros_like(ids_1L), torch.ones_like(ids_1L, dtype=torch.bool)
    )
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
    """An export in transformers' class. model: the target. Raises UserError for one with custom
    code."""
    if "auto_map" in read_config(folder):
        raise UserError("comes with custom Python code, which is not run")
    quiet_loading()
    # trust_remote_code: if it is not given, transformers asks on the terminal
    network = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return network.eval().to(model.device)


@torch.no_grad()
def trace_assistant(network: Any, model: Any, text: GreedyText, vocab: Tensor | None) -> Tensor:
    """The same in transformers' class, through the target's own head. model: the target."""
    config = network.config
    ids_1L = torch.tensor([text.tokens], device=model.device)
    states = model(ids_1L, output_hidden_states=True, use_cache=False).hidden_states
    taps_LD = torch.cat([states[i + 1][0] for i in config.target_layer_ids], dim=-1).float()
    blocks: list[Tensor] = []
    for anchor in text.anchors:
        block = [text.tokens[anchor]] + [config.mask_token_id] * (config.block_size - 1)
        embedded_RD = model.get_input_embeddings()(torch.tensor(block, device=model.device))
        hidden_1RD = network(
            noise_embeds=embedded_RD[None].float(),
            context_hidden_states=taps_LD[None, :anchor],
            position_ids=torch.arange(anchor + len(block), device=model.device)[None],
            attention_mask=None,
        ).last_hidden_state
        blocks.append(hidden_1RD[0, 1:])
    logits_AKV = model.get_output_embeddings()(torch.stack(blocks)).float()
    return logits_AKV if vocab is None else logits_AKV[..., vocab]


def compare_logits(
    verdict: ExportVerdict,
    reader: str,
    texts: Sequence[GreedyText],
    trace_ours: Callable[[GreedyText], Tensor],
    trace_theirs: Callable[[GreedyText], Tensor],
    engine: bool = False,
) -> None:
    """Add whether two networks give the same logits and greedy drafts."""
    largest, equal, count = 0.0, 0, 0
    for text in texts:
        ours, theirs = trace_ours(text).cpu(), trace_theirs(text).cpu()
        apart = distance(theirs, ours)
        if not apart < TOLERANCE:
            verdict.add(reader, False, f"logits DIFFERENT by {apart:.2g} of their size", engine)
            return
        largest = max(largest, apart)
        equal += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count += ours[..., 0].numel()
    line = f"logits the same ({largest:.1e}), {equal} of {count} greedy drafts equal"
    verdict.add(reader, True, line, engine)  # others are near-ties


# ---- one export ----


def compare_export(
    drafter: BlockDrafter, verdict: ExportVerdict, texts: Sequence[GreedyText], model: Any = None
) -> None:
    """Compare an export with its drafter. Adds to the verdict.

    Args:
        model: the target in transformers; None = engines are not asked.
    """
    folder, form, vocab = verdict.folder, FORMATS[verdict.format], drafter.draft_vocab

    def trace_ours(text: GreedyText) -> Tensor:
        return trace_drafter(drafter, text)

    try:
        made, held = form.make(drafter), form.read(folder)
        wanted = made.config
        if form.name == "gguf":  # a file holds some of the keys
            wanted = {key: value for key, value in wanted.items() if key in held.config}
        other = find_other_setting(held.config, wanted)
        verdict.add_contents(other or find_other_tensor(held.tensors, made.tensors))
        with in_one_line(f"{folder}: can't be read as {form.name}"):
            restored = form.restore(held, folder, drafter.target)
            compare_logits(
                verdict,
                "read back",
                texts,
                trace_ours,
                lambda text: trace_drafter(restored, text, vocab),
            )
    except UserError as error:
        verdict.add("the files", False, str(error))
    if model is None or not verdict.files_same:
        return
    try:
        with in_one_line(f"{folder}: the engine can't run it"):
            if form.name == "transformers":
                network = open_assistant(folder, model)
                compare_logits(
                    verdict,
                    form.name,
                    texts,
                    trace_ours,
                    lambda text: trace_assistant(network, model, text, vocab),
                    engine=True,
                )
            if form.name == "custom_generate":
                _compare_generate(drafter, verdict, texts, model)
    except UserError as error:
        verdict.add("the engine", False, str(error), engine=True)


def _compare_generate(
    drafter: BlockDrafter, verdict: ExportVerdict, texts: Sequence[GreedyText], model: Any
) -> None:
    """Outputs and accepted drafts of transformers' `generate` with the folder, against ours."""
    decoder = Decoder(drafter.target, BlockProposer(drafter, tree_nodes=0))
    equal = alike = 0
    for text in texts:
        tokens, accepted = run_generate(verdict.folder, model, text.prompt, len(text.output))
        ours = decoder.generate(text.prompt, max_new_tokens=len(text.output)).accepted
        equal += tokens == text.output
        alike += (
            accepted[:-1] == ours[:-1]
        )  # the last round counts an accepted end of text differently
    line = f"{equal} of {len(texts)} outputs equal plain decoding's, {alike} accept the same drafts"
    verdict.add("generate(custom_generate=…)", equal == alike == len(texts), line, engine=True)
