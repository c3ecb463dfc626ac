"""What a server computes of the target: hidden states of its layers, which it stores in files that this process reads.

vLLM does it with the speculative method `extract_hidden_states` and its ExampleHiddenStatesConnector: each request of a text with one
new token leaves a file of states (tokens, layers, D) in `shared_storage_path`, a lock beside it for as long as it is written.
The target stays here without most of its layers: embedding, last norm and head, and of a drafter that shares keys and values the
layers that make them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from align.common.batch import Batch
from align.common.errors import UserError
from align.common.text import plural, say
from align.config.recipe import Recipe
from align.models.block_config import BlockConfig
from align.models.target_features import TargetFeatures, document_places, each_document
from align.outputs.stand_ins import StandIns, distance, layers_asked, own_states
from align.target.model import Target
from align.writing.client import Client, RetryPolicy, choose_model

KEY = "trainer.features_writer"
NEAR = 0.05
"""The largest distance, as a share of its length, between a state of the server and the target's own: bf16 of 30 layers has 0.01."""
PROBE = 48
"""Tokens of the text that a server is tried with."""
Item = tuple[int, Batch, float]
"""A row's place in the order of training, the row as a batch of one, and the temperature of p."""
SHARED = Path("/dev/shm/states")
"""Where a server on this machine may store states: memory."""
_LAST = 60.0
"""Most seconds that requests in flight are waited for when no more rows are wanted."""
_LOOK = 0.005
"""Seconds between looks at a file that is being written."""


def serve_words(
    layers: Sequence[int],
    folder: Path,
    module: str | None = None,
    connector: str = "ExampleHiddenStatesConnector",
) -> list[str]:
    """vLLM's options for the outputs of these layers; it counts states, the first one being the embedding.

    Args:
        folder: where it stores them. module: of a connector that is not vLLM's own.
    """
    ids = {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in layers]}
    method = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": ids},
    }
    store = {
        "kv_connector": connector,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    } | ({} if module is None else {"kv_connector_module_path": module})
    return [
        "--no-enable-chunked-prefill", "--speculative-config", json.dumps(method), "--kv-transfer-config", json.dumps(store),
    ]  # fmt: skip


def _command(target: Target, config: BlockConfig | None) -> str:
    """How vLLM is started for a target and what a drafter reads of it."""
    return shlex.join(["vllm", "serve", target.spec, *serve_words(layers_asked(target, config), SHARED)])


def _client(recipe: Recipe, quiet: bool) -> Client:
    """Raises UserError: an invalid address, API key or proxy."""
    d, url = recipe.data, recipe.trainer.features_server
    assert url is not None
    return Client(url, RetryPolicy(d.reply_seconds, d.retry_seconds), quiet, KEY)


async def _model(client: Client, recipe: Recipe, target: Target, command: str) -> str:
    """The target's name on the server.

    Raises:
        UserError: no answer, no such model, or one with too little room for a row. `command` starts the right one.
    """
    try:
        models = await client.list_models()
    except UserError as error:
        raise UserError(f"{error} Start it with: {command}") from None
    model = choose_model(models, client.url, target.spec, recipe.data.served_model)
    name = str(model["id"])
    limit = model.get("max_model_len")
    if isinstance(limit, int) and limit <= recipe.data.length:
        raise UserError(
            f"{client.url}: {name!r} takes {limit} tokens, a row may have {recipe.data.length} and one new one (data.length)"
        )
    return name


def check_server(recipe: Recipe, target: Target, config: BlockConfig | None) -> None:
    """Raises UserError where no server has the target, before anything is written for it."""

    async def ask() -> None:
        client = _client(recipe, quiet=True)
        try:
            await _model(client, recipe, target, _command(target, config))
        finally:
            await client.close()

    asyncio.run(ask())


