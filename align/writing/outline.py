"""A target without its weights: tokenizer, chat template, end-of-text tokens and sizes."""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, GenerationConfig

from align.config.recipe import Recipe
from specalign.common.hub import model_folder
from specalign.common.schema import JsonObject
from specalign.folder.chat import Chat
from specalign.folder.tokenizer import open_tokenizer
from specalign.lm.inspection.anatomy import context_limit, eos_ids
from specalign.lm.loading import load_target, resolve_folder
from specalign.lm.model import Target
from specalign.lm.names import DEBUG
from specalign.lm.opening import cannot_load, processors_template

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
    """The target; next to a server its outline. Raises UserError: it can't be read."""
    name, options = recipe.target.name, recipe.target_options
    if recipe.data.server is None or name in DEBUG:
        return load_target(name, device=recipe.target.device, **options)
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
        raise cannot_load("target", name, error) from None
    chat = Chat(dict(recipe.data.template_kwargs), recipe.data.system)
    chat.check(tokenizer, name)
    text_config = config.get_text_config(decoder=True)
    ends = eos_ids(config, generation, tokenizer)
    size = int(text_config.vocab_size)
    return Outline(name, tokenizer, chat, ends, size, context_limit(text_config))
