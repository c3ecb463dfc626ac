"""The rows of a batch before generation. They depend only on the seed and the batch number."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from align.config.recipe import Recipe
from align.writing.outline import TargetInfo
from align.writing.prompts import TOO_LONG, Dropped, PromptReader, first_turn
from align.writing.template import Template
from specalign.common.errors import UserError
from specalign.folder.tokenizer import text_ids
from specalign.rows.conversation import Conversation, Message

EMPTY_PROMPT = "empty prompt"


@dataclass
class Row:
    """One sample that is being written.

    Attributes:
        forced: tokens still to be fed before the answer; with a given prompt all of them.
        opening: tokens that its written prompt has to begin with.
        answer_start: where the answer begins in `tokens`; -1 before it does.
        broken: why the row is dropped; "" = it is not.
        conversation: what is answered, if it is known as text.
        later: given messages after the answer.
        turn: the number of answers before this one.
        prompt_ended: whether a written prompt that is still to be rendered reached its end.
    """

    index: int
    answer_temperature: float
    forced: list[int]
    writes_prompt: bool
    opening: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    answer_start: int = -1
    done: bool = False
    broken: str = ""
    conversation: Conversation | None = None
    later: tuple[Message, ...] = ()
    turn: int = 0
    prompt_ended: bool = False

    def drop(self, reason: str) -> None:
        self.broken = reason
        self.done = True


class Source:
    """Writes the rows of batches. about: what the manifest records besides the settings."""

    about: Mapping[str, str] = {}

    def write(self, number: int) -> list[Row] | None:
        """The finished rows of a batch; None after the last prompt."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop what is still running."""


