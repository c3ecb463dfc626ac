"""A conversation: the messages of one request and the tools that the model may call. Every reader of prompts returns this type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""role: system, developer, user, assistant or tool. content: a string, "" where there is none. The keys that chat templates
read beside them (tool_calls, tool_call_id, name, reasoning_content) are kept."""

TEXT_PARTS = (None, "text", "input_text", "output_text")
"""Types of parts that hold text; one without a type does as well."""
ROLES = {
    "system": "system sys",
    "developer": "developer",
    "user": "user human prompter usr customer end_user instruction question",
    "assistant": "assistant gpt model bot chatbot ai chatgpt answer response output completion function_call tool_call",
    "tool": "tool function ipython observation tool_response tool_result function_response",
}
"""How roles are spelled, any case: by the role that chat templates know."""
ROLE_OF = {spelling: role for role, spellings in ROLES.items() for spelling in spellings.split()}


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and the tools declared for them (JSON schemas, as chat templates take them)."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    @classmethod
    def from_text(cls, text: str) -> Conversation:
        """A single user message."""
        return cls(({"role": "user", "content": text},))

    @property
    def text(self) -> str | None:
        """The user's text where the conversation is that alone, else None."""
        text: str = self.messages[0]["content"] if self.messages else ""
        return text if self == Conversation.from_text(text) else None

    @property
    def prompt(self) -> Conversation:
        """The conversation without the assistant messages that end it: what the target is asked to continue."""
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        return Conversation(self.messages[:end], self.tools)


def fold_role(spelled: Any) -> str:
    """A role without capitals, spaces and hyphens, as `ROLE_OF` has it."""
    return str(spelled).strip().casefold().replace("-", "_").replace(" ", "_")
