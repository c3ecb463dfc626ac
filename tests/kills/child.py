"""A command in a process of its own that is forked from this one, which has imported all it takes, and how it is disturbed."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
LOGS = "stdout", "stderr"
LIMIT_S = 300
"""A command that takes longer hangs."""

_CALLS = {
    "open", "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.fsync", "shutil.rmtree",
    "tempfile.mkstemp",
}  # fmt: skip
"""Audit events of what changes files (`os.fsync` is reported by ourselves)."""


@dataclass(frozen=True)
class Disturbance:
    """What befalls a command. Only one of these:

    after_s: seconds after which it gets `signal`. calls: at which of its calls that change files it is killed. size: it is
    killed within the write that makes a file as many bytes long.
    """

    signal: int = signal.SIGKILL
    after_s: float | None = None
    call: int | None = None
    size: int | None = None

    def __str__(self) -> str:
        if self.call is not None:
            return f"killed at file call {self.call}"
        if self.size is not None:
            return f"killed in the write that reaches {self.size} bytes"
        return f"{signal.Signals(self.signal).name} after {self.after_s:.3f} s"


NOTHING = Disturbance(after_s=float("inf"))


@dataclass(frozen=True)
class Outcome:
    """How a command ended: exit code (negative: by this signal), what it said, seconds, and its calls that change files; where
    it was killed, -1."""

    code: int
    out: str
    err: str
    seconds: float
    calls: int


def run(
    module: str, words: Sequence[str], folder: Path, scratch: Path, logs: Path, what: Disturbance
) -> Outcome:
    """Run `python -m module words` in `folder` with its temporary files in `scratch` and what it says in `logs`, and disturb it."""
    one_thread()
    sys.stdout.flush()
    sys.stderr.flush()
    for place in (scratch, logs):
        place.mkdir(exist_ok=True)
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _child(module, list(words), folder, scratch, logs, what, theirs)
    os.close(theirs)
    os.read(ours, 1)  # it is about to begin
    begun = time.monotonic()
    code = _wait(pid, what, begun)
    seconds = time.monotonic() - begun
    said = os.read(ours, 100) if select.select([ours], [], [], 0)[0] else b""
    os.close(ours)
    out, err = ((logs / name).read_text(errors="replace") for name in LOGS)
    return Outcome(code, out, err, seconds, int(said or -1))


def one_thread() -> None:
    """Raises RuntimeError where this process has more threads than one: what they hold locked stays so in a fork."""
    names = [Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in os.listdir("/proc/self/task")]
    if len(names) != 1:
        raise RuntimeError(f"can't fork: threads {', '.join(names)}")


def _wait(pid: int, what: Disturbance, begun: float) -> int:
    due = begun + (what.after_s if what.after_s is not None else float("inf"))
    pidfd = os.pidfd_open(pid)
    try:
        for limit in (min(due, begun + LIMIT_S), begun + LIMIT_S):
            if select.select([pidfd], [], [], max(0.0, limit - time.monotonic()))[0]:
                break
            if limit == due:
                if what.signal == signal.SIGINT:  # Ctrl-C reaches all that a command has started
                    os.killpg(pid, what.signal)
                else:
                    os.kill(pid, what.signal)
        else:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise RuntimeError(f"hangs (more than {LIMIT_S} s)")
    finally:
        os.close(pidfd)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it started and left
    return code


def _child(
    module: str, words: list[str], folder: Path, scratch: Path, logs: Path, what: Disturbance, pipe: int
) -> NoReturn:
    """The forked process: made to look like a fresh one, it runs the command and ends."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in enumerate(LOGS, 1):
            os.dup2(os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ["TMPDIR"], tempfile.tempdir = str(scratch), None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.argv = ["-m", *words]
        main: Callable[[], Any] = importlib.import_module(module).main
        subprocess.run = _forked
        importlib.import_module("align.outputs.store").SHARD_BYTES = 1 << 15  # several shards of few rows
        calls = _Calls(what.call)
        if what.size is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (what.size, what.size))
        os.write(pipe, b"b")
        code = _called(main)
        sys.stdout.flush()
        os.write(pipe, str(calls.count).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


_run = subprocess.run


def _forked(command: Any, **options: Any) -> Any:
    """In the place of `subprocess.run`: a command that trains is forked from this process, which has imported all it takes."""
    if command[1:3] != ["-m", "align.train"] or options.get("stdout") in (None, subprocess.PIPE):
        return _run(command, **options)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for number in (1, 2):
                os.dup2(options["stdout"].fileno(), number)
            sys.argv = ["-m", *command[3:]]
            code = _called(importlib.import_module("align.train").main)
            sys.stdout.flush()
        finally:
            os._exit(code)
    try:
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    except BaseException:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it may have ended meanwhile
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise


def _called(main: Callable[[], Any]) -> int:
    """The exit code of a command, as the interpreter has it. Signals after its end change nothing."""
    try:
        main()
        return 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


class _Calls:
    """Counts this process's calls that change files, and kills it before one of them."""

    def __init__(self, fatal: int | None) -> None:
        self.count, self.fatal = 0, fatal
        fsync = os.fsync

        def audited(handle: Any) -> None:
            sys.audit("os.fsync", handle)
            fsync(handle)

        os.fsync = audited
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _CALLS or event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def fresh(module: str, words: Sequence[str], folder: Path) -> Outcome:
    """The same command in a fresh interpreter."""
    begun = time.monotonic()
    command, env = [sys.executable, "-m", module, *words], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    return Outcome(done.returncode, done.stdout, done.stderr, time.monotonic() - begun, -1)
