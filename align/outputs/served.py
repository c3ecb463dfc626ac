"""The target's hidden states from a server, requested while training runs and stored nowhere.

vLLM's speculative method `extract_hidden_states` with its ExampleHiddenStatesConnector: a request
of a text with one new token leaves a file of states (tokens, layers, D) in `shared_storage_path`;
until it is complete, a file FILE.lock is locked. Files are deleted once read.
"""

from __future__ import annotations

import asyncio
import fcntl
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from align.config.recipe import Recipe
from align.writing.client import Server
from specalign.common.batch import Batch, Step
from specalign.common.errors import UserError
from specalign.common.text import say, short
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig
from specalign.models.target_features import TargetFeatures, target_features

NEAR = 0.05
"""The largest relative distance of outputs from the target's own; bf16 over 30 layers: 0.01."""
PROBE = """The river was low that summer, and the old mill stood still. def area(width, height):
return width * height. In 1987 the two brothers sold it to a painter."""
OPTIONS = """--no-enable-chunked-prefill --speculative-config \
'{"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": \
{"hf_config": {"eagle_aux_hidden_state_layer_ids": %s}}}' --kv-transfer-config \
'{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer", \
"kv_connector_extra_config": {"shared_storage_path": "/dev/shm/states"}}'"""
"""vLLM's, given the states' numbers; state 0 is the embedding."""
DRAIN_SECONDS = 30.0
"""How long to wait for requests in flight when training ends, so that their files are deleted."""


class ServedLayers:
    """Replaces the target's layers whenever `states_BLFD` is set: the model's own decoder runs
    around them. asked: the layers whose states are needed, ascending. running: layers whose keys
    and values a drafter shares; they run, on the states before them."""

    def __init__(self, target: Target, config: BlockConfig | None) -> None:
        if target.anatomy.apart or target.anatomy.repeats:
            raise UserError(f"target {target.spec!r}: needs trainer.features_writer=target")
        tapped = set() if config is None else set(config.target_layer_ids)
        is_shared = config is not None and config.context == "shared_kv"
        self.running = tapped if is_shared else set()
        needed = {i - 1 for i in tapped if i} if is_shared else tapped
        self.asked = sorted({*needed, target.num_layers - 1})
        self.target = target
        self.states_BLFD: Tensor | None = None
        target.unfuse()
        for i, layer in enumerate(target.layers):
            layer.forward = self._replace(i, layer.forward)

    def _replace(self, layer: int, run: Callable[..., Any]) -> Callable[..., Any]:
        """The layer's new `forward`, given its own."""

        def forward(hidden_states: Tensor, *inputs: Any, **named: Any) -> Any:
            states = self.states_BLFD
            if states is None:
                return run(hidden_states, *inputs, **named)
            if layer - 1 in self.asked:
                hidden_states = states[:, :, self.asked.index(layer - 1)]
            if layer in self.running:
                hidden_states = run(hidden_states, *inputs, **named)
            return states[:, :, self.asked.index(layer)] if layer in self.asked else hidden_states

        return forward

    def free(self) -> None:
        """Free the weights of the layers that no longer run."""
        self.target.hash  # noqa: B018 (of all weights, while they exist)
        for i, layer in enumerate(self.target.layers):
            if i not in self.running:
                layer.to("meta")


