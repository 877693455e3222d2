"""Run launch/first_code.py, the torchrun of the run_*.sh scripts, with ranks that are forked instead of executed.

The command line, the rendezvous, the restarts and the exit codes come from torch itself. A forked rank already has
torch and Megatron; a new interpreter would need seconds to import them.
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import launched
import psutil
import training
import world
from planting import Plant, before
from pytest import MonkeyPatch
from source import ROOT

from launch import first_code


class Agent(NamedTuple):
    """A launcher, which leads the process group of its ranks."""

    process: BaseProcess
    log: Path

    def end(self, seconds: float = 100) -> tuple[int | None, str]:
        """The exit code and the output; None for a launcher that has not ended in ``seconds``, and is killed.

        AssertionError if a launcher that was not killed leaves a rank behind.
        """
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()
        text = self.log.read_text(errors="replace")
        assert code in (None, -signal.SIGKILL) or not self.living(), text
        return code, text

    def living(self) -> list[psutil.Process]:
        """The launcher and those of its ranks that still run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == self.process.pid and launched.runs(process):
                    found.append(process)
        return found


def start(
    ranks: int,
    script: str | Path,
    *arguments: object,
    log: Path,
    plant: Plant = lambda patch: None,
    nodes: Iterable[str] = ("--standalone", "--local-addr=localhost"),
    restarts: int = 0,
    light: bool = True,
) -> Agent:
    """Start ``ranks`` ranks of a script of the repository, each with the fault of ``plant``, also after a restart.

    ``nodes``: how torchrun finds the other nodes. ``light``: the runs are cheaper, see training.lighten.
    """
    training.import_before_the_fork()
    words = ["--run-path", "--start-method=fork", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", *nodes]
    words += [str(word) for word in (ROOT / script, *arguments)]
    variables = launched.VARIABLES | ({launched.NEW_STORE: "1"} if restarts else {})
    work = (variables, log, launch, (words, plant, light))
    process = get_context("fork").Process(target=world.as_launched, args=work)
    process.start()
    return Agent(process, log)


def launch(words: list[str], plant: Plant, light: bool) -> int:
    """The launcher in its process.  -> its exit code"""
    from torch.distributed import run

    os.setsid()
    if light:
        training.lighten()
    patch = MonkeyPatch()
    before(run, "run_script_path", lambda *_: plant(patch))(patch)
    return first_code.launch(words)
