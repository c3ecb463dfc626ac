"""vLLM's connector for hidden states on a processor: its own copies states on a CUDA stream. Loaded by vLLM's own environment, where
`kv_connector_module_path` names this module.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllms


class _Now:
    """In place of CUDA's streams and events: everything has happened."""

    def __init__(self, *more: Any, **named: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def record(self, *stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class OnProcessor(vllms.ExampleHiddenStatesConnector):  # type: ignore[misc]
    """The same, without CUDA."""

    def _submit_async_write(self, pending: Any) -> None:
        empty, kept = torch.empty_like, (torch.cuda.Event, torch.cuda.Stream, torch.cuda.stream)
        torch.cuda.Event = torch.cuda.Stream = torch.cuda.stream = _Now  # type: ignore[assignment,misc]
        torch.empty_like = lambda *args, pin_memory=False, **named: empty(*args, **named)  # type: ignore[assignment]
        try:
            super()._submit_async_write(pending)
        finally:
            torch.empty_like = empty
            torch.cuda.Event, torch.cuda.Stream, torch.cuda.stream = kept  # type: ignore[assignment,misc]
