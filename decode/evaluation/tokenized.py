"""Tokenizes a suite's prompts for the target."""

from collections.abc import Sequence

from decode.engine.prompts import prompt_tokens
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.common.text import plural
from specalign.folder.chat import describe_ignored
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from specalign.suites.long import CHARACTERS, shorten
from specalign.suites.prompt import Prompt
from specalign.suites.sources import Loaded

TokenizedPrompts = list[tuple[Prompt, list[int]]]


def tokenize_prompts(
    target: Target, prompts: Sequence[Prompt]
) -> tuple[TokenizedPrompts, list[str]]:
    """Prompts with their tokens, and a line for each one that the target can't take (too long,
    refused by its template)."""
    fitting: TokenizedPrompts = []
    refused: list[str] = []
    for prompt in prompts:
        try:
            fitting.append((prompt, tokenize_prompt(target, prompt)))
        except UserError as error:
            refused.append(f"{prompt.id}: {error}")
    return fitting, refused


def tokenize_prompt(target: Target, prompt: Prompt) -> list[int]:
    """A prompt's tokens, cut to at most `prompt.cut` of them. Raises UserError as `prompt_tokens`
    does, or for a text that is too short to be cut."""
    if prompt.cut is None:
        return prompt_tokens(target, prompt.content, prompt.raw)
    content, most = str(prompt.content), prompt.cut
    high = CHARACTERS * most
    while (found := len(target.chat_tokens(shorten(content, high)))) < most:
        if high >= len(content):
            raise UserError(f"too little text: {found} of {most} tokens")
        high *= 2
    low = high if found == most else 0
    while high - low > max(1, most // 64):
        middle = (low + high) // 2
        if len(target.chat_tokens(shorten(content, middle))) <= most:
            low = middle
        else:
            high = middle
    if low == 0:
        raise UserError(f"a context of {most} tokens leaves no room for a text")
    return prompt_tokens(target, shorten(content, low))


def continue_conversation(
    target: Target, messages: Sequence[JsonObject], answers: Sequence[str]
) -> list[int]:
    """The tokens of a later turn: the user's messages, with the target's answer before each of the
    last ones. Raises UserError as `prompt_tokens` does."""
    first = len(messages) - len(answers)
    conversation = list(messages[:first])
    for answer, message in zip(answers, messages[first:], strict=True):
        conversation += [{"role": "assistant", "content": answer}, message]
    return prompt_tokens(target, conversation)


def tokenize_suites(
    target: Target, suites: Sequence[Loaded]
) -> tuple[dict[str, TokenizedPrompts], list[str]]:
    """Each suite's prompts with their tokens, and a line for each suite with prompts that the
    target can't take, or whose tools it ignores. Raises UserError if it can take none."""
    tokenized: dict[str, TokenizedPrompts] = {}
    lines: list[str] = []
    for suite in suites:
        tokenized[suite.name], refused = tokenize_prompts(target, suite.prompts)
        if refused:
            count = f"{len(refused)} of {plural(len(suite.prompts), 'prompt')}"
            lines.append(
                f"{suite.name}: {count} can't be used with this target; the first is {refused[0]}"
            )
        contents = [prompt.content for prompt, _ in tokenized[suite.name]]
        given = [one for one in contents if isinstance(one, Conversation)]
        ignored = dict.fromkeys(describe_ignored(target, one) for one in given)
        lines += [f"declared tools ({suite.name}): {line}" for line in ignored if line]
    if not any(tokenized.values()):
        raise UserError(f"every prompt was rejected: {lines[0]}")
    return tokenized, lines
