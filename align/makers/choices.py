"""The default mask token, and notes on options that `drafter.init` overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from align.config.drafter import DrafterConfig
from specalign.common.errors import UserError
from specalign.common.text import say
from specalign.lm.model import Target

_SPARE = re.compile(
    r"\[MASK\]|<\|?_?mask_?\|?>|<\|?mdm_mask\|?>|[<\[]\|?_?((reserved|unused|extra|dummy|"
    r"place_?holder)[\w -]*|(special|control)_?\d+)\|?[>\]]",
    re.IGNORECASE,
)
"""Reserved tokens: `[MASK]`, `<|mask|>`, `<|reserved_special_token_0|>`, `<unused7>`,
`[control_8]`."""
_IN_USE = re.compile(
    r"fim|prefix|middle|suffix|hole|vision|image|img|audio|video|<\|?_?(pre|mid|suf)\W|"
    r"think|tool|call|channel|message|"
    r"^<\|?(user|assistant|system|developer|observation|human|bot)\|?>$|"
    r"(end|start|begin).?of|^</?s>$|im_(start|end)|(bo|eo)[stm](_id)?\W|<\|?(end|start)\|?>|"
    r"header_id",
    re.IGNORECASE,
)
"""Tokens for infilling, images and sound, and those that begin or end texts, turns, thoughts and
calls in some model."""


def mask_token(target: Target) -> int:
    """The id whose row of the frozen embedding serves as the mask: the last row without a token
    (padding), else the first reserved token, else the first unused special token. It depends on the
    target's files only. Raises UserError if there is none."""
    tokenizer = target.tokenizer
    names = {index: _to_ascii(token) for token, index in tokenizer.get_vocab().items()}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    rows = min(target.vocab_size, len(target.embedding_VD))
    roles = _role_ids(target)
    used = roles | _config_ids(target)
    free = [i for i in range(rows) if i not in names and i not in added and i not in used]
    if free:
        return free[-1]
    template = _to_ascii(str(tokenizer.chat_template or ""))
    unused = [i for i in sorted(names) if i < rows and i not in roles and names[i] not in template]
    unused = [i for i in unused if not _IN_USE.search(names[i])]
    spare = [i for i in unused if _SPARE.fullmatch(names[i])]
    found = spare or [i for i in unused if i in added and added[i].special and i not in used]
    if not found:
        raise UserError(
            f"target {target.spec!r} has no unused special token for the mask; choose one that "
            "never occurs in its texts: drafter.mask_token_id=ID"
        )
    return found[0]


def _to_ascii(name: str) -> str:
    """A token's text with DeepSeek's characters replaced: `<｜place▁holder▁no▁0｜>`."""
    return name.replace("▁", "_").replace("｜", "|")


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


def note_ignored(options: DrafterConfig, has: Mapping[str, Any]) -> None:
    """Print the recipe's options that `drafter.init` overrules by its own, `has`."""
    default = DrafterConfig()
    for name, own in has.items():
        asked = getattr(options, name)
        if asked not in (getattr(default, name), own):
            note = f"note: drafter.init={options.init} has {name}={own}; ignoring {name}={asked}"
            say(note, error=True)
