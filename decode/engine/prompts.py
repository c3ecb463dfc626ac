"""Prompts as users give them, as the target's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from specalign.common.errors import UserError, in_one_line
from specalign.common.text import say_once, short
from specalign.folder.ignored import find_ignored, note_ignored
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from specalign.rows.shapes import parse_prompt

Messages = Sequence[Mapping[str, Any]]
Tokens = Sequence[int] | Tensor | np.ndarray[Any, Any]
Prompt = str | Messages | Conversation | Tokens | Mapping[str, Any]
"""A user message; a conversation in any shape that a row of `data.prompts` may have, such as a list
of messages or a mapping with `messages` and `tools`; tokens; or what a tokenizer returns, a mapping
with `input_ids`."""
Tool = Mapping[str, Any] | Callable[..., Any]
"""A JSON schema, as OpenAI's API takes it, or a function with type hints and a Google-style
docstring, as transformers takes it."""


def add_tools(prompt: Prompt, tools: Sequence[Tool] | None) -> Prompt:
    """The prompt as a conversation that declares these tools; without tools the prompt itself.

    Raises:
        UserError: tools that are malformed, declared twice, or given with tokens.
    """
    if not tools:
        return prompt
    schemas = read_tools(tools)
    if not isinstance(prompt, str | Conversation) and not _has_messages(prompt):
        raise UserError(
            "tools need a text or messages as the prompt: tokens do not go through the chat "
            "template"
        )
    conversation = _read_conversation(prompt)
    if conversation.tools:
        raise UserError("tools: the conversation declares its own")
    return replace(conversation, tools=schemas)


def read_tools(tools: Sequence[Tool] | None) -> tuple[dict[str, Any], ...]:
    """Tools as JSON schemas. Raises UserError for malformed ones."""
    if not tools:
        return ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise UserError(
            f"tools must be a list of JSON schemas or functions, not {short(tools, 60)}"
        )
    return tuple(map(_read_tool, tools))


def prompt_tokens(
    target: Target, prompt: Prompt, raw: bool = False, ignored: Counter[str] | None = None
) -> list[int]:
    """A prompt as the target's tokens, checked.

    Args:
        raw: tokenize a string as plain text, without the chat template.
        ignored: counts the parts that the chat template leaves out; None = a note names them, once
            in a process.

    Raises:
        UserError: the prompt is empty, malformed, or as long as the context.
    """
    if isinstance(prompt, str):
        _check_text(prompt)
        tokens = target.text_tokens(prompt) if raw else _apply_template(target, prompt)
    elif isinstance(prompt, Conversation) or _has_messages(prompt):
        if raw:
            raise UserError(
                "raw=True continues a string as plain text: messages go through the chat template"
            )
        conversation = _read_conversation(prompt)
        if conversation.prompt != conversation and target.has_chat_template:
            _note(
                "a conversation ends with an assistant message: the target answers in a new turn "
                "after it"
            )
        tokens = _apply_template(target, conversation)
        if ignored is None:
            note_ignored(target, conversation)
        else:
            ignored.update(find_ignored(target, conversation))
    else:
        tokens = [_read_token(token, target.vocab_size) for token in _read_row(prompt)]
    if not tokens:
        raise UserError("the prompt is empty")
    limit = target.context_limit
    if len(tokens) >= limit:
        raise UserError(
            f"the prompt has {len(tokens)} tokens: the target's context of {limit} leaves no room "
            "for an answer"
        )
    return tokens


def _has_messages(prompt: Any) -> bool:
    """Whether it is a conversation: a list of messages, or a mapping without tokens."""
    if isinstance(prompt, Mapping):
        return "input_ids" not in prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return False
    return isinstance(next((entry for entry in prompt if entry is not None), None), Mapping)


def _read_conversation(prompt: Any) -> Conversation:
    """A conversation, read as a row of `data.prompts` is; a note names what is not used. Raises
    UserError as `parse_prompt`."""
    parsed = parse_prompt(prompt)
    if parsed.columns:
        _note(f"keys of prompts not used: {', '.join(parsed.columns)}")
    if parsed.later_turns:
        _note("of a list of turns the first alone is used (a list of messages keeps all)")
    return parsed.conversation


def _note(text: str) -> None:
    """Print a note once in a process."""
    say_once(f"note: {text}")


def _read_row(prompt: Any) -> Sequence[Any]:
    """The tokens of a prompt: a sequence, a tensor or array of one row, or the `input_ids` of a
    mapping.

    Raises:
        UserError: anything else, several rows, or padding.
    """
    if isinstance(prompt, Mapping):
        mask = prompt.get("attention_mask")
        if mask is not None and not np.all(np.asarray(mask)):
            raise UserError(
                "the prompt's attention_mask has zeros: give its tokens without padding"
            )
        prompt = prompt["input_ids"]
    if isinstance(prompt, Tensor | np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or not len(prompt):
        raise UserError(f"the prompt must be text, messages or tokens, not {short(prompt, 60)}")
    if isinstance(prompt[0], list | tuple | Tensor | np.ndarray) and np.ndim(prompt[0]) > 0:
        if len(prompt) > 1:
            raise UserError(
                "the prompt holds several rows of tokens: generate takes one, generate_batch "
                "several"
            )
        return _read_row(prompt[0])
    if isinstance(prompt[0], str):
        raise UserError("the prompt is a list of texts: generate takes one, generate_batch several")
    return prompt


def _read_token(token: Any, vocab_size: int) -> int:
    if isinstance(token, np.generic | Tensor):
        token = token.item()
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise UserError(
            f"prompt token {short(token, 60)} is not a whole number within 0..{vocab_size - 1}"
        )
    return token


def _read_tool(tool: Any) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        return dict(tool)
    if not callable(tool):
        raise UserError(f"a tool is a JSON schema or a function, not {short(tool, 60)}")
    from transformers.utils.chat_template_utils import get_json_schema

    name = getattr(tool, "__name__", "tool")
    with in_one_line(f"tools: no JSON schema can be made of {name!r}"):
        schema: dict[str, Any] = get_json_schema(tool)
    return schema


def _check_text(text: str) -> None:
    if not text.strip():
        raise UserError("the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not valid Unicode at character {error.start}") from None


def _apply_template(target: Target, prompt: str | Conversation) -> list[int]:
    from jinja2 import TemplateError

    try:
        return target.chat_tokens(prompt)
    except TemplateError as error:
        raise UserError(f"the target's chat template refuses these messages: {error}") from None
