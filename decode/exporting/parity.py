"""From a drafter to exported folders and a verdict on each: what is written is read back and compared on the user's own target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors import safe_open

from align.common.claims import scratch
from align.common.errors import UserError, in_one_line
from align.common.files import check_ordinary
from align.common.hub import hub_id, local_path, model_folder
from align.common.text import short
from align.models.block import BlockDrafter
from align.models.checkpoints.block import load_drafter
from align.target.loading import load_target
from align.target.model import Target
from decode.drafters.autoregressive import AutoregressiveDrafter
from decode.drafters.base import Drafter
from decode.drafters.block import BlockProposer
from decode.engine.compiled import stock_model
from decode.exporting import causal
from decode.exporting.folder import Exported, check_free, read_record
from decode.exporting.registry import FORMATS
from decode.exporting.server import Server
from decode.exporting.verdict import Counts, Verdict, decoded
from decode.suites.prompt import Prompt
from decode.suites.registry import prompts_of
from decode.suites.tokenized import tokenize_prompts


def exported(
    drafter: str,
    role: str,
    target: str,
    folders: Mapping[str, Path],
    *,
    dtype: str = "bfloat16",
    device: str = "auto",
    trust_remote_code: bool = False,
    limit: int = 4,
    max_new_tokens: int = 48,
    vocabulary: Path | None = None,
) -> list[Verdict]:
    """Write a drafter in formats, each into its folder, and compare each with it over built-in prompts.

    Args:
        drafter: folder or hub id. role: its kind. target: as `load_target` takes it; opened in fp32.
        dtype: of the written weights. limit: prompts; 0 = nothing is compared. vocabulary: the target's GGUF file, for `gguf`.

    Raises:
        UserError: a kind of drafter, or a drafter, that a format can't hold; folders of something else.
    """
    for name, out in folders.items():
        check_free(out, name)
    if role == "autoregressive":
        causal.check_format(folders)
        opened = (
            load_target(target, "float32", device, trust_remote_code=trust_remote_code) if limit else None
        )
        verdict = causal.export(drafter, hub_id(target) or target, folders, dtype)
        if opened is not None:
            causal.compare(verdict, drafter, opened, _builtin(opened, limit), max_new_tokens)
        return [verdict]
    if role == "diffusion":
        raise UserError(
            f"--drafter={drafter}: a standalone diffusion drafter is of no engine's format; train with drafter.kind=block and "
            "drafter.context=taps (recipe=smollm2_taps)"
        )
    if not folders.keys() <= FORMATS.keys():
        raise UserError(
            "--format draft_model: an ordinary language model, which a block drafter is not; --format dflash, or train with "
            "drafter.kind=autoregressive"
        )
    network = _opened(drafter, target, device, trust_remote_code)
    # a folder may hold a finetuned model, of which the name that the drafter was made under says nothing
    own = network.config.target
    known = target if local_path(target).is_dir() else hub_id(own) or own
    network.config = replace(network.config, target=hub_id(target) or known)
    number = getattr(torch, dtype)
    notes = [causal.ROUNDED.format(dtype)] if _round(network, number) else []
    if vocabulary is None and target.endswith(".gguf"):
        vocabulary = Path(target)
    for name in folders:  # all that can be refused, before anything is written
        FORMATS[name].check(made_for(name, network), vocabulary)
    prompts = _builtin(network.target, limit) if limit else []
    source = model_folder(drafter, "drafter", ["config.json", "README.md"])
    verdicts = list[Verdict]()
    for name, out in folders.items():
        form = FORMATS[name]
        card = form.card(source, network, out.name)
        made = form.write(network, out, number, card, vocabulary)
        serve = form.lines(network, str(out))
        verdicts.append(Verdict(name, out, notes=[*made.notes, *notes], serve=serve))
    if prompts:
        compare(network, verdicts, prompts, max_new_tokens)
    return verdicts


def _builtin(target: Target, limit: int) -> list[list[int]]:
    """So many of this project's own prompts."""
    return tokens_of(
        target, [prompt for suite in prompts_of("builtin", limit=limit)[0] for prompt in suite.prompts]
    )


