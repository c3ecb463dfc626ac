"""The target's hidden states from a server, read from the files that it stores.

vLLM's speculative method `extract_hidden_states` with its ExampleHiddenStatesConnector: each
request of a text with one new token leaves a file of states (tokens, layers, D) in
`shared_storage_path`, with a lock next to it while it is written. The target here keeps embedding,
last norm, head, and the layers that make shared keys and values.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from align.config.recipe import Recipe
from align.outputs.stand_ins import StandIns, distance, layers_asked, own_states
from align.outputs.state_files import StateFiles
from align.writing.client import Client, RetryPolicy, choose_model
from specalign.common.batch import Batch
from specalign.common.errors import UserError
from specalign.common.text import plural, say
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig
from specalign.models.target_features import TargetFeatures, document_places, each_document

KEY = "trainer.features_writer"
NEAR = 0.05
"""The largest relative distance of a served state from the target's own; bf16 over 30 layers:
0.01."""
PROBE = 48
"""Tokens of the text that tests a server."""
Item = tuple[int, Batch, float]
"""A row's place in the order of training, the row as a batch of one, and the temperature of p."""
SHARED = Path("/dev/shm/states")
"""Where a server on this machine may store states: memory."""
_DRAIN_SECONDS = 60.0
"""How long to wait for requests in flight when no more rows are needed."""
Result = TypeVar("Result")


def serve_words(
    layers: Sequence[int],
    folder: Path,
    module: str | None = None,
    connector: str = "ExampleHiddenStatesConnector",
) -> list[str]:
    """vLLM's options for the outputs of these layers; its state 0 is the embedding.

    Args:
        folder: where it stores them. module: of a connector that is not vLLM's own.
    """
    ids = {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in layers]}
    method = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": ids},
    }
    store: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    if module is not None:
        store["kv_connector_module_path"] = module
    options = ["--no-enable-chunked-prefill", "--speculative-config", json.dumps(method)]
    return [*options, "--kv-transfer-config", json.dumps(store)]


def _command(target: Target, config: BlockConfig | None) -> str:
    """How to start vLLM for a target and what a drafter reads of it."""
    return shlex.join(
        ["vllm", "serve", target.spec, *serve_words(layers_asked(target, config), SHARED)]
    )


def _client(recipe: Recipe, quiet: bool) -> Client:
    """Raises UserError: an invalid address, API key or proxy."""
    d, url = recipe.data, recipe.trainer.features_server
    assert url is not None
    return Client(url, RetryPolicy(d.reply_seconds, d.retry_seconds), quiet, KEY)


