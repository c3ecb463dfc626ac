"""The settings that a data folder's samples depend on, as recorded in its manifest."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from align.config.recipe import Recipe
from align.writing.outline import TargetInfo
from align.writing.template import Template, chat_template
from specalign.common.errors import UserError
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from specalign.rows.shards import Manifest


def identity(
    recipe: Recipe, target: TargetInfo, template: Template, prompts: Sequence[Conversation] | None
) -> dict[str, object]:
    """The settings that must be unchanged on resume. They include neither a server's address nor
    its dtype; a target whose weights are not on this machine has no hash."""
    d = recipe.data
    served = d.server is not None
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
        "prompts_sha256": None if prompts is None else _hash_prompts(prompts),
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
        "date": template.date,
        "template_seed": template.seed,
        "rendered_sha256": template.rendered_sha256,
    }


def _hash_prompts(prompts: Sequence[Conversation]) -> str:
    """Hash of the user's texts if the prompts consist of nothing else, otherwise of all messages
    and tools."""
    values: list[object] = [prompt.text for prompt in prompts]
    if None in values:
        values = [[prompt.messages, prompt.tools] for prompt in prompts]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def find_differences(manifest: Manifest, recipe: Recipe, target: Target) -> list[str]:
    """The settings of a folder's texts that differ from the recipe's; the content of the prompts
    and the target's name are not compared."""
    wanted = identity(recipe, target, chat_template(target, manifest.get("date")), None)
    ignored = ("prompts_sha256", "target")
    return [k for k, v in wanted.items() if k not in ignored and not is_same(manifest, k, v)]


def check_same(path: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Raises UserError if a manifest's settings differ from the wanted ones."""
    for key, value in wanted.items():
        if not is_same(found, key, value):
            raise UserError(
                f"{path}: {key} is {found.get(key)!r}, this recipe says {value!r}; use the data.… "
                "keys that it was written with, or another data.path"
            )


def is_same(manifest: Mapping[str, object], key: str, value: object) -> bool:
    found = manifest.get(key)
    if key == "target_sha256" and None in (found, value):
        return True  # the weights are not on this machine
    return bool(found == value)
