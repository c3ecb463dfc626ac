"""Run the methods side by side, after a warm-up, prompt by prompt and repeated, and record every generation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from align.common.provenance import load_average
from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from decode.method_names import LOSSY, PLAIN
from decode.reporting.records import Record
from decode.speculation.sampling import Sampling
from decode.suites.prompt import Prompt
from decode.verification.divergence import examine

WARMUP_TOKENS = 16


@dataclass(frozen=True)
class Task:
    """One prompt in one repeat: every method runs on it, one after another, before the next task begins."""

    suite: str
    prompt: Prompt
    tokens: tuple[int, ...]
    repeat: int
    order: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """The settings of every generation."""

    sampling: Sampling
    max_new_tokens: int


def plan(
    suites: Sequence[tuple[str, Sequence[tuple[Prompt, list[int]]]]],
    methods: Sequence[str],
    repeats: int,
    seed: int,
) -> list[Task]:
    """All tasks, repeat by repeat, over all suites at once. However early a run is stopped, its prompts are spread evenly over
    every suite, whose categories usually lie in blocks. With few methods every order of them occurs equally often; with many,
    each method is equally often in each place (seeded).
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
    """0 … count − 1, sorted by their reversed bits: every beginning of this order is spread evenly over the whole."""
    bits = count.bit_length()
    return sorted(range(count), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))


def _orders(methods: list[str], rng: random.Random) -> Iterator[tuple[str, ...]]:
    """Orders without end: for up to five methods all orders in turn, shuffled; for more, all rotations of one shuffle after
    another."""
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


def warm_up(decoders: dict[str, Decoder], tokens: list[int], settings: Settings, times: int) -> None:
    """Short generations that are not timed, by which memory is allocated, weights are paged in and kernels are chosen."""
    count = min(WARMUP_TOKENS, settings.max_new_tokens)
    for decoder in [decoder for _ in range(times) for decoder in decoders.values()]:
        decoder.generate(tokens, max_new_tokens=count, sampling=settings.sampling)


def run_task(
    decoders: dict[str, Decoder],
    task: Task,
    settings: Settings,
    ended: Callable[[str], object] = lambda method: None,
) -> list[Record]:
    """One record per method, in the order in which they ran. `ended(method)` is called after each.

    At temperature 0, with `plain` among the methods, each output is compared with plain decoding's, and a difference is examined
    unless the method's verifier is lossy. Above temperature 0, each repeat has a seed of its own, the same for all methods.
    """
    sampling, generations = _sampling(task, settings), []
    for method in task.order:
        tokens, most = list(task.tokens), settings.max_new_tokens
        generations.append(decoders[method].generate(tokens, max_new_tokens=most, sampling=sampling))
        ended(method)
    return _records(decoders, task, sampling, generations)


def run_together(
    decoders: dict[str, Decoder],
    tasks: Sequence[Task],
    settings: Settings,
    ended: Callable[[str], object] = lambda method: None,
) -> list[list[Record]]:
    """`run_task` for each of several tasks, whose prompts every method decodes in one batch. Their times are those of calls that
    prompts share, and products over more rows round differently. `ended(method)` is called after each generation."""
    samplings = [_sampling(task, settings) for task in tasks]
    found: list[dict[str, Generation]] = [{} for _ in tasks]
    for method in decoders:
        batch = decoders[method].generate_batch(
            [list(task.tokens) for task in tasks],
            batch_size=len(tasks),
            max_new_tokens=settings.max_new_tokens,
            sampling=samplings,
        )
        for its, generation in zip(found, batch, strict=True):
            its[method] = generation
            ended(method)
    return [
        _records(decoders, task, sampling, [its[method] for method in task.order])
        for task, sampling, its in zip(tasks, samplings, found, strict=True)
    ]


def _sampling(task: Task, settings: Settings) -> Sampling:
    sampling = settings.sampling
    if sampling.greedy:
        return sampling
    return replace(sampling, seed=(sampling.fixed_seed + 1_000_003 * task.repeat) % 2**63)


def _records(
    decoders: dict[str, Decoder], task: Task, sampling: Sampling, generations: Sequence[Generation]
) -> list[Record]:
    """Of a task's generations, in the order of its methods, compared with plain decoding's where that can be."""
    records = []
    for position, (method, generation) in enumerate(zip(task.order, generations, strict=True)):
        verifier = "" if decoders[method].drafter is None else decoders[method].verifier_for(sampling)
        if verifier and sampling.greedy and not verifier.startswith(LOSSY):
            verifier = "greedy"  # at temperature 0 every exact verifier does what this one does
        records.append(record_of(task, method, position, generation, verifier))
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


def record_of(task: Task, method: str, position: int, generation: Generation, verifier: str) -> Record:
    """The generation as a record. The prefill gave the first token, the calls committed the others."""
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
        tokens_per_s=committed / generation.seconds if committed and generation.seconds > 0 else 0.0,
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


def remaining(tasks: Sequence[Task], records: Sequence[Record]) -> Iterator[Task]:
    """The tasks of which some method has no record yet."""
    done = {record.key for record in records}
    for task in tasks:
        if not all((task.suite, task.prompt.id, method, task.repeat) in done for method in task.order):
            yield task