class StateServer:
    """A server of the target's hidden states, asked by a thread; a context manager. Raises
    UserError: no such server, one that returns no states, or those of another model. config: of the
    drafter, None = it reads only the last hidden state."""

    def __init__(
        self, recipe: Recipe, target: Target, config: BlockConfig | None, quiet: bool = False
    ) -> None:
        self.layers = ServedLayers(target, config)
        self.target, self.ahead, self.quiet = target, recipe.trainer.features_ahead, quiet
        options = replace(recipe.data, writer=f"openai:{recipe.trainer.features_server}")
        self.server = Server(target, options)
        ids = [i + 1 for i in self.layers.asked]
        self.advice = f"start it with: vllm serve {shlex.quote(target.spec)} {OPTIONS % ids}"
        self.texts = self.tokens = 0
        self.waited = 0.0
        self._slots = asyncio.Semaphore(options.concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="states", daemon=True)
        self._thread.start()
        try:
            self._check(config)
        except BaseException:
            self.close()
            raise

    def _check(self, config: BlockConfig | None) -> None:
        """Raises UserError: no such server, or its outputs over a text are not the target's."""
        server, target, layers = self.server, self.target, self.layers
        length = server.options.length
        try:
            self._submit(server.find_model(length + 1, "data.length")).result()
        except UserError as error:
            raise UserError(f"{error}; {self.advice}") from None
        tokens = torch.tensor([target.text_tokens(PROBE)[:length]])
        places, zeros = torch.arange(tokens.shape[1])[None], torch.zeros_like(tokens)
        probe = Batch(tokens, places, zeros, zeros == 0)
        own = target_features(target, probe.to(target.device), config)
        try:
            layers.states_BLFD = self.request(probe).result().to(target.device)
            apart = _distance(target_features(target, probe.to(target.device), config), own)
        except (RuntimeError, TypeError, AttributeError, IndexError) as error:
            why = f"target {target.spec!r} cannot run without its layers ({short(error)})"
            raise UserError(f"{why}: needs trainer.features_writer=target") from None
        layers.states_BLFD = None
        name = f"{server.url}: states of {server.model!r} are {apart:.1%} from the target's own"
        if not apart <= NEAR:
            raise UserError(f"{name}: another model, or other layers; {self.advice}")
        if not self.quiet:
            say(f"{name}; at most {self.ahead} batches requested", error=True)

    # ---- in the thread ----

    async def _fetch(self, batch: Batch) -> Tensor:
        """States (B, L, F, D) of the layers asked; zeros at padding."""
        shape = (*batch.tokens_BL.shape, len(self.layers.asked), self.target.hidden_size)
        states_BLFD = torch.zeros(shape, dtype=self.target.dtype)

        async def fill(row: int, places: Tensor) -> None:
            states_BLFD[row, places] = await self._fetch_text(batch.tokens_BL[row, places].tolist())

        tasks = [asyncio.create_task(fill(row, places)) for row, places in batch.documents()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return states_BLFD

    async def _fetch_text(self, tokens: list[int]) -> Tensor:
        """States (L, F, D) of one text."""
        server = self.server
        body = {"model": server.model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0}
        async with self._slots:
            reply = await server.send("/completions", body)
            found = reply.get("kv_transfer_params")
            path = found.get("hidden_states_path") if isinstance(found, dict) else None
            if not isinstance(path, str):
                raise UserError(f"{server.url} returned no hidden states; {self.advice}")
            states = await self._read(Path(path), tokens)
        self.texts += 1
        self.tokens += len(tokens)
        return states.to(self.target.dtype)

    async def _read(self, path: Path, tokens: list[int]) -> Tensor:
        """The states in a file, which is deleted once it is known to answer this request."""
        where, lock = f"{path}, stored by {self.server.url}", Path(f"{path}.lock")
        try:
            async with asyncio.timeout(self.server.options.reply_seconds):
                while _is_locked(lock):
                    await asyncio.sleep(0.005)
            file = load_file(path)
            text, states = file["token_ids"].flatten(), file["hidden_states"]
        except (OSError, SafetensorError, KeyError) as error:
            why = f"not readable here ({str(error) or 'data.reply_seconds'})"
            raise UserError(f"{where}: {why}; the server must share its folder") from None
        if text[: len(tokens)].tolist() != tokens:
            raise UserError(f"{where}: holds states of another text")
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        wanted = (len(tokens), len(self.layers.asked), self.target.hidden_size)
        if states[: len(tokens)].shape != wanted:
            raise UserError(f"{where}: shape {tuple(states.shape)}, not {wanted}; {self.advice}")
        return states[: len(tokens)]

    async def _stop(self, seconds: float) -> None:
        """Wait for what is in flight, and cancel the rest."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.server.close()

    # ---- for the caller ----

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def request(self, batch: Batch) -> Future[Tensor]:
        """States (B, L, F, D) on the host of a batch on the host, once the server returns them."""
        return self._submit(self._fetch(batch))

    def close(self, seconds: float = 0.0) -> None:
        """End the thread, after at most these seconds for what is in flight."""
        self._submit(self._stop(seconds)).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> StateServer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(0.0 if isinstance(error, UserError) else DRAIN_SECONDS)
        if kind is None and not self.quiet:
            line = f"{self.server.url} returned states of {self.texts:,} texts"
            waited = f"training waited {self.waited:.1f} s for them"
            say(f"{line} ({self.tokens:,} tokens); {waited}", error=True)


class PrefetchedSteps:
    """Steps in their order with states from a server, at most `server.ahead` requested at once."""

    def __init__(self, steps: DataLoader[Step], server: StateServer) -> None:
        self.steps, self.server = steps, server

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        queue = deque[tuple[Step, Future[Tensor]]]()
        for step in self.steps:
            queue.append((step, self.server.request(step.batch)))
            if len(queue) == self.server.ahead:
                yield self._wait(*queue.popleft())
        while queue:
            yield self._wait(*queue.popleft())

    def _wait(self, step: Step, states: Future[Tensor]) -> Step:
        start = time.monotonic()
        step.states_BLFD = states.result()
        self.server.waited += time.monotonic() - start
        return step


def _distance(found: TargetFeatures, own: TargetFeatures) -> float:
    """The largest mean relative distance of a layer's vectors. RuntimeError: shapes differ."""

    def split(features: TargetFeatures) -> list[Tensor]:
        taps = features.taps_BLFD
        layers = [] if taps is None else [*taps.unbind(2)]
        return [
            t.double() for t in (features.hidden_BLD, *features.keys, *features.values, *layers)
        ]

    pairs = [*zip(split(found), split(own), strict=True)]
    if any(a.shape != b.shape for a, b in pairs):
        raise RuntimeError("shapes differ")
    return max(float(((a - b).norm(dim=-1) / b.norm(dim=-1)).mean()) for a, b in pairs)


def _is_locked(lock: Path) -> bool:
    """Whether a file's lock is held. Raises OSError: it does not exist, or is not readable."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
