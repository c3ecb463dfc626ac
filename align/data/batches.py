"""The batches of prompts and answers that the target writes, by number: each depends on the seed and its number alone."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from align.common.errors import UserError, in_one_line
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.generation import Row, Writer, WriterSettings
from align.data.near_duplicates import NearDuplicates
from align.folder.chat import rendered
from align.target.model import Target

_MARK = "\u2402PROMPT\u2402"


@dataclass(frozen=True)
class Template:
    """Tokens before a prompt, between a prompt and its answer, and the identity of the template they came from."""

    prefix: tuple[int, ...]
    turn: tuple[int, ...]
    sha256: str


def chat_template(target: Target) -> Template:
    """The target's own template around one user prompt; for a base model the beginning-of-text token and no turn."""
    tokenizer = target.tokenizer
    if not target.has_chat_template:
        if target.chat.system is not None:
            raise UserError(f"data.system: target {target.spec!r} has no chat template to put it into")
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else target.eos_ids[0]
        return Template((first,), (), hashlib.sha256(b"").hexdigest())
    with in_one_line(f"target {target.spec!r}: its chat template refuses a user's text"):
        text = rendered(tokenizer, target.chat.messages(_MARK), target.chat.kwargs)
    before, found, after = text.partition(_MARK)
    if not found:
        raise UserError(f"target {target.spec!r}: its chat template does not keep the user's text")
    parts = [tuple(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, after)]
    digest = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
    return Template(parts[0], parts[1], digest)


class Batches:
    """The target's batches by number, without what is broken or was said before."""

    def __init__(
        self, recipe: Recipe, target: Target, template: Template, prompts: list[str] | None, folder: Path
    ) -> None:
        self.recipe, self.target, self.template, self.prompts = recipe, target, template, prompts
        self.folder = folder

    @cached_property
    def seen(self) -> NearDuplicates:
        """What was said before, in all shards."""
        return NearDuplicates(
            self.recipe.data.near_duplicate_threshold, self.folder / "near-duplicates.sqlite"
        )

    def know(self, manifest: dict[str, Any]) -> bool:
        """Whether the texts of these shards, and no others, are remembered from the last time."""
        return self.seen.holds(_shards_key(manifest))

    def keep(self, manifest: dict[str, Any]) -> None:
        """Remember, for the next time too, what the batches of these shards hold."""
        self.seen.keep(_shards_key(manifest))

    @cached_property
    def writer(self) -> Writer:
        d, t = self.recipe.data, self.template
        settings = WriterSettings(
            d.prompt_temperature, d.top_p, d.top_k, d.max_prompt_tokens, d.max_answer_tokens
        )
        capacity = len(t.prefix) + d.max_prompt_tokens + len(t.turn) + d.max_answer_tokens
        return Writer(self.target, t.prefix, t.turn, settings, capacity)

    def remember(self, samples: data.Samples) -> None:
        """Samples that are written: what is near to them is dropped."""
        for tokens, start in zip(
            map(samples.__getitem__, range(len(samples))), samples.answer_start, strict=True
        ):
            self.seen.add(_text_key(tokens.tolist(), int(start), len(self.template.prefix)))

    def write(
        self,
        number: int,
        room: int,
        dropped: Counter[str],
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> data.Samples | None:
        """At most `room` samples of a batch, those of the batches before it being known; None after the last prompt.

        `dropped` counts why rows are left out; `progress` hears of new tokens.
        """
        rows = _rows(self.recipe, number, self.target, self.template, self.prompts)
        if not rows:
            return None
        self.writer.write(
            rows, torch.Generator().manual_seed(_batch_seed(self.recipe.seed, number)), progress
        )
        chosen: list[Row] = []
        full = False
        for row in rows:
            if not full and len(chosen) >= room:
                self.seen.mark()  # a later run, which wants more, knows of what is in the shards alone
                full = True
            if row.broken:
                dropped[row.broken] += 1
            elif not self.seen.add(_text_key(row.tokens, row.answer_start, len(self.template.prefix))):
                dropped["near-duplicate"] += 1
            elif not full:
                chosen.append(row)
        if full:
            self.seen.forget()
        return data.from_lists(
            [r.tokens for r in chosen],
            [r.answer_start for r in chosen],
            [r.answer_temperature for r in chosen],
        )


def _shards_key(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest["sha256"]).encode()).hexdigest()


def _batch_seed(seed: int, batch: int) -> int:
    digest = hashlib.sha256(f"{seed}/{batch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _rows(
    recipe: Recipe, batch: int, target: Target, template: Template, prompts: list[str] | None
) -> list[Row]:
    d = recipe.data
    indices = range(batch * d.batch_size, (batch + 1) * d.batch_size)
    heat = list(d.answer_temperatures)
    if prompts is None:
        chat = bool(template.turn)
        openings = _openings(recipe, target) if chat else []
        rows = [Row(i, heat[i % len(heat)], [], writes_prompt=chat) for i in indices]
        for row in rows if openings else []:  # an opening meets every answer temperature
            row.opening = list(openings[row.index // len(heat) % len(openings)])
        return rows
    rows = []
    for i in indices:
        if i >= len(prompts):
            break
        tokens = list(target.tokenizer(prompts[i], add_special_tokens=False)["input_ids"])[
            : d.max_prompt_tokens
        ]
        rows.append(Row(i, heat[i % len(heat)], tokens + list(template.turn), writes_prompt=False))
    return rows


def _openings(recipe: Recipe, target: Target) -> list[list[int]]:
    """data.prompt_openings as tokens. Raises UserError for one that leaves a prompt no room."""
    found = [
        list(target.tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in recipe.data.prompt_openings
    ]
    for text, tokens in zip(recipe.data.prompt_openings, found, strict=True):
        if len(tokens) >= recipe.data.max_prompt_tokens:
            raise UserError(
                f"data.prompt_openings: {text!r} has {len(tokens)} tokens, "
                f"data.max_prompt_tokens={recipe.data.max_prompt_tokens} leaves no room"
            )
    return found


def _text_key(tokens: list[int], answer_start: int, prefix: int) -> list[int]:
    """The part of a sample that near-duplicates are judged by: its prompt, or a base text's first 64 tokens."""
    return tokens[prefix:answer_start] if answer_start > prefix else tokens[prefix : prefix + 64]
