"""Scores of completions: the reward to learn from, whether an answer was found, and whether it is correct.

Every reward.method except math runs in this process. reward.function, reward.method=math and rollout.environment may
hang or crash, so they run in worker processes, one call at a time in each. The workers are plain child processes, not
those of multiprocessing or pebble. With the start method spawn, each worker of these packages would import the trainer
and torch. With fork, a worker that is started later would be a copy of a process that already uses the device.
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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe, TimeoutError
from multiprocessing.connection import Connection
from multiprocessing.pool import IMapIterator, ThreadPool
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import reward_gsm8k
from facts.exits import InputError
from facts.root import ROOT
from inputs.files import usable_cores, variable
from inputs.functions import load

if TYPE_CHECKING:
    from knobs import RewardConfig

MATH = f"{Path(__file__).parent / 'math_answers.py'}:score"
START = "import sys; sys.path.insert(0, sys.argv[1]); from tasks.scoring import serve; serve(*sys.argv[2:])"
START_SECONDS = 120  # time limit for importing the user's file, which may import a large package
IMPORTING, IMPORTED = "importing", "imported"  # a process sends these when an import begins and when it ends
MOST = 8  # largest number of workers per rank
NEEDED = "return a number, (number, answer found, correct) with two bools, or {'score': number, ...}"
ENVIRONMENT = "rollout.environment"
NEEDED_TEXT = "return a text, or None to end the completion"


class Call(NamedTuple):
    """The arguments of reward.function for one completion."""

    completion: str
    gold: str
    row: dict[str, Any]  # the question's columns in its file


class Score(NamedTuple):
    reward: float
    found: bool  # whether an answer was found in the completion
    correct: bool  # whether accuracy counts the completion as correct
    answer: str | None = None  # the answer that reward.method found
    parts: dict[str, float | str] = {}  # other values from reward.function; numbers are logged under their names
    text: str = ""  # the text that was scored


class Failure(NamedTuple):
    """The reason why a call has no result."""

    cause: str  # one line
    trace: str = ""  # the traceback if the function raised an exception


class Pool:
    """Worker processes that import and call the user's functions. Create a Pool before you open the device."""

    def __init__(self, functions: Mapping[str, str], beat: Callable[[], None] = lambda: None) -> None:
        """Start the processes, each of which imports all functions.

        ``functions`` maps a key of the configuration, such as reward.function, to FILE.py:NAME. If it is empty, no
        process is started. While `results` waits for the processes, it calls ``beat`` at least once a second.
        """
        self.functions, self.beat = functions, beat
        self.workers: list[Worker] = []
        if not functions:
            return
        count = max(1, min(MOST, usable_cores() // variable("LOCAL_WORLD_SIZE", 1, 1, 2**16)))
        self.workers = [Worker(functions) for _ in range(count)]
        self.threads = ThreadPool(count)  # each thread waits for one process at a time
        try:
            self.threads.map(Worker.wait_for_start, self.workers)
        except InputError:
            self.close()
            raise
        self.idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)

    def results(self, key: str, calls: Sequence[tuple], seconds: float) -> Iterator[Any]:
        """Yield the result of the function with this ``key``, or a Failure, for each of ``calls``, in their order.

        If a call takes more than ``seconds``, its process is ended and its result is a Failure.
        """
        results = self.threads.imap(lambda call: self._ask(key, call, seconds), calls)
        for _ in calls:
            yield self._next(results)

    def _ask(self, key: str, call: tuple, seconds: float) -> Any:
        """Make the call in an idle process, and return its result. This method runs in a thread."""
        worker = self.idle.get()
        try:
            return worker.ask(key, call, seconds)
        finally:
            self.idle.put(worker)

    def _next(self, results: IMapIterator) -> Any:
        while True:
            self.beat()
            with contextlib.suppress(TimeoutError):
                return results.next(timeout=1)

    def refuse(self, key: str, failure: Failure, row: Mapping[str, Any], what: str, text: str) -> NoReturn:
        """Print the traceback of a failed call and raise InputError, which quotes ``text`` and the question of ``row``.

        In the message, the word ``what`` precedes the text, for example "completion".
        """
        sys.stderr.write(failure.trace)
        raise InputError(
            f"{key}: {self.functions[key]} {failure.cause}; question {str(row.get('question', row))[:60]!r}, "
            f"{what} {text[:60]!r}"
        )

    def close(self) -> None:
        """End the processes. They also end when the process that started them ends."""
        if not self.workers:
            return
        self.threads.terminate()
        for worker in self.workers:
            worker.process.kill()  # so that no thread waits for an answer
        self.threads.join()
        for worker in self.workers:
            worker.end()


class Scorer(Pool):
    """The scorer of a run's completions, whose processes also call rollout.environment.

    Create a Scorer before you open the device.
    """

    def __init__(
        self, reward: RewardConfig, beat: Callable[[], None] = lambda: None, environment: str | None = None
    ) -> None:
        """Start the processes that the reward and ``environment`` need, if any.

        ``environment`` is rollout.environment. Pool explains ``beat``.
        """
        self.reward = reward
        self.key = "reward.function" if reward.function else "reward.method"
        self.name = f"{self.key}: {reward.function or reward.method}"
        functions = {self.key: reward.function or MATH} if reward.function or reward.method == "math" else {}
        self.in_processes = bool(functions)
        super().__init__(functions | ({ENVIRONMENT: environment} if environment else {}), beat)

    def __call__(self, calls: Sequence[Call]) -> list[Score]:
        """Return the score of each completion, in the order of ``calls``.

        If a call of reward.function fails or takes too long, this method prints the traceback, if there is one, and
        raises InputError. It also raises InputError if reward.method cannot read the gold answer. If reward.method=math
        fails or takes too long, the completion counts as having no answer.
        """
        if not self.in_processes:
            return [self._of_method(call) for call in calls]
        results = self.results(self.key, calls, self.reward.seconds)
        return [self._judged(call, result) for call, result in zip(calls, results, strict=True)]

    def _of_method(self, call: Call) -> Score:
        try:
            reward = reward_gsm8k.score(call.completion, call.gold, self.reward.method)
        except ValueError as error:  # the gold answer is not a number
            raise InputError(
                f"{self.name}: {error}; for other answers, set reward.method to math or use a reward.function"
            ) from None
        answer = reward_gsm8k.extract(call.completion, self.reward.method)
        return Score(reward, answer is not None, reward == 1.0, answer)

    def _judged(self, call: Call, result: Score | Failure) -> Score:
        if isinstance(result, Score):
            answer = None if self.reward.function else reward_gsm8k.extract(call.completion, "math")
            return result._replace(answer=answer)
        if not self.reward.function:
            return Score(0.0, False, False)
        self.refuse(self.key, result, call.row, "completion", call.completion)


class Worker:
    """A process that imports functions and then answers calls. If it has ended, the next call starts a new process."""

    def __init__(self, functions: Mapping[str, str]) -> None:
        self.functions = functions
        self.start()

    def start(self) -> None:
        self.connection, theirs = Pipe()
        end = theirs.fileno()
        command = [sys.executable, "-c", START, str(ROOT), str(end)]
        for key, named in self.functions.items():
            command += [key, named]
        self.process = subprocess.Popen(command, pass_fds=[end], stdin=subprocess.DEVNULL)
        theirs.close()

    def wait_for_start(self) -> None:
        """Wait until the process has imported its functions.

        Raises InputError if a function cannot be imported, or if it does not accept the arguments of its calls.
        """
        for key, named in self.functions.items():
            problem = self.answer(START_SECONDS)
            if isinstance(problem, Failure):
                raise InputError(f"{key}: {named} {problem.cause} while it was imported")
            if problem:
                raise InputError(problem)

    def restart(self) -> None:
        """Replace a process that has ended with a new one, and wait until it has imported the functions."""
        self.end()
        self.start()
        self.wait_for_start()

    def ask(self, key: str, call: tuple, seconds: float) -> Any:
        """Pass the arguments ``call`` to the function with this ``key``, and return its result or a Failure."""
        try:
            self.connection.send((key, tuple(call)))
        except OSError:  # the process has ended
            self.restart()
            self.connection.send((key, tuple(call)))
        return self.answer(seconds)

    def answer(self, seconds: float) -> Any:
        """Return the next value from the process, or a Failure if it ends or takes more than ``seconds``.

        A process that takes too long is ended. An import may take START_SECONDS. After the import, the time limit of
        ``seconds`` starts again.
        """
        limit = seconds
        try:
            while self.connection.poll(limit):
                found = self.connection.recv()
                if found not in (IMPORTING, IMPORTED):
                    return found
                limit = START_SECONDS if found == IMPORTING else seconds
        except (EOFError, OSError):
            return Failure(f"ended its process ({self.end()})")
        self.process.kill()
        self.end()
        return Failure(f"took more than {seconds:g} s and was ended")

    def end(self) -> str:
        """End the process if it still runs, and return a string with its exit code or the signal that ended it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)
        self.process.kill()
        code = self.process.wait()
        self.connection.close()
        return f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


# --------------------------------------------------------------------------------------------- in the worker's process


def serve(end: str, *functions: str) -> None:
    """Import the functions, and answer calls until the parent closes its end of the connection.

    ``functions`` contains each function's key, followed by its FILE.py:NAME. ``end`` is the file descriptor of this
    process's end of the connection.
    """
    connection = Connection(int(end))
    os.dup2(2, 1)  # so that prints of a function do not mix with the output of a command
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, but the parent ends this process
    with contextlib.suppress(AttributeError, OSError):
        # PR_SET_PDEATHSIG of Linux kills this process, even in a call that hangs, when the thread that started it ends.
        # That thread is the main thread or one of Pool.threads.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    imported = {}
    for key, named in zip(functions[::2], functions[1::2], strict=True):
        arguments = ("turns", "row") if key == ENVIRONMENT else Call._fields
        try:
            imported[key] = load(key, named, *arguments)
        except InputError as error:
            connection.send(str(error))
            return
        connection.send("")
    busy = threading.Lock()
    builtins.__import__ = announcing(builtins.__import__, connection, busy)
    importlib.import_module = announcing(importlib.import_module, connection, busy)
    with contextlib.suppress(EOFError, OSError):
        while True:
            key, call = connection.recv()
            checked = text_of if key == ENVIRONMENT else score_of
            connection.send(result_of(imported[key], call, checked))


def announcing(plain: Callable[..., Any], connection: Connection, busy: threading.Lock) -> Callable[..., Any]:
    """Wrap ``plain``, which imports a module, so that it sends IMPORTING before the import and IMPORTED after it.

    ``busy`` is locked during an import.
    """
    process = os.getpid()

    def announced(name: str, *arguments: Any, **named: Any) -> Any:
        # Imports within an import belong to it. Imports in other threads and processes are not announced.
        alone = threading.current_thread() is threading.main_thread() and os.getpid() == process
        if name in sys.modules or not alone or not busy.acquire(blocking=False):
            return plain(name, *arguments, **named)
        connection.send(IMPORTING)
        try:
            return plain(name, *arguments, **named)
        finally:
            busy.release()
            connection.send(IMPORTED)

    return announced


def result_of(function: Callable[..., Any], call: tuple, checked: Callable[[Any], Any]) -> Any:
    """Call the function, pass its result to ``checked``, and return the result of ``checked``.

    If one of the two raises an exception, return a Failure.
    """
    try:
        return checked(function(*call))
    except (Exception, SystemExit) as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())


def text_of(value: Any) -> str | None | Failure:
    """Return ``value`` if it is a string or None, and a Failure otherwise.

    Raises UnicodeError if the string has lone surrogates.
    """
    if isinstance(value, str):
        return value.encode().decode()  # a plain str, even if the value has a class of the user's file
    return Failure(f"returned {value!r:.80}; {NEEDED_TEXT}") if value is not None else None


def score_of(value: Any) -> Score | Failure:
    """Return the Score that a reward function's ``value`` describes, or a Failure if it describes none.

    The value is a number, (score, found, correct), or a dict with "score". The entries "found" and "correct" may be
    absent, and all other entries are parts. Without "correct", a score of 1.0 or more counts as correct.
    """
    try:
        named = dict(zip(("score", "found", "correct"), value, strict=True)) if isinstance(value, tuple) else value
        said = dict(named) if isinstance(named, dict) else {"score": named}
        reward, found = said.pop("score"), said.pop("found", True)
        correct = said.pop("correct", float(reward) >= 1.0)
        score = Score(float(reward), bool(found), bool(correct))
    except (TypeError, ValueError, KeyError):
        return Failure(f"returned {value!r:.80}; {NEEDED}")
    parts: dict[str, float | str] = {}
    for name, part in said.items():
        try:
            parts[f"{name}"] = f"{part}" if isinstance(part, str) else float(part)
        except (TypeError, ValueError):
            return Failure(f"returned {value!r:.80}; part {name!r:.40} is {part!r:.40}; make it a number or a text")
    numbers = [part for part in parts.values() if isinstance(part, float)]
    if not all(map(math.isfinite, [score.reward, *numbers])):
        return Failure(f"returned {value!r:.80}; return a finite number")
    if isinstance(reward, str | bytes) or (found, correct) != (score.found, score.correct):
        return Failure(f"returned {value!r:.80}; {NEEDED}")
    return score._replace(parts=parts)
