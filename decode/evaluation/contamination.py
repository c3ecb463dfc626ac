"""What is known of a drafter's training: its folder's record, and the prompts that overlap with its
training data (the rule of `data.exclude`)."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from decode.engine.decoder import Decoder
from decode.evaluation.config import EvalConfig
from decode.evaluation.plan import EvalPlan
from decode.evaluation.records import DrafterTraining, Overlap
from decode.evaluation.tokenized import TokenizedPrompts
from decode.systems.parsing import first_kind
from decode.systems.registry import MAIN, PLAIN
from specalign.common.errors import UserError
from specalign.folder.training_record import read_record
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation
from specalign.rows.shards import FolderFields, read_manifest, read_samples
from specalign.rows.tables import EVERY, read_rows
from specalign.suites import bbh, humaneval, livecodebench, mbpp
from specalign.suites.overlap import Passages, find_strings
from specalign.suites.prompt import CHOOSE, REASON

_SUITES = (bbh, humaneval, livecodebench, mbpp)
ASKS = tuple(ask.strip() for ask in (REASON, CHOOSE, *(suite.ASK for suite in _SUITES)))
"""The instructions that this project adds to a benchmark's text."""
_ASKS = re.compile("|".join(map(re.escape, ASKS)))


def find_training(
    config: EvalConfig,
    plan: EvalPlan,
    decoders: Mapping[str, Decoder],
    prompts: Mapping[str, TokenizedPrompts],
    earlier: DrafterTraining | None,
) -> DrafterTraining | None:
    """What is known of the drafter that the first method with one uses; None without such a method.
    `earlier`: of a measurement that is continued, with its overlaps. Raises UserError: training
    data that can't be read, or of another target."""
    methods = [plan.methods[name] for name in decoders if name in plan.methods]
    methods.sort(key=lambda method: method.name != MAIN)
    method = next((method for method in methods if method.needs), None)
    if method is None or config.tuning:
        return None
    saved = read_record(plan.drafters[first_kind(plan.drafters, method.needs[0])])
    record = None if saved is None else saved.training
    found = replace(earlier or DrafterTraining(""), method=method.name, record=record)
    if config.training_data is None:
        return found
    texts = read_training_texts(config.training_data, decoders[PLAIN].target)
    overlaps = find_overlaps(prompts, texts)
    return replace(found, data=str(config.training_data), overlaps=overlaps)


def find_overlaps(
    suites: Mapping[str, TokenizedPrompts], texts: Iterable[str]
) -> dict[str, Overlap]:
    """The prompts of each suite that share a passage with one of the texts."""
    asked: dict[tuple[str, str], list[str]] = {}
    for suite, prompts in suites.items():
        for prompt, _ in prompts:
            own: object = prompt.content
            if isinstance(own, Conversation):  # without its tools, the same for many prompts
                own = own.messages
            strings = find_strings([own, prompt.later])
            asked[suite, prompt.id] = [part for text in strings for part in _ASKS.split(text)]
    passages = Passages(asked)
    found = {owner for text in texts for owner in passages.find_in(text)}
    return {
        suite: Overlap(len(prompts), [p.id for p, _ in prompts if (suite, p.id) in found])
        for suite, prompts in suites.items()
    }


def read_training_texts(path: Path, target: Target) -> Iterator[str]:
    """The texts of a data folder, generated and other, or the strings of a file of rows."""
    if path.is_file():
        empty = True
        for row in read_rows(path, EVERY):
            empty = False
            yield from find_strings(row)
        if empty:
            raise UserError(f"--training-data={str(path)!r} contains no rows")
        return
    for folder in (path, path / "text"):
        if folder != path and not folder.is_dir():
            continue
        manifest = read_manifest(folder, FolderFields)
        written_by = (manifest.get("target"), manifest.get("target_sha256"))
        if target.spec != written_by[0] and target.hash != written_by[1]:
            raise UserError(
                f"--training-data: {folder} was tokenised for {written_by[0]!r}, not for "
                f"{target.spec!r}"
            )
        samples = read_samples(folder, target.vocab_size, manifest)
        for number in range(len(samples)):
            yield target.detokenize(samples[number].tolist())
