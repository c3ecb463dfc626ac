"""The child of `decode.evaluation.execution`: confines itself, then runs the program that its argument
names, and proves that it ran to its end. Standard library alone: it is started as a file."""

import ctypes
import os
import platform
import resource
import runpy
import struct
import sys
from typing import Any

SECONDS, MEMORY, FILE = 10, 2 << 30, 16 << 20
"""Limits: of the processor's time, memory and a file's size."""
SECRET = 32  # bytes of standard input before the program's own

# Linux's numbers of system calls, by machine. Refused: those that open a network (socket,
# io_uring_setup) and those that start a process (fork, vfork, clone without a thread's flag).
# clone3, whose flags a filter can't read, is missing, and the C library uses clone instead.
MACHINES: dict[str, dict[str, Any]] = {
    "x86_64": {"machine": 0xC000003E, "refused": (41, 425, 57, 58), "clone": 56, "missing": 435},
    "aarch64": {"machine": 0xC00000B7, "refused": (198, 425), "clone": 220, "missing": 435},
}
_THREAD = 0x10000
_OTHER_ABI = 0x40000000  # x86_64's calls of 32-bit pointers
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # places in what the filter reads
_ALLOW, _REFUSE, _MISSING, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def confine() -> None:
    for kind, limit in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    _install(_filter(MACHINES[platform.machine()]))


def _filter(calls: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """Steps of a filter; each jumps over as many steps as its second (if so) or third field."""
    tests = []
    for call in calls["refused"]:
        tests += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _REFUSE)]
    return [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, calls["machine"]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _OTHER_ABI),
        (_RETURN, 0, 0, _REFUSE),
        *tests,
        (_EQUAL, 0, 1, calls["missing"]),
        (_RETURN, 0, 0, _MISSING),
        (_EQUAL, 1, 0, calls["clone"]),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _install(steps: list[tuple[int, int, int, int]]) -> None:
    packed = b"".join(struct.pack("=HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(steps), packed)
    if libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(
        _SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp is unavailable")


def run(program: str, ended: str, name: str) -> None:
    """Run a program; if it does not exit on its way, write the secret to `ended`."""
    secret = os.read(0, SECRET)
    runpy.run_path(program, run_name=name)
    file = os.open(ended, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.write(file, secret)


if __name__ == "__main__":
    confine()
    run(*sys.argv[1:])
