"""The drafter's network, for torch and transformers alone: one pass over a block [last token, MASK × …] drafts K tokens.

It is conditioned on the target: on the keys and values of some of its layers (context `shared_kv`), or on keys and values of its
own, made from the target's hidden states (context `taps`; DFlash, arXiv 2602.06036). Embedding and head are the target's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

Context = list[tuple[Tensor, Tensor]]
"""Of each layer the keys and values (1, Hkv, n, d) of the text before the block."""


class _Held(dict[str, Any]):
    """What a file holds by name; what it lacks is said in one line."""

    def __init__(self, held: dict[str, Any], where: str) -> None:
        super().__init__(held)
        self.where = where

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{self.where}: {name!r} is missing")


class Drafter:
    """q, tied to its target.

    Args:
        config, tensors: what config.json and model.safetensors hold. model: the target, a language model of transformers.
        folder: where they lie, for messages.

    Raises:
        ValueError: a target of another shape.
    """

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], model: Any, folder: Path | None = None
    ) -> None:
        where = "" if folder is None else f"{folder}/"
        self.config = c = _Held(config, f"{where}config.json")
        vocab, own = tensors.get("draft_vocab"), tensors.get("head")
        self.model, self.device, self.dtype = model, model.device, model.dtype
        weights = {name: t for name, t in tensors.items() if name not in ("draft_vocab", "head")}
        weights = {name: t.to(self.device, self.dtype) for name, t in weights.items()}
        self.weights = _Held(weights, f"{where}model.safetensors")
        self.embedding = model.get_input_embeddings()
        head = getattr(model.get_output_embeddings(), "weight", None)
        if not isinstance(head, Tensor):
            raise ValueError(
                f"{type(model).__name__}: its output head has no weights that a drafter could read"
            )
        if tuple(head.shape) != (c["vocab_size"], c["hidden_size"]):
            raise ValueError(
                f"the drafter was made for {c['target']}, whose head is {c['vocab_size']} × {c['hidden_size']}; this model's is "
                f"{head.shape[0]} × {head.shape[1]}"
            )
        layers = getattr(
            model.config.get_text_config(decoder=True), "num_hidden_layers", c["num_target_layers"]
        )
        if layers != c["num_target_layers"]:
            raise ValueError(
                f"the drafter was made for a target of {c['num_target_layers']} layers, {c['target']}; this has {layers}"
            )
        self.vocab = None if vocab is None else vocab.long().to(self.device)
        self.head_VdD = (head if self.vocab is None else head[self.vocab]).detach().to(self.dtype)
        if own is not None:  # rows that came with the drafter
            self.head_VdD = own.to(self.device, self.dtype)
        self.layers: list[int] = c["target_layer_ids"]
        self.taps = c["context"] == "taps"
        self.fill_in = not c.get("sample_from_anchor", True)
        self.markov = (c.get("markov") or "silu") if c.get("markov_rank") else ""
        self.rotary = None if c.get("rotary") else self._target_rotary()

    @classmethod
    def read(cls, folder: Path, model: Any) -> Drafter:
        """Out of a folder. Raises ValueError where a file can't be read, or lacks something."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            path = folder / "model.safetensors"
            tensors = load_file(str(path))
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"{path}: can't be read: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{folder / 'config.json'}: holds no object")
        return cls(config, tensors, model, folder)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def context_of(self, states: tuple[Tensor, ...], start: int) -> Context:
        """Context `taps`: keys and values from the target's `hidden_states` (1, n, D) at the positions from `start` on."""
        fused = self.norm(
            self.linear(torch.cat([states[i + 1] for i in self.layers], dim=-1).to(self.dtype), "fc"),
            "hidden_norm",
        )
        count = len(self.config["init_layer_ids"])
        return [
            self._keys_values(fused, self._rotation(i, start, fused), f"layers.{i}") for i in range(count)
        ]

    def shared(self, layers: list[Any]) -> Context:
        """Context `shared_kv`: what these layers of the target's cache hold. Raises ValueError for heads of another shape."""
        c, held = self.config, [layers[i] for i in self.layers]
        heads = (c["num_key_value_heads"], c["head_dim"])
        for layer in held:
            if (found := (layer.keys.shape[1], layer.keys.shape[3])) != heads:
                raise ValueError(
                    f"the drafter was made for {c['target']}, whose keys are {heads[0]} heads × {heads[1]}; this model's are "
                    f"{found[0]} × {found[1]}"
                )
        return [(layer.keys, layer.values) for layer in held]

    def drafts(self, token: int, before_1D: Tensor, context: Context) -> list[int]:
        """The most probable tokens after `token`, K of them. `before_1D`: the target's last hidden state before it."""
        c, place = self.config, context[0][0].shape[2]
        block = [token] + [c["mask_token_id"]] * (c["block_size"] - 1)
        x = self.embedding(torch.tensor([block], device=self.device)).to(self.dtype)
        if c.get("places"):
            x = x + self.weights["places"]
        if not self.taps:
            x = x + self.linear(self.norm(before_1D.to(self.dtype), "hidden_norm"), "fc")[:, None]
        hidden = self._through(x, context, place)
        if c.get("self_conditioning"):  # a second pass sees what the first one says of each row's token
            said = hidden[:, 1:] if self.fill_in else hidden[:, :-1]
            hidden = self._through(x + F.pad(self.linear(said, "estimate"), (0, 0, 1, 0)), context, place)
        return self._tokens(token, hidden[0, 1:] if self.fill_in else hidden[0])

    def _tokens(self, token: int, hidden_KD: Tensor) -> list[int]:
        logits_KV, found = (hidden_KD @ self.head_VdD.T).float(), list[int]()
        for k in range(len(hidden_KD)):
            row = logits_KV[k]
            if self.markov:  # a bias from the token before (after DSpark, arXiv 2607.05147)
                row = row + (self._mixed(hidden_KD[k], token) @ self.weights["markov.basis"]).float()
            best = row.argmax()
            token = int(best if self.vocab is None else self.vocab[best])
            found.append(token)
        return found

    def _mixed(self, hidden_D: Tensor, token: int) -> Tensor:
        if self.markov in ("vanilla", "gated", "rnn"):
            row = self.weights["markov.table.weight"][token]
            if self.markov == "vanilla":
                return row
            mixed = self.linear(hidden_D, "markov.hidden") + self.linear(row, "markov.previous")
            return mixed.tanh() if self.markov == "rnn" else mixed.sigmoid() * row
        word = self.embedding(torch.tensor(token, device=self.device)).to(self.dtype)
        z = self.linear(word, "markov.previous")
        if self.markov == "linear":
            return z
        z = z + self.linear(hidden_D, "markov.hidden")
        z = z.tanh() if self.markov == "tanh" else F.silu(z)
        if self.markov == "mlp":
            z = F.silu(self.linear(z, "markov.middle"))
        return self.linear(z, "markov.out")

    def _through(self, x: Tensor, context: Context, place: int) -> Tensor:
        for i, (keys, values) in enumerate(context):
            name, turned = f"layers.{i}", self._rotation(i, place, x)

            def attend(
                rows: Tensor, name: str = name, turned: Any = turned, k: Tensor = keys, v: Tensor = values
            ) -> Tensor:
                own_k, own_v = self._keys_values(rows, turned, name)
                q = self._turn(self._heads(rows, name, "q"), turned)
                scale = self.config["head_dim"] ** -0.5
                out = F.scaled_dot_product_attention(
                    q,
                    torch.cat((k, own_k), dim=2),
                    torch.cat((v, own_v), dim=2),
                    scale=scale,
                    enable_gqa=True,
                )
                return self.linear(out.transpose(1, 2).flatten(2), f"{name}.self_attn.o_proj")

            def feed(rows: Tensor, name: str = name) -> Tensor:
                gate = ACT2FN[self.config["hidden_act"]](self.linear(rows, f"{name}.mlp.gate_proj"))
                return self.linear(gate * self.linear(rows, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")

            x = x + self._between(f"{name}.attn_conv", self.norm(x, f"{name}.input_layernorm"), attend)
            x = x + self._between(f"{name}.mlp_conv", self.norm(x, f"{name}.post_attention_layernorm"), feed)
        return self.norm(x, "norm")

    def _heads(self, x: Tensor, name: str, part: str) -> Tensor:
        heads = self.config["num_attention_heads" if part == "q" else "num_key_value_heads"]
        found = self.linear(x, f"{name}.self_attn.{part}_proj").unflatten(-1, (heads, -1)).transpose(1, 2)
        normed = part != "v" and self.config.get("qk_norm")
        return self.norm(found, f"{name}.self_attn.{part}_norm") if normed else found

    def _keys_values(self, x: Tensor, turned: Any, name: str) -> tuple[Tensor, Tensor]:
        return self._turn(self._heads(x, name, "k"), turned), self._heads(x, name, "v")

    def _between(self, name: str, x: Tensor, sublayer: Any) -> Tensor:
        """A sublayer, between two-tap convolutions where the drafter has them."""
        if not self.config.get("convolution"):
            return sublayer(x)
        delta = self.linear(x, f"{name}.delta").unflatten(-1, (2, 2, -1))
        return self._mix(sublayer(self._mix(x, name, delta, 0)), name, delta, 1)

    def _mix(self, x: Tensor, name: str, delta: Tensor, which: int) -> Tensor:
        groups, before = delta.shape[-1], F.pad(x[:, :-1], (0, 0, 1, 0))
        for tap, row in ((0, x), (1, before)):
            offset = self.weights[f"{name}.offset"][which, tap].unflatten(-1, (groups, -1))
            x = x + (offset + delta[..., which, tap, :, None]).flatten(-2) * row
        return x

    def _rotation(self, layer: int, start: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the positions from `start` on: cos, sin with its sign (1, 1, n, d), and with which number each one of a head is turned."""
        positions = torch.arange(start, start + x.shape[1], device=self.device)
        width, entries = self.config["head_dim"], self.config.get("rotary") or []
        partner = torch.arange(width, device=self.device)
        if not entries:  # by the target's own module
            assert self.rotary is not None
            cos, sin = self.rotary(x, positions[None])
            half = width // 2
            return (
                cos[:, None],
                torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)[:, None],
                partner.roll(half),
            )
        entry = entries[min(layer, len(entries) - 1)]
        angles = positions[:, None].float() * torch.tensor(entry["inv_freq"], device=self.device)
        count, at = angles.shape[1], entry["start"] + torch.arange(angles.shape[1], device=self.device)
        first, second = at, at + count
        if entry["layout"] == "pairs":
            first = entry["start"] + 2 * torch.arange(count, device=self.device)
            second = first + 1
        partner[first], partner[second] = second, first
        cos, sin = (
            torch.ones(len(positions), width, dtype=torch.float32, device=self.device),
            torch.zeros(len(positions), width, dtype=torch.float32, device=self.device),
        )
        scale = entry.get("scale", 1.0)
        cos[:, first] = cos[:, second] = angles.cos() * scale
        sin[:, first], sin[:, second] = -angles.sin() * scale, angles.sin() * scale
        return cos[None, None].to(x.dtype), sin[None, None].to(x.dtype), partner

    def _target_rotary(self) -> Any:
        named = self.model.get_decoder().named_modules()
        found = next((module for name, module in named if name.rpartition(".")[2] == "rotary_emb"), None)
        if found is None:
            made_for = f"the drafter was made for {self.config['target']}"
            raise ValueError(
                f"{made_for}, which turns keys by their positions; {type(self.model).__name__} does not"
            )
        return found

    @staticmethod
    def _turn(x: Tensor, turned: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        cos, sin, partner = turned
        return x * cos + x[..., partner] * sin
