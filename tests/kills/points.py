"""Point N of a seed: a command is disturbed, or finds its disk full, and is then run again until it ends."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kills.child import NOTHING, ROOT, Disturbance, Outcome, fresh, run
from tests.kills.compare import contents, difference, torn
from tests.kills.scenarios import SCENARIOS, Scenario, filled, inputs

PAGE = 4096
SPARE = 64 * PAGE
"""What a disk has room for besides the finished run and one checkpoint more."""
TEMPORARY = 64 << 20
"""What temporary files of a run may take, where they are on that disk too."""
_BAD = ("Traceback (most recent call last)", "Exception ignored", "Fatal Python error", "terminate called")


@dataclass
class Reference:
    """A run without disturbance: what it leaves, how long it took, its calls that change files, its largest file and all of
    them in bytes, its files."""

    contents: dict[str, Any]
    seconds: float
    calls: int
    largest: int
    used: int
    files: int


@dataclass
class Place:
    """Where everything happens. `only`: words of which a scenario's name must hold one. `references`: of the scenarios that have been
    run."""

    root: Path
    fresh: bool
    only: Sequence[str] = ()
    references: dict[str, Reference] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inputs(self.root / "inputs")
        self._server: subprocess.Popen[str] | None = None

    def server(self) -> str:
        """The address of a server that writes answers, started when it is first asked for."""
        if self._server is None:
            command = [sys.executable, "-m", "tests.kills.server"]
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, start_new_session=True
            )
            assert self._server.stdout is not None
            self._address = self._server.stdout.readline().strip()
        return self._address

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def chosen(self, r: random.Random) -> Scenario:
        """One of the scenarios, by weight."""
        fitting = [s for s in SCENARIOS if not self.only or any(word in s.name for word in self.only)]
        return r.choices(fitting, [s.weight for s in fitting])[0]

    def words(self, scenario: Scenario) -> list[str]:
        server = self.server() if any("{server}" in word for word in scenario.words) else ""
        return filled(scenario, self.root / "inputs", server)

    @property
    def work(self) -> Path:
        return self.root / "work"

    def start(self, scenario: Scenario, what: Disturbance = NOTHING, scratch: Path | None = None) -> Outcome:
        return run(
            scenario.module,
            self.words(scenario),
            self.work,
            scratch or self.root / "tmp",
            self.root / "said",
            what,
        )

    def clear(self) -> None:
        for folder in (self.work, self.root / "tmp"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def reference(self, scenario: Scenario) -> Reference:
        """The undisturbed run; the same in a fresh process, where that is asked for."""
        if scenario.name not in self.references:
            self.clear()
            done = self.start(scenario)
            if done.code or _said_wrong(done):
                raise RuntimeError(f"{scenario.name} fails undisturbed: {done.err}")
            files = [p for p in self.work.rglob("*") if p.is_file()]
            sizes = [p.stat().st_size for p in files]
            used = sum(-(-size // PAGE) * PAGE for size in sizes)
            found = Reference(
                contents(self.work),
                done.seconds,
                done.calls,
                max(sizes),
                used,
                len(list(self.work.rglob("*"))),
            )
            if self.fresh:
                self.clear()
                fresh(scenario.module, self.words(scenario), self.work)
                if why := difference(contents(self.work), found.contents):
                    raise RuntimeError(f"{scenario.name}: a forked process and a fresh one differ: {why}")
            self.references[scenario.name] = found
        return self.references[scenario.name]


def kill(place: Place, seed: int, number: int, say: Callable[[str], object]) -> str:
    """What is wrong with how a command took being killed, several times perhaps; nothing where it took it well."""
    r = random.Random(f"kill {seed} {number}")
    scenario = place.chosen(r)
    reference = place.reference(scenario)
    place.clear()
    signalled, again = False, 1.0
    said = [scenario.name]
    try:
        while r.random() < again:
            what = disturbance(r, reference)
            said.append(str(what))
            done = place.start(scenario, what)
            if why := _misbehaved(done, what, scenario.stops):
                return f"{why} ({done.err[-1500:]!r})"
            signalled |= done.code == 130
            again = 0.6
        return _ended(place, scenario, reference, signalled)
    finally:
        say(" · ".join(said))


def full_disk(place: Place, seed: int, number: int, say: Callable[[str], object]) -> str:
    """What is wrong with how a command took a full disk, and how it went on when that had room; nothing where all was well.

    Raises:
        OSError, subprocess.CalledProcessError: no disk can be mounted.
    """
    r = random.Random(f"disk {seed} {number}")
    scenario = place.chosen(r)
    reference = place.reference(scenario)
    place.clear()
    few = reference.files + 12 if r.random() > 0.15 else r.randrange(2, reference.files + 2)
    free = r.randrange(0, int(1.1 * reference.used), PAGE)
    inside = r.random() < 0.3
    size = reference.used + reference.largest + SPARE
    say(f"{scenario.name} · {free} bytes free, {few} files{', temporary ones there too' if inside else ''}")
    with Disk(place.work, size, few) as disk:
        scratch = place.work / "tmp" if inside else None
        disk.fill(free)
        done = place.start(scenario, NOTHING, scratch)
        last = done.err.rstrip().splitlines()[-1:] or [""]
        if (
            _said_wrong(done)
            or done.code not in (0, 1, 2)
            or (
                done.code
                and not last[0].startswith("error: ")
                and not (scenario.stops and "tries them again" in last[0])
            )
        ):
            return f"exit code {done.code} of a full disk ({done.err[-1500:]!r})"
        if why := torn(reference.contents, contents(place.work)):
            return f"left by a full disk: {why}"
        disk.free()
        return _ended(place, scenario, reference, False, scratch)


def disturbance(r: random.Random, reference: Reference) -> Disturbance:
    """At a moment of its time, at a call that changes a file, or within a write."""
    match r.choices(("time", "call", "size", "signal"), (35, 35, 15, 15))[0]:
        case "time":
            return Disturbance(after_s=r.uniform(0, 1.05 * reference.seconds))
        case "call":
            return Disturbance(call=r.randint(1, reference.calls))
        case "size":
            return Disturbance(size=int(reference.largest ** r.random()))
    number = r.choice((signal.SIGTERM, signal.SIGINT))
    return Disturbance(signal=number, after_s=r.uniform(0, 1.05 * reference.seconds))


def _said_wrong(done: Outcome) -> str:
    return next((bad for bad in _BAD if bad in done.out + done.err), "")


def _misbehaved(done: Outcome, what: Disturbance, stops: bool) -> str:
    if said := _said_wrong(done):
        return said
    if done.code == 0 or done.code in (-signal.SIGKILL, -signal.SIGXFSZ) and what.signal == signal.SIGKILL:
        return ""
    if stops and done.code == 130 and "was stopped" in done.err:
        return ""
    if what.signal != signal.SIGKILL and (done.code == 130 and done.err.strip()):
        return ""
    if what.signal == -done.code == signal.SIGTERM and not done.out + done.err:  # before it had begun
        return ""
    return f"exit code {done.code} after {what}"


def _ended(
    place: Place, scenario: Scenario, reference: Reference, signalled: bool, scratch: Path | None = None
) -> str:
    """Run it to its end; what is wrong with that and with what it leaves."""
    done = place.start(scenario, NOTHING, scratch)
    if done.code or _said_wrong(done):
        return f"exit code {done.code} of the last run ({done.err[-1500:]!r})"
    tmp = scratch or place.root / "tmp"
    if left := sorted(path.name for path in tmp.iterdir()):
        return f"left over among the temporary files: {', '.join(left[:3])}"
    if scratch is not None:
        scratch.rmdir()
    found = contents(place.work)
    expected = dict(reference.contents)
    if signalled:  # a stop saves a checkpoint of its own
        _without_early_checkpoints(expected, found)
    return difference(expected, found)


def _without_early_checkpoints(*folders: dict[str, Any]) -> None:
    """Leave out all but the last checkpoint."""
    names = [
        {name for name in folder if "/checkpoints/" in name and "can't" not in str(folder[name])[:5]}
        for folder in folders
    ]
    last = max((int(n.rpartition("-")[2].partition(".")[0]) for n in names[0]), default=0)
    for folder, each in zip(folders, names, strict=True):
        for name in each:
            if f"step-{last}." not in name and Path(name).name.startswith("step-"):
                del folder[name]


class Disk:
    """A small disk in memory at a folder, as a context."""

    def __init__(self, folder: Path, size: int, files: int) -> None:
        self.folder, self.size, self.files = folder, size, files

    def __enter__(self) -> Disk:
        options = f"size={self.size},nr_inodes={self.files + 3}"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)],
            check=True,
            capture_output=True,
        )
        return self

    def fill(self, free: int) -> None:
        """Leave so many bytes."""
        found = os.statvfs(self.folder)
        wanted = found.f_bavail * found.f_frsize - free
        if wanted > 0:
            with open(self.folder / "filler", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, wanted)

    def free(self) -> None:
        """Room for a whole run and one checkpoint more."""
        (self.folder / "filler").unlink(missing_ok=True)
        options = f"remount,size={self.size + TEMPORARY},nr_inodes=1000"
        subprocess.run(["mount", "-o", options, str(self.folder)], check=True, capture_output=True)

    def __exit__(self, *error: object) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)