class ServedStates:
    """The target's hidden states out of a server. `features` goes into the place of
    `TargetOutputCache.run`. It is a context; the target that it was given is good for nothing else afterwards.

    Raises:
        UserError: no such server, one that returns no hidden states, or other ones than the target's.
    """

    def __init__(
        self, recipe: Recipe, target: Target, config: BlockConfig | None, quiet: bool = False
    ) -> None:
        d, url = recipe.data, recipe.trainer.features_server
        assert url is not None
        self.recipe, self.target, self.config, self.url = recipe, target, config, url
        self.layers = layers_asked(target, config)
        self.command = _command(target, config)
        self.most = 2 * d.concurrency
        """Documents that wait for the server, or to be used."""
        self._waiting: dict[tuple[int, ...], Future[Tensor]] = {}
        self._enough, self._ended = threading.Event(), threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.client: Client | None = None
        try:
            self._wait(self._meet(quiet))
            apart = self._compare()
            self.stood = StandIns(target, config, self.layers, self._probe())
        except NotImplementedError as why:
            self.close()
            raise UserError(
                f"{KEY}: target {target.spec!r} can't do without its layers ({why}); {KEY}=target"
            ) from None
        except BaseException:
            self.close()
            raise
        if not quiet:
            say(
                f"{url} returns states of {plural(len(self.layers), 'layer')} as {self.model!r}, within {apart:.1%} of the target's own, "
                f"up to {d.concurrency} requests at once"
            )

    # ---- requests ----

    async def _meet(self, quiet: bool) -> None:
        self.client = _client(self.recipe, quiet)
        self._slots = asyncio.Semaphore(self.recipe.data.concurrency)
        self.model = await _model(self.client, self.recipe, self.target, self.command)

    async def _states(self, tokens: tuple[int, ...]) -> Tensor:
        assert self.client is not None
        async with self._slots:
            if self._enough.is_set():
                raise asyncio.CancelledError
            body = {"model": self.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0}
            reply = await self.client.complete(body)
        found = reply.get("kv_transfer_params")
        path = found.get("hidden_states_path") if isinstance(found, dict) else None
        if not isinstance(path, str) or not Path(path).name or not path.isprintable():
            raise UserError(f"{self.url} returns no hidden states; start it with: {self.command}")
        return await asyncio.to_thread(self._read, Path(path), tokens)

    def _read(self, path: Path, tokens: tuple[int, ...]) -> Tensor:
        """States (layers, tokens, D). The file goes away once it is known to be the answer to this request."""
        lock, until = path.with_name(path.name + ".lock"), time.monotonic() + self.recipe.data.reply_seconds
        while not self._written(path, lock):
            if self._ended.is_set():
                raise InterruptedError  # nobody waits for it, but the interpreter would for this thread
            if time.monotonic() > until:
                seen = "has the server room to write?"
                why = (
                    seen
                    if lock.exists()
                    else "its shared_storage_path must be a folder that this machine sees"
                )
                raise UserError(
                    f"{self.url} stored states in {path}, which is not complete here after {self.recipe.data.reply_seconds:g} s "
                    f"(data.reply_seconds); {why}"
                )
            time.sleep(_LOOK)
        try:
            with safe_open(path, "pt") as file:
                text, states = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}, stored by {self.url}: can't be read ({error})") from None
        if text.flatten()[: len(tokens)].tolist() != list(tokens):
            raise UserError(f"{path}, stored by {self.url}: holds states of another text")
        shape = (len(self.layers), self.target.hidden_size)
        if states.dim() != 3 or len(states) < len(tokens) or tuple(states.shape[1:]) != shape:
            raise UserError(
                f"{self.url} returns states of shape {tuple(states.shape)} for {len(tokens)} tokens, not {(len(tokens), *shape)}; "
                f"start it with: {self.command}"
            )
        states = states[: len(tokens)].transpose(0, 1)
        # fp8 can't be asked itself
        if not states.is_floating_point() or not bool(states.float().isfinite().all()):
            raise UserError(f"{self.url} returns states that are not finite floating-point numbers")
        for used in (path, lock):
            used.unlink(missing_ok=True)
        return states.to(self.target.dtype)

    def _written(self, path: Path, lock: Path) -> bool:
        """Whether the file is there and nobody writes it."""
        try:
            handle = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for
        except FileNotFoundError:
            return path.is_file()  # a server that is told to do without locks answers when it has written
        except OSError as error:
            raise UserError(f"{lock}, stored by {self.url}: can't be read ({error.strerror})") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(handle)
        return path.is_file()

    def _wait(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    # ---- the target's own ----

    def _compare(self) -> float:
        """The largest distance of the server's states from the target's own, over a short text.

        Raises:
            UserError: they are other layers', or another model's.
        """
        text, every = self._probe(), range(self.target.num_layers)
        own = own_states(self.target, text, every)
        found = self._wait(self._states(tuple(text[0].tolist()))).to(self.target.device)
        worst = 0.0
        for layer, states in zip(self.layers, found, strict=True):
            # the first token's state is of another size in many models, and says little
            apart = torch.stack([distance(states[1:], own[0, 1:, i]) for i in every])
            nearest = int(apart.argmin())
            if nearest != layer and float(apart[nearest]) < NEAR:
                raise UserError(
                    f"{self.url} returns states of layer {nearest} of target {self.target.spec!r} where those of layer {layer} are wanted; "
                    f"start it with: {self.command}"
                )
            worst = max(worst, float(apart[layer]))
        if worst > NEAR and self.recipe.data.server_check == "auto":
            raise UserError(
                f"{self.url}: {self.model!r} is not target.name={self.target.spec!r}: its states are {worst:.0%} away from the target's, "
                f"{NEAR:.0%} are the most (data.server_check=never goes on all the same)"
            )
        return worst

    def _probe(self) -> Tensor:
        """A short text, (1, tokens)."""
        tokens = self.target.text_tokens(" ".join(_TEXT.split()))[:PROBE]
        return torch.tensor([tokens], device=self.target.device)

    # ---- for the cache ----

    def ahead(self, rows: Iterable[Item], there: Callable[[Item], bool]) -> Iterator[Item]:
        """The same rows in the same order; the documents of those to come that are not `there` are asked for meanwhile."""
        queue = deque[Item]()
        for item in rows:
            queue.append(item)
            if not there(item):
                for text in documents(item[1]):
                    if text not in self._waiting:
                        self._waiting[text] = asyncio.run_coroutine_threadsafe(self._states(text), self._loop)
            while queue and len(self._waiting) >= self.most:
                yield queue.popleft()
        yield from queue

    def features(self, target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
        """As `target_features`."""

        def of_one(target: Target, alone: Batch, config: BlockConfig | None) -> TargetFeatures:
            text = tuple(alone.tokens_BL[0].tolist())
            found = self._waiting.pop(text, None)
            states: Tensor = self._wait(self._states(text)) if found is None else found.result()
            return self.stood.features(alone, states.to(target.device))

        return each_document(target, batch, config, of_one)

    def close(self) -> None:
        """End the requests in flight; their files stay."""
        if self._loop.is_closed():
            return
        self._ended.set()
        for waiting in self._waiting.values():
            waiting.cancel()
        if self.client is not None:
            self._wait(self.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> ServedStates:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:  # there is no room for more rows: what was asked for already comes, and its files go
            self._enough.set()
            wait(self._waiting.values(), timeout=_LAST)
        self.close()


def documents(alone: Batch) -> list[tuple[int, ...]]:
    """The texts in a row, given as a batch of one."""
    return [tuple(alone.tokens_BL[0, places].tolist()) for places in document_places(alone.document_BL[0])]


_TEXT = """The river was low that summer, and the old mill, which had ground corn for two hundred years, stood still. def area(width,
height): return width * height. In 1987 the two brothers sold it to a painter, who wanted the light, not the stones."""