def made_for(name: str, network: BlockDrafter) -> Exported:
    """What a format holds of a drafter. Raises UserError where it can't, which names the formats that can."""
    try:
        return FORMATS[name].make(network)
    except UserError as error:
        fits = [other for other in FORMATS if other != name and _holds(other, network)]
        raise UserError(
            f"{error}; as it is, it fits --format {' or '.join(fits)}" if fits else str(error)
        ) from None


def _holds(name: str, network: BlockDrafter) -> bool:
    try:
        FORMATS[name].make(network)
    except UserError:
        return False
    return True


def _opened(drafter: str, target: str, device: str, trust_remote_code: bool) -> BlockDrafter:
    """With its target, in fp32: what is compared are networks, not roundings."""
    return load_drafter(drafter, load_target(target, "float32", device, trust_remote_code=trust_remote_code))


@torch.no_grad()
def _round(network: BlockDrafter, dtype: torch.dtype) -> bool:
    """Leave in fp32 what weights of `dtype` hold; whether that is less than there was."""
    changed = False
    for weights in (*network.parameters(), *network.buffers()):
        if weights.is_floating_point():
            held = weights.to(dtype).to(weights.dtype)
            changed |= not torch.equal(held, weights)
            weights.copy_(held)
    return changed


def _dtype_of(folder: Path) -> torch.dtype:
    """Of an export's weights. Raises UserError where they can't be read."""
    path = folder / "model.safetensors"
    with in_one_line(f"{folder}: can't be read"):
        check_ordinary(path)
        with safe_open(path, "pt") as file:
            return next(t.dtype for name in file.keys() if (t := file.get_tensor(name)).is_floating_point())  # noqa: SIM118


