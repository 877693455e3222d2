"""Real torchrun processes for tests: start, find, end with SIGKILL, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from source import ROOT


class Launch:
    """A torchrun and the processes it has started."""

    def __init__(
        self, ranks: int, script: str, *arguments: object, log: Path, meet: tuple[str, ...] = ("--standalone",)
    ) -> None:
        # --standalone: a free port, so that tests and trainings of one machine do not meet.
        launcher = ["-m", "torch.distributed.run", *meet, f"--nproc_per_node={ranks}"]
        command = [sys.executable, *launcher, script, *map(str, arguments)]
        # As launch.sh does: in torchrun's own store a restarted process would meet the addresses of dead ones.
        variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.log = log
        self.known: set[tuple[int, str]] = set()
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | variables, stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def text(self) -> str:
        """What it has printed, torchrun's own lines included."""
        return self.log.read_text(errors="replace")

    def family(self) -> set[tuple[int, str]]:
        """torchrun and all that it has started: (process, start time), as far as they have been seen alive."""
        found = _processes()
        self.known |= {process for process in found if process[0] == self.process.pid}
        while True:
            parents = {pid for pid, _ in self.known}
            born = {child for child, parent in found.items() if parent in parents} - self.known
            if not born:
                return self.known
            self.known |= born

    def until(self, happened: Callable[[], bool], seconds: float = 240) -> None:
        """Wait until ``happened()``; an AssertionError with the output if the launch ends or time is up before."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text}"
            assert time.monotonic() < deadline, f"nothing in {seconds} s:\n{self.text}"
            self.family()
            time.sleep(0.01)
        self.family()

    def wait(self, seconds: float = 300) -> int:
        """Its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.family()
            time.sleep(0.05)
        return self.process.wait(0.1)

    def kill(self) -> None:
        """SIGKILL to all of them: stopped first, so that none sees another one end."""
        for sent in (signal.SIGSTOP, signal.SIGKILL):
            self.family()
            for pid, _ in self.living():
                os.kill(pid, sent)
        self.process.wait(10)
        deadline = time.monotonic() + 10
        while self.living() and time.monotonic() < deadline:  # a kill is an order, not yet a death
            time.sleep(0.01)

    def living(self) -> set[tuple[int, str]]:
        """Those of the family that still run."""
        return self.known & _processes().keys()


@contextmanager
def launch(ranks: int, script: str, *arguments: object, log: Path, **options: tuple[str, ...]) -> Iterator[Launch]:
    """A torchrun that is gone with all its processes when the block ends, however it ends. ``meet``: how ranks do."""
    started = Launch(ranks, script, *arguments, log=log, **options)
    try:
        yield started
    finally:
        if started.process.poll() is None or started.living():
            started.kill()


def _processes() -> dict[tuple[int, str], int]:
    """(process, start time) -> parent of every process that is no zombie; a number used again has another start."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *rest = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if state not in "ZX":
            found[int(stat.parent.name), rest[17]] = int(parent)
    return found
