"""Waiting threads sleep on a busy machine, unless the user has chosen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specalign.common import threads


@pytest.mark.parametrize(
    ("running", "chosen", "policy"),
    [(1, None, None), (3, None, "PASSIVE"), (3, "ACTIVE", "ACTIVE")],
)
def test_waiting_threads_sleep_on_a_busy_machine(
    running: int,
    chosen: str | None,
    policy: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in threads.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    (tmp_path / "loadavg").write_text(f"0.5 0.5 0.5 {running}/300 12345\n")
    monkeypatch.setattr(threads, "LOADAVG", tmp_path / "loadavg")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    threads.wait_passively_if_busy()
    assert os.environ.get("OMP_WAIT_POLICY") == policy
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
