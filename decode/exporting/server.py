"""A running server, vLLM's or llama.cpp's: its outputs and accepted drafts, and whether they are those of a drafter."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

from align.common.claims import scratch
from align.common.errors import UserError
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
from decode.exporting.folder import read_record
from decode.exporting.parity import round_weights, stored_dtype, tokens_of
from decode.exporting.registry import FORMATS, fitting_formats
from decode.exporting.verdict import NEAR_TIE, Counts, Decoded, Verdict, compare_output, decoded
from decode.suites.prompt import Prompt

_LABELS = r'(?:[^"}]|"(?:\\.|[^"\\])*")*'  # their values may hold a brace
_SAMPLE = re.compile(rf"^(?P<name>[\w:]+?)(?:_total)?(?:\{{(?P<labels>{_LABELS})\}})? (?P<value>[-+.\deE]+)$")
_COUNTERS = re.compile(r"^(?:vllm|llamacpp):spec_decode_num_(?P<name>\w+)$")
"""Both count the same under the same names."""
_GREEDY = {
    "temperature": 0,
    "repetition_penalty": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Of every request: servers fill what is not said from the model's generation_config.json or the command line."""
_MOST = 1 << 26
"""Bytes of an answer."""


class Server:
    """One server, by the address of its API (`http://127.0.0.1:8000`, with or without `/v1`).

    Raises:
        UserError: no address, no answer, or an answer that is none of this protocol.
    """

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError:
            parts = urlsplit("")
        if " " in url or parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError(f"--engine={url!r}: no address; an example: http://127.0.0.1:8000")
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout
        models = self._json("/v1/models").get("data")
        if (
            not isinstance(models, list)
            or not models
            or not isinstance(models[0], dict)
            or "id" not in models[0]
        ):
            raise UserError(f"{self.url}/v1/models: names no model, so this is no OpenAI-compatible server")
        self.model = str(models[0]["id"])
        self.llama = models[0].get("owned_by") == "llamacpp"
        """llama.cpp's server returns tokens by a protocol of its own alone."""

    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The server's greedy output for a prompt of tokens, as tokens."""
        if self.llama:
            body = {**_GREEDY, "prompt": list(prompt), "n_predict": max_new_tokens, "return_tokens": True}
            tokens = self._json("/completion", body).get("tokens")
        else:
            body = {**_GREEDY, "prompt": list(prompt), "max_tokens": max_new_tokens}
            answer = self._json("/v1/completions", {**body, "model": self.model, "return_token_ids": True})
            choices = answer.get("choices")
            choice = choices[0] if isinstance(choices, list) and choices else None
            tokens = choice.get("token_ids") if isinstance(choice, dict) else None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise UserError(
                f"{self.url}: its answer has no token ids, so outputs can't be compared; vLLM's has from 0.11 on, and llama.cpp's"
            )
        return tokens

    def counts(self) -> Counts:
        """Its counters now. Raises UserError where it counts no drafts, so that it has no drafter."""
        found, positions = dict[str, float](), dict[int, float]()
        for line in self._text("/metrics").splitlines():
            match = _SAMPLE.match(line)
            counter = None if match is None else _COUNTERS.match(match["name"])
            if match is None or counter is None:
                continue
            name, value = counter["name"], _number(match["value"])
            if name == "accepted_tokens_per_pos":
                place = re.search(r'position="([0-9]{1,3})"', match["labels"] or "")
                if place is not None:
                    positions[int(place[1])] = positions.get(int(place[1]), 0.0) + value
            else:
                found[name] = found.get(name, 0.0) + value
        if "drafts" not in found:
            raise UserError(
                f"{self.url}/metrics: counts no drafts: start the server with the drafter (vLLM: --speculative-config; llama-server: -md FILE --metrics)"
            )
        at = tuple(positions.get(k, 0.0) for k in range(max(positions, default=-1) + 1))
        return Counts(found["drafts"], found.get("draft_tokens", 0.0), found.get("accepted_tokens", 0.0), at)

    def _json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        text = self._text(path, body)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.url}{path}: answered {short(text)}, no JSON object")
        return found

    def _text(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            try:
                with urlopen(request, timeout=self.timeout) as answer:
                    text = bytes(answer.read(_MOST + 1)).decode("utf-8", "replace")
            except HTTPError as error:
                said = error.read(4096).decode("utf-8", "replace")
                raise UserError(f"{self.url}{path}: answered {error.code}: {short(said, 200)}") from None
            if len(text) > _MOST:
                raise UserError(f"{self.url}{path}: answered more than {_MOST >> 20} MiB")
            return text
        except (URLError, OSError, HTTPException, UnicodeError) as error:  # the last: of an address
            raise UserError(
                f"{self.url}{path}: no answer ({getattr(error, 'reason', error)}); is the server up? decode.export prints the line that starts "
                "it with a drafter (vllm serve …, llama-server …)"
            ) from None


def _number(text: str) -> float:
    """A counter's value; 0 for what is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def served(
    drafter: str,
    role: str,
    target: str,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    url: str,
    export: Path | None = None,
    *,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Verdict:
    """Compare a running server with the drafter: its files as the reference reader reads them, and what the engine computes, by its
    greedy outputs beside plain decoding here and its acceptance with as many drafts a forward.

    Args:
        role: the drafter's kind. export: the folder that the server has loaded; None = what is checked is a fresh export.

    Raises:
        UserError: no such server, one without a drafter, or one that drafted nothing meanwhile; an export of a format that no
            server loads.
    """
    if export is not None:
        _served_format(export)
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
        round_weights(network, torch.bfloat16 if export is None else stored_dtype(export))
        ours: Drafter = BlockProposer(network, min(counts.drafts, network.config.block_size), tree_nodes=0)
    else:
        ours = AutoregressiveDrafter(network, counts.drafts)
    texts = decoded(opened, ours, asked, max_new_tokens)
    verdict = Verdict("server", Path(url), files_same=None)
    compare_server(verdict, server, opened, texts, theirs, counts)
    with scratch("specalign-parity-") as made:
        if isinstance(network, BlockDrafter):
            _check_files(verdict, network, export, made, asked[0])
        else:
            _check_causal(verdict, drafter, opened, export, made)
    return verdict


SERVED_FORMATS = ("dflash", "speculators", "dspark", "gguf", causal.FORMAT)


def _served_format(export: Path) -> str:
    """The format of a folder that a server has loaded. Raises UserError for one that no server loads."""
    form = str(read_record(export).get("format"))
    if form not in SERVED_FORMATS:
        raise UserError(f"--export={export}: is in the format {form!r}, which no server loads")
    return form


NOT_READ = "files: checked in a fresh export ({}); --export DIR checks the folder that the server has loaded"


def _check_files(
    verdict: Verdict, network: BlockDrafter, export: Path | None, scratch_folder: Path, prompt: list[int]
) -> None:
    """Compare a block drafter's export, or a fresh one, by the format's definition. Writes into the verdict."""
    if export is not None:
        form, folder = _served_format(export), export
    else:
        form = next((name for name in ("dflash", "dspark") if name in fitting_formats(network)), "")
        if not form:
            return
        folder = scratch_folder / form
        FORMATS[form].write(network, folder, torch.bfloat16, "")
        verdict.lines.append(NOT_READ.format(form))
    texts = decoded(network.target, BlockProposer(network, tree_nodes=0), [prompt], CHECKED_TOKENS)
    found = Verdict(form, folder)
    FORMATS[form].compare_files(network, found, stock_model(network.target), texts)
    verdict.take_files(found)


CHECKED_TOKENS = 16
"""Of the first prompt's output, over which the reference reader drafts too."""


def _check_causal(
    verdict: Verdict, drafter: str, target: Target, export: Path | None, scratch_folder: Path
) -> None:
    """Compare an autoregressive drafter's export, or a fresh one. Writes into the verdict."""
    found = Verdict(causal.FORMAT, export or scratch_folder / causal.FORMAT)
    if export is None:
        causal.export(drafter, target.spec, {causal.FORMAT: found.folder}, "bfloat16")
        verdict.lines.append(NOT_READ.format(causal.FORMAT))
    causal.compare(found, drafter, target, [], 0, generate=False)
    verdict.take_files(found)


def compare_server(
    verdict: Verdict,
    server: Server,
    target: Target,
    texts: Decoded,
    theirs: Sequence[list[int]],
    counts: Counts,
) -> None:
    """Compare a server's outputs and counts with those decoded here. Writes into the verdict, as the engine's."""
    name = f"{server.model} at {server.url}"
    each = zip(texts.prompts, texts.outputs, theirs, strict=True)
    same = [compare_output(target, prompt, output, other) for prompt, output, other in each]
    equal, ties = same.count(""), same.count(NEAR_TIE)
    others = next((f"; {why}" for why in same if why not in ("", NEAR_TIE)), "")
    line = f"outputs: {equal} of {len(theirs)} as plain greedy decoding here, {ties} differ from a near-tie of p on{others}"
    verdict.add(name, equal + ties == len(theirs), line, by_engine=True)
    own = Counts.of(texts.accepted, counts.drafts)
    alike = own.alike(counts, ties / len(theirs)) and abs(own.tau - counts.tau) < SERVED * own.tau
    change = counts.tau / own.tau - 1
    line = f"acceptance (τ {change:+.1%}): ours: {own.line}; the server's: {counts.line}"
    verdict.add(name, alike, line, by_engine=True)


SERVED = 0.05
"""Of τ: how far a server's may lie from ours. It may run in another dtype, and another order of sums turns near-ties."""
