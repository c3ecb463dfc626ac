"""A target without its weights: tokenizer, chat template, end-of-text tokens and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, GenerationConfig

from align.config.recipe import Recipe
from specalign.common.errors import UserError
from specalign.common.hub import model_folder
from specalign.common.provenance import memory_bytes
from specalign.common.schema import JsonObject
from specalign.folder.chat import Chat
from specalign.folder.tokenizer import open_tokenizer
from specalign.lm.inspection.anatomy import context_limit, eos_ids
from specalign.lm.loading import load_target, resolve_folder
from specalign.lm.model import Target
from specalign.lm.names import DEBUG
from specalign.lm.opening import check_asked, processors_template

_LOADING_FACTOR = 4
"""Memory needed per byte of weights on disk: they may be widened and copied."""
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]


@dataclass
class Outline:
    """The properties of a `Target` that do not need its weights."""

    spec: str
    tokenizer: Any
    chat: Chat
    eos_ids: tuple[int, ...]
    vocab_size: int
    context_limit: int
    hash: str | None = None

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))


TargetInfo = Target | Outline


def open_writer(recipe: Recipe) -> TargetInfo:
    """The target; next to a server on the CPU if its weights are on this machine and fit, else its
    outline. Raises UserError: neither can be read."""
    name, options = recipe.target.name, recipe.target_options
    if recipe.data.server is None:
        return load_target(name, device=recipe.target.device, **options)
    check = recipe.data.server_check == "auto"
    if name in DEBUG or (check and _weights_fit(name, recipe.target.revision)):
        return load_target(name, device="cpu", **options)
    return outline(recipe)


def outline(recipe: Recipe) -> Outline:
    """A target's outline, read from its folder or fetched without the weights. Raises UserError:
    config or tokenizer cannot be read, or the template refuses the recipe's options."""
    name, revision = recipe.target.name, recipe.target.revision
    folder = resolve_folder(name)
    if isinstance(folder, str):
        folder = model_folder(folder, "target", _SMALL_FILES, revision)
    options: JsonObject = {"trust_remote_code": recipe.target.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(str(folder), **options)
        tokenizer = open_tokenizer(folder, **options)
        if not getattr(tokenizer, "chat_template", None):
            tokenizer.chat_template = processors_template(folder, revision)
        generation: Any = GenerationConfig.from_model_config(config)
        if (folder / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(str(folder))
    except Exception as error:  # transformers' errors for broken folders have no common class
        check_asked("target", name, error)
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"target {name!r} cannot be read: {line}") from None
    chat = Chat(dict(recipe.data.template_kwargs), recipe.data.system)
    chat.check(tokenizer, name)
    text_config = config.get_text_config(decoder=True)
    ends = eos_ids(config, generation, tokenizer)
    size = int(text_config.vocab_size)
    return Outline(name, tokenizer, chat, ends, size, context_limit(text_config))


def _weights_fit(name: str, revision: str | None) -> bool:
    """Whether weights are on this machine and fit into its memory."""
    folder = resolve_folder(name)
    if isinstance(folder, str):
        config = try_to_load_from_cache(folder, "config.json", revision=revision)
        if not isinstance(config, str):
            return False
        folder = Path(config).parent
    files = folder.glob("*")
    size = sum(path.stat().st_size for path in files if path.suffix in (".safetensors", ".bin"))
    return 0 < size * _LOADING_FACTOR <= (memory_bytes() or 0)
