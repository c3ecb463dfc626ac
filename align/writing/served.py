"""Batches that a server writes: one request at a time per row, many rows in flight.

Every row has its own seed. Finished rows are kept in a journal until their batch is a shard.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from align.writing.agreement import PROBE_TOKENS, PROBES, check_answers
from align.writing.client import Client, choose_model
from align.writing.completions import CompletionRequest, Completions, MismatchError
from align.writing.journal import append_row, restore_rows
from align.writing.rows import Plan, Progress, Row, Source, ignore_progress, row_seed
from specalign.common.errors import UserError
from specalign.common.text import say
from specalign.lm.model import Target
from specalign.rows.conversation import Conversation


class Served(Source):
    """Rows that a server writes; finished ones are kept in `folder`. Raises UserError: no server,
    another model, or a server that cannot write these samples."""

    def __init__(self, plan: Plan, folder: Path, quiet: bool = False) -> None:
        self.plan, self.quiet = plan, quiet
        self.data = d = plan.recipe.data
        assert d.server is not None
        self.folder = folder
        self.ends = frozenset(plan.target.eos_ids)
        self._progress: Progress = ignore_progress
        self._rows: dict[int, list[Row]] = {}
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}
        self._slots = asyncio.Semaphore(d.concurrency)
        self._runner = asyncio.Runner()
        self.client = Client(d.server, d.reply_seconds, d.retry_seconds)
        try:
            self.completions = self._runner.run(self._connect())
        except BaseException:
            self.close()
            raise
        token_ids = "exact" if self.completions.dialect.ids_out else "tokenised again"
        self.about = {"served_model": self.completions.model, "token_ids": token_ids}

    async def _connect(self) -> Completions:
        """Choose the model, find the server's dialect, and compare the model with the target."""
        d, target, url = self.data, self.plan.target, self.client.url
        model = choose_model(await self.client.list_models(), url, target.spec, d.served_model)
        name = str(model["id"])
        limit = model.get("max_model_len")
        if isinstance(limit, int) and limit < self.plan.capacity:
            raise UserError(
                f"{url}: {name!r} accepts {limit} tokens, a sample can have {self.plan.capacity} "
                "(data.max_prompt_tokens, data.max_answer_tokens)"
            )
        completions = Completions(self.client, name, target, d.top_p, d.top_k)
        prompts = [self.plan.reader.tokens(Conversation.from_text(text)) for text in PROBES]
        requests = [
            CompletionRequest(tuple(prompt), PROBE_TOKENS, 0.0, 0, self.ends) for prompt in prompts
        ]
        await completions.find_dialect(requests[0])
        ids = "exact token ids" if completions.dialect.ids_out else "text that is tokenized again"
        line = f"generating with {name!r} at {url}, up to {d.concurrency} requests at once, {ids}"
        if d.server_check == "auto" and isinstance(target, Target):
            answers = await asyncio.gather(*(_answer(completions, probe) for probe in requests))
            if not any(answers):
                raise UserError(f"{url}: {name!r} gave no usable answer")
            share = check_answers(target, prompts, answers, f"{url}: {name!r}")
            line += (
                f"; {share:.0%} of its greedy tokens for {len(prompts)} prompts match the target's"
            )
        if not self.quiet:
            say(line)
        return completions

    def write(self, number: int, needed: int, progress: Progress) -> list[Row] | None:
        self._progress = progress
        return self._runner.run(self._write(number, needed))

    async def _write(self, number: int, needed: int) -> list[Row] | None:
        """A batch's rows; while requests are free, later batches that are needed for certain are
        begun."""
        if not self._begin(number):
            return None
        more_prompts = True
        while not all(task.done() for task in self._tasks[number]):
            running = [t for tasks in self._tasks.values() for t in tasks if not t.done()]
            rows = sum(map(len, self._rows.values()))
            if more_prompts and rows < needed and len(running) < self.data.concurrency:
                more_prompts = self._begin(max(self._rows) + 1)
                continue
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises its error
        for task in self._tasks.pop(number):
            task.result()
        return self._rows.pop(number)

    def _begin(self, number: int) -> bool:
        """Start the missing rows of a batch; False after the last prompt."""
        if number in self._rows:
            return True
        rows = self.plan.rows(number)
        if not rows:
            return False
        unwritten = [row for row in rows if not row.done]
        missing = restore_rows(self.folder, number, unwritten)
        restored = len(unwritten) - len(missing)
        if restored and not self.quiet:
            say(f"batch {number}: {restored} of {len(unwritten)} rows are already written")
        self._rows[number] = rows
        self._tasks[number] = [
            asyncio.create_task(self._finish_row(number, row)) for row in missing
        ]
        return True

    async def _finish_row(self, number: int, row: Row) -> None:
        """Write a row as `Writer` does: its prompt if it has none, and its answers."""
        async with self._slots:
            try:
                if not row.writes_prompt or await self._write_prompt(row):
                    await self._write_answer(row)
                    while self.plan.advance(row):
                        await self._write_answer(row)
            except MismatchError as error:
                row.done = True
                row.broken = f"{error}, in the server's reply"
            append_row(self.folder, number, row)

    async def _write_answer(self, row: Row) -> None:
        row.tokens = [*row.tokens, *row.forced] or [*self.plan.template.prefix]
        row.forced = []
        row.answer_start = len(row.tokens)
        row.done = True
        room = min(self.data.max_answer_tokens, self.plan.capacity - len(row.tokens))
        if room <= 0:
            return
        part = f"answer {row.turn}" if row.turn else "answer"
        tokens = await self._draw(row, part, room, row.answer_temperature, self.ends)
        row.tokens += tokens
        if len(tokens) == 1 and tokens[0] in self.ends:
            row.broken = "empty answer"

    async def _write_prompt(self, row: Row) -> bool:
        """Write the row's prompt, and render it with the template; whether it can be answered."""
        plan = self.plan
        row.tokens = [*plan.template.prefix, *row.opening]
        room = plan.longest_prompt - len(row.opening) + 1
        row.opening = []
        temperature = self.data.prompt_temperature
        tokens = await self._draw(row, "prompt", room, temperature, plan.prompt_ends)
        row.prompt_ended = bool(tokens) and tokens[-1] in plan.prompt_ends
        row.tokens += tokens[:-1] if row.prompt_ended else tokens
        row.done = True
        return plan.advance(row)

    async def _draw(
        self, row: Row, part: str, room: int, temperature: float, ends: frozenset[int]
    ) -> list[int]:
        seed = row_seed(self.plan.recipe.seed, row.index, part)
        request = CompletionRequest(tuple(row.tokens), room, temperature, seed, ends)
        tokens = await self.completions.continue_text(request)
        self._progress(len(tokens))
        return tokens

    def close(self) -> None:
        """Cancel the requests in flight; finished rows stay on disk."""
        self._runner.run(self._shut_down())
        self._runner.close()

    async def _shut_down(self) -> None:
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()


async def _answer(completions: Completions, request: CompletionRequest) -> list[int]:
    """The answer to a probe; empty if its tokens are uncertain."""
    try:
        return await completions.continue_text(request)
    except MismatchError:
        return []
