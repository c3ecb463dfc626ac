"""The messages of one request and its tools. Every reader of prompts returns this type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""role: system, developer, user, assistant or tool. content: a string, "" if there is none. Keys
that chat templates read (tool_calls, tool_call_id, name, reasoning_content) are kept."""

ROLES = {
    "system": "system sys",
    "developer": "developer",
    "user": "user human prompter usr customer end_user instruction question",
    "assistant": "assistant gpt model bot chatbot ai chatgpt answer response output completion "
    "function_call tool_call",
    "tool": "tool function ipython observation tool_response tool_result function_response",
}
"""Spellings in data sets by the role that chat templates know."""
ROLE_OF = {spelling: role for role, spellings in ROLES.items() for spelling in spellings.split()}


Tool = dict[str, Any]
"""A tool's JSON schema."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and the tools declared for them as JSON schemas."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    @classmethod
    def from_text(cls, text: str) -> Conversation:
        """A single user message."""
        return cls(({"role": "user", "content": text},))

    @property
    def text(self) -> str | None:
        """The user's text if the conversation is one plain user message, else None."""
        text: str = self.messages[0]["content"] if self.messages else ""
        return text if self == Conversation.from_text(text) else None

    @property
    def prompt(self) -> Conversation:
        """The conversation without trailing assistant messages: what the target continues."""
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        return Conversation(self.messages[:end], self.tools)


def fold_role(spelling: object) -> str:
    """A role in the spelling of `ROLE_OF`: lower case, underscores for spaces and hyphens."""
    return str(spelling).strip().casefold().replace("-", "_").replace(" ", "_")
