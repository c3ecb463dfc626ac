"""Tokenizes given conversations as prompts, and shortens those that are too long."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, replace

from align.config.recipe import Recipe
from align.writing.outline import TargetInfo
from align.writing.template import Template, common_start
from specalign.common.text import say_once
from specalign.folder.chat import Chat, chat_ids
from specalign.folder.rendering import TemplateRefusal
from specalign.folder.template_notes import note_ignored
from specalign.rows.conversation import Conversation, Message

TOO_LONG = "prompt too long"
REFUSED = "prompt rejected by the chat template"
_OTHER_TEXTS = ("Hello", "1", "é")


@dataclass(frozen=True)
class PromptTokens:
    """A conversation to answer. `broken`: why it is dropped; "" = it is not."""

    conversation: Conversation
    ids: list[int]
    broken: str = ""


class PromptReader:
    """Turns conversations into prompts, exactly as decoding does."""

    def __init__(self, recipe: Recipe, target: TargetInfo, template: Template) -> None:
        self.recipe, self.target, self.template = recipe, target, template
        self.chat: Chat = replace(target.chat, date=template.date)
        self.limit = min(recipe.data.prompt_limit, target.context_limit - template.bare - 1)

    def tokens(self, conversation: Conversation, where: str = "") -> list[int]:
        """A conversation's tokens. Raises as `chat_ids`."""
        target = self.target
        return chat_ids(
            target.tokenizer, conversation, self.chat, target.vocab_size, target.spec, where
        )

    def _fits(self, conversation: Conversation) -> bool:
        return len(self.tokens(conversation)) - self.template.bare <= self.limit

    def read(self, conversation: Conversation, where: str = "") -> PromptTokens:
        """A conversation as a prompt, cut if it is too long and the recipe asks for it. Raises
        UserError: a token that the target lacks; the message begins with `where`."""
        bare = self.template.bare
        try:
            ids = self.tokens(conversation, where)
            if len(ids) - bare > self.limit and self.recipe.data.long_prompts == "cut":
                conversation, ids = self._cut(conversation, ids)
                limit = f"data.max_prompt_tokens={self.limit}"
                say_once(f"note: prompts longer than {limit} are cut (data.long_prompts=cut)")
        except TemplateRefusal as refusal:
            say_once(f"note: {refusal}")
            return PromptTokens(conversation, [], REFUSED)
        if len(ids) - bare > self.limit:
            return PromptTokens(conversation, [], TOO_LONG)
        note_ignored(self.target, conversation)
        return PromptTokens(conversation, ids)

    def text_start(self, prompt: PromptTokens) -> int:
        """Where the first user text begins, after system prompt and tools, which prompts may
        share."""
        messages = prompt.conversation.messages
        if messages[0]["role"] == "user" and not prompt.conversation.tools:
            prefix = list(self.template.prefix)
            return len(prefix) if prompt.ids[: len(prefix)] == prefix else 0
        users = (i for i, message in enumerate(messages) if message["role"] == "user")
        first = next(users, len(messages) - 1)
        others = [_replace_content(prompt.conversation, first, text) for text in _OTHER_TEXTS]
        return len(common_start([prompt.ids, *map(self.tokens, others)]))

    def _cut(self, conversation: Conversation, ids: list[int]) -> tuple[Conversation, list[int]]:
        """Drop the oldest turns, then the start of the longest messages, until it fits."""
        if not self.target.has_chat_template:  # a text to continue
            return conversation, ids[: self.template.bare + self.limit]
        while not self._fits(conversation):
            shorter = _without_oldest_turn(conversation)
            if shorter is None:
                break
            conversation = shorter
        lengths = [len(message["content"]) for message in conversation.messages]
        for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
            if not self._fits(conversation):
                conversation = self._shorten(conversation, place)
        return conversation, self.tokens(conversation)

    def _shorten(self, conversation: Conversation, place: int) -> Conversation:
        """Keep the longest end of a message that fits, at least its last word; of a text of hardly
        any words, the last character."""
        text = conversation.messages[place]["content"]
        starts = [found.start() for found in re.finditer(r"\S+", text)]
        if len(starts) <= 4:
            starts = [*range(max(1, len(text)))]

        def fits(start: int) -> bool:
            return self._fits(_replace_content(conversation, place, text[start:]))

        chosen = min(bisect_left(starts, True, key=fits), len(starts) - 1)
        return _replace_content(conversation, place, text[starts[chosen] :])


def _replace_content(conversation: Conversation, place: int, content: str) -> Conversation:
    """The conversation with another content of one message."""
    messages = list(conversation.messages)
    messages[place] = {**messages[place], "content": content}
    return replace(conversation, messages=tuple(messages))


def _without_oldest_turn(conversation: Conversation) -> Conversation | None:
    """Without the first user message and its answers; None if there is only one. A system prompt
    stays."""
    messages = conversation.messages
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(users) < 2:
        return None
    lead = tuple(message for message in messages[: users[0]] if message["role"] != "assistant")
    return replace(conversation, messages=(*lead, *messages[users[1] :]))


def first_turn(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The messages before the first answer that the target can write, and those after it. An answer
    that calls a tool stays, as the tool's result follows it."""
    for i in range(1, len(messages)):
        is_answer = messages[i]["role"] == "assistant" and not messages[i].get("tool_calls")
        if is_answer and messages[i - 1]["role"] in ("user", "tool"):
            after = i
            while after < len(messages) and messages[after]["role"] == "assistant":
                after += 1
            return messages[:i], messages[after:]
    return messages, ()
