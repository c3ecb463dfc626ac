"""Converts user prompts to the target's tokens."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jinja2 import TemplateError
from torch import Tensor
from transformers.utils.chat_template_utils import get_json_schema

from specalign.common.errors import UserError, in_one_line
from specalign.common.schema import JsonObject
from specalign.common.text import say_once, short
from specalign.folder.chat import note_ignored
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation, is_message
from specalign.rows.shapes import parse_prompt

Messages = Sequence[Mapping[str, Any]]
Tokens = Sequence[int] | Tensor | np.ndarray[Any, Any]
Prompt = str | Messages | Conversation | Tokens | Mapping[str, Any]
"""A user message; a conversation in any shape that a row of `data.prompts` may have; tokens; or a
mapping with `input_ids`."""
Tool = Mapping[str, Any] | Callable[..., Any]
"""A JSON schema, as OpenAI's API takes it, or a function with type hints and a Google-style
docstring."""


def prompt_tokens(
    target: Target, prompt: Prompt, raw: bool = False, tools: Sequence[Tool] | None = None
) -> list[int]:
    """A prompt as the target's tokens, checked.

    Args:
        raw: tokenize a string as plain text, without the chat template.
        tools: declared to the chat template.

    Raises:
        UserError: the prompt is empty, malformed, or as long as the context.
    """
    if isinstance(prompt, str) or _is_conversation(prompt):
        tokens = _text_tokens(target, prompt, raw, tools)
    elif tools:
        raise UserError("tools need a string or messages as the prompt, not tokens")
    else:
        tokens = _read_tokens(prompt, target.vocab_size)
    if not tokens:
        raise UserError("the prompt is empty")
    limit = target.context_limit
    if len(tokens) >= limit:
        size = f"the prompt has {len(tokens)} tokens"
        raise UserError(f"{size}: the target's context of {limit} leaves no room for an answer")
    return tokens


def _is_conversation(prompt: Any) -> bool:
    if isinstance(prompt, Mapping):
        return "input_ids" not in prompt
    messages = isinstance(prompt, Sequence) and any(isinstance(x, Mapping) for x in prompt[:2])
    return messages or isinstance(prompt, Conversation)


def _text_tokens(target: Target, prompt: Any, raw: bool, tools: Sequence[Tool] | None) -> list[int]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError("the prompt is empty")
        with in_one_line("the prompt is not valid Unicode"):
            prompt.encode()
    if raw:
        if not isinstance(prompt, str) or tools:
            raise UserError("raw=True continues a string: messages and tools need the template")
        return target.text_tokens(prompt)
    conversation = prompt
    if tools or not isinstance(prompt, str):
        conversation = _read_conversation(prompt)
        if tools:
            if conversation.tools:
                raise UserError("tools: the conversation already declares its own")
            conversation = replace(conversation, tools=_read_tools(tools))
        if conversation.prompt != conversation and target.has_chat_template:
            what = "a conversation ends with an assistant message"
            say_once(f"note: {what}; the target answers in a new turn")
    try:
        tokens = target.chat_tokens(conversation)
    except TemplateError as error:
        raise UserError(f"the target's chat template rejects these messages: {error}") from None
    if isinstance(conversation, str):
        return tokens
    note_ignored(target, conversation)
    return tokens


def _read_conversation(prompt: Any) -> Conversation:
    """Read as a row of `data.prompts` is; a note names what is not used."""
    parsed = parse_prompt(prompt)
    if parsed.columns:
        say_once(f"note: unused keys in prompts: {', '.join(parsed.columns)}")
    if parsed.later_turns:
        say_once("note: only the first turn in a list of turns is used (pass messages to use all)")
    return parsed.conversation


def _read_tokens(prompt: Any, vocab_size: int) -> list[int]:
    """One row of tokens: a sequence, a tensor or an array, or the `input_ids` of a mapping."""
    if isinstance(prompt, Mapping):
        mask = prompt.get("attention_mask")
        if mask is not None and not np.all(np.asarray(mask)):
            raise UserError("the prompt's attention_mask has zeros: give tokens without padding")
        prompt = prompt["input_ids"]
    try:
        tokens = np.asarray(prompt.tolist() if isinstance(prompt, Tensor) else prompt)
    except ValueError:  # rows of different lengths
        tokens = np.zeros(0)
    if tokens.ndim == 2 and len(tokens) == 1:
        tokens = tokens[0]
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        kinds = "text, messages or one row of tokens (generate_batch takes several)"
        raise UserError(f"the prompt must be {kinds}, not {short(prompt, 60)}")
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocab_size:
            raise UserError(f"prompt token {token} is not within 0..{vocab_size - 1}")
    row: list[int] = tokens.tolist()
    return row


def _read_tools(tools: Any) -> tuple[JsonObject, ...]:
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise UserError(f"tools must be a list of schemas or functions, not {short(tools, 60)}")
    schemas: list[JsonObject] = []
    for tool in tools:
        if isinstance(tool, Mapping):
            schemas.append(dict(tool))
            continue
        if not callable(tool):
            raise UserError(f"a tool is a JSON schema or a function, not {short(tool, 60)}")
        name = getattr(tool, "__name__", "tool")
        with in_one_line(f"tools: can't derive a JSON schema from {name!r}"):
            schemas.append(get_json_schema(tool))
    return tuple(schemas)


def list_prompts(prompts: Any) -> list[Prompt]:
    """The prompts of a batch. Raises UserError for one prompt or for padded rows of tokens."""
    single = isinstance(prompts, str | Mapping | Tensor | np.ndarray)
    single = single or not isinstance(prompts, Iterable)
    found = [] if single else list(prompts)
    first = found[0] if found else None
    if single or (isinstance(first, Mapping) and ("role" in first or is_message(dict(first)))):
        raise UserError(f"generate_batch takes a list of prompts, not {short(prompts, 60)}")
    return found
