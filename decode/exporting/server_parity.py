"""`decode.parity` against a running server: its outputs, its accepted drafts, and the files that it has loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import torch

from align.common.claims import scratch
from align.common.errors import UserError
from align.common.text import short
from align.models.block import BlockDrafter
from align.models.checkpoints.block import load_drafter
from align.target.model import Target
from decode.drafters.autoregressive import AutoregressiveDrafter
from decode.drafters.base import Drafter
from decode.drafters.block import BlockProposer
from decode.engine.decoder import Decoder
from decode.exporting.compare import GreedyText, Verdict, compare_export, decode_texts, encode_prompts
from decode.exporting.draft_model import FORMAT as DRAFT_MODEL
from decode.exporting.draft_model import compare_draft_model, open_draft_model
from decode.exporting.exports import DrafterPair, prepare_draft_model, prepare_export
from decode.exporting.folder import read_format
from decode.exporting.registry import find_fitting_formats
from decode.exporting.server import Counts, Server
from decode.suites.prompt import Prompt

SERVED = 0.05
"""Of τ: how far a server's may be from ours. Its dtype may be another, and near-ties turn."""
SERVED_FORMATS = ("dflash", "speculators", "dspark", "gguf", DRAFT_MODEL)
NEAR = 0.1
"""Nats between two tokens that half precision may exchange."""
NEAR_TIE = "tie"


def check_server(
    pair: DrafterPair, url: str, prompts: Sequence[Prompt], max_new_tokens: int, export: Path | None = None
) -> Verdict:
    """Compare a running server with the drafter: its greedy outputs with plain decoding, its acceptance with ours, and the files
    that it has loaded (or a fresh export).

    Raises:
        UserError: no such server, one without a drafter, or one that drafted nothing; an export that no server loads.
    """
    form = None if export is None else read_format(export)
    if form is not None and form not in SERVED_FORMATS:
        raise UserError(f"--export={export}: is in the format {form!r}, which no server loads")
    server = Server(url)
    before = server.counts()
    target = pair.open_target()
    tokens = encode_prompts(target, prompts)
    if pair.role == "autoregressive":
        network: BlockDrafter | Target = open_draft_model(pair.drafter, target)
        form = DRAFT_MODEL
    else:
        network = load_drafter(pair.drafter, target)
        form = form or next((f for f in find_fitting_formats(network) if f in SERVED_FORMATS[:3]), None)
    theirs = [server.greedy(prompt, max_new_tokens) for prompt in tokens]
    counts = server.counts().since(before)
    if counts.calls <= 0 or min(counts.drafted, counts.accepted, *counts.at_position) < 0:
        raise UserError(
            f"{server.url}/metrics: after {len(tokens)} prompts {counts.calls:.0f} rounds, {counts.drafted:.0f} "
            f"drafted and {counts.accepted:.0f} accepted tokens more than before, so nothing can be compared: "
            "it does not draft for them, or was restarted meanwhile"
        )
    texts = decode_texts(target, tokens, max_new_tokens)
    with scratch("specalign-parity-") as folder:
        found = _check_files(pair, network, form, export, folder, texts[:1])
    verdict = Verdict("server", Path(url), found.files_same if found else None)
    name = f"{server.model} at {server.url}"
    parted = _compare_outputs(verdict, name, target, texts, theirs)
    proposer: Drafter
    if isinstance(network, BlockDrafter):
        proposer = BlockProposer(network, min(counts.drafts, network.config.block_size), tree_nodes=0)
    else:
        proposer = AutoregressiveDrafter(network, counts.drafts)
    decoder = Decoder(target, proposer)
    accepted = [decoder.generate(prompt, max_new_tokens=max_new_tokens).accepted for prompt in tokens]
    ours = Counts.of(accepted, counts.drafts)
    same = ours.matches(counts, parted) and abs(ours.tau - counts.tau) < SERVED * ours.tau
    change = counts.tau / ours.tau - 1
    line = f"acceptance (τ {change:+.1%}): ours: {ours.line}; the server's: {counts.line}"
    verdict.add(name, same, line, engine=True)
    if found is not None:
        verdict.lines += found.lines
    return verdict


def _check_files(
    pair: DrafterPair,
    network: BlockDrafter | Target,
    form: str | None,
    export: Path | None,
    folder: Path,
    texts: list[GreedyText],
) -> Verdict | None:
    """Compare the server's export, or a fresh one, with the drafter, which is rounded alike; None if no format holds it."""
    if form is None:
        return None
    if isinstance(network, BlockDrafter):
        found = prepare_export(network, form, export, folder)
        compare_export(network, found, texts)
    else:
        found = prepare_draft_model(pair, export, folder)
        compare_draft_model(found, pair.drafter, network, texts)
    if export is None:
        found.lines.insert(0, f"a fresh export ({form}) is checked; --export DIR checks the server's folder")
    return found


def _compare_outputs(
    verdict: Verdict, name: str, target: Target, texts: Sequence[GreedyText], theirs: Sequence[list[int]]
) -> float:
    """Returns the share of outputs that differ from a near-tie on."""
    found = [compare_output(target, text, other) for text, other in zip(texts, theirs, strict=True)]
    equal, ties = found.count(""), found.count(NEAR_TIE)
    different = [why for why in found if why not in ("", NEAR_TIE)]
    line = (
        f"outputs: {equal} of {len(theirs)} equal plain greedy decoding's, {ties} differ from a near-tie on"
    )
    verdict.add(name, not different, "; ".join([line, *different[:1]]), engine=True)
    return ties / len(theirs)


def compare_output(target: Target, text: GreedyText, theirs: list[int]) -> str:
    """Empty if the output is plain greedy decoding's, `NEAR_TIE` if it parts at two tokens of nearly equal probability."""
    for place, (a, b) in enumerate(zip_longest(text.output, theirs)):
        if a == b:
            continue
        if a is None or b is None:
            longer = text.output if b is None else theirs
            ended = longer[place] in target.eos_ids
            return "" if ended else f"{len(theirs)} tokens for {len(text.output)}"
        if not 0 <= b < target.vocab_size:
            return f"token {short(b)} at place {place}, which the target does not have"
        ids = torch.tensor([text.prompt + text.output[:place]], device=target.device)
        logits = target.forward(ids).logits_BLV
        assert logits is not None
        gap = float(logits[0, -1, a] - logits[0, -1, b])
        factor = math.exp(min(gap, 50))
        why = f"token {b} at place {place}, where {a} is more probable by a factor of {factor:.3g}"
        return NEAR_TIE if gap < NEAR else why
    return ""
