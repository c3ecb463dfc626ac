"""Counts which given prompts are dropped or cut, before anything is written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from align.writing.prompts import REFUSED, PromptReader
from specalign.common.errors import UserError
from specalign.folder.ignored import find_ignored, ignored_notes
from specalign.rows.conversation import Conversation


def survey_prompts(reader: PromptReader, prompts: Sequence[Conversation]) -> tuple[int, list[str]]:
    """Read the prompts that `data.samples` need. Raises UserError if none is usable.

    Returns:
        The number of usable prompts, and a note for everything that is dropped or cut.
    """
    d, bare = reader.recipe.data, reader.template.bare
    counts = Counter[str]()
    ignored = Counter[str]()  # parts (system messages, tool calls) that the template drops
    examples: dict[str, str] = {}
    special = _special_tokens(reader)
    for number, conversation in enumerate(prompts, 1):
        if counts["usable"] >= d.samples:
            break
        prompt = reader.read(conversation.prompt, f"data.prompts, prompt {number}")
        counts["read"] += 1
        counts["longest"] = max(counts["longest"], prompt.length)
        counts["long"] += prompt.length > reader.limit
        user_text = "\n".join(m["content"] for m in conversation.messages if m["role"] == "user")
        mark = special.search(user_text) if special else None
        if mark:
            counts["marked"] += 1
            examples.setdefault("mark", mark[0])
        if not prompt.broken:
            counts["usable"] += 1
            end = bare + min(prompt.length, reader.limit) + d.max_answer_tokens
            counts["late"] += end > d.length
            ignored.update(find_ignored(reader.target, prompt.conversation))
        elif prompt.broken == REFUSED:
            counts["refused"] += 1
            examples.setdefault("reason", prompt.reason)
    notes = _describe(reader, counts, examples, len(prompts))
    notes += ignored_notes(reader.target, ignored, str(counts["read"]))
    if not counts["usable"]:
        raise UserError(f"data.prompts={d.prompts!r}: no prompt is usable: {'; '.join(notes)}")
    return counts["usable"], [f"data.prompts={d.prompts!r}: {note}" for note in notes]


def _describe(
    reader: PromptReader, counts: Counter[str], examples: dict[str, str], total: int
) -> list[str]:
    d, target, bare = reader.recipe.data, reader.target, reader.template.bare
    of = f"of {counts['read']} prompts"
    notes = []
    if counts["read"] < total:
        notes.append(f"data.samples={d.samples} takes the first {counts['read']} of {total}")
    if counts["refused"]:
        notes.append(
            f"the chat template of target {target.spec!r} refuses {counts['refused']} {of}, which "
            f"are left out: {examples['reason']}"
        )
    if counts["long"]:
        is_cut = d.long_prompts == "cut"
        fate = "cut" if is_cut else "left out (data.long_prompts=cut shortens them)"
        most = min(counts["longest"], target.context_limit - bare - 1)
        notes.append(
            f"{counts['long']} {of} are longer than data.max_prompt_tokens={reader.limit} and "
            f"{fate}; data.max_prompt_tokens={most} keeps as much as possible"
        )
    if counts["marked"]:
        notes.append(
            f"{counts['marked']} {of} hold special tokens ({examples['mark']}), as if a chat "
            "template had been applied, and it is applied again; give messages instead"
        )
    if counts["late"]:
        needed = min(counts["longest"], reader.limit) + bare + d.max_answer_tokens
        notes.append(
            f"{counts['late']} {of} leave no room for an answer of "
            f"data.max_answer_tokens={d.max_answer_tokens} within data.length={d.length}; "
            f"data.length={needed} holds all"
        )
    return notes


def _special_tokens(reader: PromptReader) -> re.Pattern[str] | None:
    """Matches the tokenizer's special tokens of more than three characters (`<s>` is text as
    well)."""
    tokenizer = reader.target.tokenizer
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    longest_first = sorted((text for text in texts if len(text) > 3), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
