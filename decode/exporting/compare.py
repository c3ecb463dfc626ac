"""The parity check: an export against its drafter, by contents, by hidden states layer by layer,
and by greedy drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decode.engine.decoder import Decoder
from decode.evaluation.tokenized import tokenize_prompts
from decode.exporting.custom_generate import run_generate
from decode.exporting.engines import EngineDrafter
from decode.exporting.registry import FORMATS
from decode.exporting.verdict import Verdict
from decode.proposers.block import BlockProposer
from specalign.common.batch import Anchors, Batch
from specalign.common.errors import UserError, in_one_line
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.target_features import target_features
from specalign.suites.prompt import Prompt

TOLERANCE = 2e-3
"""Of a quantity's root mean square, in fp32: another order of sums stays a hundred times below."""
BLOCKS = 16
"""Blocks that are compared in each text."""

Stages = dict[str, Tensor]
"""What a drafter computes for the blocks of a text, by name, in order; the last is the draft logits
(A, K, Vd)."""


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


@contextmanager
def _record_outputs(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collects what each layer returns."""
    outputs: list[Tensor] = []

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def trace_drafter(drafter: BlockDrafter, text: GreedyText, vocab: Tensor | None = None) -> Stages:
    """The blocks of a text by the graph that is trained. vocab: tokens to draft over if the drafter
    has no own ones."""
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
    with _record_outputs(drafter.blocks) as outputs:
        hidden = drafter(batch, features, anchors)
    stages: Stages = {}
    if features.taps_BLFD is not None:
        stages["context"] = drafter.hidden_norm(
            drafter.fc(features.taps_BLFD[0].flatten(1).float())
        )
    for i, output in enumerate(outputs[-len(drafter.blocks) :]):
        stages[f"layer {i + 1}"] = output[0]
    logits_AKV = hidden[0].float() @ drafter.head_weight_VdD.float().T
    if (factors := drafter.markov_factors(batch, anchors, hidden)) is not None:
        logits_AKV = logits_AKV + factors[0][0].float() @ factors[1].float()
    narrow = vocab is not None and drafter.draft_vocab is None
    stages["draft logits"] = logits_AKV[..., vocab] if narrow else logits_AKV
    return stages


@torch.no_grad()
def trace_engine(
    engine: EngineDrafter, model: Any, text: GreedyText, vocab: Tensor | None
) -> Stages:
    """The same blocks in an engine's class, through the target's own head. model: the target in
    transformers."""
    settings = engine.settings
    ids_1L = torch.tensor([text.tokens], device=model.device)
    states = model(ids_1L, output_hidden_states=True, use_cache=False).hidden_states
    taps_LD = torch.cat([states[i + 1][0] for i in settings.target_layer_ids], dim=-1).float()
    blocks: list[list[Tensor]] = []
    for anchor in text.anchors:
        block = [text.tokens[anchor]] + [settings.mask_token_id] * (settings.block_size - 1)
        embedded_RD = engine.embed(torch.tensor(block, device=model.device))
        positions_1L = torch.arange(anchor + len(block), device=model.device)[None]
        with _record_outputs(engine.network.layers) as outputs:
            hidden_RD = engine.run(embedded_RD[None], taps_LD[None, :anchor], positions_1L)[0]
        blocks.append([*(output[0] for output in outputs), hidden_RD[1:]])
    *layers, hidden_AKD = (torch.stack(rows) for rows in zip(*blocks, strict=True))
    logits_AKV = model.get_output_embeddings()(hidden_AKD).float()
    stages = {"context": engine.fuse(taps_LD)}
    stages |= {f"layer {i + 1}": layer for i, layer in enumerate(layers)}
    stages["draft logits"] = logits_AKV if vocab is None else logits_AKV[..., vocab]
    return stages


def compare_stages(
    verdict: Verdict,
    reader: str,
    texts: Sequence[GreedyText],
    trace_ours: Callable[[GreedyText], Stages],
    trace_theirs: Callable[[GreedyText], Stages],
    engine: bool = False,
) -> None:
    """Add where two networks part, or that their stages and greedy drafts are the same."""
    largest, equal, count = 0.0, 0, 0
    for text in texts:
        ours, theirs = trace_ours(text), trace_theirs(text)
        for name, wanted in ours.items():
            apart = distance(theirs[name], wanted)
            if not apart < TOLERANCE:
                verdict.add(reader, False, f"{name}: DIFFERENT by {apart:.2g} of its size", engine)
                return
            largest = max(largest, apart)
        drafts, others = ours["draft logits"].argmax(-1), theirs["draft logits"].argmax(-1)
        equal += int((drafts == others.to(drafts.device)).sum())
        count += drafts.numel()
    line = f"every layer the same ({largest:.1e}), {equal} of {count} greedy drafts equal"
    verdict.add(reader, True, line, engine)  # others are near-ties


# ---- one export ----


def compare_export(
    drafter: BlockDrafter, verdict: Verdict, texts: Sequence[GreedyText], model: Any = None
) -> None:
    """Compare an export with its drafter. Adds to the verdict.

    Args:
        model: the target in transformers; None = engines are not asked.
    """
    folder, form, vocab = verdict.folder, FORMATS[verdict.format], drafter.draft_vocab

    def trace_ours(text: GreedyText) -> Stages:
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
            compare_stages(
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
            if form.open_engine is not None and form.installed():
                opened = form.open_engine(folder, model)
                compare_stages(
                    verdict,
                    form.package or form.name,
                    texts,
                    trace_ours,
                    lambda text: trace_engine(opened, model, text, vocab),
                    engine=True,
                )
            if form.name == "custom_generate":
                _compare_generate(drafter, verdict, texts, model)
    except UserError as error:
        verdict.add("the engine", False, str(error), engine=True)


def _compare_generate(
    drafter: BlockDrafter, verdict: Verdict, texts: Sequence[GreedyText], model: Any
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
