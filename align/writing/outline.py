"""A target without its weights: what the writing by a server needs of it (tokenizer, chat template, ends of text, sizes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from align.common.errors import UserError
from align.common.hub import model_folder
from align.common.provenance import memory_bytes
from align.config.recipe import Recipe
from align.folder.chat import Chat, chat_ids
from align.rows.conversation import Conversation
from align.rows.shapes import as_conversation
from align.target.debug import DEBUG
from align.target.inspection.anatomy import context_limit, eos_ids
from align.target.loading import adapter_behind, load_target, resolve_folder, target_tokenizer
from align.target.model import Target
from align.target.opening import check_asked, processors_template

ROOM = 4
"""A target is loaded beside a server where its weights on disk fit so many times into memory: they may be widened and copied."""


@dataclass
class Outline:
    """What `Target` says of itself, from config.json, generation_config.json and the tokenizer's files."""

    spec: str
    tokenizer: Any
    chat: Chat
    eos_ids: tuple[int, ...]
    vocab_size: int
    context_limit: int
    hash: str | None = None
    """Of its weights; None where they are not on this machine."""
    dtype_name: str | None = None
    """Their type; None as above."""

    @staticmethod
    def of(target: Target) -> Outline:
        """Of a target with its weights: this can be sent to another process."""
        return Outline(
            target.spec, target.tokenizer, target.chat, target.eos_ids, target.vocab_size, target.context_limit, target.hash,
            target.dtype_name,
        )  # fmt: skip

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def chat_tokens(self, prompt: str | Sequence[dict[str, Any]] | Conversation) -> list[int]:
        """As `Target.chat_tokens`."""
        return chat_ids(self.tokenizer, as_conversation(prompt), self.chat, self.vocab_size, self.spec)


def open_beside_server(recipe: Recipe) -> Target | Outline:
    """The target, on the processor, where its weights are on this machine and fit; else its outline.

    Raises:
        UserError: neither can be had.
    """
    name, options = recipe.target.name, recipe.target_options
    if name in DEBUG or recipe.data.server_check == "auto" and _fits(name, recipe.target.revision):
        return load_target(name, device="cpu", **options)
    return outline(recipe)


def outline(recipe: Recipe) -> Outline:
    """Raises UserError where the target's config or tokenizer can't be had, or its template refuses what the recipe says."""
    from transformers import AutoConfig, GenerationConfig

    name, t = recipe.target.name, recipe.target
    folder, adapter = _small_files(name, t.revision), adapter_behind(name)
    options: dict[str, Any] = {"trust_remote_code": t.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(str(folder), **options)
        tokenizer = target_tokenizer(folder, adapter, **options)
        if not getattr(tokenizer, "chat_template", None):
            tokenizer.chat_template = processors_template(folder, t.revision)
        generation: Any = GenerationConfig.from_model_config(config)
        if (folder / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(str(folder))
        if adapter is not None:
            generation = adapter.generation_config(generation, f"target {name!r}")
    except Exception as error:  # transformers' errors for broken folders have no common class
        check_asked("target", name, error)
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"target {name!r} can't be read: {line}") from None
    chat = Chat(dict(recipe.data.template_kwargs), recipe.data.system)
    chat.check(tokenizer, name)
    text = config.get_text_config(decoder=True)
    ends = eos_ids(SimpleNamespace(generation_config=generation, config=config), tokenizer)
    rows = int(text.vocab_size)
    if adapter is not None and adapter.tokenizer_folder is not None:  # it may have tokens that its base lacks
        rows = max(rows, len(tokenizer))
    return Outline(name, tokenizer, chat, ends, rows, context_limit(text))


def _small_files(name: str, revision: str | None) -> Path:
    """The folder of a target's configuration and tokenizer; of a hub id, these alone are fetched."""
    folder = resolve_folder(name)
    if isinstance(folder, Path):
        return folder
    return model_folder(folder, "target", ["*.json", "*.txt", "*.model", "*.jinja", "*.py"], revision)


def _fits(name: str, revision: str | None) -> bool:
    """Whether the weights lie on this machine, and leave room."""
    folder = resolve_folder(name)
    if isinstance(folder, str):
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(folder, "config.json", revision=revision)
        if not isinstance(config, str):
            return False
        folder = Path(config).parent
    index = [*folder.glob("*.index.json")]
    weights = [p for p in folder.glob("*") if p.suffix in (".safetensors", ".bin")]
    size = sum(p.stat().st_size for p in weights)
    parts = {int(p.stem.rpartition("-of-")[2]) for p in weights if "-of-" in p.stem}
    whole = not index or any(len(weights) >= count for count in parts)
    return 0 < size * ROOM <= (memory_bytes() or 0) and whole
