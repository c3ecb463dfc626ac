"""A second definition of what a request asks for: transformers' own model and logits processors,
and the end of a text. No code of the engine, its processors or its sampling is used."""

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from decode.speculation.settings import Sampling
from specalign.common.schema import JsonObject
from specalign.lm.inspection.own_output import positions
from specalign.lm.model import Target

NEAR = 1e-6  # a draw at a number so near to the border of two tokens may be either
TIE = 1e-12
"""Taken off each logit times its id, so that transformers' processors take the lowest id among
equals, as decoding does."""
STORED = 48  # texts whose rows are stored
BATCH_TOKENS, BATCH_TEXTS = 512, 16  # the largest forward pass over several texts
_ULPS = {torch.float32: 256.0, torch.bfloat16: 16.0, torch.float16: 16.0}
"""The largest bound that rounding explains, in units of eps · max|z|, well above what was seen.
Measured on SmolLM2-135M (30 layers), widths 4, 9 and 16 against 1: the bound is 20 to 47 such units
in fp32, 0 to 8.4 in bf16."""
PERTURBED, AMPLIFIED = 3, 16
"""Perturbed forward passes, and how many times the largest of their changes rounding may reach.
Measured: 3 to 5 times."""
Wanted = tuple[list[int], int]  # a text, and after how many of its last tokens


