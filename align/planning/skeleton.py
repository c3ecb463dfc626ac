"""A target without its weights: what its config.json says, and the network of that config on torch's `meta` device, where numbers have
shapes and take no memory. Enough to plan with; the weights may be on another machine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.overrides import TorchFunctionMode

from align.common.errors import UserError
from align.common.hub import hub_reachable, is_hub_id
from align.target.debug import DEBUG, debug_model
from align.target.inspection.anatomy import context_limit, decoder, decoder_layers, examine, query_heads
from align.target.inspection.text_model import embedding_names
from align.target.loading import resolve_folder
from align.target.names import check_sizes, similar
from align.target.opening import check_asked, check_hub_files, opener, quiet_loading


@dataclass(frozen=True)
class Skeleton:
    """Sizes of a target, in numbers (not bytes).

    parameters: all of them, a tied head counted once. layers: of each layer. active: the same, of experts only those that a token
    is sent to. embedding, head: V × D. last_norm: behind the layers. kept: numbers that the layers keep of a token (keys, values).
    """

    spec: str
    architecture: str
    parameters: int
    layers: tuple[int, ...]
    active: tuple[int, ...]
    embedding: int
    tied: bool
    last_norm: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kept: int
    vocab_size: int
    context_limit: int
    linears: tuple[tuple[str, int, int], ...]
    """Name, inputs and outputs of the linear layers of its last layer."""
    weights_here: bool
    """Whether the weights lie beside the config."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def head(self) -> int:
        """Numbers that a token's logits read."""
        return self.vocab_size * self.hidden_size


