"""Choices that a recipe leaves open: the mask token, the scale of low-rank updates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from align.config.drafter import DrafterConfig
from specalign.common.errors import UserError
from specalign.common.text import say
from specalign.folder.chat import TOOL, Chat, chat_ids
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation, Message

_SPARE = re.compile(
    r"\[MASK\]|<\|?_?mask_?\|?>|<\|?mdm_mask\|?>|[<\[]\|?_?((reserved|unused|extra|dummy|place_?holder)[\w -]*|(special|control)_?\d+)\|?[>\]]",
    re.IGNORECASE,
)
"""Reserved tokens: `[MASK]`, `<|mask|>`, `<|reserved_special_token_0|>`, `<unused7>`,
`[control_8]`."""
_PURPOSE = re.compile(
    r"fim|prefix|middle|suffix|hole|vision|image|img|audio|video|tool|<\|?_?(pre|mid|suf)\W",
    re.IGNORECASE,
)
"""Tokens for infilling, images, sound and tools, which are in use."""
_ENDING = re.compile(
    r"think|tool|call|channel|message|^<\|?(user|assistant|system|human|bot)\|?>$|(end|start|begin).?of|^</?s>$|im_(start|end)|(bo|eo)[stm](_id)?\W|<\|?(end|start)\|?>|header_id",
    re.IGNORECASE,
)
"""Tokens that begin or end texts, turns, thoughts and calls in some model."""


def mask_token(target: Target) -> int:
    """The id whose row of the frozen embedding serves as the mask: the last row without a token
    (padding), else the first reserved token, else the first unused special token. It depends on the
    target's files only.

    Raises:
        UserError: there is none (drafter.mask_token_id names one).
    """
    tokenizer = target.tokenizer
    names: dict[int, str] = {
        index: _to_ascii(token) for token, index in tokenizer.get_vocab().items()
    }
    added = getattr(tokenizer, "added_tokens_decoder", {})
    rows = min(target.vocab_size, len(target.embedding_VD))
    roles = _role_ids(target)
    used = roles | _config_ids(target)
    free = [i for i in range(rows) if i not in names and i not in added and i not in used]
    if free:
        return free[-1]
    template = _template_text(tokenizer.chat_template or "")
    taken = roles | _template_ids(target)
    unused = [i for i in sorted(names) if i < rows and i not in taken and names[i] not in template]
    unused = [i for i in unused if not _PURPOSE.search(names[i])]
    spare = [i for i in unused if _SPARE.fullmatch(names[i])]
    special = [i for i in unused if i in added and added[i].special and i not in used]
    found = spare or [i for i in special if not _ENDING.search(names[i])]
    if not found:
        raise UserError(
            f"target {target.spec!r} has no unused special token for the mask; name a token that "
            "its "
            "texts never have: "
            "drafter.mask_token_id=ID"
        )
    return found[0]


def _to_ascii(name: str) -> str:
    """A token's text with DeepSeek's characters replaced: `<｜place▁holder▁no▁0｜>`."""
    return name.replace("▁", "_").replace("｜", "|")


def _template_text(templates: str | Mapping[str, str]) -> str:
    text = templates if isinstance(templates, str) else " ".join(map(str, templates.values()))
    return _to_ascii(text)


def _template_ids(target: Target) -> set[int]:
    """Tokens that the chat template writes around messages of every role, which it may compose
    (`'<|' + role + '|>'`)."""
    if not getattr(target.tokenizer, "chat_template", None):
        return set()
    user: Message = {"role": "user", "content": "a"}
    answer: Message = {"role": "assistant", "content": "b"}
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    result: Message = {"role": "tool", "name": "f", "content": "d"}
    talks = [[user, answer, user], [user, answer], [user, {**answer, "tool_calls": [call]}, result]]
    talks += [[{"role": role, "content": "c"}, user] for role in ("system", "developer")]
    found: set[int] = set()
    for messages in talks:
        for tools in ((), (TOOL,)):
            talk = Conversation(tuple(messages), tools)
            with suppress(UserError):  # a template may refuse a role
                found.update(
                    chat_ids(target.tokenizer, talk, Chat(), target.vocab_size, target.spec)
                )
    return found


def _role_ids(target: Target) -> set[int]:
    """Tokens that end a text, that the tokenizer names, or that stand for images and sound."""
    roles = ("bos", "eos", "pad", "unk", "sep", "cls")
    named = [getattr(target.tokenizer, f"{role}_token_id", None) for role in roles]
    return {*target.eos_ids, *target.placeholder_ids, *(i for i in named if i is not None)}


def _config_ids(target: Target) -> set[int]:
    """Tokens that the target's configs name (`bos_token_id`, `image_token_id`)."""
    configs = (target.model.config, target.config, getattr(target.model, "generation_config", None))
    found: list[Any] = []
    for config in configs:
        for key, value in ({} if config is None else config.to_dict()).items():
            if key.endswith(("token_id", "token_index")) and key != "mask_token_id":
                found += value if isinstance(value, list) else [value]
    return {i for i in found if isinstance(i, int)}


def lora_alpha(options: DrafterConfig) -> float:
    """The scale of low-rank updates."""
    return 2.0 * options.lora_rank if options.lora_alpha is None else options.lora_alpha


def note_ignored(
    options: DrafterConfig, has: Mapping[str, Any], asked: Mapping[str, Any] | None = None
) -> None:
    """Print which options `drafter.init` overrules; not an error, as a base recipe may set them.

    Args:
        has: what the drafter has, by option. asked: values that replace the recipe's own in the
            comparison.
    """
    default = DrafterConfig()
    wanted = {name: getattr(options, name) for name in has} | dict(asked or {})
    ignored = [name for name in has if wanted[name] not in (getattr(default, name), has[name])]
    if ignored:
        own = ", ".join(f"{name}={has[name]}" for name in ignored)
        other = ", ".join(f"{name}={wanted[name]}" for name in ignored)
        say(
            f"note: drafter.init={options.init} keeps its own {own}; the recipe asks for {other}",
            error=True,
        )
