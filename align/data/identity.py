"""What the samples of a folder depend on, as its manifest records it and as a recipe asks for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from align.common.errors import UserError
from align.common.files import expanded
from align.common.text import short
from align.config.recipe import Recipe
from align.data.prompts import read_prompts
from align.rows.conversation import Conversation
from align.target.model import Target
from align.writing.template import TargetInfo, Template, chat_template

_OLDER: dict[str, Any] = {
    "prompt_openings": [],
    "template_kwargs": {},
    "system": None,
    "writer": "target",
    "turns": "last",
}
"""What a manifest means that was written before the key came."""
_UNKNOWN = ("long_prompts", "date", "rendered_sha256")
"""Keys that an older manifest may lack, whatever it was written with."""


def identity(
    recipe: Recipe, target: TargetInfo, template: Template, prompts: Sequence[Conversation] | None
) -> dict[str, Any]:
    """What a restart must find unchanged, or the shards would not belong together.

    A server's address is none of it, and its type of numbers is not known; a target whose weights are not here has no hash.
    """
    d, served = recipe.data, recipe.data.server is not None
    return {
        "writer": "server" if served else "target",
        "target": target.spec,
        "target_sha256": target.hash,
        "template_sha256": template.sha256,
        "template_kwargs": dict(d.template_kwargs),
        "system": d.system,
        "dtype": None if served else getattr(target, "dtype_name", None),
        "seed": recipe.seed,
        "prompts": d.prompts,
        "prompts_sha256": None if prompts is None else _prompts_sha256(prompts),
        "prompt_temperature": d.prompt_temperature,
        "prompt_openings": list(d.prompt_openings),
        "answer_temperatures": list(d.answer_temperatures),
        "top_p": d.top_p,
        "top_k": d.top_k,
        "max_prompt_tokens": d.prompt_limit,
        "long_prompts": None if d.prompts is None else d.long_prompts,
        "turns": "last" if d.prompts is None else d.turns,
        "max_answer_tokens": d.max_answer_tokens,
        "batch_size": d.batch_size,
        "near_duplicate_threshold": d.near_duplicate_threshold,
        "date": template.date,
        "rendered_sha256": template.rendered_sha256,
    }


def _prompts_sha256(prompts: Sequence[Conversation]) -> str:
    """Of the user's texts, where the prompts are no more than that; else of all messages and tools."""
    plain = [c == Conversation.from_text(c.messages[0]["content"]) for c in prompts]
    if all(plain):
        values: list[Any] = [c.messages[0]["content"] for c in prompts]
    else:
        values = [[c.messages, c.tools] for c in prompts]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def same_settings(manifest: dict[str, Any], recipe: Recipe, target: Target) -> bool:
    """Whether `synthesize` would go on from there; the prompts themselves are not looked at."""
    wanted = identity(recipe, target, chat_template(target, manifest.get("date")), None)
    return all(
        is_same(manifest, key, value)
        for key, value in wanted.items()
        if key not in ("prompts_sha256", "target")
    )


_WORDING = (
    "prompt_temperature", "prompt_openings", "answer_temperatures", "top_p", "top_k", "max_prompt_tokens", "long_prompts", "turns",
    "max_answer_tokens", "system", "template_kwargs",
)  # fmt: skip
"""Settings that make other texts, beside prompts, seed and target."""


def written_otherwise(manifest: dict[str, Any], recipe: Recipe, target: Target) -> list[str]:
    """How the texts that are there were written where the recipe says otherwise, `data.key=value` each. Prompts in a file are read and
    compared; a data set is not asked."""
    d, prompts = recipe.data, None
    if d.prompts is not None and expanded(d.prompts).is_file():
        with suppress(UserError):  # it was needed for the writing alone
            prompts = read_prompts(d.prompts, d.prompts_split, d.prompts_column, quiet=True)
    wanted = identity(recipe, target, chat_template(target, manifest.get("date")), prompts)
    keys = _WORDING if prompts else (*_WORDING, "prompts")
    other = [key for key in keys if not is_same(manifest, key, wanted[key])]
    said = [f"data.{key}={short(manifest.get(key, _OLDER.get(key)), 60)}" for key in other]
    if prompts and not is_same(manifest, "prompts_sha256", wanted["prompts_sha256"]):
        said.append(f"other prompts than {d.prompts} holds")
    return said


def is_same(manifest: dict[str, Any], key: str, value: Any) -> bool:
    found = manifest.get(key, _OLDER.get(key))
    if key == "target_sha256" and None in (found, value):  # written where the weights were not
        return True
    if key in _UNKNOWN and key not in manifest:
        return True
    return bool(found == value)
