"""A format of another engine: what it holds of a drafter, how that is written, served, read back and compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from align.common.errors import UserError, in_one_line
from align.common.files import load_safetensors
from align.common.schema import read_config
from align.models.block import BlockDrafter
from align.models.block_config import BlockConfig
from decode.drafters.block import BlockProposer
from decode.engine.decoder import Decoder
from decode.exporting.content import vllm_refuses
from decode.exporting.folder import EMBEDDING, Exported, bullets, card, check_free, unnamed, write_folder
from decode.exporting.ladder import climb, replay, rest
from decode.exporting.reader import FilesReader, Reader
from decode.exporting.serving import ServedTarget, Snippet
from decode.exporting.verdict import Decoded, Verdict


@dataclass(frozen=True)
class Format:
    """A folder in hub layout, config.json and model.safetensors; one that is written or compared otherwise overrides methods.

    make: a drafter's content; raises UserError with the key that trains what the format can hold. serve: lines that serve a drafter of
    this config and target from a folder, for the engines that can. readers: who reads it; the first is the reference, and those whose package is
    missing are skipped. library, tags: of the card.
    """

    name: str
    make: Callable[[BlockDrafter], Exported]
    serve: Callable[[BlockConfig, ServedTarget, str], list[Snippet]]
    readers: tuple[type[Reader], ...] = (FilesReader,)
    library: str = "vllm"
    tags: tuple[str, ...] = ()

    def check(self, made: Exported, vocabulary: Path | None) -> None:
        """Raises UserError where what the format takes from elsewhere is missing or does not fit: the target's GGUF file."""

    def write(
        self, drafter: BlockDrafter, out: Path, dtype: torch.dtype, card: str, vocabulary: Path | None = None
    ) -> Exported:
        """Write a drafter's folder; an export in this format that stands there gives way when all is written.

        Args:
            vocabulary: the target's GGUF file, for the format that takes it.

        Raises:
            UserError: what the format can't hold; a folder of something else.
        """
        check_free(out, self.name)
        made = self.make(drafter)
        self.check(made, vocabulary)
        made.notes += unnamed(drafter.config.target)
        record = {"format": self.name, "target": drafter.config.target}
        write_folder(
            out,
            record,
            card + bullets(made.notes),
            lambda part: self.fill(part, made, out.name, dtype, vocabulary),
        )
        return made

    def fill(
        self, part: Path, made: Exported, name: str, dtype: torch.dtype, vocabulary: Path | None
    ) -> None:
        """Write the content into a folder, which becomes the export `name`."""
        made.config["dtype"] = str(dtype).removeprefix("torch.")
        exact = {EMBEDDING: torch.float32}
        tensors = {name: _stored(tensor, exact.get(name, dtype)) for name, tensor in made.tensors.items()}
        save_file(tensors, str(part / "model.safetensors"), metadata={"format": "pt"})
        for name, text in {"config.json": json.dumps(made.config, indent=2) + "\n", **made.files}.items():
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_text(text, encoding="utf-8")

    def snippets(self, drafter: BlockDrafter, target: ServedTarget, folder: str) -> list[Snippet]:
        """Lines that serve the folder, without vLLM's if it serves no drafter for such a target."""
        found = self.serve(drafter.config, target, folder)
        refused = vllm_refuses(drafter)
        served = [s for s in found if not (refused and s.engine.startswith("vLLM"))]
        return [*target.preparation, *served] if served else []

    def card(self, source: Path, drafter: BlockDrafter, name: str, serve: Sequence[Snippet]) -> str:
        """README.md of an export of the drafter in `source`. serve: lines to paste."""
        config = drafter.config
        tags = ("speculative-decoding", "discrete-diffusion", "drafter", *self.tags)
        title = f"{name}: drafts {config.block_size} tokens a pass for {config.target}"
        lead = f"Format `{self.name}`."
        return card(source, self.library, config.target, tags, title, lead, serve) + "\n"

    def compare(self, drafter: BlockDrafter, verdict: Verdict, model: Any, texts: Decoded) -> None:
        """Climb the ladder with each reader, then compare whole outputs. Writes into the verdict; a reader that can't go on, too.

        Args:
            model: the target as transformers runs it.
        """
        for kind in self.readers:
            if kind.installed():
                self._compare_by(kind, drafter, verdict, model, texts)

    def compare_files(self, drafter: BlockDrafter, verdict: Verdict, model: Any, texts: Decoded) -> None:
        """The same with the reference reader only, which no engine has a part in."""
        self._compare_by(self.readers[0], drafter, verdict, model, texts)

    def _compare_by(
        self, kind: type[Reader], drafter: BlockDrafter, verdict: Verdict, model: Any, texts: Decoded
    ) -> None:
        made, reader = self.make(drafter), None
        try:
            with in_one_line(f"{verdict.folder}: can't be read as {self.name}"):
                reader = kind(verdict.folder, model)
            with in_one_line(f"{verdict.folder}: {kind.name} can't run it"):
                self._climbed(drafter, made, verdict, reader, texts)
        except UserError as error:
            verdict.fail(str(error), _other(made, verdict.folder, reader))

    def _climbed(
        self, drafter: BlockDrafter, made: Exported, verdict: Verdict, reader: Reader, texts: Decoded
    ) -> None:
        served = as_served(drafter, made, reader)
        rungs = climb(served, made, reader, texts.prompts[0])
        by_engine = reader.of_an_engine and not rungs[-1].same and _files_right(made, reader)
        for rung in rungs:
            verdict.add(reader.name, rung.same, rung.line, by_engine=by_engine)
        if rungs[-1].same:
            ours = texts if served is drafter else _again(served, texts)
            _whole(verdict, reader, ours, drafter.config.block_size)


