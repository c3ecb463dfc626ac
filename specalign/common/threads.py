"""How torch's threads wait for one another. To be decided before torch is imported."""

from __future__ import annotations

import os
import time
from pathlib import Path

LOADAVG = Path("/proc/loadavg")
CHOSEN = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"}
"""Variables by which a user has chosen."""


def wait_passively_if_busy() -> None:
    """Have waiting threads sleep if other processes take half of the cores or more. They spin
    otherwise, which is quicker on an idle machine and up to 20 times as slow on a busy one, because
    a thread spins on the core that it waits for."""
    cores = os.cpu_count() or 1
    if cores > 1 and not CHOSEN & {*os.environ} and 2 * count_running() >= cores:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def count_running() -> int:
    """Other threads that run or wait for a core: the least of three looks. 0 if the system does not
    say."""
    found = []
    for _ in range(3):
        try:
            running = LOADAVG.read_text(encoding="ascii").split()[3].split("/")[0]
        except OSError:
            return 0
        found.append(int(running) - 1)  # this one
        time.sleep(0.003)
    return min(found)
