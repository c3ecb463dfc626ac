"""What a recipe leaves open: the mask's token, chosen by the target, and what its own other keys decide."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from align.common.errors import UserError
from align.common.text import say
from align.config.drafter import DrafterConfig
from align.folder.chat import TOOL, Chat, chat_ids
from align.rows.conversation import Conversation, Message
from align.target.model import Target

_SPARE = re.compile(
    r"\[MASK\]|<\|?_?mask_?\|?>|<\|?mdm_mask\|?>|[<\[]\|?_?((reserved|unused|extra|dummy|place_?holder)[\w -]*|(special|control)_?\d+)\|?[>\]]",
    re.IGNORECASE,
)
"""Texts of tokens that are there to be given a meaning: `[MASK]`, `<|mask|>`, `<|reserved_special_token_0|>`, `<unused7>`, `[control_8]`."""
_PURPOSE = re.compile(
    r"fim|prefix|middle|suffix|hole|vision|image|img|audio|video|tool|<\|?_?(pre|mid|suf)\W", re.IGNORECASE
)
"""Texts of tokens for infilling, images, sound and tools. They are in use, though no text of ours has them."""
_ENDING = re.compile(
    r"think|tool|call|channel|message|^<\|?(user|assistant|system|human|bot)\|?>$|(end|start|begin).?of|^</?s>$|im_(start|end)|(bo|eo)[stm](_id)?\W|<\|?(end|start)\|?>|header_id",
    re.IGNORECASE,
)
"""Texts of tokens that begin or end texts, turns, thoughts and calls in some model, whether or not this one's files say so."""


def mask_token(target: Target) -> int:
    """The id whose row of the frozen embedding stands for a mask: the largest that no token has (a padding row), else the first token that
    is there to be given a meaning, else the first special token that nothing uses. It depends on the target's files alone.

    Raises:
        UserError: there is none of these (drafter.mask_token_id names one).
    """
    tokenizer = target.tokenizer
    names: dict[int, str] = {index: token for token, index in tokenizer.get_vocab().items()}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    rows = min(target.vocab_size, len(target.embedding_VD))
    roles = _roles(target)
    used = roles | _config_ids(target)
    free = [i for i in range(rows) if i not in names and i not in added and i not in used]
    if free:
        return free[-1]
    templates = tokenizer.chat_template or ""
    template = templates if isinstance(templates, str) else " ".join(map(str, templates.values()))
    written = _template_ids(target)
    unused = [i for i in sorted(names) if i < rows and i not in roles | written and names[i] not in template]
    unused = [i for i in unused if not _PURPOSE.search(_in_ascii(names[i]))]
    spare = [i for i in unused if _SPARE.fullmatch(_in_ascii(names[i]))]
    special = [i for i in unused if i in added and added[i].special and i not in used]
    found = [*spare[:1], *(i for i in special if not _ENDING.search(_in_ascii(names[i])))]
    if not found:
        raise UserError(
            f"target {target.spec!r} has no unused special token for the mask; name a token that its texts never have: "
            "drafter.mask_token_id=ID"
        )
    return int(found[0])


def _in_ascii(name: str) -> str:
    """A token's text with the signs that DeepSeek's models use replaced: `<｜place▁holder▁no▁0｜>`."""
    return name.replace("▁", "_").replace("｜", "|")


def _template_ids(target: Target) -> set[int]:
    """Tokens that the chat template writes around messages of every role. It may put their texts together (`'<|' + role + '|>'`)."""
    user: Message = {"role": "user", "content": "a"}
    answer: Message = {"role": "assistant", "content": "b"}
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    talks = [[user, answer, user], [user, answer]]
    talks += [[{"role": role, "content": "c"}, user] for role in ("system", "developer")]
    talks += [[user, {**answer, "tool_calls": [call]}, {"role": "tool", "name": "f", "content": "d"}]]
    found: set[int] = set()
    for messages in talks if getattr(target.tokenizer, "chat_template", None) else ():
        for tools in ((), (TOOL,)):
            talk = Conversation(tuple(messages), tools)
            with suppress(UserError):  # a template may refuse a role
                found.update(chat_ids(target.tokenizer, talk, Chat(), target.vocab_size, target.spec))
    return found


def _roles(target: Target) -> set[int]:
    """Tokens that end a text, that the tokenizer names, or that stand for images and sound."""
    roles = ("bos", "eos", "pad", "unk", "sep", "cls")
    named = [getattr(target.tokenizer, f"{role}_token_id", None) for role in roles]
    return {*target.eos_ids, *target.placeholder_ids, *(i for i in named if i is not None)}


def _config_ids(target: Target) -> set[int]:
    """Tokens that the target's configs name (`bos_token_id`, `image_token_id`), some of them by their class's defaults."""
    found: list[Any] = []
    for config in (target.model.config, target.config, getattr(target.model, "generation_config", None)):
        for key, value in ({} if config is None else config.to_dict()).items():
            if key.endswith(("token_id", "token_index")) and key != "mask_token_id":
                found += value if isinstance(value, list) else [value]
    return {i for i in found if isinstance(i, int)}


def lora_alpha(options: DrafterConfig) -> float:
    """The scale of low-rank updates."""
    return 2.0 * options.lora_rank if options.lora_alpha is None else options.lora_alpha


def say_kept(options: DrafterConfig, has: Mapping[str, Any], asked: Mapping[str, Any] | None = None) -> None:
    """Say what the recipe asks for and `drafter.init` has otherwise. No error: a recipe that this one is based on may have set it.

    Args:
        has: what the drafter has, by the option's name.
        asked: what stands for an option where it is not what the recipe says word by word.
    """
    default, asked = DrafterConfig(), asked or {}
    words = {name: asked.get(name, getattr(options, name)) for name in has}
    passed_over = [name for name in has if words[name] not in (getattr(default, name), has[name])]
    if passed_over:
        own, other = (", ".join(f"{name}={values[name]}" for name in passed_over) for values in (has, words))
        say(f"note: drafter.init={options.init} keeps its own {own}; the recipe asks for {other}", error=True)
