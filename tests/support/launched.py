"""Real processes for tests: start a command, find all its processes, and end them with SIGKILL."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from source import ROOT

VARIABLES = {"OMP_NUM_THREADS": "1"}
# Set before a restart, as in launch/launch.sh. Without it, no other program can take the port before the first rank.
NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def noting_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in which every Python process from now on that has this process's PYTHONPATH notes its command line."""
    code = "import sys\nwith open({!r}, 'a') as log:\n    print(sys.orig_argv, file=log)\n"
    log = folder / "starts"
    (folder / "sitecustomize.py").write_text(code.format(str(log)))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return log


class Launch:
    """A command, which leads a process group as in a terminal, and all processes that it has started."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | VARIABLES,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # under nohup pytest ignores it
            )
        self.known = {psutil.Process(self.process.pid)}  # with their start times, which tell reused numbers apart

    @property
    def text(self) -> str:
        """The output so far, including the lines of a launcher."""
        return self.log.read_text(errors="replace")

    def look(self) -> None:
        """Take note of the descendants of known processes. One whose parent has ended must be known already."""
        for process in list(self.known):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.known |= set(process.children(recursive=True))

    def until(self, happened: Callable[[], bool], seconds: float = 1200) -> None:
        """Wait until ``happened()``. AssertionError with the output if the launch ends first, or after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text}"
            assert time.monotonic() < deadline, f"nothing in {seconds} s:\n{self.text}"
            self.look()
            time.sleep(0.01)
        self.look()

    def wait(self, seconds: float = 1200) -> int:
        """The exit code of the command, for which this waits."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.look()
            time.sleep(0.05)
        return self.process.wait(0.1)

    def kill(self) -> None:
        """Send SIGKILL to all processes. SIGSTOP comes first, so that no process notices the end of another."""
        for sent in (signal.SIGSTOP, signal.SIGKILL):
            self.look()
            for process in self.living():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(sent)
        self.process.wait(10)
        psutil.wait_procs(self.living(), timeout=10)

    def living(self) -> list[psutil.Process]:
        """The known processes that still run."""
        return [process for process in self.known if runs(process)]


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended. Its parent may not have asked for its exit code yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def started(*command: object, log: Path) -> Iterator[Launch]:
    """A command in the repository's folder. All its processes have ended when the block ends."""
    launch = Launch([str(word) for word in command], log)
    try:
        yield launch
    finally:
        if launch.process.poll() is None or launch.living():
            launch.kill()


def launch(ranks: int, script: str, *arguments: object, log: Path) -> contextlib.AbstractContextManager[Launch]:
    """The same with a torchrun."""
    # --standalone takes a free port, so that tests and trainings on one machine do not disturb each other.
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return started(sys.executable, *launcher, script, *arguments, log=log)
