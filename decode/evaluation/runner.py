"""Run the methods on the same prompts, in changing order, and record every generation."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeVar
from zlib import crc32

from decode.engine.decoder import Decoder
from decode.engine.output import Generation
from decode.engine.pace import TRY_AGAIN
from decode.evaluation.accuracy import score
from decode.evaluation.divergence import explain_divergence
from decode.evaluation.records import Record
from decode.speculation.settings import Sampling
from decode.systems.registry import LOSSY, PLAIN
from specalign.common.provenance import load_average
from specalign.common.terminal import PlainConsole
from specalign.common.text import clock
from specalign.suites.prompt import TURN, Prompt

_MEASURED = (
    "prompt_tokens", "seconds", "prefill_seconds", "calls", "accepted", "drafted", "nodes",
    "finish", "tokens", "draft_seconds", "verify_seconds",
)  # fmt: skip
LINE_EVERY = 30.0  # seconds between lines of progress
WARMUP_TOKENS, LEARNING_TOKENS = 16, TRY_AGAIN + 16  # of one prompt, and of batches

Work = TypeVar("Work")


@dataclass(frozen=True)
class Task:
    """One prompt in one repeat, on which every method runs before the next task begins.

    tokens: none yet for a later turn, which needs the target's answer to the one before.
    follows: the prompts of the turns before it; its own prompt holds what the user says in all.
    batch: prompts that are decoded together.
    """

    suite: str
    prompt: Prompt
    tokens: tuple[int, ...]
    repeat: int
    order: tuple[str, ...]
    follows: tuple[str, ...] = ()
    batch: int = 1


@dataclass(frozen=True)
class GenerationSettings:
    """How a suite's prompts are answered, and scored. metric: "" = not scored."""

    sampling: Sampling
    max_new_tokens: int
    metric: str = ""


def plan_tasks(
    suites: Mapping[str, Sequence[tuple[Prompt, list[int]]]],
    methods: Sequence[str],
    repeats: int,
    seed: int,
    batch: int = 1,
) -> list[list[Task]]:
    """All tasks, those that are decoded together in one list, repeat by repeat, over all suites at
    once; later turns follow the earlier ones. A run that is interrupted has covered every suite
    evenly, although categories usually lie in blocks. With few methods every order occurs equally
    often in each suite; with many, each method is equally often at each position (seeded). Suites
    with fewer prompts than `batch` are left out."""
    suites = {name: prompts for name, prompts in suites.items() if len(prompts) >= batch}
    orders = {
        name: itertools.islice(_orders(list(methods), random.Random(seed)), start, None)
        for start, name in enumerate(suites)
    }
    each = [
        ((rank + 0.5) / len(prompts), name, *prompts[i])
        for name, prompts in suites.items()
        for rank, i in enumerate(_spread(len(prompts)))
    ]
    each.sort(key=lambda task: task[0])
    groups: list[list[Task]] = []
    for repeat in range(repeats):
        waiting: dict[str, list[tuple[Prompt, tuple[int, ...]]]] = {name: [] for name in suites}
        left = {name: len(prompts) for name, prompts in suites.items()}
        for _, name, prompt, tokens in each:
            waiting[name].append((prompt, tuple(tokens)))
            left[name] -= 1
            if len(waiting[name]) == batch or not left[name]:
                order = next(orders[name])
                tasks = [Task(name, *pair, repeat, order, batch=batch) for pair in waiting[name]]
                while tasks:
                    groups.append(tasks)
                    tasks = [next_turn(task) for task in tasks if task.prompt.later]
                waiting[name] = []
    return groups


def next_turn(task: Task) -> Task:
    """The task of the turn after this one."""
    prompt, follows = task.prompt, (*task.follows, task.prompt.id)
    content = prompt.content
    earlier = list(content) if isinstance(content, list) else [{"role": "user", "content": content}]
    said, *later = prompt.later
    following = replace(
        prompt,
        id=f"{follows[0]}{TURN}{len(follows) + 1}",
        content=[*earlier, {"role": "user", "content": said}],
        later=tuple(later),
    )
    return replace(task, prompt=following, tokens=(), follows=follows)


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


def missing_tasks(
    groups: Sequence[Sequence[Task]], records: Sequence[Record]
) -> list[Sequence[Task]]:
    """The groups of which some method has no record yet."""
    done = {record.key for record in records}
    return [
        group
        for group in groups
        if not done.issuperset(
            (task.suite, task.prompt.id, method, task.repeat, task.batch)
            for task in group
            for method in task.order
        )
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


def warm_up(
    decoders: Mapping[str, Decoder],
    groups: Sequence[Sequence[Task]],
    sampling: Sampling,
    limit: int,
) -> None:
    """Decode untimed, with every method: the first prompt, and the first full batch of each size,
    in which a decoder measures how much it should draft."""
    first = next(list(task.tokens) for group in groups for task in group if task.tokens)
    full = [group for group in groups if len(group) == group[0].batch > 1 and group[0].tokens]
    batches = {len(group): [list(task.tokens) for task in group] for group in reversed(full)}
    for decoder in decoders.values():
        decoder.generate(first, min(WARMUP_TOKENS, limit), sampling=sampling, adapt=False)
        for size, prompts in batches.items():
            new = min(LEARNING_TOKENS, limit)
            decoder.generate_batch(prompts, new, batch_size=size, sampling=sampling, adapt=True)


def run_tasks(
    decoders: dict[str, Decoder], tasks: Sequence[Task], settings: GenerationSettings
) -> list[Record]:
    """One record per task and method, in the order in which they ran. Above temperature 0 each
    prompt and repeat has its own seed, the same for all methods. Several tasks are decoded in one
    batch: their prompts share the times of their forward passes, and products over more rows round
    differently."""
    limit = settings.max_new_tokens
    samplings = [settings.sampling] * len(tasks)
    if not settings.sampling.greedy:
        seed = settings.sampling.fixed_seed
        names = [f"{task.suite}/{task.prompt.id}/{task.repeat}".encode() for task in tasks]
        seeds = [(seed + crc32(name)) % 2**63 for name in names]
        samplings = [replace(settings.sampling, seed=seed) for seed in seeds]
    prompts = [list(task.tokens) for task in tasks]
    outputs: list[dict[str, Generation]] = [{} for _ in tasks]
    for method in tasks[0].order:
        decoder = decoders[method]
        if len(tasks) == 1:
            found = [decoder.generate(prompts[0], limit, sampling=samplings[0], adapt=False)]
        else:
            found = decoder.generate_batch(
                prompts, limit, batch_size=len(tasks), sampling=samplings, adapt=True
            )
        for of_task, generation in zip(outputs, found, strict=True):
            of_task[method] = generation
    done = zip(tasks, samplings, outputs, strict=True)
    records: list[Record] = []
    for task, sampling, of_task in done:
        records += _record_task(decoders, task, sampling, of_task, settings.metric)
    for record in records:
        record.group = tasks[0].prompt.id
    return records


def _record_task(
    decoders: dict[str, Decoder],
    task: Task,
    sampling: Sampling,
    outputs: dict[str, Generation],
    metric: str,
) -> list[Record]:
    """The records of a task. At temperature 0 each output is compared with plain decoding's, if
    that was measured; a difference is examined unless the verifier is lossy."""
    records: list[Record] = []
    scores: dict[str, float] = {}
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
                    batched=task.batch > 1,
                )
            record.identical = output.tokens == outputs[PLAIN].tokens
        if metric and task.prompt.reference is not None:
            text = output.text
            if text not in scores:
                scores[text] = score(metric, task.prompt.reference, text)
            record.score = scores[text]
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
        batch=task.batch,
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