async def _find_model(client: Client, recipe: Recipe, target: Target, command: str) -> str:
    """The target's name on the server.

    Raises:
        UserError: no answer, no such model, or one with too little room for a row.
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
            f"{client.url}: {name!r} takes {limit} tokens, a row may have {recipe.data.length} and "
            "one "
            "new one (data.length)"
        )
    return name


def check_server(recipe: Recipe, target: Target, config: BlockConfig | None) -> None:
    """Raises UserError if no server has the target, before anything is written for it."""

    async def ask() -> None:
        client = _client(recipe, quiet=True)
        try:
            await _find_model(client, recipe, target, _command(target, config))
        finally:
            await client.close()

    asyncio.run(ask())


class ServedStates:
    """The target's hidden states from a server: a context whose `features` replaces
    `TargetOutputCache.run`. The target given to it loses its layers.

    Raises:
        UserError: no such server, one that returns no hidden states, or other ones than the
            target's.
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
        """Documents that are requested or waiting to be used."""
        self._waiting: dict[tuple[int, ...], Future[Tensor]] = {}
        self._enough = threading.Event()
        shape = (len(self.layers), target.hidden_size)
        self.files = StateFiles(url, d.reply_seconds, shape, self.command)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.client: Client | None = None
        try:
            self._wait(self._connect(quiet))
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
                f"{url} returns states of {plural(len(self.layers), 'layer')} as {self.model!r}, "
                "within "
                f"{apart:.1%} of "
                f"the target's own, up to {d.concurrency} requests at once"
            )

    # ---- requests ----

    async def _connect(self, quiet: bool) -> None:
        self.client = _client(self.recipe, quiet)
        self._slots = asyncio.Semaphore(self.recipe.data.concurrency)
        self.model = await _find_model(self.client, self.recipe, self.target, self.command)

    async def _states(self, tokens: tuple[int, ...]) -> Tensor:
        assert self.client is not None
        async with self._slots:
            if self._enough.is_set():
                raise asyncio.CancelledError
            body = {
                "model": self.model,
                "prompt": list(tokens),
                "max_tokens": 1,
                "temperature": 0.0,
            }
            reply = await self.client.complete(body)
        found = reply.get("kv_transfer_params")
        path = found.get("hidden_states_path") if isinstance(found, dict) else None
        if not isinstance(path, str) or not Path(path).name or not path.isprintable():
            raise UserError(f"{self.url} returns no hidden states; start it with: {self.command}")
        states = await asyncio.to_thread(self.files.read, Path(path), tokens)
        return states.to(self.target.dtype)

    def _wait(self, what: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    # ---- the target's own ----

    def _compare(self) -> float:
        """The largest relative distance of the server's states from the target's own, over a short
        text.

        Raises:
            UserError: they are of other layers, or of another model.
        """
        text, every = self._probe(), range(self.target.num_layers)
        own = own_states(self.target, text, every)
        found = self._wait(self._states(tuple(text[0].tolist()))).to(self.target.device)
        worst = 0.0
        for layer, states in zip(self.layers, found, strict=True):
            # many models give the first token a state of another size
            apart = torch.stack([distance(states[1:], own[0, 1:, i]) for i in every])
            nearest = int(apart.argmin())
            if nearest != layer and float(apart[nearest]) < NEAR:
                raise UserError(
                    f"{self.url} returns states of layer {nearest} of target {self.target.spec!r} "
                    "where "
                    "those of layer "
                    f"{layer} are wanted; start it with: {self.command}"
                )
            worst = max(worst, float(apart[layer]))
        if worst > NEAR and self.recipe.data.server_check == "auto":
            raise UserError(
                f"{self.url}: {self.model!r} is not target.name={self.target.spec!r}: its states "
                "are "
                f"{worst:.0%} away from "
                f"the target's, more than {NEAR:.0%} (data.server_check=never continues anyway)"
            )
        return worst

    def _probe(self) -> Tensor:
        """A short text, (1, tokens)."""
        tokens = self.target.text_tokens(" ".join(_TEXT.split()))[:PROBE]
        return torch.tensor([tokens], device=self.target.device)

    # ---- for the cache ----

    def ahead(self, rows: Iterable[Item], there: Callable[[Item], bool]) -> Iterator[Item]:
        """The same rows in order, while the documents of coming rows that are not `there` are
        requested."""
        queue = deque[Item]()
        for item in rows:
            queue.append(item)
            if not there(item):
                for text in documents(item[1]):
                    if text not in self._waiting:
                        self._waiting[text] = asyncio.run_coroutine_threadsafe(
                            self._states(text), self._loop
                        )
            while queue and len(self._waiting) >= self.most:
                yield queue.popleft()
        yield from queue

    def features(self, target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
        """As `target_features`."""

        def of_one(target: Target, alone: Batch, config: BlockConfig | None) -> TargetFeatures:
            text = tuple(alone.tokens_BL[0].tolist())
            found = self._waiting.pop(text, None)
            states = self._wait(self._states(text)) if found is None else found.result()
            return self.stood.features(alone, states.to(target.device))

        return each_document(target, batch, config, of_one)

    def close(self) -> None:
        """Cancel the requests in flight; their files stay."""
        if self._loop.is_closed():
            return
        self.files.closed.set()
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
        if (
            kind is None
        ):  # the store is full: requested documents still arrive, and their files are deleted
            self._enough.set()
            wait(self._waiting.values(), timeout=_DRAIN_SECONDS)
        self.close()


def documents(alone: Batch) -> list[tuple[int, ...]]:
    """The texts in a row, given as a batch of one."""
    return [
        tuple(alone.tokens_BL[0, places].tolist())
        for places in document_places(alone.document_BL[0])
    ]


_TEXT = """The river was low that summer, and the old mill, which had ground corn for two hundred years, stood still. def area(width,
height): return width * height. In 1987 the two brothers sold it to a painter, who wanted the light, not the stones."""
