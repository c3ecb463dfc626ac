"""Folders that hold a LoRA adapter of another model, as peft saves them: they are merged into that model on loading."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from align.common.errors import UserError, in_one_line
from align.common.files import expanded, read_text
from align.common.schema import read_object
from align.common.text import short
from align.folder.ends import check_ends

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
HOW_TO_MERGE = "merge it (peft: merge_and_unload), save the merged model and name its folder"


@dataclass(frozen=True)
class Adapter:
    """folder: where it lies. base: the name of the model that it changes; a folder or hub id. revision: of the base's hub id."""

    folder: Path
    base: str
    revision: str | None = None

    @property
    def tokenizer_folder(self) -> Path | None:
        """The adapter's folder if it brings a tokenizer, which then takes the place of the base's."""
        vocabulary = any((self.folder / name).is_file() for name in _VOCABULARIES)
        return self.folder if vocabulary and (self.folder / "tokenizer_config.json").is_file() else None

    @property
    def chat_template(self) -> str | None:
        """The chat template that the adapter's folder holds in a file."""
        path = self.folder / "chat_template.jinja"
        return read_text(path) if path.is_file() else None

    def generation_config(self, base: Any, what: str) -> Any:
        """The generation config of the adapter's folder, or the base's if it holds none. One that names no end of text has the base's.

        Args:
            what: the model, for the message.

        Raises:
            UserError: the file is broken, or names an end that is no token's id.
        """
        path = self.folder / "generation_config.json"
        if not path.exists():
            return base
        from transformers import GenerationConfig

        check_ends(read_object(path), f"{what}: {path.name}")
        own = GenerationConfig.from_pretrained(str(self.folder))
        if own.eos_token_id is None:
            own.eos_token_id = base.eos_token_id
        return own


def adapter_of(folder: Path, what: str) -> Adapter | None:
    """The adapter that a folder holds; None for a folder without adapter_config.json. Weights of a whole model next to it do not change
    that, as in transformers.

    Args:
        what: the model, for the message.

    Raises:
        UserError: it names no base, has no weights, or is of a kind that can't be merged; peft is not installed.
    """
    path = folder / CONFIG
    if not path.is_file():
        return None
    config = read_object(path)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{what}: {path}: base_model_name_or_path={short(base)} names no model: name its base there, or {HOW_TO_MERGE}"
        )
    said = f"{what}: an adapter of {base!r}"
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise UserError(f"{said} without its weights ({WEIGHTS[0]})")
    kind = config.get("peft_type")
    if config.get("is_prompt_learning") or kind in ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING"):
        raise UserError(f"{said} of peft_type={kind}, which can't be merged into its weights")
    if find_spec("peft") is None:
        raise UserError(
            f"{said}, which needs the package peft: pip install 'specalign[lora]'; or {HOW_TO_MERGE}"
        )
    beside = folder / base
    if not expanded(base).exists() and beside.is_dir():
        base = str(beside.resolve())
    revision = config.get("revision")
    return Adapter(folder, base, revision if isinstance(revision, str) else None)


def merge_adapter(model: Any, adapter: Adapter, what: str) -> Any:
    """The model with the adapter merged into its weights.

    Raises:
        UserError: the adapter does not fit the model.
    """
    from peft import PeftConfig, PeftModel

    said = f"{what}: an adapter of {adapter.base!r} that can't be merged into it"
    with in_one_line(said):
        config = PeftConfig.from_pretrained(str(adapter.folder))
        config.inference_mode = True
        _resize(model, adapter, config)
        _untie_head(model, adapter)
        wrapped = PeftModel(model, config)
        found = wrapped.load_adapter(str(adapter.folder), "default")
        odd = [*found.missing_keys, *(key for key in found.unexpected_keys if not _is_copy(key, adapter))]
        if odd:
            more = f", and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise ValueError(f"{odd[0]!r} is in one of the two alone{more}")
        merged = wrapped.merge_and_unload()
        for part in (merged.get_input_embeddings(), merged.get_output_embeddings()):
            if part is not None and bool(part.weight[:, 0].isnan().any()):
                raise ValueError(f"it holds no weights for its new tokens; {HOW_TO_MERGE}")
        return merged


def _resize(model: Any, adapter: Adapter, config: Any) -> None:
    """Give the base as many tokens as the adapter was trained with. New rows are NaN until the adapter's weights replace them.

    Raises:
        ValueError: there are more than the base's, and no tokenizer that has them.
    """
    rows, old = vocabulary_rows(model, adapter, config), len(model.get_input_embeddings().weight)
    if rows is None or rows == old:
        return
    if rows > old and adapter.tokenizer_folder is None:
        raise ValueError(
            f"it has {rows} tokens, its base {old}, and there is no tokenizer next to it: save that into {adapter.folder}, or {HOW_TO_MERGE}"
        )
    model.resize_token_embeddings(rows, mean_resizing=False)
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        if part is not None:
            part.weight.data[old:] = float("nan")


def vocabulary_rows(model: Any, adapter: Adapter, config: Any) -> int | None:
    """How many tokens the adapter's weights of embedding and head are for; None if it holds none of them."""
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if any(module is part for part in both)]
    for key, shape in _weight_shapes(adapter).items():
        module, _, kind = key.partition(".lora_")
        if not kind:
            module = re.sub(
                r"(\.(modules_to_save|original_module|token_adapter|base_layer))*\.weight$", "", key
            )
        if not any(module.endswith(name) for name in names):
            continue
        if not kind or kind.startswith("B"):
            return shape[0]
        if kind == "embedding_A":
            return shape[1]
    indices = getattr(config, "trainable_token_indices", None) or []
    listed = indices.values() if isinstance(indices, dict) else [indices]
    most = max((index for one in listed for index in one), default=-1) + 1
    return most if most > len(both[0].weight) else None


def _is_copy(key: str, adapter: Adapter) -> bool:
    """Whether a tensor that peft does not read is a copy of one that it does: with a grown vocabulary it stores rows of embedding and
    head more than once."""
    kind = next(
        (kind for kind in (".modules_to_save.weight", ".trainable_tokens_delta") if key.endswith(kind)), ""
    )
    if not kind:
        return False
    stored = _weights(adapter)
    read = [key.replace(".modules_to_save", "")]
    if kind == ".trainable_tokens_delta":
        read = [other for other in stored if other.endswith(kind) and other != key]
    return any(other in stored and stored[key].equal(stored[other]) for other in read)


def changes_tied_head(model: Any, adapter: Adapter) -> bool:
    """Whether the adapter changes one of head and embedding, which the model has tied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    names = {name for name, module in model.named_modules() if module in (head, embedding)}
    changed = {key.rpartition(".lora_")[0] for key in _weight_shapes(adapter) if ".lora_" in key}
    return any(place.endswith(name) for place in changed for name in names)


def _untie_head(model: Any, adapter: Adapter) -> None:
    """Untie head and embedding where the adapter changes one of them; merging would change both."""
    from torch.nn import Parameter

    if changes_tied_head(model, adapter):
        head = model.get_output_embeddings()
        head.weight = Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def _weight_shapes(adapter: Adapter) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in _weights(adapter).items()}


def _weights(adapter: Adapter) -> dict[str, Any]:
    path = adapter.folder / WEIGHTS[0]
    if path.is_file():
        from safetensors.torch import load_file

        return dict(load_file(path))
    import torch

    return dict(torch.load(adapter.folder / WEIGHTS[1], map_location="cpu", weights_only=True))
