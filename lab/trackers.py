"""TensorBoard, Weights & Biases and SwanLab show the numbers of a run while it trains (train.trackers).

    python -m lab.trackers NAME RUN        one tracker, which logs the rows of its standard input; the trainer starts it

A tracker is a process of its own. Whatever its package does (fail, exit, hang, print, catch signals) happens outside of
the training. It gets the rows of metrics.jsonl, eval.jsonl and timing.jsonl; after a resume it gets all of them again.
"""

import hashlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from run_record import SECRETS, json_line, read_lines

LOG_SECONDS, CLOSE_SECONDS = 180, 60  # the longest opening or step of a tracker; the longest end
PROJECT = "megatron-grpo"  # WANDB_PROJECT and SWANLAB_PROJECT name another one


# ------------------------------------------------------------------------------------------------ in its own process


class Tracker(Protocol):
    """What a package is used for; the constructor opens it for a run's folder. Steps do not decrease."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """An event file for each start of the run. The first event says that all values of earlier files are replaced."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.event, self.summary = Event, Summary
        # Not tensorboard's EventFileWriter, which puts the name of the machine into that of the file.
        path = run_dir / "tensorboard" / f"events.out.tfevents.{time.time_ns()}"
        self.writer = RecordWriter(open(path, "xb"))
        self._write(file_version="brain.Event:2")
        self._write(step=0, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **event: Any) -> None:
        self.writer.write(self.event(wall_time=time.time(), **event).SerializeToString())
        self.writer.flush()

    def log(self, step: int, values: dict[str, float]) -> None:
        scalars = [self.summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self.summary(value=scalars))

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of wandb without code, console, host, user, command and git. Online, it continues the run of this id.

    Offline, each start of the run writes a whole run of the same id, because wandb cannot read what it wrote.
    """

    def __init__(self, run_dir: Path) -> None:
        import wandb

        settings = wandb.Settings(
            root_dir=str(run_dir), console="off", silent=True, symlink=False, host="", username="", email="",
            program="", disable_git=True, disable_code=True, save_code=False, x_disable_meta=True, x_disable_stats=True,
            x_disable_machine_info=True, x_save_requirements=False, finish_timeout=float(CLOSE_SECONDS),
        )  # fmt: skip
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.name,
            id=run_id(run_dir),
            resume="allow",
            mode=mode("WANDB"),
            settings=settings,
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        if step >= self.run.starting_step:  # wandb has the earlier ones, and drops them with a warning
            self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class SwanLab:
    """A run of swanlab without machine, command, git and console. Online, its server drops the steps that it has.

    Offline, each start of the run writes a whole run of the same id.
    """

    def __init__(self, run_dir: Path) -> None:
        import swanlab

        probes = ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor")
        self.run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            name=run_dir.name,
            id=run_id(run_dir),
            resume="allow",
            mode=mode("SWANLAB"),
            log_dir=str(run_dir / "swanlab"),
            settings=swanlab.Settings(
                interactive=False,
                probe=swanlab.Settings.Probe(**dict.fromkeys(probes, False)),
                terminal=swanlab.Settings.Terminal(proxy_type="none"),
            ),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "swanlab": SwanLab}


def run_id(run_dir: Path) -> str:
    """The id of a run in its trackers: 16 hexadecimal digits that the name of its folder determines."""
    return hashlib.sha256(run_dir.name.encode()).hexdigest()[:16]


def mode(prefix: str) -> str:
    """What PREFIX_MODE says; else online if PREFIX_API_KEY is set, and offline without a key, so that nothing asks."""
    return os.environ.get(f"{prefix}_MODE") or ("online" if os.environ.get(f"{prefix}_API_KEY") else "offline")


def main(arguments: list[str]) -> int:
    """Log each row of the standard input, which has a "step"; only its numbers are logged.

    SIGALRM, which nothing here handles, ends a process that takes longer than the limits, even after the trainer.
    """
    name, run_dir = arguments
    rows = open(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a package that asks something must not read the rows
    signal.alarm(LOG_SECONDS)
    tracker = TRACKERS[name](Path(run_dir))
    signal.alarm(0)  # the next row comes with the next step
    for line in rows:
        signal.alarm(LOG_SECONDS)
        row = json.loads(line)
        values = {key: float(value) for key, value in row.items() if type(value) in (int, float) and key != "step"}
        tracker.log(row["step"], values)
        signal.alarm(0)
    signal.alarm(CLOSE_SECONDS)
    tracker.close()
    return 0


# ------------------------------------------------------------------------------------------------ beside the training


class Trackers:
    """The processes of all trackers of a run. One that ends too early or does not end is off, after one warning."""

    def __init__(self, names: Iterable[str], run_dir: Path, say: Callable[[str], None]) -> None:
        self.processes = [_Process(name, run_dir, say) for name in names]
        files = ("eval", "metrics", "timing") if self.processes else ()
        rows = [row for file in files for row in read_lines(run_dir / f"{file}.jsonl")]
        for row in sorted(rows, key=lambda row: row["step"]):
            self.log(row["step"], row)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand over the numbers of a step; never waits."""
        for process in self.processes:
            process.send(json_line({**values, "step": step}))

    def close(self) -> None:
        """End all trackers, in CLOSE_SECONDS at most."""
        for process in self.processes:
            process.rows.put("")
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self.processes:
            process.wait(deadline)
        self.processes = []


class _Process:
    """A tracker's process; a thread writes to its pipe, because a process that hangs does not read."""

    def __init__(self, name: str, run_dir: Path, say: Callable[[str], None]) -> None:
        self.name, self.say = name, say
        self.rows: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.output: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # not in the run's folder: it may be told
        self.process: subprocess.Popen[str] | None = None
        root = str(Path(__file__).resolve().parent.parent)
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        try:
            (run_dir / name).mkdir(exist_ok=True)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lab.trackers", name, str(run_dir.resolve())],
                stdin=subprocess.PIPE, stdout=self.output, stderr=self.output, text=True,
                env=os.environ | {"PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C is for the training; the end of the pipe ends a tracker
            )  # fmt: skip
        except OSError as error:
            self._off(f"{name}: {error.strerror}")
        else:
            threading.Thread(target=self._write, args=(self.process.stdin,), daemon=True).start()

    def _write(self, pipe: IO[str]) -> None:
        with suppress(OSError), pipe:
            for line in iter(self.rows.get, ""):
                pipe.write(line)
                pipe.flush()

    def send(self, line: str) -> None:
        """Write ``line`` to the process, if it is on."""
        if self.process and self.process.poll() is not None:
            self._off(self._last_words())
        elif self.process:
            self.rows.put(line)

    def wait(self, deadline: float) -> None:
        """Wait for the end until ``deadline`` (time.monotonic); then end the process and those that it started."""
        if self.process is None:
            return
        try:
            if self.process.wait(max(0.0, deadline - time.monotonic())):
                self._off(self._last_words())
            self.output.close()
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._off(f"it did not end within {CLOSE_SECONDS} s")

    def _last_words(self) -> str:
        self.output.seek(0)
        *_, last = ["", *self.output.read().strip().splitlines()]
        for key, value in os.environ.items():
            last = last.replace(value, "(set)") if value and SECRETS.search(key) else last
        return last or f"it ended with exit code {self.process.returncode}"

    def _off(self, reason: str) -> None:
        self.process = None
        self.output.close()
        self.say(f"warning: train.trackers: {self.name} is off: {reason}")


def notes(names: Iterable[str]) -> list[str]:
    """A line for each of the trackers whose package is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return [f"train.trackers: {name} is not installed, so it is off; needed: pip install {name}" for name in missing]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
