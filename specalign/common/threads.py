"""How torch's threads wait for one another."""

import os
import time
from pathlib import Path

_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"}
"""Variables by which a user has chosen."""


def wait_passively_if_busy() -> None:
    """Have waiting threads sleep if other processes take half of the cores or more; called before
    torch is imported. They spin otherwise, which is quicker on an idle machine and up to 20 times
    as slow on a busy one, because a thread spins on the core that it waits for."""
    cores = os.cpu_count() or 1
    load = Path("/proc/loadavg")
    if cores == 1 or _WAITING & {*os.environ} or not load.is_file():
        return
    running = []
    for _ in range(3):
        waiting_too = load.read_text(encoding="ascii").split()[3].split("/")[0]
        running.append(int(waiting_too) - 1)  # without this one
        time.sleep(0.003)
    if 2 * min(running) >= cores:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
