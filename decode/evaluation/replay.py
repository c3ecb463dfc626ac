"""Replays: a prompt's rounds with their drafts and times, for the report. They are recorded apart from
the measured generations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decode.engine.decoder import Decoder
from decode.engine.output import RoundTrace
from decode.evaluation.runner import GenerationSettings, Task
from decode.systems.registry import PLAIN
from specalign.common.schema import JsonObject
from specalign.lm.model import Target

MOST_METHODS = 3
_SHOWN = 400
"""Characters of a prompt that are shown."""


def record_replay(
    decoders: Mapping[str, Decoder], task: Task, settings: GenerationSettings
) -> JsonObject:
    """Decode a prompt by plain decoding and the first methods; returns what the page shows."""
    drafting = [name for name in decoders if name != PLAIN][-MOST_METHODS:]
    lanes = []
    for name in (PLAIN, *drafting):
        decoder = decoders[name]
        out = decoder.generate(
            list(task.tokens), settings.max_new_tokens, sampling=settings.sampling, trace=True
        )
        lanes.append({"method": name, "rounds": show_rounds(decoder.target, out.tokens, out.trace)})
    content = task.prompt.content
    text = content if isinstance(content, str) else task.prompt.id
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return {"title": f"{task.suite}: {task.prompt.id}", "prompt": shown, "lanes": lanes}


def show_rounds(
    target: Target, tokens: Sequence[int], trace: Sequence[RoundTrace]
) -> list[JsonObject]:
    """The rounds of an output as text: accepted drafts, the target's own token, rejected drafts,
    and the seconds since the first token."""
    rounds: list[JsonObject] = [_describe(target, tokens, 0, 1, 0, (), 0.0)]
    start = 1
    for one in trace:
        rounds.append(
            _describe(target, tokens, start, one.committed, one.accepted, one.rejected, one.seconds)
        )
        start += one.committed
    return rounds


def _describe(
    target: Target,
    tokens: Sequence[int],
    start: int,
    committed: int,
    accepted: int,
    rejected: Sequence[int],
    seconds: float,
) -> JsonObject:
    texts = [_piece(target, tokens, i) for i in range(start, min(start + committed, len(tokens)))]
    own = "".join(texts[accepted:])
    lost = [target.detokenize([token]) for token in rejected]
    return {"seconds": seconds, "accepted": texts[:accepted], "own": own, "rejected": lost}


def _piece(target: Target, tokens: Sequence[int], index: int) -> str:
    """What a token adds to the text."""
    before, after = target.detokenize([*tokens[:index]]), target.detokenize([*tokens[: index + 1]])
    return after[len(before) :] if after.startswith(before) else ""
