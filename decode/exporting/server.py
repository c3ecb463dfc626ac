"""`decode.parity` against a running server (vLLM or llama.cpp): its outputs, accepted drafts, and
the files that it has loaded."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import httpx2
import torch

from decode.engine.decoder import Decoder
from decode.exporting import compare
from decode.exporting.compare import ExportVerdict, GreedyText
from decode.exporting.draft_model import FORMAT, compare_draft_model, open_draft_model
from decode.exporting.exports import DrafterPair, prepare_export, round_weights
from decode.exporting.folder import read_format
from decode.proposers.autoregressive import AutoregressiveProposer
from decode.proposers.base import Proposer
from decode.proposers.block import BlockProposer
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.common.text import short
from specalign.formats.block import load_drafter
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt

SERVED_FORMATS = ("dflash", "speculators", "dspark", "gguf", FORMAT)
SERVED = 0.05
"""Of τ: how far a server's may be from ours. Its dtype may be another, and near-ties turn."""
NEAR = 0.1
"""Nats between two tokens that half precision may exchange."""
NEAR_TIE = "tie"
_COUNTER = re.compile(
    r"^(?:vllm|llamacpp):spec_decode_num_(drafts|draft_tokens|accepted_tokens)(?:_total)?(?:\{.*\})? (\d\S*)$",
    re.MULTILINE,
)
_GREEDY = {
    "temperature": 0, "repetition_penalty": 1.0, "repeat_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
"""In every request: servers fill in the rest from the model's generation_config.json."""


@dataclass(frozen=True)
class Counts:
    """Speculative decoding of a server: rounds, drafted and accepted tokens."""

    rounds: float
    drafted: float
    accepted: float

    @property
    def tau(self) -> float:
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    def matches(self, other: Counts, parted: float = 0.0) -> bool:
        """Whether `other` accepts as many drafts in as many rounds, up to near-ties.

        Near-ties turn three drafts or a tenth (vLLM accepted 137 for our 132); a fault in vLLM
        turned 42 into 31. Texts that part, a share `parted`, are samples of their own: three times
        the root of a count.
        """
        if min(self.rounds, other.rounds) <= 0:
            return self.rounds == other.rounds
        scaled = other.accepted * self.rounds / other.rounds
        largest = max(self.accepted, scaled)
        slack = max(3.0, 0.1 * largest, 3 * math.sqrt(largest * parted))
        near = abs(self.tau - other.tau) < SERVED * self.tau
        return near and abs(self.accepted - scaled) <= slack


class Server:
    """A server by the address of its API (`http://127.0.0.1:8000`, with or without `/v1`). Raises
    UserError for no answer, or one of another protocol."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        models = self._ask("/v1/models").get("data") or [{}]
        if "id" not in models[0]:
            raise UserError(f"{self.url}/v1/models: names no model: no OpenAI-compatible server")
        self.model = str(models[0]["id"])
        self.llama = models[0].get("owned_by") == "llamacpp"
        """llama.cpp returns tokens by its own protocol only."""

    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The greedy output for a prompt, both as tokens."""
        body: JsonObject = {**_GREEDY, "prompt": list(prompt)}
        if self.llama:
            body |= {"n_predict": max_new_tokens, "return_tokens": True}
            tokens = self._ask("/completion", body).get("tokens")
        else:
            body |= {"max_tokens": max_new_tokens, "model": self.model, "return_token_ids": True}
            choices = self._ask("/v1/completions", body).get("choices") or [{}]
            tokens = choices[0].get("token_ids")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise UserError(f"{self.url}: its answer has no token ids; vLLM has them since 0.11")
        return tokens

    def counts(self) -> Counts:
        """Its counters now. Raises UserError if it has no drafter."""
        totals: defaultdict[str, float] = defaultdict(float)
        for name, value in _COUNTER.findall(self._request("/metrics").text):
            totals[name] += float(value)
        if "drafts" not in totals:
            options = "vLLM: --speculative-config; llama-server: -md FILE --metrics"
            raise UserError(f"{self.url}/metrics: counts no drafts: start it with them ({options})")
        return Counts(totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"])

    def _request(self, path: str, body: JsonObject | None = None) -> httpx2.Response:
        """Raises UserError for no answer, or one of failure."""
        method = "GET" if body is None else "POST"
        try:
            answer = httpx2.request(method, self.url + path, json=body, timeout=600)
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            hint = "is the server up? decode.export prints the line that starts it (vllm serve …)"
            raise UserError(f"{self.url}{path}: no answer ({error}); {hint}") from None
        if answer.is_error:
            text = short(answer.text, 200)
            raise UserError(f"{self.url}{path}: answered {answer.status_code}: {text}")
        return answer

    def _ask(self, path: str, body: JsonObject | None = None) -> JsonObject:
        """The object that it answers. Raises UserError for anything else."""
        answer = self._request(path, body)
        with suppress(ValueError, RecursionError):
            found = answer.json()
            if isinstance(found, dict):
                return found
        raise UserError(f"{self.url}{path}: answered {short(answer.text)}, no JSON object")


def check_server(
    pair: DrafterPair,
    url: str,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    export: Path | None = None,
) -> ExportVerdict:
    """Compare a running server's greedy outputs with plain decoding, its acceptance with ours, and
    the files that it has loaded (`export`) with the drafter. Raises UserError for a server that did
    not draft, or an export that no server loads."""
    if export is not None and read_format(export) not in SERVED_FORMATS:
        form = read_format(export)
        raise UserError(f"--export={export}: is in the format {form!r}, which no server loads")
    server = Server(url)
    before = server.counts()
    target = pair.open_target()
    tokens = compare.encode_prompts(target, prompts)
    theirs = [server.greedy(prompt, max_new_tokens) for prompt in tokens]
    after = server.counts()
    rounds = after.rounds - before.rounds
    counts = Counts(rounds, after.drafted - before.drafted, after.accepted - before.accepted)
    if rounds <= 0 or counts.drafted <= 0 or counts.accepted < 0:
        found = f"{rounds:.0f} rounds and {counts.drafted:.0f} drafted tokens for the prompts"
        raise UserError(f"{server.url}/metrics: {found}: it does not draft, or was restarted")
    texts = compare.decode_prompts(target, prompts, max_new_tokens)
    drafts = max(1, math.ceil(counts.drafted / rounds))
    proposer, files = _open_drafter(pair, export, target, drafts, texts[:1])
    verdict = ExportVerdict("server", Path(url), None if files is None else files.files_same)
    name = f"{server.model} at {server.url}"
    parted = _compare_outputs(verdict, name, target, texts, theirs)
    decoder = Decoder(target, proposer)
    accepted = [decoder.generate(p, max_new_tokens=max_new_tokens).accepted for p in tokens]
    count = sum(map(len, accepted))
    ours = Counts(count, count * drafts, sum(map(sum, accepted)))
    line = f"acceptance: τ {ours.tau:.3f} here ({ours.accepted:.0f} drafts in {count} rounds)"
    line += f", {counts.tau:.3f} there ({counts.accepted:.0f} in {rounds:.0f})"
    verdict.add(name, ours.matches(counts, parted), line, engine=True)
    verdict.lines += ["--export DIR checks the server's folder"] if files is None else files.lines
    return verdict


def _open_drafter(
    pair: DrafterPair, export: Path | None, target: Target, drafts: int, texts: list[GreedyText]
) -> tuple[Proposer, ExportVerdict | None]:
    """The drafter with the server's number of drafts, rounded as the export is, and the comparison
    of the server's export with it."""
    found = None
    if pair.role == "autoregressive":
        if export is not None:
            found = ExportVerdict(FORMAT, export)
            compare_draft_model(found, pair.drafter, target)
        return AutoregressiveProposer(open_draft_model(pair.drafter, target), drafts), found
    network = load_drafter(pair.drafter, target)
    if export is None:
        round_weights(network, torch.bfloat16)
    else:
        found = prepare_export(network, read_format(export), export, export)
        compare.compare_export(network, found, texts)
    drafts = min(drafts, network.config.block_size)
    return BlockProposer(network, drafts, tree_nodes=0), found


def _compare_outputs(
    verdict: ExportVerdict,
    name: str,
    target: Target,
    texts: Sequence[GreedyText],
    theirs: Sequence[list[int]],
) -> float:
    """Returns the share of outputs that differ from a near-tie on."""
    found = [compare_output(target, text, other) for text, other in zip(texts, theirs, strict=True)]
    ties = found.count(NEAR_TIE)
    different = [why for why in found if why not in ("", NEAR_TIE)]
    line = f"outputs: {found.count('')} of {len(theirs)} equal plain greedy decoding's, "
    line += f"{ties} differ from a near-tie on"
    verdict.add(name, not different, "; ".join([line, *different[:1]]), engine=True)
    return ties / len(theirs)


def compare_output(target: Target, text: GreedyText, theirs: list[int]) -> str:
    """Empty if the output is plain greedy decoding's, `NEAR_TIE` if it parts at two tokens of
    nearly equal probability."""
    for place, (a, b) in enumerate(zip_longest(text.output, theirs)):
        if a == b:
            continue
        if a is None or b is None:
            ended = (b if a is None else a) in target.eos_ids
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
