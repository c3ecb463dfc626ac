"""LoRA adapters as peft saves them: merged into their base when loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specalign.common.errors import UserError, in_one_line
from specalign.common.files import expand_path, load_safetensors, load_tensors, read_text
from specalign.common.schema import read_object
from specalign.common.text import short
from specalign.folder.ends import check_ends

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
HOW_TO_MERGE = "merge it (peft: merge_and_unload), save the merged model and name its folder"
_WRAPPERS = r"(\.(modules_to_save|original_module|token_adapter|base_layer))*\.weight$"
"""What peft appends to the name of a module whose weight it stores."""


@dataclass(frozen=True)
class Adapter:
    """folder: of its files. base: the folder or Hub id of the model that it changes. revision: of
    the base."""

    folder: Path
    base: str
    revision: str | None = None

    @property
    def tokenizer_folder(self) -> Path | None:
        """The adapter's folder if it has a tokenizer, which then replaces the base's."""
        vocabulary = any((self.folder / name).is_file() for name in _VOCABULARIES)
        has_tokenizer = vocabulary and (self.folder / "tokenizer_config.json").is_file()
        return self.folder if has_tokenizer else None

    @property
    def chat_template(self) -> str | None:
        """The chat template in a file of the adapter's folder."""
        path = self.folder / "chat_template.jinja"
        return read_text(path) if path.is_file() else None

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        path = self.folder / WEIGHTS[0]
        if path.is_file():
            return load_safetensors(path)
        weights: dict[str, Tensor] = load_tensors(self.folder / WEIGHTS[1], map_location="cpu")
        return weights

    def generation_config(self, base: Any, what: str) -> Any:
        """The generation config of the adapter's folder, with the base's end of text if it names
        none; else the base's.

        Args:
            what: the model, for the message.

        Raises:
            UserError: the file is broken, or names an end that is no token's id.
        """
        path = self.folder / "generation_config.json"
        if not path.exists():
            return base
        from transformers import GenerationConfig  # slow to import

        check_ends(read_object(path), f"{what}: {path.name}")
        config = GenerationConfig.from_pretrained(str(self.folder))
        if config.eos_token_id is None:
            config.eos_token_id = base.eos_token_id
        return config


def adapter_of(folder: Path, what: str) -> Adapter | None:
    """The adapter in a folder; None without adapter_config.json. As in transformers, weights of a
    whole model next to it do not matter.

    Args:
        what: the model, for the message.

    Raises:
        UserError: it names no base, has no weights, or can't be merged; peft is not installed.
    """
    path = folder / CONFIG
    if not path.is_file():
        return None
    config = read_object(path)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{what}: {path}: base_model_name_or_path={short(base)} names no model: name its base "
            f"there, or {HOW_TO_MERGE}"
        )
    where = f"{what}: an adapter of {base!r}"
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise UserError(f"{where} without its weights ({WEIGHTS[0]})")
    kind = config.get("peft_type")
    if config.get("is_prompt_learning") or kind in ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING"):
        raise UserError(f"{where} of peft_type={kind}, which can't be merged into its weights")
    if find_spec("peft") is None:
        raise UserError(
            f"{where}, which needs the package peft: pip install 'specalign[lora]'; or "
            f"{HOW_TO_MERGE}"
        )
    if not expand_path(base).exists() and (folder / base).is_dir():
        base = str((folder / base).resolve())
    revision = config.get("revision")
    return Adapter(folder, base, revision if isinstance(revision, str) else None)


def merge_adapter(model: Any, adapter: Adapter, what: str) -> Any:
    """The model with the adapter merged into its weights.

    Raises:
        UserError: the adapter does not fit the model.
    """
    from peft import PeftConfig, PeftModel  # slow to import
    from torch.nn import Parameter

    with in_one_line(f"{what}: an adapter of {adapter.base!r} that can't be merged into it"):
        config = PeftConfig.from_pretrained(str(adapter.folder))
        config.inference_mode = True
        _resize(model, adapter, config)
        if changes_tied_head(model, adapter):  # merging would change both
            head = model.get_output_embeddings()
            head.weight = Parameter(head.weight.detach().clone(), requires_grad=False)
            model.config.tie_word_embeddings = False
        wrapped = PeftModel(model, config)
        loaded = wrapped.load_adapter(str(adapter.folder), "default")
        unexpected = [key for key in loaded.unexpected_keys if not _is_copy(key, adapter.weights)]
        different = [*loaded.missing_keys, *unexpected]
        if different:
            more = f", and {len(different) - 1} more" if len(different) > 1 else ""
            raise ValueError(f"{different[0]!r} is in one of the two alone{more}")
        merged = wrapped.merge_and_unload()
        for module in (merged.get_input_embeddings(), merged.get_output_embeddings()):
            if module is not None and bool(module.weight[:, 0].isnan().any()):
                raise ValueError(f"it holds no weights for its new tokens; {HOW_TO_MERGE}")
        return merged


def _resize(model: Any, adapter: Adapter, config: Any) -> None:
    """Give the base as many tokens as the adapter has. New rows are NaN until the adapter's weights
    replace them.

    Raises:
        ValueError: there are more than the base's, and no tokenizer that has them.
    """
    rows = vocabulary_rows(model, adapter, config)
    old = len(model.get_input_embeddings().weight)
    if rows is None or rows == old:
        return
    if rows > old and adapter.tokenizer_folder is None:
        raise ValueError(
            f"it has {rows} tokens, its base {old}, and there is no tokenizer next to it: save "
            "that "
            f"into {adapter.folder}, or {HOW_TO_MERGE}"
        )
    model.resize_token_embeddings(rows, mean_resizing=False)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:
            module.weight.data[old:] = float("nan")


def vocabulary_rows(model: Any, adapter: Adapter, config: Any) -> int | None:
    """The vocabulary size of the adapter's weights of embedding and head; None if it has
    neither."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module in (embedding, head)]
    for key, weight in adapter.weights.items():
        module, _, kind = key.partition(".lora_")
        if not kind:
            module = re.sub(_WRAPPERS, "", key)
        if any(module.endswith(name) for name in names):
            if not kind or kind.startswith("B"):
                return weight.shape[0]
            if kind == "embedding_A":
                return weight.shape[1]
    indices = getattr(config, "trainable_token_indices", None) or []
    lists = indices.values() if isinstance(indices, dict) else [indices]
    rows = max((index for trained in lists for index in trained), default=-1) + 1
    return rows if rows > len(embedding.weight) else None


def _is_copy(key: str, weights: dict[str, Tensor]) -> bool:
    """Whether a tensor that peft does not read repeats one that it reads: with a grown vocabulary
    it stores rows of embedding and head more than once."""
    delta = ".trainable_tokens_delta"
    others: list[str] = []
    if key.endswith(".modules_to_save.weight"):
        others = [key.replace(".modules_to_save", "")]
    elif key.endswith(delta):
        others = [other for other in weights if other.endswith(delta) and other != key]
    return any(other in weights and weights[key].equal(weights[other]) for other in others)


def changes_tied_head(model: Any, adapter: Adapter) -> bool:
    """Whether the adapter changes either of head and embedding, which the model has tied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    names = [name for name, module in model.named_modules() if module in (head, embedding)]
    changed = [key.rpartition(".lora_")[0] for key in adapter.weights if ".lora_" in key]
    return any(module.endswith(name) for module in changed for name in names)