def skeleton(spec: str, revision: str | None = None, trust_remote_code: bool = False) -> Skeleton:
    """The sizes of a target from its config.json alone: of a folder, a GGUF file, a hub id (its config alone is fetched) or a debug
    model.

    Raises:
        UserError: no config to be had, or one of a model that is no target.
    """
    if spec in DEBUG:
        return _measured(debug_model(DEBUG[spec])[0].to("meta"), spec, True)
    folder = _config_folder(spec, revision)
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    quiet_loading()
    if isinstance(folder, Path):
        check_sizes(folder, f"target {spec!r}")
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(folder), **options)
        with torch.device("meta"):
            model = opener(folder, spec, options).from_config(config, trust_remote_code=trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # transformers' errors for broken configs have no common class
        check_asked("target", spec, error)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # of a package that is missing the second says how to install it
        line = " ".join(lines[: 1 + lines[0].endswith(":")])
        raise UserError(f"target {spec!r}: no network can be made of its config.json: {line}") from None
    here = isinstance(folder, Path) and any(folder.glob("*.safetensors"))
    own_head = isinstance(folder, Path) and _has_own_head(folder, model)
    return _measured(model, spec, here, own_head)


def _has_own_head(folder: Path, model: Any) -> bool:
    """Whether the checkpoint in a folder holds a head that is not its embedding, whatever its config says."""
    try:
        embedding, head = (_stored(folder, name) for name in embedding_names(model))
    except (SafetensorError, OSError):  # what is wrong is said where it is loaded
        return False
    if embedding is None or head is None:
        return False
    return embedding.shape != head.shape or not torch.equal(embedding, head)


def _stored(folder: Path, name: str) -> torch.Tensor | None:
    """A tensor of the folder's checkpoint; None where it is not there."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118  (it is no mapping)
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    return None


def _config_folder(spec: str, revision: str | None) -> Path | str:
    """Where the config is: a folder, or a hub id whose config is cached or can be fetched."""
    try:
        found = resolve_folder(spec)
    except UserError as error:
        if not is_hub_id(spec):
            raise
        check_hub_files(spec)
        raise UserError(
            f"target {spec!r}: its config.json can't be had here{similar(spec)}; a folder that holds it alone will do: "
            "target.name=FOLDER"
        ) from error
    if isinstance(found, str):
        from huggingface_hub import hf_hub_download

        try:
            hf_hub_download(found, "config.json", revision=revision, local_files_only=not hub_reachable())
        except Exception as error:  # of many kinds
            raise UserError(
                f"target {spec!r}: its config.json can't be had ({type(error).__name__}); a folder that holds it alone will do: "
                "target.name=FOLDER"
            ) from None
    return found


def _measured(model: Any, spec: str, here: bool, own_head: bool = False) -> Skeleton:
    """The sizes of a network on `meta`. own_head: its head is not its embedding, although its config may say so."""
    config = model.config.get_text_config(decoder=True)
    try:
        body = decoder(model)
        layers = decoder_layers(body, config.num_hidden_layers)
    except (NotImplementedError, AttributeError) as error:
        raise UserError(f"target {spec!r}: {error}") from None
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    vocab, width = head.shape
    # on `meta` tied weights may be two tensors; they are one as soon as they are loaded, where the whole model's config says so
    flag = bool(getattr(model.config, "tie_word_embeddings", False))
    tied = flag and embedding.shape == head.shape and not own_head
    own = {id(p): p.numel() for p in model.parameters()}
    total = sum(own.values()) - (head.numel() if tied and embedding is not head else 0)
    total += head.numel() if own_head and embedding is head else 0
    heads = query_heads(config)
    kv_heads, head_dim, kept = _kept(model, body, config, heads)
    inside = {id(p) for p in layers.parameters()}
    outside = sum(p.numel() for p in body.parameters() if id(p) not in inside)
    return Skeleton(
        spec=spec,
        architecture=str(config.model_type),
        parameters=total,
        layers=tuple(sum(p.numel() for p in layer.parameters()) for layer in layers),
        active=tuple(_active(layer, config) for layer in layers),
        embedding=embedding.numel(),
        tied=tied,
        last_norm=max(0, outside - embedding.numel()),
        hidden_size=width,
        inner_size=_inner(layers[-1], width),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kept=kept,
        vocab_size=vocab,
        context_limit=context_limit(config),
        linears=tuple(
            (name, m.in_features, m.out_features)
            for name, m in layers[-1].named_modules()
            if isinstance(m, torch.nn.Linear)
        ),
        weights_here=here,
    )


class _NothingFound(TorchFunctionMode):
    """On `meta` no number is looked at: whoever asks where they are not zero (which experts have a token, which keys are seen) hears of
    none. What layers keep of a token does not depend on it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        none = torch.empty(0, dtype=torch.int64, device="meta")
        if func in (torch.nonzero, torch.Tensor.nonzero):
            return none.new_empty(0, args[0].dim())
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            found = [(none,) * i.dim() if _chooses(i) else (i,) for i in args[1]]
            args = (args[0], tuple(itertools.chain(*found)))
        return func(*args, **(kwargs or {}))


def _chooses(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def _kept(model: Any, body: Any, config: Any, heads: int) -> tuple[int, int, int]:
    """Key heads, width of a key, and numbers that all layers keep of a token: by one token through the network on `meta`, or
    as the config says where that can't be."""
    try:
        model.set_experts_implementation("batched_mm")  # grouped products take bf16 alone on `meta`
        with _NothingFound():
            anatomy = examine(model, body)
        return *anatomy.heads(config), sum(s.numbers for s in anatomy.shapes if s is not None)
    except Exception:  # a network that looks at numbers, of which there are none
        first = next(iter(getattr(config, "per_layer_config", None) or ()), config)
    kv = int(getattr(first, "num_key_value_heads", None) or heads)
    width = int(getattr(first, "head_dim", None) or config.hidden_size // heads)
    return kv, width, 2 * kv * width * int(config.num_hidden_layers)


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_topk")


def _active(layer: torch.nn.Module, config: Any) -> int:
    """Numbers of a layer that a token is multiplied with: of routed experts the share that is chosen."""
    config = getattr(config, "ffn_config", config)  # DBRX's
    count = next((int(v) for n in _EXPERTS if (v := getattr(config, n, None))), 1)
    chosen = next((int(v) for n in _CHOSEN if (v := getattr(config, n, None))), count)
    return sum(
        p.numel() * chosen // count if ".experts." in f".{name}." else p.numel()
        for name, p in layer.named_parameters()
    )


def _inner(layer: torch.nn.Module, width: int) -> int:
    """Width of the feed-forward part: the widest output of a linear layer."""
    widest = [m.out_features for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    return max(widest, default=4 * width)
