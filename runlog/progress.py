"""Ends a process on a signal, measures the times of a step, and ends a rank that makes no progress."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from facts.exits import STALLED

if TYPE_CHECKING:
    import torch

    from runlog.log import RunLog

PROGRESS_SECONDS = 30  # longest time without a line in the log, even in a long phase
GRACE_SECONDS = 2.0  # time between report and exit, so that other ranks, which wait for this one, also report


# ------------------------------------------------------------------------------------------------ the end by a signal

# In this order, they come from Ctrl-C, a scheduler or torchrun, and a terminal that is closed. The last two are a
# scheduler's warnings before its time limit.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NOT_STARTED = "before the first step of this start; the same command starts it again"


def ending_signals() -> list[signal.Signals]:
    """Return the SIGNALS that should end this process.

    Signals that the process ignores from its start, as it does under nohup, are left out.
    """
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def end_on_signals(reached: Callable[[], str] = lambda: "", note: Callable[[str], None] = lambda line: None) -> None:
    """Make each signal in ending_signals() end this process at once.

    Before rank 0 ends, it prints one line with ``reached()``, and passes the line to ``note``. Python calls signal
    handlers in the main thread, but not while that thread waits in a collective. However, Python writes the number of a
    signal to a pipe as soon as the signal arrives, and a thread here reads the pipe. Without a pipe, a thread could
    wait for a blocked signal, but the signal would then stay blocked in every program that this process starts.
    """
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
    ending = ending_signals()
    for number in ending:
        signal.signal(number, lambda number, frame: None)  # otherwise the system would act before the thread does
    os.register_at_fork(after_in_child=lambda: _end_silently(ending))

    def wait() -> None:
        number = 0
        while number not in SIGNALS:  # Python also writes other signals that have a handler
            number = os.read(receiving, 1)[0]
        try:
            if os.environ.get("RANK", "0") == "0":
                line = f"ended by {signal.Signals(number).name} {reached() or NOT_STARTED}"
                os.write(2, f"\n{line}\n".encode())
                note(line)
        finally:
            os._exit(128 + number)

    threading.Thread(target=wait, daemon=True).start()


def _end_silently(ending: list[signal.Signals]) -> None:
    """Restore the system's default handling of the signals ``ending`` in a forked process.

    A forked process lacks the thread that handles these signals.
    """
    signal.set_wakeup_fd(-1)
    for number in ending:
        signal.signal(number, signal.SIG_DFL)


# ------------------------------------------------------------------------------------------------ the times of a step


class StepTimer:
    """The time and the peak memory of each phase of one step on ``device``.

    Peaks exist only if the device counts its memory. A phase that occurs several times counts once, with the sum of its
    times. The times of all phases add up to the time of the step. The host runs ahead of an accelerator, so a phase
    ends when the device has finished the work of the phase.
    """

    def __init__(self, heartbeat: Heartbeat, step: int, device: torch.device) -> None:
        from hardware import device as devices  # here, because train_grpo.py reads this file before torch

        self.devices, self.heartbeat, self.step, self.device = devices, heartbeat, step, device
        self.peaks: dict[str, float] = {}  # GiB
        self._count_memory("between_steps")  # loading, an evaluation, a checkpoint
        self.start = devices.moment(device)
        self.ends: list[tuple[str, Any]] = []  # of each phase

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Count the time of this block as ``phase``, which is also its name in a profiler's trace."""
        from torch.profiler import record_function

        with record_function(phase):
            yield
        self.end_phase(phase)

    def end_phase(self, phase: str) -> None:
        """Count the time since the end of the last phase as ``phase``."""
        self.heartbeat.beat(f"{phase} of step {self.step + 1}")
        self.ends.append((phase, self.devices.moment(self.device)))
        self._count_memory(phase)

    def _count_memory(self, phase: str) -> None:
        gib = self.devices.peak_memory_gib(self.device)
        if gib is not None:
            self.peaks[phase] = max(gib, self.peaks.get(phase, 0.0))

    def peak(self) -> tuple[float, str] | tuple[()]:
        """Return the peak memory in GiB and the name of the phase that reached it.

        If the device does not count its memory, return ().
        """
        return max(((gib, phase) for phase, gib in self.peaks.items()), default=())

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase so far."""
        total: dict[str, float] = defaultdict(float)
        last = self.start
        for phase, end in self.ends:
            total[phase] += self.devices.seconds_between(last, end)
            last = end
        return dict(total)

    def timing(self, new_tokens: int) -> dict[str, float]:
        """Return the metrics timing/PHASE_s of each phase, timing/step_s of the whole step, and perf/tokens_per_s.

        perf/tokens_per_s is ``new_tokens`` divided by the seconds of the step.
        """
        total = self.devices.seconds_between(self.start, self.devices.moment(self.device))
        phases = {f"timing/{phase}_s": round(seconds, 4) for phase, seconds in self.seconds.items()}
        return phases | {"timing/step_s": round(total, 4), "perf/tokens_per_s": round(new_tokens / total, 1)}


# ------------------------------------------------------------------------------------------------ a rank that stalls


class Heartbeat:
    """A thread that ends the process after ``stall_seconds`` without a `beat`. With 0 seconds there is no thread.

    Before it ends the process, the thread prints the last finished phase and the stack of every thread. The stacks show
    whether a thread waits in a collective. Code that keeps Python's global lock (GIL) also stops this thread. In that
    case, faulthandler, which needs no lock, prints the stacks and ends the process with exit code 1, after 1.5 x
    ``stall_seconds``.
    """

    def __init__(self, stall_seconds: int, log: RunLog) -> None:
        self.stall_seconds, self.log = stall_seconds, log
        self.done, self.last = "start", time.monotonic()
        self.stopped = threading.Event()
        self.waits = False
        if stall_seconds:
            threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def beat(self, done: str = "") -> None:
        """Report that this rank is alive and has finished the phase ``done``.

        If ``done`` is "", the last finished phase stays the same.
        """
        self.done, self.last = done or self.done, time.monotonic()
        if self.last - self.log.said > PROGRESS_SECONDS:
            self.log.say(f"still working; last finished: {self.done}{self.log.left()}")

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Switch the limit of ``stall_seconds`` off in this block, in which this rank waits for ranks with more work.

        The heartbeats of those ranks watch them, and parallel.timeout_seconds limits the wait.
        """
        self.waits = True
        try:
            yield
        finally:
            self.beat()
            self.waits = False

    def stop(self) -> None:
        """End the thread, so that this process is no longer watched."""
        self.stopped.set()

    def _watch(self) -> None:
        while not self.stopped.wait(min(1.0, self.stall_seconds / 4)):
            still = time.monotonic() - self.last
            if still > self.stall_seconds and not self.waits:
                self._end(still)
            # As long as this thread runs, it postpones the time at which faulthandler acts. File 2 is stderr.
            faulthandler.dump_traceback_later(1.5 * self.stall_seconds, exit=True, file=2)
        faulthandler.cancel_dump_traceback_later()

    def _end(self, still: float) -> None:
        """Report that this rank has made no progress for ``still`` seconds, with all stacks, and end the process."""
        faulthandler.cancel_dump_traceback_later()
        limit = f"train.stall_seconds = {self.stall_seconds}"
        cause = f"made no progress for {still:.0f} s; last finished: {self.done} ({limit})"
        # Written in one piece, because the ranks share a terminal or a log.
        os.write(2, f"rank {self.log.rank}: {cause}; its stacks:\n{tracebacks()}".encode())
        self.log.note(f"stopped: rank {self.log.rank} {cause}")
        time.sleep(GRACE_SECONDS)
        os._exit(STALLED)


def tracebacks() -> str:
    """Return the stacks of all threads except the calling thread, each with its innermost call last.

    The main thread comes last.
    """
    frames = sys._current_frames()
    others = [thread for thread in reversed(threading.enumerate()) if thread is not threading.current_thread()]
    return "\n".join(
        f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in others
        if thread.ident in frames
    )
