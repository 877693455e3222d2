"""Real processes for tests: start a command, find all its processes, and end them with SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from source import ROOT

# As in launch.sh: torchrun's own store keeps the addresses of processes that have ended.
VARIABLES = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Launch:
    """A command and all processes that it has started."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        self.known: set[tuple[int, str]] = set()
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | VARIABLES, stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def text(self) -> str:
        """The output so far, including the lines of a launcher."""
        return self.log.read_text(errors="replace")

    def family(self) -> set[tuple[int, str]]:
        """(process, start time) of the command and of all its descendants that have been seen alive."""
        found = _processes()
        self.known |= {process for process in found if process[0] == self.process.pid}
        while True:
            parents = {pid for pid, _ in self.known}
            born = {child for child, parent in found.items() if parent in parents} - self.known
            if not born:
                return self.known
            self.known |= born

    def until(self, happened: Callable[[], bool], seconds: float = 240) -> None:
        """Wait until ``happened()``. AssertionError with the output if the launch ends first, or after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text}"
            assert time.monotonic() < deadline, f"nothing in {seconds} s:\n{self.text}"
            self.family()
            time.sleep(0.01)
        self.family()

    def wait(self, seconds: float = 300) -> int:
        """The exit code of the command, for which this waits."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.family()
            time.sleep(0.05)
        return self.process.wait(0.1)

    def kill(self) -> None:
        """Send SIGKILL to all processes. SIGSTOP comes first, so that no process notices the end of another."""
        for sent in (signal.SIGSTOP, signal.SIGKILL):
            self.family()
            for pid, _ in self.living():
                os.kill(pid, sent)
        self.process.wait(10)
        deadline = time.monotonic() + 10
        while self.living() and time.monotonic() < deadline:  # a killed process needs a moment to end
            time.sleep(0.01)

    def living(self) -> set[tuple[int, str]]:
        """The processes of the family that still run."""
        return self.known & _processes().keys()


@contextmanager
def started(*command: object, log: Path) -> Iterator[Launch]:
    """A command in the repository's folder. All its processes have ended when the block ends."""
    launch = Launch([str(word) for word in command], log)
    try:
        yield launch
    finally:
        if launch.process.poll() is None or launch.living():
            launch.kill()


def launch(
    ranks: int, script: str, *arguments: object, log: Path, meet: tuple[str, ...] = ("--standalone",)
) -> AbstractContextManager[Launch]:
    """The same with a torchrun. ``meet``: arguments for the rendezvous."""
    # --standalone takes a free port, so that tests and trainings on one machine do not disturb each other.
    launcher = ["-m", "torch.distributed.run", *meet, f"--nproc_per_node={ranks}"]
    return started(sys.executable, *launcher, script, *arguments, log=log)


def _processes() -> dict[tuple[int, str], int]:
    """(process, start time) -> parent, for all processes but zombies. The start time tells reused numbers apart."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *rest = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if state not in "ZX":
            found[int(stat.parent.name), rest[17]] = int(parent)
    return found
