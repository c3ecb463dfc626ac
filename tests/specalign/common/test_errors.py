"""What a user sees of an error: one line, the nearest valid name, an exit code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from specalign.common.errors import UserError, cli, in_one_line, nearest


def test_the_nearest_name_is_offered_or_all_of_them() -> None:
    assert nearest("blok", ["block", "taps"]) == " (did you mean 'block'?)"
    assert (
        nearest("SMOLLM2_BLOCK", ["debug_block", "smollm2_block"])
        == " (did you mean 'smollm2_block'?)"
    )
    assert nearest("dflas", ["DFlash", "x"]) == " (did you mean 'DFlash'?)"
    assert nearest("zzz", ["b", "a"]) == " (one of: a, b)" and nearest("x", []) == ""
    many = [f"name{i:03}" for i in range(200)]
    assert nearest("zzz", many) == f" (one of: {', '.join(many[:26])}, and 174 more)"
    assert nearest("zzz", many[:26]) == f" (one of: {', '.join(many[:26])})"
    assert nearest("zzz", ["n" * 300, "m" * 300]) == f" (one of: {'m' * 300}, and 1 more)"


def test_a_librarys_error_becomes_one_line() -> None:
    with pytest.raises(UserError, match="^config.json: last$"), in_one_line("config.json"):
        raise TypeError("first\nlast\n")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("k=1:\n no"), 2, "error: k=1: no"),
        (UserError("k=\x1b[2J"), 2, "error: k=\\x1b[2J"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "a/b"),
            2,
            "error: a/b: No such file",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "a"),
            1,
            "error: a: No space left on device",
        ),
        (OSError("a hub's own words"), 2, "error: a hub's own words"),
        (
            SafetensorError("I/O error: No space left on device (os error 28)"),
            1,
            "error: a file can't be",
        ),
        (
            RuntimeError("[enforce fail at inline_container.cc:600] . PytorchStreamWriter failed"),
            1,
            "error: a file",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
            2,
            "error: not enough memory",
        ),
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


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    def main() -> None:
        raise ValueError("shapes do not match")

    with pytest.raises(ValueError, match="shapes"):
        cli(main)()


def test_an_interrupt_within_an_import_is_not_lost(tmp_path: Path) -> None:
    """Libraries catch whatever is raised while they look for others."""
    (tmp_path / "library.py").write_text("""
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    import json.tool
except BaseException:
    print("caught")
""")
    program = """
import signal, time
from specalign.common.errors import cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # behind `&` it is ignored

def main():
    import library
    for _ in range(400):
        time.sleep(0.05)
    print("went on")

cli(main)()
"""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=found
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted: run the same command again to continue\n"


def test_output_to_a_full_disk_is_one_line() -> None:
    program = "from specalign.common.errors import cli\ncli(lambda: print('x'))()"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1 and done.stderr == "error: No space left on device\n"


def test_a_reader_that_is_gone_ends_the_command_quietly() -> None:
    program = "from specalign.common.errors import cli\ncli(lambda: print('x\\n' * 10**6))()"
    line = f'"{sys.executable}" -c "$0" | head -1 > /dev/null; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", line, program], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_any_text_reaches_a_terminal_of_another_encoding() -> None:
    program = "from specalign.common.errors import cli\ncli(lambda: print('τ 1.62'))()"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (0, "? 1.62\n")
