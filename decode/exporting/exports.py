"""Exports of a block drafter to one or several formats, and the parity check: an export against its
drafter, by contents, draft logits and greedy drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from decode.engine.decoder import Decoder
from decode.engine.stock import stock_model
from decode.evaluation.tokenized import tokenize_prompts
from decode.exporting import formats
from decode.proposers.block import BlockProposer
from specalign.common.batch import Anchors, Batch
from specalign.common.errors import UserError, in_one_line
from specalign.common.hub import hub_id, local_path, model_folder, opening_name
from specalign.common.schema import JsonObject
from specalign.formats.block import FILES, load_drafter
from specalign.lm.model import Target
from specalign.lm.opening import quiet_loading
from specalign.models.block import BlockDrafter
from specalign.models.target_features import target_features
from specalign.suites.prompt import Prompt

TOLERANCE = 2e-3
"""Of a quantity's root mean square, in fp32: another order of sums stays a hundred times below."""
BLOCKS = 16  # blocks that are compared in each text


@dataclass
class ExportVerdict:
    """What was found about one export. files_same: the files hold the drafter; None = not checked.
    engine_same: the engine computes the same with them. serve: lines that serve the folder."""

    format: str
    folder: Path
    files_same: bool | None = None
    engine_same: bool = True
    lines: list[str] = field(default_factory=list)
    serve: list[formats.Snippet] = field(default_factory=list)

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


def compare_export(
    drafter: BlockDrafter, verdict: ExportVerdict, texts: Sequence[GreedyText], model: Any = None
) -> None:
    """Compare an export with its drafter, which is rounded as the export is, and add to the
    verdict. `model`: the target in transformers; None = engines are not asked."""
    folder, form = verdict.folder, verdict.format
    try:
        held = formats.read_export(folder)
        matrix = held.tensors.get("fc.weight", held.tensors.get("encoder.fc.weight"))
        if matrix is not None:
            round_weights(drafter, matrix.dtype)
        made = formats.MAKERS[form](drafter)
        other = formats.find_other_setting(held.config, made.config)
        other = other or formats.find_other_tensor(held.tensors, made.tensors)
        line = f"settings and tensors: {f'DIFFERENT: {other}' if other else 'the same'}"
        verdict.add("the files", not other, line)
        with in_one_line(f"{folder}: can't be read as {form}"):
            compare_logits(verdict, drafter, texts, load_drafter(folder, drafter.target))
    except UserError as error:
        verdict.add("the files", False, str(error))
    if model is None or not verdict.files_same:
        return
    how: JsonObject = {}
    try:
        with in_one_line(f"{folder}: the engine can't run it"):
            if form == "transformers":
                assistant = open_assistant(folder, model)
                how = {"assistant_model": assistant, "speculation_type": "dflash"}
            elif form == "custom_generate":
                how = {"custom_generate": str(folder), "trust_remote_code": True}
            if how:
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
        apart = formats.distance(theirs, ours)
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
        formats.check_free(out, form)
    network = load_drafter(drafter, target)
    # a folder may hold a finetuned model, whatever name the drafter was trained under
    given = hub_id(target.spec) or local_path(target.spec).is_dir()
    known = opening_name(target.spec if given else network.config.target)
    network.config = replace(network.config, target=known)
    stored = getattr(torch, dtype)
    round_weights(network, stored)
    for form in folders:  # refuse before anything is written
        formats.make_export(form, network)
    source = model_folder(drafter, "drafter", FILES)
    verdicts = []
    for form, out in folders.items():
        lines = formats.serve(form, network.config, target, out.name)
        card = formats.write_card(form, source, known, out.name, lines)
        formats.write_export(form, network, out, stored, card)
        lines = formats.serve(form, network.config, target, str(out.absolute()))
        verdicts.append(ExportVerdict(form, out, serve=lines))
    if prompts:
        texts = decode_greedily(network, encode_prompts(target, prompts))
        model = stock_model(target)
        for verdict in verdicts:
            compare_export(network, verdict, texts, model)
    return verdicts
