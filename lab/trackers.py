"""TensorBoard, Weights & Biases and SwanLab show the numbers of a run while it trains (train.trackers).

    python -m lab.trackers NAME RUN        one tracker, which logs the rows of its standard input; the trainer starts it

A tracker is a process of its own. Whatever its package does (fail, exit, hang, print, catch signals) happens outside of
the training. It gets the rows of metrics.jsonl, eval.jsonl and timing.jsonl; after a resume it gets all of them again.
"""

import hashlib
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
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from run_record import SECRETS, json_line, read_lines

CLOSE_SECONDS = 60  # the longest end of a tracker
ENDED_WELL = 10  # exit code of a tracker; not 0, with which a package may exit before it has logged anything
FOLDER = "TRACKERS_DIR"  # names a folder of packages for the trackers alone, beside those of the training
INSTALL = f"pip install --no-deps --target FOLDER -r requirements/trackers.txt, and {FOLDER}=FOLDER"
PROJECT = "megatron-grpo"  # WANDB_PROJECT and SWANLAB_PROJECT name another one


# ------------------------------------------------------------------------------------------------ in its own process


class TensorBoard:
    """An event file for each start of the run. Its first event says that it replaces all values of earlier files."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.event, self.summary = Event, Summary
        # Not tensorboard's EventFileWriter, which puts the name of the machine into that of the file.
        self.writer = RecordWriter(open(run_dir / "tensorboard" / f"events.out.tfevents.{time.time_ns()}", "xb"))
        self._write(file_version="brain.Event:2")
        self._write(step=0, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **event: Any) -> None:
        self.writer.write(self.event(wall_time=time.time(), **event).SerializeToString())
        self.writer.flush()

    def log(self, values: dict[str, float], step: int) -> None:
        scalars = [self.summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self.summary(value=scalars))

    def finish(self) -> None:
        self.writer.close()


def open_wandb(run_dir: Path) -> Any:
    """A run of wandb without code, console, host, user, command and git. Online, it continues the run of this id.

    It drops a repeated step, because its steps only grow. Offline, each start of the run writes a whole run of the same
    id, because wandb cannot read what it wrote.
    """
    import wandb

    settings = wandb.Settings(
        root_dir=str(run_dir), console="off", silent=True, symlink=False, host="", username="", email="", program="",
        disable_git=True, disable_code=True, save_code=False, x_disable_meta=True, x_disable_stats=True,
        x_disable_machine_info=True, x_save_requirements=False, finish_timeout=float(CLOSE_SECONDS),
    )  # fmt: skip
    return wandb.init(**_run_options(run_dir, "WANDB"), settings=settings)


def open_swanlab(run_dir: Path) -> Any:
    """A run of swanlab without machine, command, git and console. Online, its server drops the steps that it has.

    Offline, each start of the run writes a whole run of the same id.
    """
    import swanlab

    probes = ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor")
    settings = swanlab.Settings(
        interactive=False,
        probe=swanlab.Settings.Probe(**dict.fromkeys(probes, False)),
        terminal=swanlab.Settings.Terminal(proxy_type="none"),
    )
    return swanlab.init(**_run_options(run_dir, "SWANLAB"), log_dir=str(run_dir / "swanlab"), settings=settings)


# Each opens a tracker for a run's folder: an object with log(values, step=step) and finish(). Steps do not decrease.
OPEN: dict[str, Callable[[Path], Any]] = {
    "tensorboard": TensorBoard,
    "wandb": open_wandb,
    "swanlab": open_swanlab,
}


def _run_options(run_dir: Path, prefix: str) -> dict[str, str]:
    """What wandb and swanlab call alike. Without an API key in the environment they are offline, so that none asks."""
    mode = os.environ.get(f"{prefix}_MODE") or ("online" if os.environ.get(f"{prefix}_API_KEY") else "offline")
    return {
        "project": os.environ.get(f"{prefix}_PROJECT") or PROJECT,
        "name": run_dir.name,
        "id": run_id(run_dir),
        "resume": "allow",
        "mode": mode,
    }


def run_id(run_dir: Path) -> str:
    """The id of a run in its trackers: 16 hexadecimal digits that the name of its folder determines."""
    return hashlib.sha256(run_dir.name.encode()).hexdigest()[:16]


def main(arguments: list[str]) -> int:
    """Log the numbers of each row of the standard input; a row has a "step"."""
    name, run_dir = arguments
    rows = open(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a package that asks something must not read the rows
    tracker = OPEN[name](Path(run_dir))
    for row in map(json.loads, rows):
        step = row.pop("step")
        tracker.log({key: float(value) for key, value in row.items() if type(value) in (int, float)}, step=step)
    signal.alarm(CLOSE_SECONDS)  # ends this process, also if the trainer, which would end it, has ended before
    tracker.finish()
    return ENDED_WELL


# ------------------------------------------------------------------------------------------------ beside the training


class Tracker:
    """The process of a tracker. One that ends too early, or does not end, is off after one warning."""

    def __init__(self, name: str, run_dir: Path, say: Callable[[str], None]) -> None:
        self.name, self.say = name, say
        self.rows: queue.SimpleQueue[str] = queue.SimpleQueue()
        (run_dir / name).mkdir(exist_ok=True)
        paths = str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH"), os.environ.get(FOLDER)
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # not in the run's folder: it may tell a secret
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lab.trackers", name, str(run_dir.resolve())],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE, stdout=self.output, stderr=self.output, text=True, bufsize=1,
            start_new_session=True,  # Ctrl-C is for the training; the end of the pipe ends a tracker
        )  # fmt: skip
        threading.Thread(target=self._write, daemon=True).start()  # a process that hangs does not read

    def _write(self) -> None:
        with suppress(OSError), self.process.stdin as pipe:
            pipe.writelines(iter(self.rows.get, ""))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand over the numbers of a step; never waits."""
        if self.process.poll() is None:
            self.rows.put(json_line({**values, "step": step}))
        else:
            self.close()

    def close(self) -> None:
        """End the process, in CLOSE_SECONDS at most."""
        if self.output.closed:
            return
        reason = ""
        self.rows.put("")
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # with the processes that it started
            reason = f"it did not end within {CLOSE_SECONDS} s"
        with self.output:
            self.output.seek(0)
            *_, last_line = ["", *self.output.read().strip().splitlines()]
        for secret in (value for key, value in os.environ.items() if value and SECRETS.search(key)):
            last_line = last_line.replace(secret, "(set)")
        if self.process.wait() != ENDED_WELL:
            reason = reason or last_line or f"it ended with exit code {self.process.returncode}"
            self.say(f"warning: train.trackers: {self.name} is off: {reason}")


def start(names: Iterable[str], run_dir: Path, say: Callable[[str], None]) -> list[Tracker]:
    """The trackers of a run, which get what its folder has already."""
    started = []
    for name in names:
        try:
            started.append(Tracker(name, run_dir, say))
        except OSError as error:
            say(f"warning: train.trackers: {name} is off: {error.strerror}")
    rows = [row for file in ("eval", "metrics", "timing") for row in read_lines(run_dir / f"{file}.jsonl")]
    for row in sorted(rows, key=lambda row: row["step"]):
        for tracker in started:
            tracker.log(row["step"], row)
    return started


def notes(names: Iterable[str]) -> list[str]:
    """A line for each of the trackers whose package is not installed."""
    folders = [*sys.path, *filter(None, [os.environ.get(FOLDER)])]
    missing = [name for name in names if PathFinder.find_spec(name, folders) is None]
    return [f"train.trackers: {name} is not installed, so it is off; needed: {INSTALL}" for name in missing]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
