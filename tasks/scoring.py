"""Scores of completions: the reward that is learned from, whether an answer was found, and whether it is correct.

reward.method computes them in this process. reward.function and the method math may hang or crash, so they are called
in processes of their own, one call at a time in each. These are plain child processes, not those of multiprocessing or
pebble: with its method spawn each of them would import the trainer and torch, and with fork a later one would copy a
process that has started a device.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, TimeoutError
from multiprocessing.connection import Connection
from multiprocessing.pool import IMapIterator, ThreadPool
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import reward_gsm8k
from facts.exits import InputError
from facts.root import ROOT
from inputs.files import usable_cores, variable
from inputs.functions import load

if TYPE_CHECKING:
    from knobs import RewardConfig

MATH = f"{Path(__file__).parent / 'math_answers.py'}:score"
START = "import sys; sys.path.insert(0, sys.argv[1]); from tasks.scoring import serve; serve(*sys.argv[2:])"
START_SECONDS = 120  # to import the file, which may import a large package
IMPORTING = "importing"  # what a process sends when an import begins, and when it ends
MOST = 8  # workers of a rank
NEEDED = "needed: a number, or (number, answer found, correct), both of these bool"


class Call(NamedTuple):
    """What a completion is scored by: the arguments of reward.function."""

    completion: str
    gold: str
    row: dict[str, Any]  # the question's columns in its file


class Score(NamedTuple):
    reward: float
    found: bool  # an answer was found in the completion
    correct: bool  # this is what accuracy counts


class Failure(NamedTuple):
    """Why a call has no score."""

    cause: str  # one line
    trace: str = ""  # the traceback of an exception


class Scorer:
    """The reward of a run. Make it before the device is started: it may start processes."""

    def __init__(self, reward: RewardConfig, beat: Callable[[], None] = lambda: None) -> None:
        """``beat`` is called at least once a second while the processes work."""
        self.reward, self.beat = reward, beat
        self.name = f"reward.function: {reward.function}" if reward.function else f"reward.method: {reward.method}"
        self.workers: list[Worker] = []
        if not (reward.function or reward.method == "math"):
            return
        count = max(1, min(MOST, usable_cores() // variable("LOCAL_WORLD_SIZE", 1, 1, 2**16)))
        self.workers = [Worker(self.name, reward.function or MATH) for _ in range(count)]
        self.threads = ThreadPool(count)  # each waits for the answer of one process at a time
        try:
            self.threads.map(Worker.wait_for_start, self.workers)
        except InputError:
            self.close()
            raise
        self.idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)

    def __call__(self, calls: Sequence[Call]) -> list[Score]:
        """The score of each completion, in their order.

        InputError if a call of reward.function fails or takes too long (its traceback is printed), or if the method
        cannot compare anything with the gold answer. The method math finds no answer in a completion that takes it too
        long.
        """
        if not self.workers:
            return [self._of_method(call) for call in calls]
        results = self.threads.imap(self._ask, calls)
        return [self._judged(call, self._next(results)) for call in calls]

    def _of_method(self, call: Call) -> Score:
        try:
            reward = reward_gsm8k.score(call.completion, call.gold, self.reward.method)
        except ValueError as error:  # a gold answer that is no number
            raise InputError(
                f"{self.name}: {error}; other answers need reward.method math or a reward.function"
            ) from None
        return Score(reward, reward_gsm8k.parsable(call.completion, self.reward.method), reward == 1.0)

    def _ask(self, call: Call) -> Score | Failure:
        """In a thread: what a process that is idle makes of the call."""
        worker = self.idle.get()
        try:
            return worker.ask(call, self.reward.seconds)
        finally:
            self.idle.put(worker)

    def _next(self, results: IMapIterator) -> Score | Failure:
        while True:
            self.beat()
            with contextlib.suppress(TimeoutError):
                return results.next(timeout=1)

    def _judged(self, call: Call, result: Score | Failure) -> Score:
        if isinstance(result, Score):
            return result
        if not self.reward.function:
            return Score(0.0, False, False)
        sys.stderr.write(result.trace)
        raise InputError(
            f"{self.name} {result.cause}; question {str(call.row.get('question', call.row))[:60]!r}, "
            f"completion {call.completion[:60]!r}"
        )

    def close(self) -> None:
        """End the processes. They also end with the process that started them."""
        if not self.workers:
            return
        self.threads.terminate()
        for worker in self.workers:
            worker.process.kill()  # so that no thread waits for an answer
        self.threads.join()
        for worker in self.workers:
            worker.end()


class Worker:
    """A process that imports a function and then answers calls. Where it has ended, the next call starts another."""

    def __init__(self, key: str, named: str) -> None:
        self.key, self.named = key, named
        self.start()

    def start(self) -> None:
        self.connection, theirs = Pipe()
        end = theirs.fileno()
        command = [sys.executable, "-c", START, str(ROOT), self.key.partition(":")[0], self.named, str(end)]
        self.process = subprocess.Popen(command, pass_fds=[end], stdin=subprocess.DEVNULL)
        theirs.close()

    def wait_for_start(self) -> None:
        """InputError if the function cannot be imported, or cannot be called with the arguments of a Call."""
        problem = self.answer(START_SECONDS)
        if isinstance(problem, Failure):
            raise InputError(f"{self.key} {problem.cause} while it was imported")
        if problem:
            raise InputError(problem)

    def restart(self) -> None:
        """Start another process in place of one that has ended."""
        self.end()
        self.start()
        self.wait_for_start()

    def ask(self, call: Call, seconds: float) -> Score | Failure:
        if self.process.poll() is not None:
            self.restart()
        try:
            self.connection.send(tuple(call))
        except OSError:  # the process has just ended
            self.restart()
            self.connection.send(tuple(call))
        return self.answer(seconds)

    def answer(self, seconds: float) -> Any:
        """Return what the process sends next, or a Failure if it ends, or takes more than ``seconds`` and is ended.

        The time in which it imports packages does not count, up to START_SECONDS for each.
        """
        deadline = time.monotonic() + seconds
        try:
            while self.connection.poll(max(0.0, deadline - time.monotonic())):
                found = self.connection.recv()
                if found != IMPORTING:
                    return found
                began = time.monotonic()
                if not self.connection.poll(START_SECONDS):
                    break
                self.connection.recv()  # the end of the import
                deadline += time.monotonic() - began
        except (EOFError, OSError):
            return Failure(f"ended its process ({self.end()})")
        self.process.kill()
        self.end()
        return Failure(f"took more than {seconds:g} s and was ended")

    def end(self) -> str:
        """End the process if it still runs, and say how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)
        self.process.kill()
        code = self.process.wait()
        self.connection.close()
        return f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


