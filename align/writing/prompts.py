"""Given conversations as prompts: their tokens, those that are too long or refused, and what is cut."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from align.config.recipe import Recipe
from align.folder.chat import Chat, chat_ids
from align.folder.rendering import TemplateRefusal
from align.rows.conversation import Conversation, Message
from align.writing.generation import common_start
from align.writing.template import Template, Told

TOO_LONG = "prompt too long"
REFUSED = "prompt refused by the chat template"
_PROBES = ("Hello", "1", "é")


@dataclass(frozen=True)
class Prompt:
    """A conversation to be answered.

    ids: its tokens.
    length: tokens beyond the bare template, before anything was cut.
    broken: why it is left out; "" = it is not. reason: what the chat template said.
    """

    conversation: Conversation
    ids: list[int]
    length: int = 0
    broken: str = ""
    reason: str = ""


class PromptReader:
    """Makes prompts of conversations, as decoding prompts with them.

    Args:
        template: the target's own, with the date of its clock.
    """

    def __init__(self, recipe: Recipe, target: Told, template: Template) -> None:
        self.recipe, self.target, self.template = recipe, target, template
        self.chat: Chat = replace(target.chat, date=template.date)
        self.limit = min(recipe.data.prompt_limit, target.context_limit - template.bare - 1)

    def tokens(self, conversation: Conversation, where: str = "") -> list[int]:
        """A conversation's tokens. Raises as `chat_ids`."""
        target = self.target
        return chat_ids(target.tokenizer, conversation, self.chat, target.vocab_size, target.spec, where)

    def length(self, conversation: Conversation) -> int:
        """Its tokens beyond the bare template."""
        return len(self.tokens(conversation)) - self.template.bare

    def read(self, conversation: Conversation, where: str = "") -> Prompt:
        """A conversation as a prompt, cut where it is too long and the recipe says so.

        Raises:
            UserError: a token that the target does not have; the line begins with `where`.
        """
        try:
            ids = self.tokens(conversation, where)
            length = len(ids) - self.template.bare
            if length > self.limit and self.recipe.data.long_prompts == "cut":
                conversation, ids = self._cut(conversation, ids)
            if len(ids) - self.template.bare > self.limit:
                return Prompt(conversation, [], length, TOO_LONG)
            return Prompt(conversation, ids, length)
        except TemplateRefusal as refusal:
            return Prompt(conversation, [], 0, REFUSED, refusal.reason)

    def text_start(self, prompt: Prompt) -> int:
        """Where the first user text begins among the tokens: behind a system prompt and tools, which many conversations share."""
        conversation, ids = prompt.conversation, prompt.ids
        usual = list(self.template.prefix)
        if conversation.messages[0]["role"] == "user" and not conversation.tools:
            return len(usual) if ids[: len(usual)] == usual else 0
        return len(common_start([ids, *self._others(conversation)]))

    def _others(self, conversation: Conversation) -> Iterator[list[int]]:
        """The tokens of conversations that differ in the first user text."""
        messages = conversation.messages
        first = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages) - 1)
        for text in _PROBES:
            changed = {**messages[first], "content": text}
            yield self.tokens(
                replace(conversation, messages=(*messages[:first], changed, *messages[first + 1 :]))
            )

    def _cut(self, conversation: Conversation, ids: list[int]) -> tuple[Conversation, list[int]]:
        """The conversation without its oldest turns, then without the start of its longest message, until it fits; its tokens."""
        if not self.target.has_chat_template:  # a text that is continued
            return conversation, ids[: self.template.bare + self.limit]
        while self.length(conversation) > self.limit and (shorter := without_oldest_turn(conversation)):
            conversation = shorter
        tried = set[int]()
        while self.length(conversation) > self.limit and len(tried) < len(conversation.messages):
            place = max(
                (i for i in range(len(conversation.messages)) if i not in tried),
                key=lambda i: len(conversation.messages[i]["content"]),
            )
            tried.add(place)
            conversation = self._shorten(conversation, place)
        return conversation, self.tokens(conversation)

    def _shorten(self, conversation: Conversation, place: int) -> Conversation:
        """With the longest end of a message that fits; where none does, with that message empty but for its last word."""
        text = conversation.messages[place]["content"]
        starts = _word_starts(text)

        def fits(start: int) -> bool:
            return self.length(with_content(conversation, place, text[start:])) <= self.limit

        chosen = bisect_left(starts, True, key=fits)
        return with_content(conversation, place, text[starts[min(chosen, len(starts) - 1)] :])


def _word_starts(text: str) -> list[int]:
    """Where a text may be cut: at its words, or anywhere in one that has none."""
    found = [i for i in range(len(text)) if not text[i].isspace() and (i == 0 or text[i - 1].isspace())]
    return found if len(found) > 4 else [*range(max(1, len(text)))]


def with_content(conversation: Conversation, place: int, content: str) -> Conversation:
    """With another content of one message."""
    messages = list(conversation.messages)
    messages[place] = {**messages[place], "content": content}
    return replace(conversation, messages=tuple(messages))


def without_oldest_turn(conversation: Conversation) -> Conversation | None:
    """Without its first user message and what follows up to the next one; None where only one is left. What stands before, a system
    prompt, stays."""
    users = [i for i, m in enumerate(conversation.messages) if m["role"] == "user"]
    if len(users) < 2:
        return None
    messages = conversation.messages
    lead = tuple(m for m in messages[: users[0]] if m["role"] != "assistant")
    return replace(conversation, messages=(*lead, *messages[users[1] :]))


def first_turn(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The messages up to the first answer that the target can write, and those behind that answer.

    An answer that calls a tool stays: what the tool returned, which follows, is its result.
    """
    for i in range(1, len(messages)):
        answers = messages[i]["role"] == "assistant" and not messages[i].get("tool_calls")
        if answers and messages[i - 1]["role"] in ("user", "tool"):
            behind = i
            while behind < len(messages) and messages[behind]["role"] == "assistant":
                behind += 1
            return messages[:i], messages[behind:]
    return messages, ()
