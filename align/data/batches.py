"""The batches of prompts and answers by number, without broken rows and near duplicates."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from functools import cached_property

import torch

from align.data import shards as data
from align.data.near_duplicates import NearDuplicates
from align.writing.rows import Plan, Progress, Row, Source, ignore_progress

_TOKEN_BITS = 20
"""Of the token ids that near duplicates are compared by, which have room for 21."""


class Batches:
    """The target's batches by number, without broken rows and near duplicates."""

    def __init__(self, plan: Plan, make_source: Callable[[Plan], Source]) -> None:
        self.plan, self._make_source = plan, make_source
        self.prefix = list(plan.template.prefix)
        self.seen = NearDuplicates(plan.recipe.data.near_duplicate_threshold)

    @cached_property
    def source(self) -> Source:
        """What writes the rows, opened when something is to be written."""
        return self._make_source(self.plan)

    def close(self) -> None:
        if "source" in vars(self):
            self.source.close()
        self.seen.close()

    def remember(self, samples: data.Samples) -> None:
        """Samples that are written already: near duplicates of them are dropped."""
        for i in range(len(samples)):
            starts = samples.text_start
            text_start = len(self.prefix) if starts is None else int(starts[i])
            key = self._text_key(samples[i].tolist(), int(samples.answer_start[i]), text_start)
            self.seen.add(key)

    def write(
        self, number: int, room: int, dropped: Counter[str], progress: Progress = ignore_progress
    ) -> data.Samples | None:
        """At most `room` samples of a batch, after those of earlier batches; None after the last
        prompt. `dropped` counts why rows are left out."""
        rows = self.source.write(number, room, progress)
        if rows is None:
            return None
        chosen: list[Row] = []
        for row in rows:
            if row.broken:
                dropped[row.broken] += 1
            elif not self.seen.add(self._text_key(row.tokens, row.answer_start, row.text_start)):
                dropped["near-duplicate"] += 1
            elif len(chosen) < room:
                chosen.append(row)
        samples = data.from_lists(
            [row.tokens for row in chosen],
            [row.answer_start for row in chosen],
            [row.answer_temperature for row in chosen],
        )
        starts = [row.text_start for row in chosen]
        if any(start != len(self.prefix) for start in starts):
            samples.text_start = torch.tensor(starts)
        return samples

    def _text_key(self, tokens: list[int], answer_start: int, text_start: int) -> list[int]:
        """What near duplicates are judged by: the prompt from the first user text on, or a base
        text's first 64 tokens. Prompts after different system prompts or tools are never near."""
        end = answer_start if answer_start > text_start else text_start + 64
        lead, text = tokens[:text_start], tokens[text_start:end]
        if lead == self.prefix:
            return text
        digest = hashlib.sha256(json.dumps(lead).encode()).digest()
        mask = int.from_bytes(digest[:4], "little") % (1 << _TOKEN_BITS)
        return [token ^ mask for token in text]
