"""The rows of a batch before they are written: what each begins with, at which temperature it is answered, and its batch's seed.

All of it depends on (seed, batch number) alone, whoever writes the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from align.common.errors import UserError
from align.config.recipe import Recipe
from align.folder.rendering import TemplateRefusal
from align.folder.tokenizer import text_ids
from align.rows.conversation import Conversation
from align.writing.generation import Row, WriterSettings
from align.writing.prompts import REFUSED, TOO_LONG, PromptReader, first_turn
from align.writing.template import Template, Told


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
        prompts: conversations to answer; None = the target writes its prompts.
    """

    recipe: Recipe
    target: Told
    template: Template
    prompts: Sequence[Conversation] | None

    @cached_property
    def reader(self) -> PromptReader:
        """Turns conversations into tokens."""
        return PromptReader(self.recipe, self.target, self.template)

    @property
    def settings(self) -> WriterSettings:
        d, t = self.recipe.data, self.template
        longest = d.prompt_limit + (t.bare + 1 if t.joined else 0)  # its end is among them
        return WriterSettings(d.prompt_temperature, d.top_p, d.top_k, longest, d.max_answer_tokens)

    @property
    def capacity(self) -> int:
        """The longest sample, in tokens."""
        d, t = self.recipe.data, self.template
        behind = max(d.max_answer_tokens, t.bare + 1) if t.joined else d.max_answer_tokens
        return min(t.bare + d.prompt_limit + behind, self.target.context_limit)

    @property
    def turn(self) -> tuple[int, ...]:
        """Tokens that a writer puts behind a written prompt; () where `advance` renders it first."""
        return () if self.template.joined else self.template.turn

    @property
    def prompt_ends(self) -> frozenset[int]:
        """Tokens that end a written prompt."""
        return frozenset(self.target.eos_ids) | self.template.ends

    def rows(self, batch: int) -> list[Row]:
        """The rows of a batch, nothing written yet; none after the last prompt. Those whose prompt can't be used are done, and broken."""
        d, prompts = self.recipe.data, self.prompts
        indices = range(batch * d.batch_size, (batch + 1) * d.batch_size)
        if prompts is not None:
            return [self._given(i, prompts[i]) for i in indices if i < len(prompts)]
        chat = bool(self.template.turn or self.template.stop)
        openings = self._openings() if chat else []
        rows = [Row(i, self._temperature(i), [], chat, text_start=len(self.template.prefix)) for i in indices]
        for row in rows if openings else []:  # an opening meets every answer temperature
            row.opening = list(openings[row.index // len(d.answer_temperatures) % len(openings)])
        return rows

    def _temperature(self, index: int) -> float:
        temperatures = self.recipe.data.answer_temperatures
        return temperatures[index % len(temperatures)]

    def _given(self, index: int, conversation: Conversation) -> Row:
        row = Row(index, self._temperature(index), [], writes_prompt=False)
        prompt = self.reader.read(conversation.prompt, f"data.prompts, prompt {index + 1}")
        if prompt.broken:
            row.done, row.broken = True, prompt.broken
            return row
        row.text_start = self.reader.text_start(prompt)
        row.conversation = prompt.conversation
        row.forced = prompt.ids
        if self.recipe.data.turns == "all":
            asked, row.later = first_turn(prompt.conversation.messages)
            row.conversation = Conversation(asked, prompt.conversation.tools)
            self._ask(row)
        return row

    def advance(self, row: Row) -> bool:
        """Make a row that has come to its end ready for what is written next, where there is something: the answer to a written prompt
        that had to be rendered, the same where serving would tokenise it in another way than the target wrote it, or the next answer of
        a conversation (`data.turns=all`)."""
        if row.broken:
            return False
        if row.answer_start < 0:
            return self._ask_written(row)
        if row.writes_prompt and self.template.turn:
            return self._ask_again(row)
        if not row.later or row.conversation is None:
            return False
        answer = self._text(row.tokens[row.answer_start :])
        messages = (*row.conversation.messages, {"role": "assistant", "content": answer}, *row.later)
        done = len(row.conversation.messages) + 1
        asked, row.later = first_turn(messages[done:])
        row.conversation = Conversation((*messages[:done], *asked), row.conversation.tools)
        row.turn += 1
        return self._ask(row)

    def _ask_written(self, row: Row) -> bool:
        """The row's written prompt, through the template. False where it is none."""
        written, stop = self._text(row.tokens[len(self.template.prefix) :]), self.template.stop
        text, ended, _ = written.partition(stop) if stop else (written, "", "")
        text = text.strip()
        if not (ended or row.prompt_ended):
            row.broken = TOO_LONG
        elif not text:
            row.broken = "empty prompt"
        if row.broken:
            return False
        row.conversation = Conversation.from_text(text)
        return self._ask(row)

    def _ask_again(self, row: Row) -> bool:
        """Have a written prompt answered once more where its tokens are not those that serving feeds. False where they are."""
        prompt = row.tokens[: row.answer_start]
        text = self._text(prompt[len(self.template.prefix) : len(prompt) - len(self.template.turn)])
        conversation = Conversation.from_text(text)
        try:
            if self.reader.tokens(conversation) == prompt:
                return False
        except TemplateRefusal:
            row.broken = REFUSED
            return False
        if not text.strip():
            row.broken = "empty prompt"
            return False
        row.conversation = conversation
        return self._ask(row)

    def _ask(self, row: Row) -> bool:
        """Have the row's conversation answered. False where it can't be."""
        assert row.conversation is not None
        row.tokens, row.answer_start, row.writes_prompt = [], -1, False
        try:
            row.forced = self.reader.tokens(row.conversation)
        except TemplateRefusal:
            row.broken = REFUSED
        if len(row.forced) - self.template.bare > self.reader.limit:
            row.broken = TOO_LONG
        row.done = bool(row.broken)
        return not row.done

    def _text(self, tokens: Sequence[int]) -> str:
        found: str = self.target.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return found

    def _openings(self) -> list[list[int]]:
        """data.prompt_openings as tokens. Raises UserError for one that leaves a prompt no room."""
        d = self.recipe.data
        found = [self._opening(text) for text in d.prompt_openings]
        for text, tokens in zip(d.prompt_openings, found, strict=True):
            if len(tokens) >= d.prompt_limit:
                raise UserError(
                    f"data.prompt_openings: {text!r} has {len(tokens)} tokens, "
                    f"data.max_prompt_tokens={d.prompt_limit} leaves no room"
                )
        return found

    def _opening(self, text: str) -> list[int]:
        target, template = self.target, self.template
        if template.joined and text:
            whole = self.reader.tokens(Conversation.from_text(text), "data.prompt_openings")
            return whole[len(template.prefix) : len(whole) - len(template.turn)]
        where = f"data.prompt_openings: target {target.spec!r}"
        return text_ids(target.tokenizer, text, target.vocab_size, where)


def batch_seed(seed: int, batch: int) -> int:
    """What a batch is drawn with, 63 bits."""
    digest = hashlib.sha256(f"{seed}/{batch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def row_seed(seed: int, row: int, part: str) -> int:
    """What one part of a row, its prompt or its answer, is drawn with where each is drawn alone; 31 bits, which every server takes."""
    digest = hashlib.sha256(f"{seed}/row {row}/{part}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
