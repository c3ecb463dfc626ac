"""Runs a generated program in a child process without network or further processes, with limits of
memory, time and files (decode/evaluation/sandbox.py). A program may still read what this user can
read: use a container for models that you do not trust."""

import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from decode.evaluation import sandbox
from specalign.common.errors import UserError

_PROBE = """
import socket
try:
    socket.socket()
except PermissionError:
    print("cut off")
"""


class ProgramResult(NamedTuple):
    """Whether a program exited without an error and what it printed; `ended`: also ran to its last
    line: a program that exits early passes none of the tests after it."""

    passed: bool
    output: str
    ended: bool


def check_sandbox() -> None:
    """Raises UserError where programs can't be cut off from the network."""
    known = sys.platform == "linux" and platform.machine() in sandbox.MACHINES
    if not known or run_program(_PROBE).output.strip() != "cut off":
        system = f"{sys.platform} on {platform.machine()}"
        raise UserError(f"--execute-code: network isolation is unavailable for {system}")


def run_program(
    code: str, given: str = "", seconds: float = sandbox.SECONDS, name: str = "__main__"
) -> ProgramResult:
    """Run a Python program with this text as its standard input and this `__name__`, in an empty
    folder. The sandbox reads a secret before the program starts and writes it when the program has
    ended."""
    secret = secrets.token_hex(sandbox.SECRET // 2)
    with (
        tempfile.TemporaryDirectory(prefix="specalign-program-") as folder,
        tempfile.TemporaryFile() as output,
    ):
        path = Path(folder, "program.py")
        path.write_text(code, encoding="utf-8", errors="replace")
        ended = Path(folder, "ended")
        process = subprocess.Popen(
            [sys.executable, "-I", sandbox.__file__, str(path), str(ended), name],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            process.communicate((secret + given).encode(errors="replace"), timeout=seconds)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        output.seek(0)
        text = output.read().decode("utf-8", errors="replace")  # at most sandbox.FILE bytes
        proven = ended.is_file() and ended.read_bytes() == secret.encode()
    passed = process.returncode == 0
    return ProgramResult(passed, text, passed and proven)
