"""The drafter's network, for torch and transformers alone: one pass over a block [last token, MASK
× …] drafts K tokens.

It is conditioned on the target: on the keys and values of some of its layers (context `shared_kv`),
or on keys and values made from the target's hidden states (context `taps`; DFlash, arXiv
2602.06036). Embedding and head are the target's.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

Context = list[tuple[Tensor, Tensor]]
"""Of each layer the keys and values (1, Hkv, n, d) of the text before the block."""
Rotation = tuple[Tensor, Tensor, Tensor]
"""cos and signed sin (1, 1, n, d), and the index of the number that each one of a head is turned
with (d,)."""


class Drafter:
    """q, out of a folder and tied to its target, `model`. Raises ValueError for a target of another
    shape."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self.config = c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.model, self.device, self.dtype = model, model.device, model.dtype
        head = model.get_output_embeddings().weight
        text = model.config.get_text_config(decoder=True)
        layers = getattr(text, "num_hidden_layers", c["num_target_layers"])
        self._check(vocab_size=head.shape[0], hidden_size=head.shape[1], num_target_layers=layers)
        tensors = load_file(str(folder / "model.safetensors"))
        vocab, rows = tensors.pop("draft_vocab", None), tensors.pop("head", None)
        self.vocab = None if vocab is None else vocab.long().to(self.device)
        if rows is None:
            rows = head if self.vocab is None else head[self.vocab]
        self.head_VdD = rows.detach().to(self.device, self.dtype)
        self.weights = {n: tensor.to(self.device, self.dtype) for n, tensor in tensors.items()}
        self.embedding = model.get_input_embeddings()
        self.layers: list[int] = c["target_layer_ids"]
        self.taps = c["context"] == "taps"
        self.fill_in = not c.get("sample_from_anchor", True)
        self.markov = (c.get("markov") or "silu") if c.get("markov_rank") else ""
        modules = dict(model.get_decoder().named_modules())
        rotary = [m for name, m in modules.items() if name.rpartition(".")[2] == "rotary_emb"]
        self.rotary: Any = None if c.get("rotary") else rotary[0]

    def _check(self, **sizes: int) -> None:
        for name, size in sizes.items():
            if self.config[name] != size:
                made = f"the drafter was made for {self.config['target']}"
                raise ValueError(f"{made}, whose {name} is {self.config[name]}, not {size}")

    # ---- context ----

    def make_context(self, states: tuple[Tensor, ...], start: int) -> Context:
        """Context `taps`: keys and values from the target's `hidden_states` (1, n, D) at the
        positions from `start` on."""
        taps = torch.cat([states[i + 1] for i in self.layers], dim=-1).to(self.dtype)
        fused = self._norm(self._linear(taps, "fc"), "hidden_norm")
        count = len(self.config["init_layer_ids"])
        return [
            self._keys_values(fused, self._rotation(i, start, fused), f"layers.{i}")
            for i in range(count)
        ]

    def read_shared(self, layers: list[Any]) -> Context:
        """Context `shared_kv`: those of the target's cache. Raises ValueError for heads of another
        shape."""
        context = [(layers[i].keys, layers[i].values) for i in self.layers]
        for keys, _ in context:
            self._check(num_key_value_heads=keys.shape[1], head_dim=keys.shape[3])
        return context

    # ---- drafts ----

    def draft(self, token: int, before_1D: Tensor, context: Context) -> list[int]:
        """K greedy drafts after `token`. `before_1D`: the target's last hidden state before it."""
        c, place = self.config, context[0][0].shape[2]
        block = [token] + [c["mask_token_id"]] * (c["block_size"] - 1)
        x = self.embedding(torch.tensor([block], device=self.device)).to(self.dtype)
        if c.get("places"):
            x = x + self.weights["places"]
        if not self.taps:
            x = x + self._linear(self._norm(before_1D.to(self.dtype), "hidden_norm"), "fc")[:, None]
        for i, past in enumerate(context):
            name = f"layers.{i}"
            attend = partial(self._attend, name, self._rotation(i, place, x), past)
            normed = self._norm(x, f"{name}.input_layernorm")
            x = x + self._convolve(f"{name}.attn_conv", normed, attend)
            normed = self._norm(x, f"{name}.post_attention_layernorm")
            x = x + self._convolve(f"{name}.mlp_conv", normed, partial(self._feed, name))
        hidden_KD = self._norm(x, "norm")[0, int(self.fill_in) :]
        tokens: list[int] = []
        for hidden_D, row in zip(hidden_KD, (hidden_KD @ self.head_VdD.T).float(), strict=True):
            if self.markov:  # a bias by the token before (after DSpark, arXiv 2607.05147)
                latent = self._mix_markov(hidden_D, token)
                row = row + (latent @ self.weights["markov.basis"]).float()
            best = row.argmax()
            token = int(best if self.vocab is None else self.vocab[best])
            tokens.append(token)
        return tokens

    def _mix_markov(self, hidden_D: Tensor, token: int) -> Tensor:
        if self.markov in ("vanilla", "gated", "rnn"):
            row = self.weights["markov.table.weight"][token]
            if self.markov == "vanilla":
                return row
            mixed = self._linear(hidden_D, "markov.hidden") + self._linear(row, "markov.previous")
            return mixed.tanh() if self.markov == "rnn" else mixed.sigmoid() * row
        embedded = self.embedding(torch.tensor(token, device=self.device)).to(self.dtype)
        z = self._linear(embedded, "markov.previous")
        if self.markov == "linear":
            return z
        z = z + self._linear(hidden_D, "markov.hidden")
        return self._linear(z.tanh() if self.markov == "tanh" else F.silu(z), "markov.out")

    # ---- layers ----

    def _attend(
        self, name: str, rotation: Rotation, past: tuple[Tensor, Tensor], x: Tensor
    ) -> Tensor:
        keys, values = self._keys_values(x, rotation, name)
        q = _rotate(self._heads(x, name, "q"), rotation)
        k, v = torch.cat((past[0], keys), dim=2), torch.cat((past[1], values), dim=2)
        scale = self.config["head_dim"] ** -0.5
        out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
        return self._linear(out.transpose(1, 2).flatten(2), f"{name}.self_attn.o_proj")

    def _feed(self, name: str, x: Tensor) -> Tensor:
        gate = ACT2FN[self.config["hidden_act"]](self._linear(x, f"{name}.mlp.gate_proj"))
        return self._linear(gate * self._linear(x, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def _heads(self, x: Tensor, name: str, part: str) -> Tensor:
        heads = self.config["num_attention_heads" if part == "q" else "num_key_value_heads"]
        rows = self._linear(x, f"{name}.self_attn.{part}_proj")
        found = rows.unflatten(-1, (heads, -1)).transpose(1, 2)
        normed = part != "v" and self.config.get("qk_norm")
        return self._norm(found, f"{name}.self_attn.{part}_norm") if normed else found

    def _keys_values(self, x: Tensor, rotation: Rotation, name: str) -> tuple[Tensor, Tensor]:
        return _rotate(self._heads(x, name, "k"), rotation), self._heads(x, name, "v")

    def _convolve(self, name: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer, between two-tap convolutions if the drafter has them."""
        if not self.config.get("convolution"):
            return sublayer(x)
        delta = self._linear(x, f"{name}.delta").unflatten(-1, (2, 2, -1))
        return self._mix_taps(sublayer(self._mix_taps(x, name, delta, 0)), name, delta, 1)

    def _mix_taps(self, x: Tensor, name: str, delta: Tensor, which: int) -> Tensor:
        groups, before = delta.shape[-1], F.pad(x[:, :-1], (0, 0, 1, 0))
        for tap, row in ((0, x), (1, before)):
            offset = self.weights[f"{name}.offset"][which, tap].unflatten(-1, (groups, -1))
            x = x + (offset + delta[..., which, tap, :, None]).flatten(-2) * row
        return x

    def _rotation(self, layer: int, start: int, x: Tensor) -> Rotation:
        """Of the positions from `start` on: by the target's module, or by the config's tables."""
        width = self.config["head_dim"]
        places_N = torch.arange(start, start + x.shape[1], device=self.device)
        partner = torch.arange(width, device=self.device)
        if self.rotary is not None:
            cos, sin = self.rotary(x, places_N[None])
            half = width // 2
            signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
            return cos[:, None], signed[:, None], partner.roll(half)
        entries = self.config["rotary"]
        entry = entries[min(layer, len(entries) - 1)]
        angles = places_N[:, None].float() * torch.tensor(entry["inv_freq"], device=self.device)
        count, steps = angles.shape[1], torch.arange(angles.shape[1], device=self.device)
        pairs = entry["layout"] == "pairs"
        first = entry["start"] + (2 * steps if pairs else steps)
        second = first + (1 if pairs else count)
        partner[first], partner[second] = second, first
        cos, scale = angles.new_ones(len(places_N), width), entry.get("scale", 1.0)
        sin = torch.zeros_like(cos)
        cos[:, first] = cos[:, second] = angles.cos() * scale
        sin[:, first], sin[:, second] = -angles.sin() * scale, angles.sin() * scale
        return cos[None, None].to(x.dtype), sin[None, None].to(x.dtype), partner


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin, partner = rotation
    return x * cos + x[..., partner] * sin
