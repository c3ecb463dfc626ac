"""What is left out or cut of given prompts, counted before anything is written, and said in notes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from align.common.errors import UserError
from align.folder.ignored import find_ignored, ignored_notes
from align.rows.conversation import Conversation
from align.writing.prompts import REFUSED, PromptReader


@dataclass
class Survey:
    """Of the prompts that a run reads.

    read: how many were looked at; usable: those that can be answered.
    longest: tokens beyond the bare template of the longest one. over: how many are longer than the limit.
    late: those that leave no room for a whole answer within `data.length`.
    ignored: by part (system messages, tool calls), prompts of which the chat template leaves it out.
    doubled: under data.turns=all, those with several assistant messages in a row, of which one answer is made.
    marked: those whose user texts hold a special token of the tokenizer, as text that went through a template does.
    """

    read: int = 0
    usable: int = 0
    longest: int = 0
    over: int = 0
    late: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    doubled: int = 0
    marked: int = 0
    mark: str = ""
    broken: Counter[str] = field(default_factory=Counter)
    reason: str = ""


def look_at(reader: PromptReader, prompts: Sequence[Conversation]) -> Survey:
    """Read the prompts that a run of `data.samples` needs."""
    d, found = reader.recipe.data, Survey()
    room = d.length - reader.template.bare - d.max_answer_tokens
    marks = _marks(reader)
    for i, conversation in enumerate(prompts):
        if found.usable >= d.samples:
            break
        prompt = reader.read(conversation.prompt, f"data.prompts, prompt {i + 1}")
        found.read += 1
        found.longest = max(found.longest, prompt.length)
        found.over += prompt.length > reader.limit
        _count_marks(found, conversation, marks)
        found.doubled += d.turns == "all" and _answers_twice(conversation.prompt)
        if not prompt.broken:
            found.ignored.update(find_ignored(reader.target, prompt.conversation))
        if prompt.broken:
            found.broken[prompt.broken] += 1
            found.reason = found.reason or prompt.reason
        else:
            found.usable += 1
            found.late += min(prompt.length, reader.limit) > room
    return found


def _marks(reader: PromptReader) -> re.Pattern[str] | None:
    """Matches the special tokens of the tokenizer; None where it has none of more than three characters (`<s>` is text as well)."""
    texts = [text for text in reader.target.tokenizer.all_special_tokens if len(text) > 3]
    added = getattr(reader.target.tokenizer, "added_tokens_decoder", {}).values()
    texts += [str(token) for token in added if token.special and len(str(token)) > 3]
    return re.compile("|".join(map(re.escape, sorted({*texts}, key=len, reverse=True)))) if texts else None


def _count_marks(found: Survey, conversation: Conversation, marks: re.Pattern[str] | None) -> None:
    texts = (m["content"] for m in conversation.messages if m["role"] == "user")
    mark = next(filter(None, map(marks.search, texts)), None) if marks is not None else None
    if mark is not None:
        found.marked += 1
        found.mark = found.mark or mark[0]


def _answers_twice(conversation: Conversation) -> bool:
    """Whether an answer of one message is followed by another one (`align.writing.prompts.first_turn`)."""
    messages = conversation.messages
    return any(
        asked["role"] in ("user", "tool")
        and {answer["role"], second["role"]} == {"assistant"}
        and not answer.get("tool_calls")
        for asked, answer, second in zip(messages, messages[1:], messages[2:], strict=False)
    )


def check(reader: PromptReader, survey: Survey, total: int) -> list[str]:
    """A note for each thing that is left out or cut, and for prompts that `data.samples` does not reach.

    Raises:
        UserError: no prompt can be used.
    """
    d, notes = reader.recipe.data, []
    start = f"data.prompts={d.prompts!r}"
    some = f"{survey.read}" if survey.read == total else f"the first {survey.read}"
    if survey.read < total:
        notes.append(
            f"{start}: data.samples={d.samples} takes the first {survey.read} of {total} prompts, in their order; "
            f"data.samples={total} takes all"
        )
    if survey.broken[REFUSED]:
        why = f"the chat template of target {reader.target.spec!r} refuses"
        if survey.broken[REFUSED] == survey.read:
            raise UserError(f"{start}: {why} every prompt: {survey.reason}")
        notes.append(
            f"{start}: {why} {survey.broken[REFUSED]} of {some} prompts, which are left out: {survey.reason}"
        )
    notes += [f"{start}: {note}" for note in ignored_notes(reader.target, survey.ignored, some)]
    if survey.doubled:
        notes.append(
            f"{start}: {survey.doubled} of {some} prompts have several assistant messages in a row, in whose place the target writes one "
            "answer (data.turns=last keeps them)"
        )
    if survey.marked:
        notes.append(
            f"{start}: {survey.marked} of {some} prompts hold special tokens ({survey.mark}): text that went through a chat template "
            "goes through it once more; give its messages instead"
        )
    if survey.over:
        keep = _keys(reader, survey)
        longer = f"prompts are longer than data.max_prompt_tokens={reader.limit}"
        if not survey.usable:
            raise UserError(
                f"{start}: no prompt fits ({survey.over} of {some} {longer}); {keep}, data.long_prompts=cut shortens them"
            )
        if d.long_prompts == "drop":
            said = f"{longer} and left out; {keep}, data.long_prompts=cut shortens them"
        else:
            said = f"{longer} and cut ({_what_is_cut(reader)}); {keep}"
        notes.append(f"{start}: {survey.over} of {some} {said}")
    if survey.late:
        needed = min(survey.longest, reader.limit) + reader.template.bare + d.max_answer_tokens
        notes.append(
            f"{start}: {survey.late} of {some} prompts leave no room for an answer of data.max_answer_tokens={d.max_answer_tokens} within "
            f"data.length={d.length}, and training reads no further; data.length={needed} holds all"
        )
    return notes


def _what_is_cut(reader: PromptReader) -> str:
    if not reader.target.has_chat_template:
        return "the end of the text"
    return "the oldest turns, then the start of the longest message"


def _keys(reader: PromptReader, survey: Survey) -> str:
    """The keys with which all prompts are kept, as far as the target's context goes."""
    most = reader.target.context_limit - reader.template.bare - 1
    if survey.longest <= most:
        return f"data.max_prompt_tokens={survey.longest} keeps all"
    return f"data.max_prompt_tokens={most} keeps all that the target's context of {reader.target.context_limit} tokens holds"
