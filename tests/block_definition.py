"""What a DFlash, DSpark or speculators folder computes by its published definition, without this project's networks or importers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from specalign.common.files import load_safetensors
from specalign.common.schema import read_config


class PublishedDrafter:
    """A folder on the target, an unchanged transformers model."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.model, self.config = model, read_config(folder)
        stored = load_safetensors(folder / "model.safetensors").items()
        self.tensors = {n: t.float() if t.is_floating_point() else t for n, t in stored}
        self.inner: dict[str, Any] = self.config.get("transformer_layer_config", self.config)
        self.speculators = "speculators_model_type" in self.config

    def get(self, name: str) -> Any:
        nested = self.config.get("dflash_config") or {}
        return nested.get(name, self.config.get(name, self.inner.get(name)))

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """Draft logits (K, Vd) of a block after the tokens, the last of which is the anchor."""
        states = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        ids = self.config.get("aux_hidden_state_layer_ids")
        ids = ids or [i + 1 for i in self.get("target_layer_ids")]
        taps = torch.cat([states[i][0] for i in ids], dim=-1)
        context = self._norm(self._linear(taps, "fc"), "hidden_norm")
        rows = int(self.get("block_size"))
        x = self._embed(torch.tensor([tokens[-1]] + [int(self.get("mask_token_id"))] * (rows - 1)))
        # a copy: transformers fills in what is missing
        config = Qwen3Config(**{k: v for k, v in self.inner.items() if k != "architectures"})
        positions = torch.arange(len(context) + rows)[None]
        cos, sin = (t[0] for t in Qwen3RotaryEmbedding(config)(torch.zeros(1), positions))
        for i in range(int(self.inner["num_hidden_layers"])):
            x = self._layer(x, context, cos, sin, f"layers.{i}")
        dspark = not self.speculators and "DSpark" in str(self.config.get("architectures"))
        first = 0 if self.config.get("sample_from_anchor", dspark) else 1
        return self._draft(self._norm(x, "norm")[first:], tokens[-1])

    def _embed(self, tokens: Tensor) -> Tensor:
        if (own := self.tensors.get("embed_tokens.weight")) is not None:
            return own[tokens]
        module = self.model.get_input_embeddings()
        if self.speculators or self.get("input_embedding_scale"):
            scale = float(self.get("input_embedding_scale") or 1)
            return F.embedding(tokens, module.weight) * scale
        return module(tokens)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.inner["rms_norm_eps"])
        return scaled * self.tensors[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _layer(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, name: str) -> Tensor:
        normed, width = self._norm(x, f"{name}.input_layernorm"), int(self.inner["head_dim"])

        def heads(rows: Tensor, part: str) -> Tensor:  # (heads, rows, d)
            projected = self._linear(rows, f"{name}.self_attn.{part}_proj")
            return projected.unflatten(-1, (-1, width)).transpose(0, 1)

        every = torch.cat((context, normed))
        q = self._norm(heads(normed, "q"), f"{name}.self_attn.q_norm")
        k = self._norm(heads(every, "k"), f"{name}.self_attn.k_norm")
        q, k = _rotate(q, cos[-len(x) :], sin[-len(x) :]), _rotate(k, cos, sin)
        groups = q.shape[0] // k.shape[0]
        k, v = (t.repeat_interleave(groups, dim=0) for t in (k, heads(every, "v")))
        # a row sees context and block
        weights = (q @ k.transpose(-1, -2) * width**-0.5).softmax(-1)
        x = x + self._linear((weights @ v).transpose(0, 1).flatten(1), f"{name}.self_attn.o_proj")
        normed = self._norm(x, f"{name}.post_attention_layernorm")
        gate = ACT2FN[self.inner["hidden_act"]](self._linear(normed, f"{name}.mlp.gate_proj"))
        inner = gate * self._linear(normed, f"{name}.mlp.up_proj")
        return x + self._linear(inner, f"{name}.mlp.down_proj")

    def _draft(self, hidden_KD: Tensor, token: int) -> Tensor:
        offsets = self.tensors.get("d2t")
        targets = self.model.get_output_embeddings().weight
        head = targets if offsets is None else self.tensors["lm_head.weight"]
        rows = []
        for hidden in hidden_KD:
            row = head @ hidden
            if self.get("markov_rank"):
                row = row + self._markov(hidden, token)
            best = int(row.argmax())
            token = best if offsets is None else best + int(offsets[best])
            rows.append(row)
        return torch.stack(rows)

    def _markov(self, hidden: Tensor, token: int) -> Tensor:
        """DSpark's bias by the token before."""
        word = self.tensors["markov_head.markov_w1.weight"][token]
        kind = self.config.get("markov_head_type")
        if kind == "gated":
            word = word * self._linear(torch.cat((hidden, word)), "markov_head.gate_proj").sigmoid()
        elif kind == "rnn":
            given = torch.cat((torch.zeros_like(word), word, hidden))
            joint = self._linear(given, "markov_head.joint_proj")
            word = joint[2 * len(word) :].tanh()
        return self.tensors["markov_head.markov_w2.weight"] @ word


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