def _other(made: Exported, folder: Path, reader: Reader | None) -> str:
    """What the files hold otherwise than an export of the drafter would, in words; empty = nothing, or they can't be read."""
    try:
        if reader is not None:
            return rest(made, reader.said(made.config), reader.stored(), "").cause
        return rest(made, read_config(folder), load_safetensors(folder / "model.safetensors"), "").cause
    except Exception:  # whatever is wrong with the files, what they could not be used for is said already
        return ""


def _files_right(made: Exported, reader: Reader) -> bool:
    """Whether all settings and tensors are those that an export of the drafter has."""
    return rest(made, reader.said(made.config), reader.stored(), reader.name).same


def as_served(drafter: BlockDrafter, made: Exported, reader: Reader) -> BlockDrafter:
    """A drafter of a draft vocabulary with the head that a reader takes: the target's whole one, or the rows as they are stored."""
    if drafter.draft_vocab is None:
        return drafter
    vocab, rows = drafter.draft_vocab, drafter.head_weight_VdD
    held: dict[str, Tensor] = dict(drafter.named_parameters())
    if reader.pruned and "d2t" in made.tensors:
        stored = reader.stored().get("lm_head.weight", rows).dtype
        if torch.equal(head := rows.to(stored).to(rows.dtype), rows):
            return drafter
        changes: dict[str, Any] = {"own_head": True}
        other = BlockDrafter(replace(drafter.config, **changes), drafter.target, vocab, head)
    else:
        changes = {"own_head": False, "draft_vocab_size": 0}
        other = BlockDrafter(replace(drafter.config, **changes), drafter.target)
        if drafter.markov is not None:  # the tokens that were not trained are left as the head says
            basis_rV = held["markov.basis"].new_zeros(len(held["markov.basis"]), drafter.config.vocab_size)
            held["markov.basis"] = basis_rV.index_copy(1, vocab, held["markov.basis"].detach())
    other.load_state_dict(held, strict=False)
    return other.to(rows.device)


def _again(drafter: BlockDrafter, texts: Decoded) -> Decoded:
    """The same texts with what chains of this drafter's have accepted in each call."""
    decoder = Decoder(drafter.target, BlockProposer(drafter, tree_nodes=0))
    both = zip(texts.prompts, texts.outputs, strict=True)
    return replace(texts, accepted=[decoder.generate(p, max_new_tokens=len(o)).accepted for p, o in both])


def _whole(verdict: Verdict, reader: Reader, texts: Decoded, drafts: int) -> None:
    """Rounds and accepted drafts over whole outputs, and the engine's own generation where the reader has one."""
    theirs = [replay(reader, p, o) for p, o in zip(texts.prompts, texts.outputs, strict=True)]
    same, line = texts.alike(theirs, drafts)
    verdict.add(reader.name, same, f"whole outputs: {line}", by_engine=reader.of_an_engine)
    if reader.generation:
        both = [reader.generate(p, len(o)) for p, o in zip(texts.prompts, texts.outputs, strict=True)]
        equal = texts.as_plain([tokens for tokens, _ in both])
        line = f"{reader.generation}: {equal} of {len(both)} outputs as plain greedy ones"
        verdict.add(reader.name, equal == len(both), line, by_engine=True)
        same, line = texts.alike([accepted for _, accepted in both], drafts)
        verdict.add(reader.name, same, f"{reader.generation}: {line}", by_engine=True)


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    wide = tensor.is_floating_point()
    return tensor.detach().to("cpu", dtype if wide else tensor.dtype).contiguous().clone()