class Reference:
    """The transformers model of a target, as transformers loads it, without a cache."""

    def __init__(self, target: Target, model: Any) -> None:
        self.target, self.model = target, model.eval()
        self._stored: deque[tuple[list[int], Tensor]] = deque(maxlen=STORED)

    def logits(self, text: list[int], count: int) -> Tensor:
        """After each of the last `count` tokens of the text, (count, V)."""
        found = self._find(text, count)
        if found is None:
            self.load([(text, count)])
            found = self._find(text, count)
        assert found is not None
        return found

    def load(self, texts: Sequence[Wanted]) -> None:
        """Compute the rows that `logits` will be asked for, several texts in one forward pass. A
        text that begins another one shares its rows."""
        missing: list[Wanted] = []
        for text, count in sorted(texts, key=lambda one: (-len(one[0]), -one[1])):
            first = len(text) - count
            shared = any(len(x) - n <= first and x[: len(text)] == text for x, n in missing)
            if not shared and self._find(text, count) is None:
                missing.append((text, count))
        missing.sort(key=lambda one: len(one[0]) - one[1], reverse=True)  # few rows for the head
        while missing:
            longest = max(len(text) for text, _ in missing[:BATCH_TEXTS])
            size = max(1, min(BATCH_TEXTS, BATCH_TOKENS // longest))
            rows = self._forward(missing[:size])
            self._stored += [(text, own) for (text, _), own in zip(missing, rows, strict=False)]
            del missing[:size]

    def _find(self, text: list[int], count: int) -> Tensor | None:
        for longer, rows_RV in self._stored:
            first = len(longer) - len(rows_RV)
            if len(text) - count >= first and longer[: len(text)] == text:
                return rows_RV[len(text) - count - first : len(text) - first]
        return None

    @torch.no_grad()
    def _forward(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[Tensor]:
        """The rows of each text. Padding stands on the right, where causal models do not see it."""
        length = max(len(text) for text, _ in texts)
        first = min(len(text) - count for text, count in texts)
        padded = [[*text, *[text[-1]] * (length - len(text))] for text, _ in texts]
        tokens_BL = torch.tensor(padded, device=self.target.device)
        given = positions(self.model, tokens_BL, 0)
        options: JsonObject = {name: x.expand(len(texts), -1) for name, x in given.items()}
        if "logits_to_keep" in signature(self.model.forward).parameters:
            options["logits_to_keep"] = length - first
        logits_BLV = self.model(input_ids=tokens_BL, use_cache=False, **options).logits
        logits_BLV = logits_BLV[:, first - length :]
        if self.target.never_V is not None:
            logits_BLV = logits_BLV.masked_fill(self.target.never_V, -math.inf)
        return [
            logits_LV[len(text) - count - first : len(text) - first]
            for logits_LV, (text, count) in zip(logits_BLV, texts, strict=True)
        ]

    def rounding_limit(self, text: Sequence[int], logits_V: Tensor, difference: float) -> float:
        """The largest difference between two logits' gaps after `text` that rounding explains: a
        multiple of the dtype's epsilon. If that is less than `difference`, the limit is measured:
        some texts amplify rounding errors (SmolLM2: by 8), and in a mixture of experts they may
        select another expert."""
        limit = dtype_limit(self.target.dtype, logits_V)
        if difference <= limit:
            return limit
        row_V, *others = self.perturb(text)
        changes = [float((row_V - other_V).abs().nan_to_num(nan=0).max()) for other_V in others]
        return max(limit, 2 * AMPLIFIED * max(changes))

    def perturb(self, text: Sequence[int]) -> list[Tensor]:
        """The logits after `text`, (V,), then those when the output of every weight is changed at
        random by about one epsilon of its size."""
        generator = torch.Generator(self.target.device).manual_seed(0)
        (row_1V,) = self._forward([(text, 1)])

        def change(module: nn.Module, args: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return output
            noise = torch.empty_like(output).normal_(generator=generator)
            size = output.square().mean(-1, keepdim=True).sqrt()
            return output + torch.finfo(output.dtype).eps * size * noise

        modules = self.model.modules()
        layers = [m for m in modules if any(w.dim() > 1 for w in m.parameters(recurse=False))]
        hooks = [module.register_forward_hook(change) for module in layers]
        try:
            return [one_1V[0] for one_1V in (row_1V, *self._forward([(text, 1)] * PERTURBED))]
        finally:
            for hook in hooks:
                hook.remove()


def dtype_limit(dtype: torch.dtype, logits_V: Tensor) -> float:
    """The largest bound that rounding in this dtype may explain for logits of this size."""
    largest = float(logits_V.nan_to_num(nan=0, posinf=0, neginf=0).abs().max())
    return _ULPS.get(dtype, 8.0) * torch.finfo(dtype).eps * largest


@lru_cache(8)
def _ids(tokens: tuple[int, ...]) -> Tensor:
    return torch.tensor(tokens)


def scores(
    logits_V: Tensor,
    prompt: Sequence[int],
    written: Sequence[int],
    sampling: Sampling,
    eos: Sequence[int],
) -> Tensor:
    """Logits (V,) in fp64 after the processors that look at the text."""
    z_1V: Any = logits_V.to(torch.float64, copy=True)[None]
    text: Any = torch.tensor([[*prompt, *written]], device=z_1V.device)
    if sampling.repetition_penalty != 1:
        z_1V = hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(text, z_1V)
    if sampling.presence_penalty and written:  # transformers has none: OpenAI's definition
        z_1V[0, sorted(set(written))] -= sampling.presence_penalty
    if sampling.banned:  # transformers' own takes seconds for thousands of tokens
        z_1V[0, _ids(sampling.banned).to(z_1V.device)] = -math.inf
    least = sampling.min_new_tokens
    if least and eos:
        barred: Any = hf.MinNewTokensLengthLogitsProcessor(len(prompt), least, list(eos))
        z_1V = barred(text, z_1V)
    return z_1V[0]


def law(scores_V: Tensor, sampling: Sampling) -> Tensor:
    """p (V,) of `scores`, fp64, at a temperature above 0."""
    none: Any = torch.empty(1, 0, dtype=torch.int64, device=scores_V.device)
    z_1V: Any = scores_V[None] - TIE * torch.arange(len(scores_V), device=scores_V.device)
    z_1V = hf.TemperatureLogitsWarper(float(sampling.temperature))(none, z_1V)
    if sampling.top_k:
        z_1V = hf.TopKLogitsWarper(sampling.top_k)(none, z_1V)
    if sampling.top_p < 1:
        z_1V = hf.TopPLogitsWarper(sampling.top_p)(none, z_1V)
    if sampling.min_p:
        z_1V = hf.MinPLogitsWarper(sampling.min_p)(none, z_1V)
    return z_1V[0].softmax(-1)


def interval(weights_V: Tensor, token: int) -> tuple[float, float]:
    """The interval of u in [0, 1) that yields the token by inverse transform sampling."""
    running_V = weights_V.double().cumsum(0)
    total = float(running_V[-1])
    return (float(running_V[token - 1]) if token else 0.0) / total, float(running_V[token]) / total


def is_inside(bounds: tuple[float, float], u: Tensor | float) -> bool:
    """Whether a number draws the token of this interval."""
    return bounds[0] - NEAR <= float(u) <= bounds[1] + NEAR and bounds[1] > bounds[0]


def noise(seed: int, position: int, size: int) -> Tensor:
    """The Gumbel noise (V,) of an absolute position under a seed: the definition of the verifier
    `gumbel`, on a CPU."""
    key = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") // 2)
    return -torch.rand(size, dtype=torch.float64, generator=generator).log().neg().log()


def own_numbers(seed: int, count: int, device: torch.device) -> Tensor:
    """The numbers that decide the target's own tokens under a seed, by the position in the output:
    the definition."""
    key = hashlib.blake2b(f"{seed} tokens".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(key, "little") // 2)
    return torch.rand(count, dtype=torch.float64, generator=generator, device=device)


def end_of(
    target: Target,
    tokens: Sequence[int],
    limit: int,
    full: str,
    eos: Sequence[int],
    stops: Sequence[str],
) -> tuple[int, str, str]:
    """Where a text of these new tokens ends: the number of its tokens, the reason, and the text,
    decoded as a whole."""
    names = getattr(target.tokenizer, "all_special_tokens", ()) if stops else ()
    with_special = [stop for stop in stops if any(name in stop for name in names)]
    marks: list[tuple[int, str]] = []  # special tokens, and where they stand in the text
    for count, token in enumerate(tokens, 1):
        text = target.detokenize(list(tokens[:count])) if stops else ""
        if found := [text.find(stop) for stop in stops if stop in text]:
            return count, "stop", text[: min(found)]
        if with_special:
            name = str(target.tokenizer.convert_ids_to_tokens(token))
            marks += [(len(text), name)] if name in names else []
        spelt = text
        for at, name in reversed(marks):
            spelt = spelt[:at] + name + spelt[at:]
        if found := [spelt.find(stop) for stop in with_special if stop in spelt]:
            text = spelt[: min(found)]
            for name in names:
                text = text.replace(name, "")
            return count, "stop", text
        ended = full if count == limit else ""
        if token in eos:
            ended = "eos"
        if ended:
            return count, ended, target.detokenize(list(tokens[:count]))
    return len(tokens), "", target.detokenize(list(tokens))
