"""Run the command train_grpo.py on forked ranks, of which the last ones only sample, with faults at exact places.

If a rank ends, nothing ends the other ranks, as torchrun would do: each rank must notice it by itself.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import training
import world
from planting import Plant

import train_grpo
from inputs.config import to_yaml
from knobs import Config
from runlog.progress import Heartbeat

# The count-th call of a function; then, in it, that of the next one; and so on.
Place = Sequence[tuple[object, str, int]]


class Ended(NamedTuple):
    """How the ranks of a launch have ended."""

    codes: list[int | None]  # of each rank; None: it still ran, or was stopped, when the others had ended
    first: int  # the rank that ended first
    text: str


def run(ranks: int, cfg: Config, folder: Path, plant: Plant = lambda patch: None, seconds: float = 100) -> Ended:
    """Run the command on ``cfg`` with the fault of ``plant``, until all ranks have ended or are stopped (SIGSTOP).

    After ``seconds`` the ranks that are left are killed, sooner than parallel.timeout_seconds would end them.
    """
    folder.mkdir(exist_ok=True)
    path, log = folder / "config.yaml", folder / "log"
    path.write_text(to_yaml(cfg))
    training.import_before_the_fork()
    processes = world.start_as_torchrun(ranks, command, plant, [str(path)], log=log)
    deadline = time.monotonic() + seconds
    order: list[int] = []
    working = processes
    while working and time.monotonic() < deadline:
        time.sleep(0.02)
        working = [one for one in processes if works(one)]
        order += [rank for rank, one in enumerate(processes) if rank not in order and not one.is_alive()]
    codes = [one.exitcode for one in processes]
    for process in processes:
        process.kill()
        process.join()
    return Ended(codes, order[0] if order else -1, log.read_text(errors="replace"))


def works(process: BaseProcess) -> bool:
    """Whether the process has neither ended nor stopped."""
    return process.is_alive() and psutil.Process(process.pid).status() != psutil.STATUS_STOPPED


def command(plant: Plant, arguments: list[str]) -> int:
    """The part of ``run`` in each process."""
    training.lighten(lenient=False)
    plant(pytest.MonkeyPatch())
    return train_grpo.main(arguments)


def on(ranks: Collection[int], plant: Plant) -> Plant:
    """``plant`` on these of the launched ranks alone."""
    return lambda patch: plant(patch) if int(os.environ["RANK"]) in ranks else None


def strike(kind: str, rank: int, *place: tuple[object, str, int]) -> Plant:
    """On ``rank`` at ``place``: ValueError (raise), a sleep of ten minutes (hang), SIGSTOP (stop), SIGKILL (die), or
    SIGKILL for all processes of the launcher of agents.py (lose), as when a machine is lost.

    train.stall_seconds holds from a hang or a stop on. Before it no rank has stood still, however slow this machine is.
    """
    struck = RawValue("b")  # in memory that the ranks share, because they are forked

    def strike_here() -> None:
        struck.value = 1
        if kind == "raise":
            raise ValueError(f"a deliberate fault of rank {rank}")
        if kind == "hang":
            time.sleep(600)
        if kind == "lose":
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])

    def plant(patch: pytest.MonkeyPatch) -> None:
        on([rank], lambda patch: arm(patch, place, strike_here))(patch)
        if kind in ("hang", "stop"):
            limit = property(
                lambda beat: beat.limit if struck.value else 600,
                lambda beat, seconds: setattr(beat, "limit", seconds),
            )
            patch.setattr(Heartbeat, "stall_seconds", limit, raising=False)

    return plant


def arm(patch: pytest.MonkeyPatch, place: Place, act: Callable[[], None]) -> None:
    """Call ``act`` at ``place``, before the last of its calls."""
    (owner, name, count), *inner = place
    real, calls = getattr(owner, name), [0]

    def counted(*args, **kwargs):
        calls[0] += 1
        if calls[0] == count:
            arm(patch, inner, act) if inner else act()
        return real(*args, **kwargs)

    patch.setattr(owner, name, counted)
