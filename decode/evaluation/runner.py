"""Run the methods on the same prompts, in changing order, and record every generation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeVar

from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from decode.evaluation.divergence import explain_divergence
from decode.evaluation.records import Record
from decode.speculation.sampling import Sampling
from decode.systems.registry import LOSSY, PLAIN
from specalign.common.provenance import load_average
from specalign.common.terminal import PlainConsole
from specalign.common.text import clock
from specalign.suites.prompt import Prompt

_MEASURED = (
    "prompt_tokens", "seconds", "prefill_seconds", "calls", "accepted", "drafted", "nodes",
    "finish", "tokens", "draft_seconds", "verify_seconds",
)  # fmt: skip
LINE_EVERY = 30.0
"""Seconds between lines of progress."""

Work = TypeVar("Work")


@dataclass(frozen=True)
class Task:
    """One prompt in one repeat, on which every method runs before the next task begins."""

    suite: str
    prompt: Prompt
    tokens: tuple[int, ...]
    repeat: int
    order: tuple[str, ...]


@dataclass(frozen=True)
class GenerationSettings:
    sampling: Sampling
    max_new_tokens: int


def plan_tasks(
    suites: Mapping[str, Sequence[tuple[Prompt, list[int]]]],
    methods: Sequence[str],
    repeats: int,
    seed: int,
) -> list[Task]:
    """All tasks, repeat by repeat, over all suites at once. A run that is interrupted has covered
    every suite evenly, although categories usually lie in blocks. With few methods every order
    occurs equally often; with many, each method is equally often at each position (seeded)."""
    orders = _orders(list(methods), random.Random(seed))
    each = [
        ((rank + 0.5) / len(prompts), name, *prompts[i])
        for name, prompts in suites.items()
        for rank, i in enumerate(_spread(len(prompts)))
    ]
    each.sort(key=lambda task: task[0])
    return [
        Task(name, prompt, tuple(tokens), repeat, next(orders))
        for repeat in range(repeats)
        for _, name, prompt, tokens in each
    ]


def _spread(count: int) -> list[int]:
    """0 … count − 1 by reversed bits: every prefix of this order is spread evenly."""
    bits = count.bit_length()
    return sorted(range(count), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))


def _orders(methods: list[str], rng: random.Random) -> Iterator[tuple[str, ...]]:
    """Endless orders: all permutations in turn for up to five methods, else all rotations of one
    shuffle after another."""
    if len(methods) <= 5:
        orders = list(itertools.permutations(methods))
        rng.shuffle(orders)
        yield from itertools.cycle(orders)
    while True:
        rng.shuffle(methods)
        starts = list(range(len(methods)))
        rng.shuffle(starts)
        for start in starts:
            yield tuple(methods[start:] + methods[:start])


def missing_tasks(tasks: Sequence[Task], records: Sequence[Record]) -> list[Task]:
    """The tasks of which some method has no record yet."""
    done = {record.key for record in records}
    return [
        task
        for task in tasks
        if not done.issuperset((task.suite, task.prompt.id, m, task.repeat) for m in task.order)
    ]


def track(work: Sequence[Work], total: int, console: PlainConsole) -> Iterator[Work]:
    """The work that is left of `total`, with a line of progress now and then."""
    started = printed = monotonic()
    for number, part in enumerate(work, 1):
        yield part
        now = monotonic()
        if now - printed >= LINE_EVERY or number == len(work):
            printed = now
            left = clock((now - started) / number * (len(work) - number))
            console.say(f"{total - len(work) + number}/{total} rounds · {left} left")


def run_task(
    decoders: dict[str, Decoder], task: Task, settings: GenerationSettings
) -> list[Record]:
    """One record per method, in the order in which they ran. Above temperature 0 each repeat has
    its own seed, the same for all methods."""
    return run_task_batch(decoders, [task], settings)[0]


def run_task_batch(
    decoders: dict[str, Decoder], tasks: Sequence[Task], settings: GenerationSettings
) -> list[list[Record]]:
    """`run_task` for several tasks, whose prompts every method decodes in one batch. Prompts share
    the times of their forward passes, and products over more rows round differently."""
    limit = settings.max_new_tokens
    samplings = [settings.sampling] * len(tasks)
    if not settings.sampling.greedy:
        seed = settings.sampling.fixed_seed
        seeds = [(seed + 1_000_003 * task.repeat) % 2**63 for task in tasks]
        samplings = [replace(settings.sampling, seed=seed) for seed in seeds]
    prompts = [list(task.tokens) for task in tasks]
    outputs: list[dict[str, Generation]] = [{} for _ in tasks]
    for method in tasks[0].order:
        decoder = decoders[method]
        if len(tasks) == 1:
            found = [decoder.generate(prompts[0], limit, sampling=samplings[0])]
        else:
            found = decoder.generate_batch(
                prompts, limit, batch_size=len(tasks), sampling=samplings
            )
        for of_task, generation in zip(outputs, found, strict=True):
            of_task[method] = generation
    done = zip(tasks, samplings, outputs, strict=True)
    return [_record_task(decoders, task, sampling, of_task) for task, sampling, of_task in done]


def _record_task(
    decoders: dict[str, Decoder], task: Task, sampling: Sampling, outputs: dict[str, Generation]
) -> list[Record]:
    """The records of a task. At temperature 0 each output is compared with plain decoding's, if
    that was measured; a difference is examined unless the verifier is lossy."""
    records = []
    for position, method in enumerate(task.order):
        decoder = decoders[method]
        output = outputs[method]
        verifier = "" if decoder.drafter is None else decoder.verifier_for(sampling)
        if verifier and sampling.greedy and not verifier.startswith(LOSSY):
            verifier = "greedy"  # every exact verifier is greedy at temperature 0
        record = make_record(task, method, position, output, verifier)
        if sampling.greedy and PLAIN in outputs:
            if not record.lossy:
                record.divergence = explain_divergence(
                    decoders[PLAIN].target,
                    list(task.tokens),
                    outputs[PLAIN].tokens,
                    output.tokens,
                    output.drafted,
                    output.accepted,
                    output.trees,
                    others=decoder.target,
                )
            record.identical = output.tokens == outputs[PLAIN].tokens
        records.append(record)
    return records


def make_record(
    task: Task, method: str, position: int, output: Generation, verifier: str
) -> Record:
    """The record of a generation. The prefill gave the first token, the calls the others."""
    committed = len(output.tokens) - 1 if output.calls else 0
    timed = committed and output.seconds > 0
    return Record(
        suite=task.suite,
        prompt=task.prompt.id,
        method=method,
        repeat=task.repeat,
        category=task.prompt.category,
        new_tokens=len(output.tokens),
        committed=committed,
        tokens_per_s=committed / output.seconds if timed else 0.0,
        tau=committed / output.calls if output.calls else None,
        load=load_average(),
        position=position,
        **{name: getattr(output, name) for name in _MEASURED},
        verifier=verifier,
    )
