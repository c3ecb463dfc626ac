"""The target: a frozen causal language model p, with what drafters read of it.

It offers logits, its last hidden state, the hidden states after chosen layers, its key/value cache, its embedding and its
head. Everywhere in this project p is the target's distribution.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from align.common.errors import in_one_line
from align.common.provenance import memory_bytes
from align.target import attention
from align.target.cache import KVCache, SharedCache
from align.target.linear import speed_up_linears


@dataclass
class TargetOutput:
    """One forward: `logits_BLV` (fp32) unless switched off, the normalised last hidden state, tapped layer outputs."""

    logits_BLV: Tensor | None
    hidden_BLD: Tensor
    taps_BLFD: Tensor | None

    def at(self, places: Sequence[int]) -> TargetOutput:
        """The hidden states and taps of these positions, without logits."""
        index = torch.tensor(places, device=self.hidden_BLD.device)
        taps = None if self.taps_BLFD is None else self.taps_BLFD[:, index]
        return TargetOutput(None, self.hidden_BLD[:, index], taps)


class Target:
    """A frozen causal language model p. Build it with `load_target`."""

    revision: str | None = None
    trust_remote_code = False
    """As `load_target` was told."""

    def __init__(
        self, model: Any, tokenizer: Any, spec: str, fast: bool = True, round_to_bf16: bool = False
    ) -> None:
        self.spec, self.tokenizer = spec, tokenizer
        self.model = model.eval().requires_grad_(False)
        config = model.config
        self.device, self.dtype = model.device, model.dtype
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.eager = config.model_type in _EAGER
        # beyond a sliding window one call over several tokens and single-token calls would differ
        window = None if self.eager else _window(config)
        self.context_limit: int = min(
            config.max_position_embeddings, window or config.max_position_embeddings
        )
        self.body = model.get_decoder()
        self.head_weight_VD: Tensor = model.get_output_embeddings().weight
        self.embedding_VD: Tensor = model.get_input_embeddings().weight
        self.vocab_size: int = self.head_weight_VD.shape[0]
        self.eos_ids = _eos_ids(model, tokenizer)
        self.fast = fast
        if fast:
            speed_up_linears(model, self.dtype, self.device, round_to_bf16)
        self._taps: dict[int, Tensor] = {}

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16` or `float16`, as `load_target` takes it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def chains_only(self) -> bool:
        """Whether its attention window counts places in the cache, so that one branch of a tree would push context out of
        another's window."""
        return self.eager and any("local" in str(kind) for kind in self.model.config.attention_layers)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        return self.body.layers if hasattr(self.body, "layers") else self.body.h  # GPT-2's name

    @property
    def rope_theta(self) -> float:
        config = self.model.config
        rope = getattr(config, "rope_parameters", None) or {}
        theta: Any = rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
        return float(theta)

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) over every weight's name, dtype, shape and bytes: it identifies p."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            if self.dtype == torch.float32 and tensor.dtype == torch.bfloat16:
                tensor = tensor.float()  # kept in half the memory (align/target/linear.py)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy())
        return digest.hexdigest()

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of `capacity` positions for `batch` rows. Raises MemoryError where the machine is too small for it."""
        size = (
            2 * self.num_layers * batch * self.num_kv_heads * capacity * self.head_dim * self.dtype.itemsize
        )
        if self.device.type == "cpu" and size > (memory_bytes() or size):
            raise MemoryError(f"a cache of {batch} rows of {capacity} tokens takes {size / 2**30:,.0f} GiB")
        shape = (batch, self.num_kv_heads, capacity, self.head_dim)
        return KVCache(self.num_layers, shape, self.dtype, self.device)

    @torch.no_grad()
    def forward(
        self,
        tokens_BL: Tensor,
        *,
        cache: KVCache | None = None,
        positions_BL: Tensor | None = None,
        mask: Tensor | None = None,
        see_LL: Tensor | None = None,
        taps: Sequence[int] = (),
        logits: bool = True,
    ) -> TargetOutput:
        """Run the model over L tokens after what the cache holds; writes their keys and values, advances its length.

        Args:
            tokens_BL: int64 token ids.
            cache: from `new_cache`; None = no past and nothing kept.
            positions_BL: rotary positions; default: counted on from the cache's length.
            mask: bool (B or 1, 1, L, S), True = attend, S = cache length + L; default: causal.
            see_LL: instead of a mask, bool (L, L): which of the L tokens each one sees, itself included; all see what
                is in the cache. A tree: its ancestors. The default position is then the depth.
            taps: layer ids whose outputs are wanted; id i is the output of layer i, `hidden_states[i + 1]`.
            logits: False leaves the head out.

        Raises:
            ValueError: the cache has no room for L more tokens.
        """
        length = tokens_BL.shape[1]
        past = cache.length if cache is not None else 0
        if cache is not None and cache.slots_B is None:
            cache.check_room(length)
        if positions_BL is None and see_LL is None:
            positions_BL = torch.arange(past, past + length, device=self.device)[None]
        elif positions_BL is None:
            assert see_LL is not None
            positions_BL = (past - 1 + see_LL.sum(1))[None]
        if mask is None:
            groups = self.num_heads // self.num_kv_heads
            mask = attention.block_mask(see_LL, length, past, groups, self.dtype, self.device)
        if self.eager and mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, torch.finfo(self.dtype).min)
        hidden_BLD, taps_BLFD = self._run(tokens_BL, mask, positions_BL, cache, taps)
        if cache is not None and cache.slots_B is None:
            cache.advance(length)
        return TargetOutput(self.head(hidden_BLD) if logits else None, hidden_BLD, taps_BLFD)

    def _run(
        self, tokens_BL: Tensor, mask: Tensor | None, positions_BL: Tensor, cache: Any, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Normalised last hidden state and tapped layer outputs."""
        hooks = [self.layers[i].register_forward_hook(self._tap(i)) for i in taps]
        try:
            hidden_BLD = self.body(
                input_ids=tokens_BL,
                attention_mask=mask,
                position_ids=positions_BL,
                past_key_values=cache,
                use_cache=cache is not None,
            ).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        taps_BLFD = torch.stack([self._taps[i] for i in taps], dim=2) if taps else None
        self._taps.clear()
        return hidden_BLD, taps_BLFD

    @torch.no_grad()
    def forward_together(
        self,
        tokens: Sequence[Tensor],
        caches: Sequence[KVCache],
        see: Sequence[Tensor | None],
        taps: Sequence[int] = (),
    ) -> list[TargetOutput]:
        """`forward` with logits for several requests at once, each after its own past: (1, L) tokens, a one-row cache and
        `see_LL` of each → its output. The weights are read once for all of them; nothing is padded."""
        if self.eager:
            each = zip(tokens, caches, see, strict=True)
            return [self.forward(t, cache=c, see_LL=s, taps=taps) for t, c, s in each]
        widths = [t.shape[1] for t in tokens]
        groups = self.num_heads // self.num_kv_heads
        masks, positions = [], []
        for cache, see_LL, width in zip(caches, see, widths, strict=True):
            cache.check_room(width)
            past = cache.length
            masks.append(attention.block_mask(see_LL, width, past, groups, self.dtype, self.device))
            depth = torch.arange(width, device=self.device) if see_LL is None else see_LL.sum(1) - 1
            positions.append(past + depth)
        # each request has its own mask: this keeps transformers from making one
        none = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        shared = SharedCache(caches, widths, masks)
        hidden_BLD, taps_BLFD = self._run(
            torch.cat(list(tokens), dim=1), none, torch.cat(positions)[None], shared, taps
        )
        for cache, width in zip(caches, widths, strict=True):
            cache.advance(width)
        logits, hidden = (x.split(widths, dim=1) for x in (self.head(hidden_BLD), hidden_BLD))
        tapped = [None] * len(widths) if taps_BLFD is None else taps_BLFD.split(widths, dim=1)
        return [TargetOutput(z, h, t) for z, h, t in zip(logits, hidden, tapped, strict=True)]

    def _tap(self, layer: int) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._taps[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings, (…) → (…, D)."""
        return self.model.get_input_embeddings()(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits in fp32, (…, D) → (…, V)."""
        return self.model.get_output_embeddings()(hidden.contiguous()).float()

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def chat_tokens(self, messages: str | list[dict[str, str]]) -> list[int]:
        """Prompt tokens up to where the answer begins; a base model gets the plain text after its BOS, if it has one."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not self.has_chat_template:
            return self.text_tokens("\n\n".join(m["content"] for m in messages))
        with in_one_line(f"target {self.spec!r}: its chat template refuses this"):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        with in_one_line(f"target {self.spec!r}: its tokenizer can't read a text"):
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text_tokens(self, text: str) -> list[int]:
        """Plain text as tokens, after the beginning-of-text token where the tokenizer has one."""
        tokens = self._ids(text)
        bos = self.tokenizer.bos_token_id
        return ([bos] if bos is not None and not self.has_chat_template else []) + tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)


def log_softmax_full(target: Target, hidden: Tensor) -> Tensor:
    """log p over the whole vocabulary in fp32, (…, D) → (…, V)."""
    return F.log_softmax(target.head(hidden), dim=-1)


_EAGER = {"gpt_neo"}
"""Architectures with their own attention, which takes an additive mask and can't be replaced."""


def _window(config: Any) -> int | None:
    """The shortest sliding window of any layer; None where all see everything."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    used = getattr(config, "use_sliding_window", True) and "sliding_attention" in kinds
    return int(window) if window and used else None


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.eos_token_id
    found = set([ids] if isinstance(ids, int) else (ids or []))
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))