@dataclass(frozen=True)
class Plan:
    """Everything that determines how a batch begins. `prompts`: None = the target generates
    them."""

    recipe: Recipe
    target: TargetInfo
    template: Template
    prompts: Sequence[Conversation] | None

    @cached_property
    def reader(self) -> PromptReader:
        return PromptReader(self.recipe, self.target, self.template)

    @property
    def longest_prompt(self) -> int:
        """Tokens of a written prompt; if it is rendered again, its end is written too."""
        limit = self.recipe.data.prompt_limit
        return limit + self.template.bare + 1 if self.template.joined else limit

    @property
    def capacity(self) -> int:
        """The longest sample, in tokens."""
        d, bare = self.recipe.data, self.template.bare
        after = max(d.max_answer_tokens, bare + 1) if self.template.joined else d.max_answer_tokens
        return min(bare + d.prompt_limit + after, self.target.context_limit)

    @cached_property
    def prompt_ends(self) -> frozenset[int]:
        """Tokens that end a written prompt."""
        return frozenset(self.target.eos_ids) | self.template.ends

    def rows(self, batch: int) -> list[Row]:
        """The unwritten rows of a batch; none after the last prompt. Unusable prompts are done and
        broken."""
        d = self.recipe.data
        indices = range(batch * d.batch_size, (batch + 1) * d.batch_size)
        if self.prompts is not None:
            given = [i for i in indices if i < len(self.prompts)]
            return [self._prompted_row(i, self.prompts[i]) for i in given]
        writes_prompt = bool(self.template.turn or self.template.stop)
        rows = [Row(i, self._temperature(i), [], writes_prompt) for i in indices]
        openings = self._openings() if writes_prompt else []
        for row in rows if openings else ():  # each opening meets every answer temperature
            number = row.index // len(d.answer_temperatures)
            row.opening = list(openings[number % len(openings)])
        return rows

    def _temperature(self, index: int) -> float:
        temperatures = self.recipe.data.answer_temperatures
        return temperatures[index % len(temperatures)]

    def _prompted_row(self, index: int, conversation: Conversation) -> Row:
        row = Row(index, self._temperature(index), [], writes_prompt=False)
        where = f"data.prompts, prompt {index + 1}"
        try:
            row.conversation, row.forced = self.reader.read(conversation.prompt, where)
            if self.recipe.data.turns == "all":
                asked, row.later = first_turn(row.conversation.messages)
                self._ask(row, Conversation(asked, row.conversation.tools))
        except Dropped as reason:
            row.drop(str(reason))
        return row

    def advance(self, row: Row) -> bool:
        """Prepare a finished row for what is written next; False if there is nothing.

        That is the answer to a written prompt which had to be rendered or which serving would
        tokenize in another way, or the next answer of a conversation (`data.turns=all`).
        """
        if row.broken:
            return False
        try:
            if row.answer_start < 0:
                return self._ask(row, self._read_written(row))
            if row.writes_prompt and self.template.turn:
                return self._ask_again(row)
            if not row.later or row.conversation is None:
                return False
            answer = {"role": "assistant", "content": self._text(row.tokens[row.answer_start :])}
            asked, row.later = first_turn(row.later)
            messages = (*row.conversation.messages, answer, *asked)
            row.turn += 1
            return self._ask(row, Conversation(messages, row.conversation.tools))
        except Dropped as reason:
            row.drop(str(reason))
            return False

    def _read_written(self, row: Row) -> Conversation:
        """The row's written prompt. Raises Dropped."""
        text = self._text(row.tokens[len(self.template.prefix) :])
        ended = row.prompt_ended
        if self.template.stop:
            text, stop, _ = text.partition(self.template.stop)
            ended = ended or bool(stop)
        if self.template.joined:
            text = text.strip()
        if not ended:
            raise Dropped(TOO_LONG)
        if not text.strip():
            raise Dropped(EMPTY_PROMPT)
        return Conversation.from_text(text)

    def _ask_again(self, row: Row) -> bool:
        """Have a written prompt answered again if serving feeds other tokens. False if it does
        not."""
        prompt = row.tokens[: row.answer_start]
        text = self._text(prompt[len(self.template.prefix) : len(prompt) - len(self.template.turn)])
        row.conversation = Conversation.from_text(text)
        if self.reader.tokens(row.conversation) == prompt:
            return False
        if not text.strip():
            raise Dropped(EMPTY_PROMPT)
        return self._ask(row, row.conversation)

    def _ask(self, row: Row, conversation: Conversation) -> bool:
        """Have a conversation answered. Raises Dropped if it is unusable."""
        row.conversation = conversation
        row.tokens = []
        row.answer_start = -1
        row.writes_prompt = False
        row.forced = self.reader.tokens(conversation)
        if not self.reader.fits(row.forced):
            raise Dropped(TOO_LONG)
        row.done = False
        return True

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.target.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _openings(self) -> list[list[int]]:
        """data.prompt_openings as tokens. Raises UserError for one that fills the whole prompt."""
        d, template, target = self.recipe.data, self.template, self.target
        where = "data.prompt_openings"
        openings = list[list[int]]()
        for text in d.prompt_openings:
            if template.joined and text:
                rendered = self.reader.tokens(Conversation.from_text(text), where)
                tokens = rendered[len(template.prefix) : len(rendered) - len(template.turn)]
            else:
                source = f"{where}: target {target.spec!r}"
                tokens = text_ids(target.tokenizer, text, target.vocab_size, source)
            if len(tokens) >= d.prompt_limit:
                raise UserError(
                    f"{where}: {text!r} has {len(tokens)} tokens, "
                    f"data.max_prompt_tokens={d.prompt_limit} leaves no room"
                )
            openings.append(tokens)
        return openings


def batch_seed(seed: int, batch: int) -> int:
    """The 63-bit seed of a batch."""
    digest = hashlib.sha256(f"{seed}/{batch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def row_seed(seed: int, row: int, part: str) -> int:
    """The seed of a row's prompt or answer on a server; 31 bits, which every server takes."""
    digest = hashlib.sha256(f"{seed}/row {row}/{part}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
