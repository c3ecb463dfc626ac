"""What an exported folder computes, read as engines read it: from its files alone, without this project's networks.

A reader traces one draft after a prefix and says each quantity on the way, in `RUNGS`' order. `FilesReader` is written after
the published definitions of DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147) and the speculators format;
`engine_reader.py` has transformers' and the dflash package's own classes.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from align.common.errors import UserError
from align.common.files import load_safetensors
from align.common.schema import read_config
from decode.exporting.folder import EMBEDDING

RUNGS = (
    "tapped features",
    "fused context",
    "block",
    "rotary tables",
    "mask",
    "hidden states",
    "draft logits",
    "draft tokens",
)
"""What is compared, the first first; after them come whole outputs."""


class Reader(ABC):
    """An exported folder in somebody's hands.

    Args:
        folder: what was written. model: the target, an unchanged transformers model.
    """

    name: str
    of_an_engine = False
    """Whether an engine's own class computes: a difference then may be the engine's, with nothing wrong in the files."""
    generation = ""
    """How the engine decodes with the folder on its own, for people; empty = it does not."""
    pruned = True
    """Whether it drafts over the folder's draft vocabulary, with the head that lies there; else over the target's whole one."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder, self.model, self.config = folder, model, read_config(folder)

    @classmethod
    def installed(cls) -> bool:
        """Whether the package that it needs is here."""
        return True

    @classmethod  # noqa: B027
    def check_installed(cls) -> None:
        """Raises UserError, with what to type, where the package that it needs can't be used."""

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
        """The engine's own greedy output, `count` tokens, and the accepted drafts of each of its calls behind the prompt's."""
        raise NotImplementedError

    @torch.no_grad()
    def states(self, tokens: list[int]) -> tuple[Tensor, ...]:
        """transformers' hidden_states over tokens, (n, D) each."""
        ids = torch.tensor([tokens], device=self.model.device)
        found = self.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        return tuple(h[0] for h in found)

    def trace(self, states: tuple[Tensor, ...], anchor: int) -> dict[str, Tensor]:
        """All of `quantities`."""
        with torch.no_grad():
            return dict(self.quantities(states, anchor))

    def said(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """What the files say of each setting; `wanted`: what an export of the drafter says."""
        return self.config

    def stored(self) -> dict[str, Tensor]:
        """All tensors of the files, as they are stored."""
        return load_safetensors(self.folder / "model.safetensors")

    @abstractmethod
    def quantities(self, states: tuple[Tensor, ...], anchor: int) -> Iterator[tuple[str, Tensor]]:
        """Quantities of one draft by their names in `RUNGS`, those that this reader shows, each before what is computed from it: a fault is
        seen where it lies, though nothing could be computed behind it. `states`: of the tokens before the anchor. Without gradients."""

    def drafts(self, states: tuple[Tensor, ...], anchor: int) -> list[int]:
        """Greedy draft tokens after the anchor."""
        return self.trace(states, anchor)["draft tokens"].tolist()

    @property
    @abstractmethod
    def layers(self) -> list[int]:
        """The tapped layers, of the target's from 0."""

    def features(self, states: tuple[Tensor, ...]) -> Tensor:
        """(n, F·D)."""
        for i in self.layers:
            if not 0 <= i + 1 < len(states):
                raise UserError(
                    f"{self.folder}/config.json: layer {i} is none of the target's {len(states) - 1}"
                )
        return torch.cat([states[i + 1] for i in self.layers], dim=-1).float()

    def embed(self, tokens: Tensor) -> Tensor:
        """As the target reads them, (n, D)."""
        return self.model.get_input_embeddings()(tokens.to(self.model.device)).float()

    def _raw(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding as they stand there."""
        return F.embedding(tokens.to(self.model.device), self.model.get_input_embeddings().weight).float()

    def head(self) -> Tensor:
        """(V, D)."""
        return self.model.get_output_embeddings().weight.float()


class FilesReader(Reader):
    """dflash, speculators and dspark folders, after their definitions."""

    name = "the files by their definition"

    def __init__(self, folder: Path, model: Any) -> None:
        super().__init__(folder, model)
        try:
            self.tensors = {
                k: t.to(model.device) for k, t in load_safetensors(folder / "model.safetensors").items()
            }
        except (SafetensorError, OSError) as error:
            raise UserError(f"{folder}/model.safetensors: not readable ({error})") from None
        self.tensors = {k: t.float() if t.is_floating_point() else t for k, t in self.tensors.items()}
        self.inner: dict[str, Any] = self.config.get("transformer_layer_config", self.config)

    def get(self, name: str) -> Any:
        """A value of config.json, of `dflash_config` where it is there."""
        nested = self.config.get("dflash_config") or {}
        return nested.get(name, self.config.get(name, self.inner.get(name)))

    @property
    def layers(self) -> list[int]:
        if (ids := self.config.get("aux_hidden_state_layer_ids")) is not None:
            return [i - 1 for i in ids]
        return list(self.get("target_layer_ids") or [])

    @property
    def from_anchor(self) -> bool:
        """Whether the anchor's row drafts too."""
        native = (
            "speculators_model_type" not in self.config
        )  # which keeps the first row where it says nothing
        dspark = native and "DSpark" in str(self.config.get("architectures"))
        return bool(self.config.get("sample_from_anchor", dspark))

    def _weight(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise UserError(f"{self.folder}/model.safetensors misses {name!r}")
        return self.tensors[name]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.inner["rms_norm_eps"])
        return scaled * self._weight(f"{name}.weight")

    def _linear(self, x: Tensor, name: str, bias: bool = False) -> Tensor:
        return F.linear(x, self._weight(f"{name}.weight"), self._weight(f"{name}.bias") if bias else None)

    def _tables(self, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions 0..count−1, (count, d), by transformers' own Qwen3 rotary module."""
        from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        # a copy: it fills what is missing in the dicts that it is given
        said = copy.deepcopy({k: v for k, v in self.inner.items() if k != "architectures"})
        config = Qwen3Config(**said)
        module = Qwen3RotaryEmbedding(config).to(self.model.device)
        positions = torch.arange(count, device=self.model.device)[None]
        cos, sin = module(torch.zeros(1, device=self.model.device), positions)
        return cos[0], sin[0]

    def quantities(self, states: tuple[Tensor, ...], anchor: int) -> Iterator[tuple[str, Tensor]]:
        yield "tapped features", (features := self.features(states))
        yield "fused context", (context := self._norm(self._linear(features, "fc"), "hidden_norm"))
        rows, count = int(self.get("block_size")), len(features)
        tokens = torch.tensor([anchor] + [int(self.get("mask_token_id"))] * (rows - 1))
        first = 0 if self.from_anchor else 1
        yield "block", torch.cat((tokens, torch.tensor([first])))
        cos, sin = self._tables(count + rows)
        yield "rotary tables", torch.cat((cos, sin), dim=-1)
        yield "mask", (mask := self._mask(count, rows))
        x = self.embed(tokens)
        for i in range(int(self.inner["num_hidden_layers"])):
            x = self._layer(x, context, cos, sin, mask, f"layers.{i}")
        yield "hidden states", (hidden := self._norm(x, "norm")[first:])
        yield from self._drafted(hidden, anchor).items()

    def embed(self, tokens: Tensor) -> Tensor:
        """The folder's own rows; else the target's by the scale that it says, in speculators' layout as they stand, elsewhere as the
        target reads them."""
        if (own := self.tensors.get(EMBEDDING)) is not None:
            return own[tokens.to(own.device)]
        scale = self.get("input_embedding_scale")
        if scale is None and "speculators_model_type" not in self.config:
            return super().embed(tokens)
        return self._raw(tokens) * float(scale or 1)

    def _mask(self, count: int, rows: int) -> Tensor:
        """What each row of a block sees, (R, n + R)."""
        causal = self.config.get("is_causal")
        if causal is None:
            causal = (self.config.get("dflash_config") or {}).get("causal")
        if causal is None:
            kinds = self.inner.get("layer_types") or []
            sliding = "sliding_attention" in kinds
            causal = sliding and not self.config.get("sliding_window_non_causal", False)
        own = torch.ones(rows, rows, dtype=torch.bool, device=self.model.device)
        return torch.cat((own.new_ones(rows, count), own.tril() if causal else own), dim=1)

    def _layer(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, name: str) -> Tensor:
        normed, bias = self._norm(x, f"{name}.input_layernorm"), bool(self.inner.get("attention_bias"))
        every = torch.cat((context, normed))

        def heads(rows: Tensor, part: str) -> Tensor:  # (heads, rows, d)
            return (
                self._linear(rows, f"{name}.self_attn.{part}_proj", bias)
                .unflatten(-1, (-1, self._width))
                .transpose(0, 1)
            )

        q = self._norm(heads(normed, "q"), f"{name}.self_attn.q_norm")
        k = self._norm(heads(every, "k"), f"{name}.self_attn.k_norm")
        v = heads(every, "v")
        q, k = _turned(q, cos[-len(x) :], sin[-len(x) :]), _turned(k, cos, sin)
        groups = q.shape[0] // k.shape[0]
        k, v = (t.repeat_interleave(groups, dim=0) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) * self._width**-0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        x = x + self._linear((weights @ v).transpose(0, 1).flatten(1), f"{name}.self_attn.o_proj", bias)
        normed, act = self._norm(x, f"{name}.post_attention_layernorm"), ACT2FN[self.inner["hidden_act"]]
        gated = act(self._linear(normed, f"{name}.mlp.gate_proj")) * self._linear(
            normed, f"{name}.mlp.up_proj"
        )
        return x + self._linear(gated, f"{name}.mlp.down_proj")

    @property
    def _width(self) -> int:
        return int(self.inner["head_dim"])

    def _drafted(self, hidden: Tensor, anchor: int) -> dict[str, Tensor]:
        """Logits of the rows, each after the draft before it, and the draft tokens."""
        offsets = self.tensors.get("d2t")
        head = self.head() if offsets is None else self._weight("lm_head.weight")
        rows, tokens, previous, base = list[Tensor](), list[int](), anchor, hidden @ head.T
        for k in range(len(hidden)):
            logits = base[k] + self._markov(hidden[k], previous) if self.get("markov_rank") else base[k]
            best = int(logits.argmax())
            previous = best if offsets is None else best + int(offsets[best])
            rows.append(logits)
            tokens.append(previous)
        return {"draft logits": torch.stack(rows), "draft tokens": torch.tensor(tokens)}

    def _markov(self, hidden: Tensor, previous: int) -> Tensor:
        """DSpark's bias of the token before."""
        kind, word = (
            self.config.get("markov_head_type"),
            self._weight("markov_head.markov_w1.weight")[previous],
        )
        if kind == "gated":
            word = word * torch.sigmoid(
                self._linear(torch.cat((hidden, word)), "markov_head.gate_proj", bias=True)
            )
        elif kind == "rnn":
            joint = self._linear(
                torch.cat((torch.zeros_like(word), word, hidden)), "markov_head.joint_proj", bias=True
            )
            word = joint[2 * len(word) :].tanh()
        return self._weight("markov_head.markov_w2.weight") @ word


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
