"""Run the methods on the same prompts, in changing order, and record every generation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from decode.evaluation.divergence import examine
from decode.evaluation.records import Record
from decode.speculation.sampling import Sampling
from decode.systems.registry import LOSSY, PLAIN
from specalign.common.provenance import load_average
from specalign.suites.prompt import Prompt

WARMUP_TOKENS = 16


@dataclass(frozen=True)
class Task:
    """One prompt in one repeat: every method runs on it, one after another, before the next task
    begins."""

    suite: str
    prompt: Prompt
    tokens: tuple[int, ...]
    repeat: int
    order: tuple[str, ...]


@dataclass(frozen=True)
class GenerationSettings:
    """What all generations have in common."""

    sampling: Sampling
    max_new_tokens: int


def plan_tasks(
    suites: Sequence[tuple[str, Sequence[tuple[Prompt, list[int]]]]],
    methods: Sequence[str],
    repeats: int,
    seed: int,
) -> list[Task]:
    """All tasks, repeat by repeat, over all suites at once. A run that is interrupted has covered
    every suite evenly, although categories usually lie in blocks. With few methods every order
    occurs equally often; with many, each method is equally often at each position (seeded).
    """
    turn = _orders(list(methods), random.Random(seed))
    each = [
        ((rank + 0.5) / len(prompts), name, *prompts[i])
        for name, prompts in suites
        for rank, i in enumerate(_spread(len(prompts)))
    ]
    each.sort(key=lambda task: task[0])
    return [
        Task(name, prompt, tuple(tokens), repeat, next(turn))
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


def warm_up(
    decoders: dict[str, Decoder], tokens: list[int], settings: GenerationSettings, times: int
) -> None:
    """Short untimed generations: memory is allocated, weights are paged in, kernels are
    selected."""
    count = min(WARMUP_TOKENS, settings.max_new_tokens)
    for _ in range(times):
        for decoder in decoders.values():
            decoder.generate(tokens, max_new_tokens=count, sampling=settings.sampling)


def run_task(
    decoders: dict[str, Decoder], task: Task, settings: GenerationSettings
) -> list[Record]:
    """One record per method, in the order in which they ran.

    At temperature 0 each output is compared with plain decoding's, if that is among the methods; a
    difference is examined unless the verifier is lossy. Above temperature 0 each repeat has its own
    seed, the same for all methods.
    """
    sampling = _sampling_of(task, settings)
    generations = []
    for method in task.order:
        tokens, limit = list(task.tokens), settings.max_new_tokens
        generations.append(
            decoders[method].generate(tokens, max_new_tokens=limit, sampling=sampling)
        )
    return _record_task(decoders, task, sampling, generations)


def run_together(
    decoders: dict[str, Decoder], tasks: Sequence[Task], settings: GenerationSettings
) -> list[list[Record]]:
    """`run_task` for several tasks, whose prompts every method decodes in one batch. Prompts share
    the times of their forward passes, and products over more rows round differently."""
    samplings = [_sampling_of(task, settings) for task in tasks]
    generations: list[dict[str, Generation]] = [{} for _ in tasks]
    for method in decoders:
        batch = decoders[method].generate_batch(
            [list(task.tokens) for task in tasks],
            batch_size=len(tasks),
            max_new_tokens=settings.max_new_tokens,
            sampling=samplings,
        )
        for of_task, generation in zip(generations, batch, strict=True):
            of_task[method] = generation
    return [
        _record_task(decoders, task, sampling, [of_task[method] for method in task.order])
        for task, sampling, of_task in zip(tasks, samplings, generations, strict=True)
    ]


def _sampling_of(task: Task, settings: GenerationSettings) -> Sampling:
    sampling = settings.sampling
    if sampling.greedy:
        return sampling
    return replace(sampling, seed=(sampling.fixed_seed + 1_000_003 * task.repeat) % 2**63)


def _record_task(
    decoders: dict[str, Decoder], task: Task, sampling: Sampling, generations: Sequence[Generation]
) -> list[Record]:
    """The records of a task's generations, in the order of its methods, compared with plain
    decoding's where possible."""
    records = []
    for position, (method, generation) in enumerate(zip(task.order, generations, strict=True)):
        verifier = (
            "" if decoders[method].drafter is None else decoders[method].verifier_for(sampling)
        )
        if verifier and sampling.greedy and not verifier.startswith(LOSSY):
            verifier = "greedy"  # every exact verifier is greedy at temperature 0
        records.append(make_record(task, method, position, generation, verifier))
    plain = next((record for record in records if record.method == PLAIN), None)
    if sampling.greedy and plain is not None:
        target = decoders[PLAIN].target
        for record, generation in zip(records, generations, strict=True):
            if record.lossy:
                record.identical = record.tokens == plain.tokens
                continue
            record.divergence = examine(
                target,
                list(task.tokens),
                plain.tokens,
                record.tokens,
                record.drafted,
                record.accepted,
                generation.trees,
                others=decoders[record.method].target,
            )
            record.identical = record.divergence is None
    return records


def make_record(
    task: Task, method: str, position: int, generation: Generation, verifier: str
) -> Record:
    """The record of a generation. The prefill gave the first token, the rounds committed the
    others."""
    committed = len(generation.tokens) - 1 if generation.calls else 0
    return Record(
        suite=task.suite,
        prompt=task.prompt.id,
        method=method,
        repeat=task.repeat,
        category=task.prompt.category,
        prompt_tokens=generation.prompt_tokens,
        new_tokens=len(generation.tokens),
        committed=committed,
        seconds=generation.seconds,
        prefill_seconds=generation.prefill_seconds,
        tokens_per_s=committed / generation.seconds
        if committed and generation.seconds > 0
        else 0.0,
        calls=generation.calls,
        accepted=list(generation.accepted),
        drafted=list(generation.drafted),
        nodes=generation.nodes,
        tau=committed / generation.calls if generation.calls else None,
        finish=generation.finish,
        tokens=list(generation.tokens),
        draft_seconds=generation.draft_seconds,
        verify_seconds=generation.verify_seconds,
        load=load_average(),
        position=position,
        verifier=verifier,
    )


def missing_tasks(tasks: Sequence[Task], records: Sequence[Record]) -> Iterator[Task]:
    """The tasks of which some method has no record yet."""
    done = {record.key for record in records}
    for task in tasks:
        if not all(
            (task.suite, task.prompt.id, method, task.repeat) in done for method in task.order
        ):
            yield task
