"""Files of hidden states that a server stores for each request."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specalign.common.errors import UserError

_POLL_SECONDS = 0.005


@dataclass
class StateFiles:
    """Reads files of states (tokens, layers, D) that another process writes under a lock
    `FILE.lock`.

    url: of the server, for messages. seconds: to wait for a file. shape: (layers, D). command:
    starts the right server. closed: stops waiting.
    """

    url: str
    seconds: float
    shape: tuple[int, int]
    command: str
    closed: threading.Event = field(default_factory=threading.Event)

    def read(self, path: Path, tokens: tuple[int, ...]) -> Tensor:
        """States (layers, tokens, D). The file is deleted once it is known to answer this request.

        Raises:
            UserError: a file that is late, unreadable, of another text, or of other values or
                shape.
        """
        lock = path.with_name(path.name + ".lock")
        self._wait_for(path, lock)
        try:
            with safe_open(path, "pt") as file:
                text, states = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}, stored by {self.url}: can't be read ({error})") from None
        if text.flatten()[: len(tokens)].tolist() != list(tokens):
            raise UserError(f"{path}, stored by {self.url}: holds states of another text")
        if states.dim() != 3 or len(states) < len(tokens) or tuple(states.shape[1:]) != self.shape:
            raise UserError(
                f"{self.url} returns states of shape {tuple(states.shape)} for {len(tokens)} "
                "tokens, not "
                f"{(len(tokens), *self.shape)}; start it with: {self.command}"
            )
        # fp8 has no isfinite
        if not states.is_floating_point() or not bool(
            states[: len(tokens)].float().isfinite().all()
        ):
            raise UserError(f"{self.url} returns states that are not finite floating-point numbers")
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        return states[: len(tokens)].transpose(0, 1)

    def _wait_for(self, path: Path, lock: Path) -> None:
        until = time.monotonic() + self.seconds
        while not self._is_written(path, lock):
            if self.closed.is_set():
                raise InterruptedError  # else the interpreter would wait for this thread at exit
            if time.monotonic() > until:
                why = "its shared_storage_path must be a folder that this machine sees"
                if lock.exists():
                    why = "has the server room to write?"
                raise UserError(
                    f"{self.url} stored states in {path}, which is not complete here after "
                    f"{self.seconds:g} s "
                    f"(data.reply_seconds); {why}"
                )
            time.sleep(_POLL_SECONDS)

    def _is_written(self, path: Path, lock: Path) -> bool:
        """Whether the file exists and nobody is writing it."""
        try:
            handle = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return path.is_file()  # a server without locks answers when it has written
        except OSError as error:
            raise UserError(
                f"{lock}, stored by {self.url}: can't be read ({error.strerror})"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(handle)
        return path.is_file()
