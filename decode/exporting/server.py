"""`decode.parity` against a running server (vLLM or llama.cpp): its outputs, accepted drafts, and
the files that it has loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from decode.evaluation.endpoint import Endpoint
from decode.exporting.exports import (
    ExportVerdict,
    GreedyText,
    compare_export,
    decode_greedily,
    encode_prompts,
    round_weights,
)
from decode.exporting.formats import read_format
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.common.text import short
from specalign.formats.block import load_drafter
from specalign.lm.model import Target
from specalign.suites.prompt import Prompt

NEAR = 0.1  # nats between two tokens that half precision may exchange
NEAR_TIE = "tie"
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

    def matches(self, other: Counts, parted: float = 0.0) -> bool:
        """Whether `other` accepts as many drafts in as many rounds, up to near-ties.

        Near-ties turn three drafts or a tenth (vLLM accepted 137 for our 132); a fault in vLLM
        turned 42 into 31. Texts that part, a share `parted`, are samples of their own: three times
        the root of a count.
        """
        scaled = other.accepted * self.rounds / other.rounds
        largest = max(self.accepted, scaled)
        slack = max(3.0, 0.1 * largest, 3 * math.sqrt(largest * parted))
        return abs(self.accepted - scaled) <= slack

    def __str__(self) -> str:
        tau = 1 + self.accepted / max(self.rounds, 1)
        return f"τ {tau:.3f} ({self.accepted:.0f} drafts in {self.rounds:.0f} rounds)"


class DraftingServer(Endpoint):
    """A server with a drafter."""

    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The greedy output for a prompt, both as tokens."""
        body: JsonObject = {**_GREEDY, "prompt": list(prompt)}
        if self.owner == "llamacpp":  # returns tokens by its own protocol only
            body |= {"n_predict": max_new_tokens, "return_tokens": True}
            tokens = self.ask("/completion", body).get("tokens")
        else:
            body |= {"max_tokens": max_new_tokens, "model": self.model, "return_token_ids": True}
            choices = self.ask("/v1/completions", body).get("choices") or [{}]
            tokens = choices[0].get("token_ids")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise UserError(f"{self.url}: no token ids in the response (vLLM 0.11+ has them)")
        return tokens

    def counts(self) -> Counts:
        """Its counters now. Raises UserError if it has no drafter."""
        found = self.read_counters()
        if not found:
            options = "vLLM: --speculative-config; llama-server: -md FILE --metrics"
            raise UserError(
                f"{self.url}/metrics: no draft metrics: enable speculative decoding ({options})"
            )
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return Counts(*(found.get(name, 0.0) for name in names))


def check_server(
    drafter: str,
    target: Target,
    url: str,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    export: Path | None = None,
) -> ExportVerdict:
    """Compare a running server's greedy outputs with this project's, its acceptance with ours, and
    the files that it has loaded (`export`) with the drafter. Raises UserError for a server that did
    not draft, or a folder that is no export."""
    form = "server" if export is None else read_format(export)
    server = DraftingServer(url)
    tokens = encode_prompts(target, prompts)
    before = server.counts()
    theirs = [server.greedy(prompt, max_new_tokens) for prompt in tokens]
    after = server.counts()
    rounds, drafted = after.rounds - before.rounds, after.drafted - before.drafted
    if rounds <= 0 or drafted <= 0 or after.accepted < before.accepted:
        found = f"{rounds:.0f} rounds and {drafted:.0f} drafted tokens for the prompts"
        raise UserError(f"{server.url}/metrics: {found}: it is not drafting, or was restarted")
    there = Counts(rounds, drafted, after.accepted - before.accepted)
    verdict = ExportVerdict(form, export or Path(url))
    drafts = math.ceil(drafted / rounds)
    network = load_drafter(drafter, target)
    if export is None:
        round_weights(network, torch.bfloat16)
    else:  # rounds it as the export is
        compare_export(network, verdict, [GreedyText(tokens[0], [])])
    drafts = min(drafts, network.config.block_size)
    texts = decode_greedily(network, tokens, max_new_tokens, drafts)
    pairs = zip(texts, theirs, strict=True)
    results = [compare_output(target, text, other) for text, other in pairs]
    ties = results.count(NEAR_TIE)
    different = [why for why in results if why not in ("", NEAR_TIE)]
    name = f"{server.model} at {server.url}"
    line = f"outputs: {results.count('')} of {len(texts)} equal, {ties} diverge at a near-tie"
    verdict.add(name, not different, "; ".join([line, *different[:1]]), engine=True)
    accepted = [n for text in texts for n in text.accepted]
    here = Counts(len(accepted), len(accepted) * drafts, sum(accepted))
    same = here.matches(there, ties / len(texts))
    verdict.add(name, same, f"acceptance: {here} here, {there} there", engine=True)
    return verdict


def compare_output(target: Target, text: GreedyText, theirs: list[int]) -> str:
    """Empty if the output is ours, `NEAR_TIE` if it parts at two tokens of nearly equal
    probability."""
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
        return NEAR_TIE if gap < NEAR else f"token {b} at place {place}, where {a} is more probable"
    return ""
