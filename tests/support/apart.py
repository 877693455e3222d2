"""The command train_grpo.py on forked ranks, of which the last ones sample, with faults at exact places.

Nothing ends the other ranks when one has ended, as torchrun would: each must notice by itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import pytest
import training
import world
from planting import Plant

import train_grpo
from config import to_yaml
from knobs import Config

Place = list[tuple[object, str, int]]  # the count-th call of a function; then, in it, that of the next one; and so on


class Ended(NamedTuple):
    """How the ranks of a launch have ended."""

    codes: list[int | None]  # of each rank; None: it still ran when all others had ended, and was killed
    first: int  # the rank that ended first
    seconds: float  # from the fault of `strike` to the end of the last rank; without a fault, from the start
    text: str


def run(ranks: int, cfg: Config, folder: Path, plant: Plant = lambda patch: None, seconds: float = 60) -> Ended:
    """Run the command on ``cfg`` with the fault of ``plant``.

    After ``seconds``, or 5 s after all but one have ended, the ranks that are left are killed.
    """
    folder.mkdir(exist_ok=True)
    path, log, flag = folder / "config.yaml", folder / "log", folder / "flag"
    path.write_text(to_yaml(cfg))
    training.import_before_the_fork()
    began = time.monotonic()
    processes, store = world.start_as_torchrun(ranks, command, plant, [str(path)], log=log)
    order: list[int] = []
    last = began
    while len(order) < ranks and time.monotonic() < began + seconds:
        new = [rank for rank, one in enumerate(processes) if not one.is_alive() and rank not in order]
        order, last = order + new, time.monotonic() if new else last
        if len(order) == ranks - 1 and time.monotonic() > last + 5:
            break
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join()
    codes = [one.exitcode if rank in order else None for rank, one in enumerate(processes)]
    struck = float(flag.read_text()) if flag.exists() else began
    return Ended(codes, order[0] if order else -1, last - struck, log.read_text(errors="replace"))


def command(plant: Plant, arguments: list[str]) -> int:
    """The part of ``run`` in each process."""
    training.lighten(lenient=False)
    plant(pytest.MonkeyPatch())
    return train_grpo.main(arguments)


def on(ranks: Collection[int], plant: Plant) -> Plant:
    """``plant`` on these of the launched ranks alone."""
    return lambda patch: plant(patch) if int(os.environ["RANK"]) in ranks else None


def strike(kind: str, rank: int, place: Place, folder: Path) -> Plant:
    """On ``rank`` at ``place``: SIGKILL (die), SIGSTOP (stop), or a sleep of ten minutes (hang)."""

    def act() -> None:
        (folder / "flag").write_text(str(time.monotonic()))
        if kind == "hang":
            time.sleep(600)
        os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])

    return on([rank], lambda patch: arm(patch, place, act))


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
