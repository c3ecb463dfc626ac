"""pytest in forked children: torch is imported once, the code under test afresh in every child."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "lightning", "datasets", "peft", "hypothesis", "matplotlib.pyplot", "gguf")
"""What the tests import and no mutant touches."""
MEMORY = 12 << 30
"""Bytes of addresses: a mutant that allocates without end fails early."""


def warm_up() -> None:
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    for name in HEAVY:
        importlib.import_module(name)


def in_child(tree: Path, files: list[str], plugin: object, *options: str) -> int:
    """pytest over `files` of a copy of the tree, in its own process.

    Returns:
        pytest's exit status, or the negative number of the signal that ended the child.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            _enter(tree)
            os._exit(int(pytest.main([*options, "-q", "-p", "no:cacheprovider", *files], plugins=[plugin])))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _enter(tree: Path) -> None:
    root = str(Path(__file__).parents[2])
    sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", ".", root))]
    os.environ["PYTHONPATH"] = str(tree)
    for name in [n for n in sys.modules if n.split(".")[0] in ("align", "decode", "tests")]:
        del sys.modules[name]
    os.chdir(tree)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    log = os.open(tree / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)


class Chosen:
    """Runs these tests in this order and writes down each as it starts. One that takes too long ends the child."""

    def __init__(self, seconds: dict[str, float], started: Path) -> None:
        self.order = {name: i for i, name in enumerate(seconds)}
        self.seconds, self.started = seconds, started
        started.write_text("")

    def pytest_sessionstart(self) -> None:
        signal.alarm(_limit(60))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(wanted, key=lambda item: self.order[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with self.started.open("a") as file:
            file.write(item.nodeid + "\n")
        signal.alarm(_limit(self.seconds[item.nodeid]))
        return (yield)


def _limit(usual: float) -> int:
    """Seconds after which a test hangs: busy machines are slow, and its module's fixtures may count, too."""
    return int(60 + 10 * usual)
