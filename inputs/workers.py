"""Processes that call a function of the user's, so that a call that hangs or crashes ends neither rank nor run unseen.

They are plain child processes, not those of multiprocessing or pebble: with its method spawn, each of them would
import the trainer and torch.
"""

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from inputs.files import InputError, variable
from inputs.functions import load

ROOT = Path(__file__).resolve().parents[1]
START = "import sys; sys.path.insert(0, sys.argv[1]); from inputs.workers import serve; serve(*sys.argv[2:])"
START_SECONDS = 120  # to import the file, which may import a large package
MOST = 8  # workers of a rank


class Failure(NamedTuple):
    """Why a call has no result."""

    cause: str  # one line
    trace: str = ""  # the traceback of an exception


def usable_cores() -> int:
    """The number of cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """A process that imports the function, and then answers calls."""

    def __init__(self, key: str, named: str, arguments: Sequence[str]) -> None:
        self.connection, theirs = Pipe()
        end = theirs.fileno()
        command = [sys.executable, "-c", START, str(ROOT), key, named, str(end), *arguments]
        self.process = subprocess.Popen(command, pass_fds=[end], stdin=subprocess.DEVNULL)
        theirs.close()

    def wait_for_start(self, key: str, named: str) -> None:
        """InputError if the function cannot be imported, or cannot be called with its arguments."""
        try:
            late = f"{key}: {named}: not imported in {START_SECONDS} s"
            problem = self.connection.recv() if self.connection.poll(START_SECONDS) else late
        except (EOFError, OSError):
            problem = f"{key}: {named}: its process ended while it was imported ({self.end()})"
        if problem:
            raise InputError(problem)

    def end(self) -> str:
        """End the process, and say how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)
        ended = self.process.poll()
        self.process.kill()
        self.process.wait()
        self.connection.close()
        if ended is None:
            return "still running"
        return f"exit code {ended}" if ended >= 0 else f"ended by {signal.Signals(-ended).name}"


class Workers:
    """Workers for one function: as many as this rank has cores, at most MOST."""

    def __init__(
        self, key: str, named: str, arguments: Sequence[str], seconds: float, beat: Callable[[], None] = lambda: None
    ) -> None:
        """``beat`` is called at least once a second while calls are waited for."""
        self.key, self.named, self.arguments, self.seconds, self.beat = key, named, arguments, seconds, beat
        count = max(1, min(MOST, usable_cores() // variable("LOCAL_WORLD_SIZE", 1, 1, 2**16)))
        self.idle = [Worker(key, named, arguments) for _ in range(count)]
        try:
            for worker in self.idle:
                worker.wait_for_start(key, named)
        except InputError:
            self.close()
            raise

    def __call__(self, calls: Sequence[tuple], *, stops: bool) -> list[Any]:
        """The result of each call, or its Failure. With ``stops`` no call is begun after a Failure (results: None).

        A call may take ``seconds``; then its process is ended. A new process takes the place of one that has ended.
        """
        results: list[Any] = [None] * len(calls)
        todo, failed = list(range(len(calls)))[::-1], False
        busy: dict[Connection, tuple[Worker, int, float]] = {}
        while busy or (todo and not failed):
            while self.idle and todo and not failed:
                call = todo.pop()
                worker = self._begin(self.idle.pop(), calls[call])
                busy[worker.connection] = worker, call, time.monotonic() + self.seconds
            soonest = min(limit for _, _, limit in busy.values())
            answered = wait(list(busy), max(0.0, min(1.0, soonest - time.monotonic())))
            self.beat()
            late = [each for each, (_, _, limit) in busy.items() if limit <= time.monotonic()]
            for connection in [each for each in busy if each in answered or each in late]:
                worker, call, _ = busy.pop(connection)
                results[call], alive = self._result(worker) if connection in answered else (None, False)
                if not alive:
                    how = worker.end()
                    slow = f"took more than {self.seconds:g} s and was ended"
                    results[call] = Failure(f"ended its process ({how})" if connection in answered else slow)
                    worker = self._new_worker()
                failed = failed or (stops and isinstance(results[call], Failure))
                self.idle.append(worker)
        return results

    def _begin(self, worker: Worker, call: tuple) -> Worker:
        """Give a worker the call. If it has ended since its last call, a new one gets it. -> the worker that has it"""
        try:
            worker.connection.send(call)
        except OSError:
            worker.end()
            worker = self._new_worker()
            worker.connection.send(call)
        return worker

    def _new_worker(self) -> Worker:
        worker = Worker(self.key, self.named, self.arguments)
        worker.wait_for_start(self.key, self.named)
        return worker

    def _result(self, worker: Worker) -> tuple[Any, bool]:
        """What the worker sent, and whether it still lives."""
        try:
            return worker.connection.recv(), True
        except (EOFError, OSError):
            return None, False

    def close(self) -> None:
        """End the processes. They also end with the process that started them."""
        for worker in self.idle:
            worker.process.kill()
            worker.process.wait()
            worker.connection.close()
        self.idle = []


# --------------------------------------------------------------------------------------------- in the worker's process


def serve(key: str, named: str, end: str, *arguments: str) -> None:
    """Import the function, then answer calls until the other end is closed."""
    connection = Connection(int(end))
    os.dup2(2, 1)  # what the function prints does not mix with the output of a command
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends this process
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of Linux: also while a call hangs
    try:
        function = load(key, named, *arguments)
    except InputError as error:
        connection.send(str(error))
        return
    connection.send("")
    with contextlib.suppress(EOFError, OSError):
        while True:
            call = connection.recv()
            try:
                result = plain(function(*call))
            except (Exception, SystemExit) as error:
                shown = traceback.TracebackException.from_exception(error)
                shown.stack = traceback.StackSummary.from_list([one for one in shown.stack if one.filename != __file__])
                result = Failure(f"{type(error).__name__}: {error}", "".join(shown.format()))
            connection.send(result)


def plain(value: Any) -> tuple[float, bool, bool] | Failure:
    """(score, answer found, correct) of what a reward returned. A score alone counts as correct from 1.0 on."""
    try:
        score, found, correct = value if isinstance(value, tuple) else (value, True, float(value) >= 1.0)
        usable = not isinstance(score, str | bytes) and found in (False, True) and correct in (False, True)
        score = float(score)
    except (TypeError, ValueError):
        usable = False
    if not usable:
        return Failure(
            f"returned {value!r:.80}; needed: a number, or (number, answer found, correct), both of these bool"
        )
    if not math.isfinite(score):
        return Failure(f"returned {score}; needed: a finite number")
    return score, bool(found), bool(correct)
