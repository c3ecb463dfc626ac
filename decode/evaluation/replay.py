"""Replays: a prompt's rounds with their drafts and times, for the report. They are recorded apart from
the measured generations."""

from collections.abc import Mapping, Sequence

from decode.engine.decoder import Decoder
from decode.engine.detokenizer import TextStream
from decode.engine.output import RoundTrace
from decode.evaluation.runner import GenerationSettings, Task
from decode.systems.registry import PLAIN
from specalign.common.schema import JsonObject
from specalign.lm.model import Target

MOST_METHODS = 3
_SHOWN = 400  # characters of a prompt that are shown


def record_replay(
    decoders: Mapping[str, Decoder], task: Task, settings: GenerationSettings
) -> JsonObject:
    """Decode a prompt by plain decoding and the last `MOST_METHODS` methods; returns what the page
    shows."""
    drafting = [name for name in decoders if name != PLAIN][-MOST_METHODS:]
    lanes = []
    for name in (PLAIN, *drafting):
        decoder = decoders[name]
        out = decoder.generate(
            list(task.tokens),
            settings.max_new_tokens,
            sampling=settings.sampling,
            trace=True,
            adapt=False,
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
    how many tokens were committed, and the seconds since the first one. A character stands with
    the token that completes it."""
    texts = split_text(target, tokens)
    rounds: list[JsonObject] = []
    start = 0
    for one in (RoundTrace(0.0, 1, 0, ()), *trace):
        end, own = start + one.committed, start + one.accepted
        rounds.append({
            "seconds": one.seconds,
            "tokens": one.committed,
            "accepted": texts[start:own],
            "own": "".join(texts[own:end]),
            "rejected": [target.detokenize([token]) for token in one.rejected],
        })  # fmt: skip
        start = end
    return rounds


def split_text(target: Target, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text."""
    pieces: list[str] = []
    stream = TextStream(target.detokenize, emit=pieces.append)
    texts = []
    for token in tokens:
        stream.push(token)
        texts.append("".join(pieces))
        pieces.clear()
    stream.finish()
    texts[-1] += "".join(pieces)
    return texts
