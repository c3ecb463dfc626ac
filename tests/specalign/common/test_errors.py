"""What a user sees of an error: one line, the nearest valid name, an exit code."""

import errno
import os
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from specalign.common.errors import UserError, cli

FULL = "No space left on device"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("k=1:\n no"), 2, "error: k=1: no"),
        (UserError("k=\x1b[2J"), 2, "error: k=\\x1b[2J"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a/b"), 2, "error: a/b: No such file"),
        (OSError(errno.ENOSPC, FULL, "a"), 1, f"error: a: {FULL}"),
        (OSError("a hub's own words"), 2, "error: a hub's own words"),
        (SafetensorError(f"I/O error: {FULL} (os error 28)"), 1, "error: can't write a file"),
        (RuntimeError("PytorchStreamWriter failed"), 1, "error: can't write a file"),
        (RuntimeError("can't allocate memory: you tried 9"), 2, "error: not enough memory"),
        (MemoryError(), 2, "error: not enough memory"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as exit:
        cli(main)()
    assert exit.value.code == code and capsys.readouterr().err.startswith(says)


def test_a_bug_keeps_its_traceback() -> None:
    def main() -> None:
        raise ValueError("shapes do not match")

    with pytest.raises(ValueError, match="shapes"):
        cli(main)()


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    program = "from specalign.common.errors import cli\ncli(lambda: print('x\\n' * 10**6))()"
    line = f'"{sys.executable}" -c "$0" | head -1 > /dev/null; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", line, program], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_any_text_reaches_a_terminal_of_another_encoding() -> None:
    program = "from specalign.common.errors import cli\ncli(lambda: print('τ 1.62'))()"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (0, "? 1.62\n")
