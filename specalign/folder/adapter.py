"""LoRA adapters as peft saves them: merged into their base when loaded."""

from __future__ import annotations

from dataclasses import dataclass
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

    def read_weights(self) -> dict[str, Tensor]:
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
        UserError: the adapter does not fit the model, or changes its embedding or head.
    """
    from peft import PeftConfig, PeftModel  # slow to import

    with in_one_line(f"{what}: an adapter of {adapter.base!r} that can't be merged into it"):
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        names = [f".{name}." for name, module in model.named_modules() if module in ends]
        if any(name in key for key in adapter.read_weights() for name in names):
            # they may be tied, or have more rows than the base's
            raise ValueError(f"it changes the embedding or the head; {HOW_TO_MERGE}")
        config = PeftConfig.from_pretrained(str(adapter.folder))
        config.inference_mode = True
        wrapped = PeftModel(model, config)
        loaded = wrapped.load_adapter(str(adapter.folder), "default")
        different = [*loaded.missing_keys, *loaded.unexpected_keys]
        if different:
            more = f", and {len(different) - 1} more" if len(different) > 1 else ""
            raise ValueError(f"{different[0]!r} is in one of the two alone{more}")
        return wrapped.merge_and_unload()
