"""Masked-diffusion language models as drafters: a known decoder architecture under another attention mask.

`load_masked_lm` reads the published families (`align.drafters.families`); `adapt` makes one out of an autoregressive
target (DiffuLLaMA, arXiv 2410.17891). Whatever the checkpoint's convention, row i here predicts the token at position i.
"""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from align.attention import block_mask, register
from align.cache import KVCache
from align.drafters.families import BASES, Family, family_of
from align.errors import UserError, nearest
from align.files import write_atomically
from align.hub import model_folder
from align.linear import few_rows
from align.target import Target, read_config

ADAPTED = Family(
    # what `adapt` makes; base, attention, cache and mask are filled in from its config.json
    name="adapted",
    hub_ids=(),
    model_type="adapted_masked_lm",
    architectures=("AdaptedMaskedLM",),
    base="",
    mask_token_id=0,
    shift=1,
)
ATTENTIONS = ("full", "prefix_causal")
"""What an adapted drafter may see by default."""
_SAFE = "model.safetensors"
# of a config.json, what says how to load it and nothing of the network
_OWN = {
    "architectures",
    "auto_map",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "_name_or_path",
}
_BUFFER = re.compile(r"\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")  # once stored, now computed


class MaskedLM(nn.Module):
    """The network q of a masked-diffusion language model. Build it with `load_masked_lm` or `adapt`.

    With a `target`, embedding and head are the target's: frozen, and not among the parameters.
    """

    def __init__(
        self, model: Any, family: Family, source: dict[str, Any], target: Target | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.family = family  # with the checkpoint's own mask_token_id and block_size
        self.source = source  # config.json as it was read and will be written
        self._target = [target] if target else []  # in a list, so that it is no submodule
        if target:
            model.set_input_embeddings(nn.Identity())
            model.set_output_embeddings(nn.Identity())
        self.eval()

    @property
    def mask_token_id(self) -> int:
        return self.family.mask_token_id

    @property
    def head_weight_VD(self) -> Tensor:
        """The output matrix, (V, D)."""
        if self._target:
            return self._target[0].head_weight_VD.detach()
        return self.model.get_output_embeddings().weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings, (…) → (…, D)."""
        if self._target:
            return self._target[0].embed(tokens).detach().to(self.model.dtype)
        return self.model.get_input_embeddings()(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits in fp32, (…, D) → (…, V)."""
        weight = self.head_weight_VD
        product = F.linear if torch.is_grad_enabled() else few_rows
        return product(hidden.to(weight.dtype), weight).float()

    def see(self, tokens_BL: Tensor) -> Tensor:
        """Who sees whom where nothing else is asked for: bool, broadcastable to (B, 1, L, L), by the family.

        full: everything; block_causal: its own and earlier blocks, counted from the row's start; prefix_causal: what
        is before the row's first mask sees causally, the rest sees everything.
        """
        length, device = tokens_BL.shape[1], tokens_BL.device
        at = torch.arange(length, device=device)
        if self.family.attention == "full":
            return torch.ones(1, 1, 1, length, dtype=torch.bool, device=device)
        if self.family.attention == "block_causal":
            block = at // self.family.block_size
            return (block <= block[:, None])[None, None]
        denoised_BL = (tokens_BL == self.mask_token_id).cumsum(1) > 0
        return ((at <= at[:, None]) | denoised_BL[:, :, None])[:, None]

    def hidden(
        self, tokens_BL: Tensor, *, positions_BL: Tensor | None = None, see: Tensor | None = None
    ) -> Tensor:
        """Normalised hidden states, (B, L, D); row i is what `head` turns into the prediction of position i.

        Args:
            tokens_BL: int64 token ids, with masks.
            positions_BL: positions; default 0, 1, ….
            see: bool, (L, L) or broadcastable to (B, 1, L, L), True = attend; every row must see something. Default:
                `see(tokens_BL)`.

        With a shift the raw row i − 1 predicts position i. Nothing predicts position 0: its row is zero, its logits
        are all equal.
        """
        if see is None:
            see = self.see(tokens_BL)
        if see.dim() == 2:
            see = see[None, None]
        if positions_BL is None:
            positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)[None]
        return self._predicting(self._run(tokens_BL, see, positions_BL, None), None)

    def block_hidden(
        self, tokens_BS: Tensor, see: Tensor, positions_BS: Tensor, index_BA: Tensor, size: int
    ) -> Tensor:
        """Of rows [clean tokens, A blocks of K] (align/drafters/ddit.py: `prefix_block_mask`), what `head` turns into the
        predictions of the blocks, (B, A, K, D). With a shift a block's anchor, at `index_BA` of the row, predicts its
        first position."""
        raw_BSD = self._run(tokens_BS, see, positions_BS, None)
        count = index_BA.shape[1]
        blocks = raw_BSD[:, -count * size :].unflatten(1, (count, size))
        if not self.family.shift:
            return blocks
        first = raw_BSD.gather(1, index_BA[..., None].expand(-1, -1, raw_BSD.shape[-1]))
        return torch.cat((first[:, :, None], blocks[:, :, :-1]), dim=2)

    def forward(
        self,
        tokens_BL: Tensor,
        *,
        positions_BL: Tensor | None = None,
        see: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Raw logits in fp32, (B, L, V), row i for position i. `keep`, bool (B, L): of these rows alone, (N, V)."""
        hidden = self.hidden(tokens_BL, positions_BL=positions_BL, see=see)
        return self.head(hidden if keep is None else hidden[keep])

    def _run(
        self, tokens_BL: Tensor, mask: Tensor | None, positions_BL: Tensor, cache: KVCache | None
    ) -> Tensor:
        """The body's last hidden states, row by row as the checkpoint has them."""
        return self.model.get_decoder()(
            inputs_embeds=self.embed(tokens_BL),
            attention_mask=mask,
            position_ids=positions_BL,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def _predicting(self, raw_BLD: Tensor, before_BD: Tensor | None) -> Tensor:
        """Rows moved to the positions that they predict: the one place where the shift is applied."""
        if not self.family.shift:
            return raw_BLD
        first = torch.zeros_like(raw_BLD[:, 0]) if before_BD is None else before_BD
        return torch.cat((first[:, None], raw_BLD[:, :-1]), dim=1)

    # ---- decoding with a cache, for attention that lets a clean prefix see nothing after it ----

    def new_cache(self, capacity: int) -> KVCache:
        """An empty one-row cache of `capacity` positions.

        Raises:
            ValueError: the family's attention is full, so that no key can be kept.
        """
        if self.family.cache != "exact":
            raise ValueError(
                f"{self.family.name} has {self.family.attention} attention: no exact cache exists"
            )
        c = self.model.config
        width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        shape = (1, getattr(c, "num_key_value_heads", None) or c.num_attention_heads, capacity, width)
        return KVCache(c.num_hidden_layers, shape, self.model.dtype, self.model.device)

    def _after(self, tokens_1L: Tensor, cache: KVCache, see_LL: Tensor | None) -> Tensor:
        """Raw hidden states of tokens after the cache's; their keys and values are written, its length stays."""
        length, past, c = tokens_1L.shape[1], cache.length, self.model.config
        cache.check_room(length)
        groups = c.num_attention_heads // cache.slabs[0].keys.shape[1]
        mask = block_mask(see_LL, length, past, groups, self.model.dtype, self.model.device)
        positions = torch.arange(past, past + length, device=tokens_1L.device)[None]
        return self._run(tokens_1L, mask, positions, cache)

    @torch.no_grad()
    def extend(self, tokens_1L: Tensor, cache: KVCache) -> Tensor:
        """Append committed tokens to the cache → their raw hidden states (1, L, D); `denoise` wants the last one.

        Raises:
            ValueError: no room, or (block_causal) anything but whole blocks.
        """
        length, size = tokens_1L.shape[1], self.family.block_size
        see_LL = None
        if self.family.attention == "block_causal":
            if length % size or cache.length % size:
                raise ValueError(f"{length} tokens after {cache.length} are not whole blocks of {size}")
            see_LL = self.see(tokens_1L)[0, 0]
        raw_1LD = self._after(tokens_1L, cache, see_LL)
        cache.advance(length)
        return raw_1LD

    @torch.no_grad()
    def denoise(
        self,
        block_1K: Tensor,
        cache: KVCache,
        before_1D: Tensor | None = None,
        see_KK: Tensor | None = None,
    ) -> Tensor:
        """Logits (1, K, V) of a block that follows the cache, sees it and all of itself, or of itself what `see_KK` says; the
        cache stays as it is.

        `before_1D`: with a shift, the raw hidden state of the last cached token, which predicts the block's first
        position; None = nothing predicts it.
        """
        length = block_1K.shape[1]
        if see_KK is None:
            see_KK = torch.ones(length, length, dtype=torch.bool, device=block_1K.device)
        return self.head(self._predicting(self._after(block_1K, cache, see_KK), before_1D))


def annealed_see(
    length: int, progress: float, generator: torch.Generator, document_BL: Tensor | None = None
) -> Tensor:
    """Attention mask annealing (DiffuLLaMA, arXiv 2410.17891): bool (1 or B, 1, L, L), True = attend.

    Causal at `progress` 0, full at 1; between, each later position is seen with that probability, drawn for every pair.
    `document_BL`: packed documents, none of which sees another.
    """
    rows = 1 if document_BL is None else document_BL.shape[0]
    drawn = torch.rand(rows, 1, length, length, generator=generator, device=generator.device) < progress
    see = drawn | torch.ones(length, length, dtype=torch.bool, device=drawn.device).tril()
    return (
        see if document_BL is None else see & (document_BL[:, None, :, None] == document_BL[:, None, None, :])
    )


# ---- making ----


def own_layers(
    target: Target, layers: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[Any, dict[str, Tensor]]:
    """Config and weights, copied, of a model that has these layers of the target's alone, in this order, and all else of it.

    Raises:
        UserError: a layer that the target lacks.
    """
    if not layers or not all(0 <= i < target.num_layers for i in layers):
        raise UserError(
            f"layers={list(layers)}: target {target.spec!r} has layers 0 to {target.num_layers - 1}"
        )
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in layers]
    tensors: dict[str, Tensor] = {}
    for name, tensor in target.model.state_dict().items():
        if layer := re.search(r"\.(?:layers|h)\.(\d+)\.", name):
            for new, old in enumerate(layers):
                if old == int(layer[1]):
                    mine = f"{name[: layer.start(1)]}{new}{name[layer.end(1) :]}"
                    tensors[mine] = tensor.detach().to(dtype, copy=True)
        else:
            tensors[name] = tensor.detach().to(dtype, copy=True)
    return config, tensors


def adapt(
    target: Target,
    layers: Sequence[int],
    mask_token_id: int,
    *,
    attention: str = "prefix_causal",
    share_embedding: bool = True,
    dtype: torch.dtype = torch.float32,
) -> MaskedLM:
    """A diffusion drafter that starts from these layers of an autoregressive target, in this order, and from its norm.

    The target's shift is kept (DiffuLLaMA, arXiv 2410.17891). `attention`: full or prefix_causal, what `see` says by
    default. `share_embedding`: the target's embedding and head serve, frozen and not stored; else they are copied,
    trained and stored, tied where the target's are.

    Raises:
        UserError: a layer, mask, attention or architecture that does not fit.
    """
    config, tensors = own_layers(target, layers, dtype)
    source = {
        "architectures": list(ADAPTED.architectures),
        "model_type": ADAPTED.model_type,
        "base": type(target.model).__name__,
        "base_config": config.to_diff_dict(),
        "layers": list(layers),
        "shift": ADAPTED.shift,
        "attention": attention,
        "mask_token_id": mask_token_id,
        "share_embedding": share_embedding,
        "target": target.spec,
        "target_sha256": target.hash,
    }
    if share_embedding:
        for name in embedding_names(target.model):
            tensors.pop(name, None)
    return _adapted(source, f"target {target.spec!r}", tensors, target, dtype).to(target.device)


def _adapted(
    source: dict[str, Any], where: str, tensors: dict[str, Tensor], target: Target | None, dtype: torch.dtype
) -> MaskedLM:
    """The network of an adapted drafter's config.json and tensors."""
    lacking = [
        k for k in ("base", "base_config", "attention", "mask_token_id", "share_embedding") if k not in source
    ]
    if lacking:
        raise UserError(f"{where}: missing key {lacking[0]!r}, so this is not an adapted drafter")
    base, kind = str(source["base"]), str(source["attention"])
    if base not in BASES:
        raise UserError(f"{where}: its architecture {base!r} can't be adapted{nearest(base, BASES)}")
    if kind not in ATTENTIONS:
        raise UserError(f"{where}: attention={kind!r} is unknown{nearest(kind, ATTENTIONS)}")
    family = replace(
        ADAPTED,
        base=base,
        attention="full" if kind == "full" else "prefix_causal",
        cache="none" if kind == "full" else "exact",
        shift=1 if source.get("shift", 1) else 0,
    )
    config = _config(base, source["base_config"], where)
    shared = target if source["share_embedding"] else None
    if source["share_embedding"]:
        if target is None:
            raise UserError(f"{where}: made for target {source.get('target')!r}, which has to be given")
        sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
        for key, value in sizes.items():
            if getattr(config, key) != value:
                raise UserError(
                    f"{where}: {key} is {getattr(config, key)}, target {target.spec!r} has {value}; "
                    f"it was made for {source.get('target')!r}"
                )
        names = embedding_names(_skeleton(base, config, where))
        tensors |= dict(zip(names, (target.embedding_VD, target.head_weight_VD), strict=True))
    model = _filled(family, config, tensors, where, dtype)
    return MaskedLM(model, _with_ids(family, source, None, config.vocab_size, where), source, shared)


def from_config(
    values: Mapping[str, Any], where: str = "config.json", dtype: torch.dtype = torch.float32
) -> MaskedLM:
    """A network of a published family with random weights, made of its config.json.

    Raises:
        UserError: no known family, or a value that does not fit.
    """
    family = family_of(values, where)
    config = _config(family.base, _renamed(family, values), where)
    with _in_one_line(where):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=register()
        )
    return MaskedLM(model, _with_ids(family, values, None, config.vocab_size, where), dict(values))


def _renamed(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Their config.json under transformers' names; without what only their own code reads."""
    if family.config:
        return {ours: values[key] for key, ours in family.config.items() if values.get(key) is not None}
    return {key: value for key, value in values.items() if key not in _OWN}


def _config(base: str, values: Mapping[str, Any], where: str) -> Any:
    with _in_one_line(where):
        return getattr(transformers, base).config_class(**{k: v for k, v in values.items() if k not in _OWN})


def _skeleton(base: str, config: Any, where: str) -> Any:
    """The architecture without memory."""
    with _in_one_line(where), torch.device("meta"):
        return getattr(transformers, base)(config)


def embedding_names(model: Any) -> tuple[str, str]:
    """Names of the embedding and of the head among the parameters."""
    embedding = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())
    return f"{embedding}.weight", "lm_head.weight"


def _with_ids(
    family: Family, values: Mapping[str, Any], folder: Path | None, vocab_size: int, where: str
) -> Family:
    """The record with this checkpoint's mask and block."""
    mask = values.get("mask_token_id")
    if mask is None and folder is not None:
        mask = _tokenizer_mask(folder)
    if mask is None:
        mask = family.mask_token_id
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise UserError(f"{where}: mask_token_id={mask!r} is not within 0..{vocab_size - 1}")
    block = family.block_size
    if family.attention == "block_causal":
        block = values.get("block_size", block)
        if type(block) is not int or block < 1:
            raise UserError(f"{where}: block_size={block!r} must be a whole number of at least 1")
    return replace(family, mask_token_id=mask, block_size=block)


def _tokenizer_mask(folder: Path) -> int | None:
    """The id of the mask token that tokenizer_config.json names, if it names one."""
    path = folder / "tokenizer_config.json"
    try:
        values = json.loads(path.read_text()) if path.is_file() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable JSON ({error})") from None
    named = values.get("mask_token")
    text = named.get("content") if isinstance(named, dict) else named
    for index, token in values.get("added_tokens_decoder", {}).items():
        if text is not None and token.get("content") == text:
            return int(index)
    return None


def _filled(family: Family, config: Any, tensors: dict[str, Tensor], where: str, dtype: torch.dtype) -> Any:
    """The transformers model that holds these tensors, named as transformers names them, and no other."""
    skeleton = _skeleton(family.base, config, where)
    expected = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    embedding, head = embedding_names(skeleton)
    if config.tie_word_embeddings:
        del expected[head]
        own = tensors.pop(head, None)
        if own is not None and embedding in tensors and not torch.equal(own, tensors[embedding]):
            raise UserError(f"{where}: {family.theirs(head)!r} differs from the embedding that it is tied to")
    for name in sorted(expected.keys() - tensors.keys()):
        raise UserError(f"{where}: its checkpoint misses {family.theirs(name)!r}")
    for name in sorted(tensors.keys() - expected.keys()):
        raise UserError(f"{where}: its checkpoint has an unknown tensor {family.theirs(name)!r}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"{where}: {family.theirs(name)} has shape {tuple(tensors[name].shape)}, expected {tuple(shape)}"
            )
    with _in_one_line(where):
        return getattr(transformers, family.base).from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, attn_implementation=register()
        )


