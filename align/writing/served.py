"""Batches that a server writes: each row alone, many in flight, the finished ones kept until their batch is a shard.

A row is drawn with a seed of its own, so who is in flight beside it decides nothing but the last bits of the server's numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from align.common.errors import UserError
from align.common.text import say
from align.target.model import Target
from align.writing.agreement import PROBE_TOKENS, PROBES, check_answers, probes
from align.writing.client import Client, Patience, choose_model
from align.writing.completions import Completions, Drawing, Mismatch, Request
from align.writing.generation import Row
from align.writing.journal import Journal
from align.writing.rows import Plan, Progress, row_seed, unheard

T = TypeVar("T")


@dataclass
class _Batch:
    rows: list[Row]
    tasks: set[asyncio.Task[None]]


class Served:
    """The source of rows where a server writes.

    Args:
        folder: of the data; finished rows are kept there.

    Raises:
        UserError: no such server, another model, or a server that can't be asked for these samples.
    """

    def __init__(self, plan: Plan, folder: Path, quiet: bool = False) -> None:
        d = plan.recipe.data
        assert d.server is not None
        self.plan, self.quiet, self.concurrency = plan, quiet, d.concurrency
        self.journal = Journal(folder, plan.target.vocab_size)
        self._loop = asyncio.new_event_loop()
        self._batches: dict[int, _Batch] = {}
        self._progress: Progress = unheard
        patience = Patience(d.reply_seconds, d.retry_seconds)
        try:
            self.client = Client(d.server, d.concurrency, patience, quiet)
            self._slots = asyncio.Semaphore(d.concurrency)
            self.ask = self._loop.run_until_complete(self._meet())
            ids = "exact" if self.ask.dialect.ids_out else "tokenised again"
            self.about = {"served_model": self.ask.model, "token_ids": ids}
        except BaseException:
            self.close()
            raise

    async def _meet(self) -> Completions:
        """Choose the model, learn what the server understands, and compare it with the target, where that can be done."""
        plan, d = self.plan, self.plan.recipe.data
        models = await self.client.models()
        name = choose_model(models, self.client.url, plan.target.spec, d.served_model)
        about = next(m for m in models if str(m["id"]) == name)
        limit = about.get("max_model_len")
        if isinstance(limit, int) and limit < plan.capacity:
            raise UserError(
                f"{self.client.url}: {name!r} takes {limit} tokens, a sample may have {plan.capacity} "
                "(data.max_prompt_tokens, data.max_answer_tokens)"
            )
        ask = Completions(self.client, name, plan.target, Drawing(d.top_p, d.top_k))
        prompts = probes(plan)
        ends = frozenset(plan.target.eos_ids)
        requests = [Request(tuple(p), PROBE_TOKENS, 0.0, 0, ends) for p in prompts]
        await ask.greet(requests[0])
        said = f"{self.client.url} writes as {name!r}, up to {d.concurrency} requests at once, {ask.dialect.said}"
        if d.server_check == "auto" and isinstance(plan.target, Target):
            found = await asyncio.gather(*(self._probe(ask, request) for request in requests))
            answers = [[] if isinstance(one, Mismatch) else one for one in found]
            if not any(answers):
                why = next((f" ({one})" for one in found if isinstance(one, Mismatch)), "")
                raise UserError(f"{self.client.url}: {name!r} gave no answer that can be used{why}")
            share = check_answers(plan.target, prompts, answers, f"{self.client.url}: {name!r}")
            said += f"; {share:.0%} of its greedy tokens to {PROBES} prompts are the target's"
        if not self.quiet:
            say(said)
        return ask

    @staticmethod
    async def _probe(ask: Completions, request: Request) -> list[int] | Mismatch:
        try:
            found = await ask(request)
        except Mismatch as why:
            return why
        return found.tokens if found.end is None else [*found.tokens, found.end]

    def write(self, number: int, needed: int, progress: Progress) -> list[Row] | None:
        self._progress = progress
        if not self._begin(number):
            return None
        self._run(self._finish(number, needed))
        return self._batches.pop(number).rows

    def _begin(self, number: int) -> bool:
        """Send what is missing of a batch; False after the last prompt."""
        if number in self._batches:
            return True
        rows = self.plan.rows(number)
        if not rows:
            return False
        written = [row for row in rows if not row.done]
        missing = self.journal.restore(number, written)
        if len(missing) < len(written) and not self.quiet:
            say(f"batch {number}: {len(written) - len(missing)} of {len(written)} rows are there")
        tasks = {self._loop.create_task(self._row(number, row)) for row in missing}
        self._batches[number] = _Batch(rows, tasks)
        return True

    async def _finish(self, number: int, needed: int) -> None:
        """Wait for a batch, and begin others behind it as soon as there is room for their requests, where they are needed for certain."""
        more = True
        while True:
            begun = [batch for n, batch in self._batches.items() if n >= number]
            open_tasks = {task for batch in begun for task in batch.tasks if not task.done()}
            if (
                more
                and len(open_tasks) < self.concurrency
                and sum(len(batch.rows) for batch in begun) < needed
            ):
                more = self._begin(max(self._batches) + 1)
                continue
            for batch in begun:
                for task in [task for task in batch.tasks if task.done()]:
                    batch.tasks.discard(task)
                    task.result()  # raises what it met
            if not self._batches[number].tasks:
                return
            await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _row(self, number: int, row: Row) -> None:
        async with self._slots:
            try:
                await self._write_row(row)
            except Mismatch as found:
                row.done, row.broken = True, f"{found}, in the server's reply"
            self.journal.add(number, row)
            self._progress(0, 1)

    async def _write_row(self, row: Row) -> None:
        """A row as `Writer` writes it, by requests: its prompt, where it writes one, and its answer."""
        if row.writes_prompt and not await self._write_prompt(row):
            return
        await self._write_answer(row)
        while self.plan.advance(row):
            await self._write_answer(row)

    async def _write_answer(self, row: Row) -> None:
        plan, ends = self.plan, frozenset(self.plan.target.eos_ids)
        row.tokens = [*row.tokens, *row.forced] or [*plan.template.prefix]
        row.forced = []
        row.answer_start = len(row.tokens)
        row.done = True
        room = min(plan.settings.max_answer_tokens, plan.capacity - len(row.tokens))
        if room <= 0:
            return
        part = f"answer {row.turn}" if row.turn else "answer"
        tokens = await self._ask(row, part, room, row.answer_temperature, ends)
        row.tokens += tokens
        if len(tokens) == 1 and tokens[0] in ends:
            row.broken = "empty answer"

    async def _write_prompt(self, row: Row) -> bool:
        """Whether it is one that can be answered."""
        plan, settings = self.plan, self.plan.settings
        row.tokens = [*plan.template.prefix, *row.opening]
        most = settings.max_prompt_tokens - len(row.opening) + 1
        tokens = await self._ask(row, "prompt", most, settings.prompt_temperature, plan.prompt_ends)
        written = len(row.opening) + len(tokens) - 1
        row.opening = []
        row.prompt_ended = bool(tokens) and tokens[-1] in plan.prompt_ends
        if plan.template.joined:
            row.tokens += tokens[:-1] if row.prompt_ended else tokens
            row.done = True
            return plan.advance(row)
        if not row.prompt_ended:
            row.tokens += tokens
            row.done, row.broken = True, "prompt too long"
            return False
        row.tokens += tokens[:-1]
        row.forced = [*plan.turn]
        if written == 0:
            row.done, row.broken = True, "empty prompt"
            return False
        return True

    async def _ask(
        self, row: Row, part: str, most: int, temperature: float, ends: frozenset[int]
    ) -> list[int]:
        seed = row_seed(self.plan.recipe.seed, row.index, part)
        found = await self.ask(Request(tuple(row.tokens), most, temperature, seed, ends))
        tokens = found.tokens if found.end is None else [*found.tokens, found.end]
        self._progress(len(tokens))
        return tokens

    def forget(self, number: int) -> None:
        self.journal.forget(number)

    def _run(self, what: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(what)

    def close(self) -> None:
        """End the requests in flight; what is finished stays on disk."""
        if self._loop.is_closed():
            return
        tasks = {
            *asyncio.all_tasks(self._loop),
            *(task for batch in self._batches.values() for task in batch.tasks),
        }
        for task in tasks:
            task.cancel()
        if tasks:
            self._run(asyncio.wait(tasks))
        for task in tasks:
            if not task.cancelled():
                task.exception()  # heard: the first one's was raised, asyncio would tell of the others
        if hasattr(self, "client"):
            self._run(self.client.close())
        self._loop.close()
        self.journal.close()