def in_process(
    drafter: str,
    role: str,
    target: str,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    engine: str,
    export: Path | None = None,
    *,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Verdict:
    """Compare an engine's own class, reading an export, with the drafter.

    Args:
        engine: `transformers` or `dflash`. export: what `decode.export` wrote in that format; None = written anew.
        role: the drafter's kind; an autoregressive one is an ordinary language model, which transformers alone drafts with here.

    Raises:
        UserError: a package that is not installed, an export in another format, a drafter that the format can't hold.
    """
    if role == "autoregressive":
        opened = load_target(target, "float32", device, trust_remote_code=trust_remote_code)
        return causal.in_process(drafter, opened, tokens_of(opened, prompts), max_new_tokens, engine, export)
    for reader in FORMATS[engine].readers:
        reader.check_installed()
    network = _opened(drafter, target, device, trust_remote_code)
    try:
        made_for(engine, network)
    except UserError as error:  # written for decode.export
        said = str(error).replace(f"--format {engine}:", f"--engine {engine}:")
        raise UserError(said.replace("--format ", "decode.export --format ")) from None
    with scratch("specalign-parity-") as made:
        folder = export or made / engine
        if export is None:
            _round(network, torch.bfloat16)
            FORMATS[engine].write(network, folder, torch.bfloat16, "")
        elif (found := read_record(export).get("format")) != engine:
            raise UserError(
                f"--export={export}: is in the format {found!r}, --engine {engine} reads {engine!r}"
            )
        else:
            _round(network, _dtype_of(export))
        verdict = Verdict(engine, folder)
        compare(network, [verdict], tokens_of(network.target, prompts), max_new_tokens)
    return verdict


def served(
    drafter: str,
    role: str,
    target: str,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    url: str,
    *,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Verdict:
    """Compare a running server's greedy outputs with plain decoding here, and its acceptance with this drafter's, drafting as many tokens
    a call as the server does. role: its kind.

    Raises:
        UserError: no such server, one without a drafter, or one that drafted nothing meanwhile.
    """
    server = Server(url)
    before = server.counts()
    opened = load_target(target, "float32", device, trust_remote_code=trust_remote_code)
    network = load_drafter(drafter, opened) if role != "autoregressive" else causal.opened(drafter, opened)
    asked = tokens_of(opened, prompts)
    theirs = [server.greedy(prompt, max_new_tokens) for prompt in asked]
    counts = server.counts().since(before)
    if counts.calls <= 0 or min(counts.drafted, counts.accepted, *counts.at_position) < 0:
        raise UserError(
            f"{server.url}/metrics: after {len(asked)} prompts {counts.calls:.0f} drafting calls, {counts.drafted:.0f} drafted and "
            f"{counts.accepted:.0f} accepted tokens more than before, so that nothing can be compared: it does not draft for them, or was "
            "started anew meanwhile"
        )
    if isinstance(network, BlockDrafter):
        ours: Drafter = BlockProposer(network, min(counts.drafts, network.config.block_size), tree_nodes=0)
    else:
        ours = AutoregressiveDrafter(network, counts.drafts)
    texts = decoded(opened, ours, asked, max_new_tokens)
    verdict, name = Verdict("server", Path(url)), f"{server.model} at {server.url}"
    each = zip(texts.prompts, texts.outputs, theirs, strict=True)
    same = [_as_plain(opened, prompt, output, other) for prompt, output, other in each]
    equal, ties = same.count(""), same.count(_TIE)
    others = next((f"; {why}" for why in same if why not in ("", _TIE)), "")
    line = f"outputs: {equal} of {len(theirs)} as plain greedy decoding here, {ties} differ from a near-tie of p on{others}"
    verdict.add(name, equal + ties == len(theirs), line)
    own = Counts.of(texts.accepted, counts.drafts)
    verdict.add(
        name,
        own.alike(counts, ties / len(theirs)) and abs(own.tau - counts.tau) < SERVED * own.tau,
        f"acceptance: ours: {own.line}; the server's: {counts.line}",
    )
    return verdict


SERVED = 0.05
"""Of τ: how far a server's may lie from ours. It may run in another dtype, and another order of sums turns near-ties."""
_TIE = "tie"


def _as_plain(target: Target, prompt: list[int], ours: list[int], theirs: list[int]) -> str:
    """Empty where the output is plain greedy decoding's, `_TIE` where it leaves it at two tokens as good as equally probable."""
    for place, (a, b) in enumerate(zip_longest(ours, theirs)):
        if a == b:
            continue
        if a is None or b is None:
            ended = ours if b is None else theirs
            return "" if ended[place] in target.eos_ids else f"{len(theirs)} tokens for {len(ours)}"
        if not 0 <= b < target.vocab_size:
            return f"token {short(b)} at place {place}, which the target does not have"
        logits = target.forward(torch.tensor([prompt + ours[:place]], device=target.device)).logits_BLV
        assert logits is not None
        gap = float(logits[0, -1, a] - logits[0, -1, b])
        return (
            _TIE
            if gap < NEAR
            else f"token {b} at place {place}, where {a} is more probable by a factor of {math.exp(min(gap, 50)):.3g}"
        )
    return ""


NEAR = 0.1
"""Nats between two tokens that half precision may exchange."""


def tokens_of(target: Target, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Prompts as the target reads them. Raises UserError where it takes none."""
    fitting, refused = tokenize_prompts(target, prompts)
    if not fitting:
        raise UserError(f"target {target.spec!r} takes none of the prompts: {refused[0]}")
    return [tokens for _, tokens in fitting]


def compare(
    drafter: BlockDrafter, verdicts: Sequence[Verdict], prompts: Sequence[list[int]], max_new_tokens: int
) -> None:
    """Compare each export with the drafter, over prompts decoded greedily. Writes into the verdicts, whatever another one meets."""
    chains = BlockProposer(drafter, tree_nodes=0)
    texts, model = decoded(drafter.target, chains, prompts, max_new_tokens), stock_model(drafter.target)
    for verdict in verdicts:
        try:
            FORMATS[verdict.format].compare(drafter, verdict, model, texts)
        except UserError as error:
            verdict.fail(str(error))