@contextmanager
def _in_one_line(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what a config of wrong values makes of transformers has no common class
        line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(f"{where}: {line}") from None


# ---- files ----


def load_masked_lm(
    spec: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    target: Target | None = None,
) -> MaskedLM:
    """A published masked-diffusion language model, or an adapted drafter, from a folder or hub id; in evaluation mode.

    Args:
        target: for an adapted drafter that shares its target's embedding and head.
        trust_remote_code: must be False: the families are mapped onto transformers' own classes.

    Raises:
        UserError: no known family; missing, unknown, torn or misshapen tensors, or values that are no numbers.
    """
    if trust_remote_code:
        raise UserError("trust_remote_code=True: remote code is never run, the known families do without it")
    folder = model_folder(str(spec), "drafter", ["*.json", "*.safetensors"], revision)
    values = read_config(folder)
    adapted = values.get("architectures") == list(ADAPTED.architectures)
    family = ADAPTED if adapted else family_of(values, str(spec))
    files = _weight_files(folder)
    if not files:
        folder = model_folder(str(spec), "drafter", ["*.json", "pytorch_model*.bin"], revision)
        files = _weight_files(folder)
    if not files:
        raise UserError(f"drafter {str(spec)!r}: {folder} has neither {_SAFE} nor pytorch_model.bin")
    tensors = {
        family.ours(name): tensor
        for file in files
        for name, tensor in _tensors(file).items()
        if not _BUFFER.search(name)
    }
    if adapted:
        return _adapted(values, str(folder), tensors, target, dtype).to(device)
    config = _config(family.base, _renamed(family, values), str(folder))
    if family.resized:
        embedding, _ = embedding_names(_skeleton(family.base, config, str(folder)))
        config.vocab_size = len(tensors.get(embedding, range(config.vocab_size)))
    model = _filled(family, config, tensors, str(folder), dtype)
    return MaskedLM(model, _with_ids(family, values, folder, config.vocab_size, str(folder)), values).to(
        device
    )


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: safetensors, else pickled tensors; in one piece or as an index lists them."""
    for whole in (_SAFE, "pytorch_model.bin"):
        if (folder / whole).is_file():
            return [folder / whole]
        index = folder / f"{whole}.index.json"
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f"{index}: has no readable weight_map") from None
            for name in names:
                if Path(name).name != name or not (folder / name).is_file():
                    raise UserError(f"{index}: names {name!r}, which is not in the folder")
            return [folder / name for name in names]
    return []


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            tensors = load_file(str(file))
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: not readable ({(str(error).splitlines() or [''])[0]})") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(f"{file}: is no table of tensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{file}: {name} holds values that are no numbers")
    return tensors


def save_masked_lm(network: MaskedLM, folder: Path, max_shard_size: str = "5GB") -> None:
    """Write the folder in the layout that the network was read from: its family's names, its own config.json.

    Raises:
        ValueError: LoRA weights are not merged.
    """
    if _is_lora(network):
        raise ValueError("merge_lora(network) before it is saved")
    folder.mkdir(parents=True, exist_ok=True)
    tied = network.model.config.tie_word_embeddings
    tensors = {
        network.family.theirs(name): tensor.detach().cpu().contiguous()
        for name, tensor in network.model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    write_weights(tensors, folder, max_shard_size)
    _write_json(folder / "config.json", network.source)


def write_weights(tensors: dict[str, Tensor], folder: Path, max_shard_size: str = "5GB") -> None:
    """model.safetensors, or shards with their index."""
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for old in folder.glob("model*.safetensors*"):  # another number of shards
        old.unlink()
    for file, names in split.filename_to_tensors.items():
        part = {name: tensors[name] for name in names}
        write_atomically(folder / file, partial(save_file, part, metadata={"format": "pt"}))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / f"{_SAFE}.index.json", index)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_atomically(path, lambda part: part.write_text(json.dumps(values, indent=2) + "\n"))


# ---- LoRA ----


def with_lora(network: MaskedLM, rank: int, alpha: float, targets: Sequence[str], seed: int = 0) -> None:
    """Freeze the network and train low-rank updates of the linear layers whose names end in `targets` (arXiv
    2106.09685); they start at zero.

    Raises:
        UserError: the package `peft` is not installed, or there is no such layer.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UserError("LoRA needs the package peft: pip install 'specalign[lora]'") from None
    with _in_one_line("LoRA"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        scale: Any = alpha  # peft's annotation wants a whole number; it takes any
        config = LoraConfig(r=rank, lora_alpha=scale, target_modules=list(targets), lora_dropout=0.0)
        network.model = get_peft_model(network.model, config)


def merge_lora(network: MaskedLM) -> None:
    """Add the low-rank updates to the weights that they update; without any, nothing happens."""
    if _is_lora(network):
        network.model = network.model.merge_and_unload()


def _is_lora(network: MaskedLM) -> bool:
    return hasattr(network.model, "merge_and_unload")
