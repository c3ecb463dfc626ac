"""Counts which given prompts are dropped or cut, before anything is written, and reports it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from align.writing.prompts import REFUSED, PromptReader
from specalign.common.errors import UserError
from specalign.folder.ignored import find_ignored, ignored_notes
from specalign.rows.conversation import Conversation


@dataclass
class Survey:
    """Counts over the prompts that a run reads.

    Attributes:
        usable: prompts that can be answered.
        longest: tokens of the longest prompt, beyond the bare template.
        too_long: prompts over the limit.
        late: prompts that leave no room for a whole answer within `data.length`.
        marked: prompts whose user texts hold special tokens, such as `mark`.
        ignored: by part (system messages, tool calls), prompts of which the template drops it.
        refused: prompts that the chat template refuses, for `reason`.
    """

    read: int = 0
    usable: int = 0
    longest: int = 0
    too_long: int = 0
    late: int = 0
    marked: int = 0
    mark: str = ""
    ignored: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    reason: str = ""


def survey_prompts(reader: PromptReader, prompts: Sequence[Conversation]) -> Survey:
    """Read the prompts that `data.samples` need."""
    d = reader.recipe.data
    survey = Survey()
    room = d.length - reader.template.bare - d.max_answer_tokens
    special = _special_tokens(reader)
    for number, conversation in enumerate(prompts, 1):
        if survey.usable >= d.samples:
            break
        prompt = reader.read(conversation.prompt, f"data.prompts, prompt {number}")
        survey.read += 1
        survey.longest = max(survey.longest, prompt.length)
        survey.too_long += prompt.length > reader.limit
        user_text = "\n".join(m["content"] for m in conversation.messages if m["role"] == "user")
        mark = special.search(user_text) if special else None
        if mark:
            survey.marked += 1
            survey.mark = survey.mark or mark[0]
        if not prompt.broken:
            survey.usable += 1
            survey.late += min(prompt.length, reader.limit) > room
            survey.ignored.update(find_ignored(reader.target, prompt.conversation))
        elif prompt.broken == REFUSED:
            survey.refused += 1
            survey.reason = survey.reason or prompt.reason
    return survey


def _special_tokens(reader: PromptReader) -> re.Pattern[str] | None:
    """Matches the tokenizer's special tokens of more than three characters (`<s>` is text as
    well)."""
    tokenizer = reader.target.tokenizer
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    longest_first = sorted((text for text in texts if len(text) > 3), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def describe_survey(reader: PromptReader, survey: Survey, total: int) -> list[str]:
    """A note for everything that is dropped or cut, and for prompts beyond `data.samples`.

    Raises:
        UserError: no prompt is usable.
    """
    d = reader.recipe.data
    target = reader.target
    notes = list[str]()
    some = f"{survey.read}" if survey.read == total else f"the first {survey.read}"
    if survey.read < total:
        notes.append(
            f"data.samples={d.samples} takes the first {survey.read} of {total} prompts, in their "
            "order; "
            f"data.samples={total} takes all"
        )
    if survey.refused:
        why = f"the chat template of target {target.spec!r} refuses"
        if survey.refused == survey.read:
            raise UserError(f"data.prompts={d.prompts!r}: {why} every prompt: {survey.reason}")
        notes.append(
            f"{why} {survey.refused} of {some} prompts, which are left out: {survey.reason}"
        )
    notes += ignored_notes(target, survey.ignored, some)
    if survey.marked:
        notes.append(
            f"{survey.marked} of {some} prompts hold special tokens ({survey.mark}), as if a chat "
            "template "
            "had been applied, and it is applied again; give messages instead"
        )
    if survey.too_long:
        notes.append(_describe_long(reader, survey, some))
    if survey.late:
        needed = min(survey.longest, reader.limit) + reader.template.bare + d.max_answer_tokens
        notes.append(
            f"{survey.late} of {some} prompts leave no room for an answer of "
            f"data.max_answer_tokens={d.max_answer_tokens} within data.length={d.length}, and "
            "training reads "
            f"no further; data.length={needed} holds all"
        )
    return [f"data.prompts={d.prompts!r}: {note}" for note in notes]


def _describe_long(reader: PromptReader, survey: Survey, some: str) -> str:
    d = reader.recipe.data
    context = reader.target.context_limit
    most = context - reader.template.bare - 1
    keep = f"data.max_prompt_tokens={survey.longest} keeps all"
    if survey.longest > most:
        keep = f"data.max_prompt_tokens={most} keeps all that the target's context of {context} tokens holds"
    longer = f"prompts are longer than data.max_prompt_tokens={reader.limit}"
    hint = f"{keep}, data.long_prompts=cut shortens them"
    if not survey.usable:
        raise UserError(
            f"data.prompts={d.prompts!r}: no prompt fits ({survey.too_long} of {some} {longer}); "
            f"{hint}"
        )
    if d.long_prompts == "drop":
        return f"{survey.too_long} of {some} {longer} and left out; {hint}"
    cut = "the oldest turns, then the start of the longest message"
    if not reader.target.has_chat_template:
        cut = "the end of the text"
    return f"{survey.too_long} of {some} {longer} and cut ({cut}); {keep}"