# --------------------------------------------------------------------------------------------- in the worker's process


def serve(key: str, named: str, end: str) -> None:
    """Import the function, then answer calls until the other end is closed."""
    connection = Connection(int(end))
    os.dup2(2, 1)  # what the function prints does not mix with the output of a command
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends this process
    with contextlib.suppress(AttributeError, OSError):
        # PR_SET_PDEATHSIG of Linux, so that a call that hangs ends, too: with the thread that started this process, the
        # main thread or one of Scorer.threads.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    try:
        function = load(key, named, *Call._fields)
    except InputError as error:
        connection.send(str(error))
        return
    connection.send("")
    busy = threading.Lock()
    builtins.__import__ = announcing(builtins.__import__, connection, busy)
    importlib.import_module = announcing(importlib.import_module, connection, busy)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(result_of(function, connection.recv()))


def announcing(plain: Callable[..., Any], connection: Connection, busy: threading.Lock) -> Callable[..., Any]:
    """Return ``plain``, which imports a module, so that it sends IMPORTING before and after; ``busy`` during it."""
    process = os.getpid()

    def announced(name: str, *arguments: Any, **named: Any) -> Any:
        # Imports within an import belong to it; those of other threads and processes are the function's own affair.
        alone = threading.current_thread() is threading.main_thread() and os.getpid() == process
        if name in sys.modules or not alone or not busy.acquire(blocking=False):
            return plain(name, *arguments, **named)
        connection.send(IMPORTING)
        try:
            return plain(name, *arguments, **named)
        finally:
            busy.release()
            connection.send(IMPORTING)

    return announced


def result_of(function: Callable[..., Any], call: tuple) -> Score | Failure:
    """What the function returns; a Failure for an exception and for anything that is no score.

    A number alone counts as correct from 1.0 on.
    """
    try:
        value = function(*call)
    except (Exception, SystemExit) as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
    try:
        reward, found, correct = value if isinstance(value, tuple) else (value, True, float(value) >= 1.0)
        score = Score(float(reward), bool(found), bool(correct))
    except (TypeError, ValueError):
        return Failure(f"returned {value!r:.80}; {NEEDED}")
    if not math.isfinite(score.reward):
        return Failure(f"returned {score.reward}; needed: a finite number")
    if isinstance(reward, str | bytes) or (found, correct) != (score.found, score.correct):
        return Failure(f"returned {value!r:.80}; {NEEDED}")
    return score
