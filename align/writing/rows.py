"""The rows of a batch before they are written: what each begins with, at which temperature it is answered, and its batch's seed.

All of it depends on (seed, batch number) alone, whoever writes the rest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

from align.common.errors import UserError, in_one_line
from align.config.recipe import Recipe
from align.folder.chat import Chat, rendered
from align.folder.tokenizer import first_id, text_ids
from align.writing.generation import Row, WriterSettings

_MARK = "\u2402PROMPT\u2402"


class Told(Protocol):
    """What is asked of a target before its weights are: a `Target` has it, and so has an `Outline`."""

    spec: str
    tokenizer: Any
    chat: Chat
    eos_ids: tuple[int, ...]
    vocab_size: int
    context_limit: int

    @property
    def has_chat_template(self) -> bool: ...
    @property
    def hash(self) -> str | None: ...


@dataclass(frozen=True)
class Template:
    """Tokens before a prompt, between a prompt and its answer, and the identity of the template they came from."""

    prefix: tuple[int, ...]
    turn: tuple[int, ...]
    sha256: str


def first_token(target: Told) -> int:
    """What stands in front of a text: the beginning-of-text token, else one that ends a text.

    Raises:
        UserError: the target has neither.
    """
    bos = first_id(target.tokenizer, target.vocab_size, f"target {target.spec!r}")
    if bos is None and not target.eos_ids:
        raise UserError(
            f"target {target.spec!r}: its files name no token that begins a text, and none that ends one"
        )
    return target.eos_ids[0] if bos is None else bos


def chat_template(target: Told) -> Template:
    """The target's own template around one user prompt; for a base model the beginning-of-text token and no turn.

    Raises:
        UserError: the template does without the prompt, fails, or writes a token that the target has not.
    """
    tokenizer = target.tokenizer
    if not target.has_chat_template:
        if target.chat.system is not None:
            raise UserError(f"data.system: target {target.spec!r} has no chat template to put it into")
        return Template((first_token(target),), (), hashlib.sha256(b"").hexdigest())
    with in_one_line(f"target {target.spec!r}: its chat template refuses a user's text"):
        text = rendered(tokenizer, target.chat.messages(_MARK), target.chat.kwargs)
    before, found, after = text.partition(_MARK)
    if not found:
        raise UserError(f"target {target.spec!r}: its chat template does not keep the user's text")
    where, given = f"target {target.spec!r}", target.chat.system or ""
    parts = [tuple(text_ids(tokenizer, part, target.vocab_size, where, given)) for part in (before, after)]
    digest = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
    return Template(parts[0], parts[1], digest)


class Progress(Protocol):
    """Hears of tokens that were drawn or fed, and of rows that have come to their end."""

    def __call__(self, tokens: int, rows: int = 0, /) -> None: ...


def unheard(tokens: int, rows: int = 0) -> None:
    """The progress that nobody watches."""


class Source(Protocol):
    """Who writes the rows of a batch. about: what the manifest says of it beside the settings."""

    about: dict[str, str]

    def write(self, number: int, needed: int, progress: Progress) -> list[Row] | None:
        """The rows of a batch at their ends; None after the last prompt. `needed`: samples that are missing before it: batches
        after this one are begun meanwhile where it can't be enough."""

    def forget(self, number: int) -> None:
        """A batch's samples are on disk."""

    def close(self) -> None:
        """End what still runs."""


@dataclass(frozen=True)
class Plan:
    """All that decides what a batch begins with.

    Args:
        prompts: texts to answer; None = the target writes them.
    """

    recipe: Recipe
    target: Told
    template: Template
    prompts: list[str] | None

    @property
    def settings(self) -> WriterSettings:
        d = self.recipe.data
        return WriterSettings(
            d.prompt_temperature, d.top_p, d.top_k, d.max_prompt_tokens, d.max_answer_tokens
        )

    @property
    def capacity(self) -> int:
        """The longest sample, in tokens."""
        d, t = self.recipe.data, self.template
        longest = len(t.prefix) + d.max_prompt_tokens + len(t.turn) + d.max_answer_tokens
        return min(longest, self.target.context_limit)

    @property
    def prompt_ends(self) -> frozenset[int]:
        """Tokens that end a written prompt."""
        return frozenset((*self.target.eos_ids, *self.template.turn[:1]))

    def rows(self, batch: int) -> list[Row]:
        """The rows of a batch, nothing written yet; none after the last prompt."""
        d, prompts = self.recipe.data, self.prompts
        indices = range(batch * d.batch_size, (batch + 1) * d.batch_size)
        heat = list(d.answer_temperatures)
        if prompts is None:
            chat = bool(self.template.turn)
            openings = self._openings() if chat else []
            rows = [Row(i, heat[i % len(heat)], [], writes_prompt=chat) for i in indices]
            for row in rows if openings else []:  # an opening meets every answer temperature
                row.opening = list(openings[row.index // len(heat) % len(openings)])
            return rows
        rows = []
        for i in indices:
            if i >= len(prompts):
                break
            tokens = self._ids(prompts[i], f"data.prompts, prompt {i + 1}")[: d.max_prompt_tokens]
            forced = tokens + list(self.template.turn)
            rows.append(Row(i, heat[i % len(heat)], forced, writes_prompt=False))
        return rows

    def _ids(self, text: str, key: str) -> list[int]:
        target = self.target
        return text_ids(target.tokenizer, text, target.vocab_size, f"{key}: target {target.spec!r}")

    def _openings(self) -> list[list[int]]:
        """data.prompt_openings as tokens. Raises UserError for one that leaves a prompt no room."""
        d = self.recipe.data
        found = [self._ids(text, "data.prompt_openings") for text in d.prompt_openings]
        for text, tokens in zip(d.prompt_openings, found, strict=True):
            if len(tokens) >= d.max_prompt_tokens:
                raise UserError(
                    f"data.prompt_openings: {text!r} has {len(tokens)} tokens, "
                    f"data.max_prompt_tokens={d.max_prompt_tokens} leaves no room"
                )
        return found


def batch_seed(seed: int, batch: int) -> int:
    """What a batch is drawn with, 63 bits."""
    digest = hashlib.sha256(f"{seed}/{batch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def row_seed(seed: int, row: int, part: str) -> int:
    """What one part of a row, its prompt or its answer, is drawn with where each is drawn alone; 31 bits, which every server takes."""
    digest = hashlib.sha256(f"{seed}/row {row}/{part}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
