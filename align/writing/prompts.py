"""Tokenizes given conversations as prompts, and shortens those that are too long."""

from dataclasses import replace

from align.config.recipe import Recipe
from align.writing.outline import TargetInfo
from align.writing.template import Template
from specalign.common.text import say_once
from specalign.folder.chat import chat_ids, note_ignored
from specalign.folder.rendering import TemplateRefusal
from specalign.rows.conversation import Conversation, Message

TOO_LONG = "prompt too long"
REFUSED = "prompt rejected by the chat template"


class Dropped(Exception):
    """A prompt that can't be answered; the message is the reason that is counted."""


class PromptReader:
    """Turns conversations into prompts, exactly as decoding does."""

    def __init__(self, recipe: Recipe, target: TargetInfo, template: Template) -> None:
        self.recipe, self.target, self.bare = recipe, target, template.bare
        self.chat = replace(target.chat, date=template.date)
        self.limit = min(recipe.data.prompt_limit, target.context_limit - template.bare - 1)

    def tokens(self, conversation: Conversation, where: str = "") -> list[int]:
        """A conversation's tokens. Raises Dropped if the template refuses it; UserError: a token
        that the target lacks; the message begins with `where`."""
        target = self.target
        try:
            return chat_ids(
                target.tokenizer, conversation, self.chat, target.vocab_size, target.spec, where
            )
        except TemplateRefusal as refusal:
            say_once(f"note: {refusal}")
            raise Dropped(REFUSED) from None

    def read(self, conversation: Conversation, where: str = "") -> tuple[Conversation, list[int]]:
        """A conversation and its tokens, cut if it is too long and the recipe asks for it. Raises
        as `tokens` does, and Dropped if it is too long."""
        ids = self.tokens(conversation, where)
        if not self.fits(ids) and self.recipe.data.long_prompts == "cut":
            conversation, ids = self._cut(conversation, ids)
            limit = f"data.max_prompt_tokens={self.limit}"
            say_once(f"note: prompts longer than {limit} are cut (data.long_prompts=cut)")
        if not self.fits(ids):
            raise Dropped(TOO_LONG)
        note_ignored(self.target, conversation)
        return conversation, ids

    def fits(self, ids: list[int]) -> bool:
        """Whether a prompt is within the limit, which does not count the template."""
        return len(ids) - self.bare <= self.limit

    def _cut(self, conversation: Conversation, ids: list[int]) -> tuple[Conversation, list[int]]:
        """Drop the oldest turns until it fits; without a chat template, the end of the text."""
        if not self.target.has_chat_template:  # a text to continue
            return conversation, ids[: self.bare + self.limit]
        while not self.fits(self.tokens(conversation)):
            shorter = _without_oldest_turn(conversation)
            if shorter is None:
                break
            conversation = shorter
        return conversation, self.tokens(conversation)


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
