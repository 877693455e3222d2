"""Shows a run's metrics and completions in TensorBoard, Weights & Biases and SwanLab while it trains (train.trackers).

The trackers' packages run in the process of rank 0. A tracker that raises an exception is switched off with one
warning, and the training continues. A tracker that hangs delays the training.
"""

import contextlib
import hashlib
import html
import importlib
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from facts.exits import InputError
from runlog.run_record import SECRETS

FOLDER = "TRACKERS_DIR"  # variable with a folder of packages that only trackers need; Python searches it last
INSTALL = f"pip install --no-deps --target FOLDER -r requirements/trackers.txt, then set {FOLDER}=FOLDER"
PROJECT = "megatron-grpo"  # WANDB_PROJECT and SWANLAB_PROJECT replace it
MOST_LETTERS = 300  # longest reason in a warning
COLUMNS = ("question", "gold", "reward", "correct", "finish", "completion")  # the columns of the table of completions


class TensorBoard:
    """A tracker that writes one event file for each start of the run.

    The first events of a file make TensorBoard drop the steps after ``steps_done`` that earlier starts have logged.
    """

    def __init__(self, run_dir: Path, steps_done: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        self.event = Event
        # tensorboard's EventFileWriter is not used, because it writes the machine's name into the file name.
        self.writer = RecordWriter(open(folder / f"events.out.tfevents.{time.time_ns()}", "xb"))
        self._write(file_version="brain.Event:2")
        self._write(step=steps_done + 1, session_log={"status": "START"})

    def _write(self, **content: Any) -> None:
        self.writer.write(self.event(wall_time=time.time(), **content).SerializeToString())
        self.writer.flush()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Write the numbers and the HTML tables in ``values``. Tables have the form that html_of returns."""
        shown = [
            {"tag": name, **(value if isinstance(value, dict) else {"simple_value": value})}
            for name, value in values.items()
        ]
        self._write(step=step, summary={"value": shown})

    def finish(self) -> None:
        self.writer.close()


def open_wandb(run_dir: Path, steps_done: int) -> Any:
    """Open a wandb run that does not record code, console, host, user, command or git.

    Online, a resume continues the run with the same id, and wandb ignores steps that it already has. Offline, each
    start writes a separate folder with its own steps, under the same id.
    """
    import wandb

    settings = wandb.Settings(
        root_dir=str(run_dir),
        console="off",
        silent=True,
        symlink=False,
        host="",
        username="",
        email="",
        program="",
        disable_git=True,
        disable_code=True,
        save_code=False,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        finish_timeout=60.0,
    )
    return wandb.init(**_run_options(run_dir, "WANDB"), settings=settings)


def open_swanlab(run_dir: Path, steps_done: int) -> Any:
    """Open a swanlab run that does not record machine, command, git or console. A resume works as with wandb."""
    import swanlab

    probes = ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor")
    settings = swanlab.Settings(
        interactive=False,
        probe=swanlab.Settings.Probe(**dict.fromkeys(probes, False)),
        terminal=swanlab.Settings.Terminal(proxy_type="none"),
    )
    return swanlab.init(**_run_options(run_dir, "SWANLAB"), log_dir=str(run_dir / "swanlab"), settings=settings)


# Each entry opens a tracker for a run's folder. A tracker has log(values, step) and finish(). Steps never decrease.
OPEN: dict[str, Callable[[Path, int], Any]] = {
    "tensorboard": TensorBoard,
    "wandb": open_wandb,
    "swanlab": open_swanlab,
}


def _run_options(run_dir: Path, prefix: str) -> dict[str, str]:
    """Return the options that wandb and swanlab have in common.

    Without an API key, both stay offline and do not ask for a key, unless WANDB_MODE or SWANLAB_MODE says otherwise.
    """
    mode = os.environ.get(f"{prefix}_MODE") or ("online" if os.environ.get(f"{prefix}_API_KEY") else "offline")
    return {
        "project": os.environ.get(f"{prefix}_PROJECT") or PROJECT,
        "name": run_dir.name,
        "id": hashlib.sha256(run_dir.name.encode()).hexdigest()[:16],  # the same after a resume
        "resume": "allow",
        "mode": mode,
    }


def html_of(name: str, rows: list[dict[str, Any]]) -> Any:
    """Return an HTML table of completions in the form that the tracker ``name`` needs.

    TensorBoard gets the table as a text summary, because it renders the HTML in text summaries.
    """
    table = f"<tr><th>{'</th><th>'.join(COLUMNS)}</th></tr>"
    for row in rows:
        cells = "</pre></td><td><pre>".join(html.escape(str(row[key])) for key in COLUMNS)
        table += f"<tr><td><pre>{cells}</pre></td></tr>"
    encoded = f"<table>{table}</table>".encode(errors="backslashreplace")
    if name == "tensorboard":
        tensor = {"dtype": "DT_STRING", "string_val": [encoded], "tensor_shape": {"dim": [{"size": 1}]}}
        return {"metadata": {"plugin_data": {"plugin_name": "text"}}, "tensor": tensor}
    return importlib.import_module(name).Html(encoded.decode())


class Trackers:
    """The trackers of a run that have not failed."""

    def __init__(self, names: Iterable[str], run_dir: Path, steps_done: int, say: Callable[[str], None]) -> None:
        self.say = say
        self.open: dict[str, Any] = {}
        for name in names:
            with self._off_after_failure(name):
                self.open[name] = OPEN[name](run_dir, steps_done)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the finite numbers among ``values`` and the rows under the key "completions" to every tracker."""
        numbers = {key: x for key, x in values.items() if type(x) in (int, float) and math.isfinite(x)}
        for name, tracker in [*self.open.items()]:
            with self._off_after_failure(name):
                texts = {"completions": html_of(name, values["completions"])} if "completions" in values else {}
                tracker.log(numbers | texts, step)

    def close(self) -> None:
        for name, tracker in [*self.open.items()]:
            with self._off_after_failure(name):
                tracker.finish()
        self.open.clear()

    @contextlib.contextmanager
    def _off_after_failure(self, name: str) -> Iterator[None]:
        """Make an exception in this block switch off the tracker ``name``, with one warning that shows no API key."""
        try:
            yield
        except (Exception, SystemExit) as error:
            self.open.pop(name, None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            for variable, value in os.environ.items():
                if value and SECRETS.search(variable):
                    reason = reason.replace(value, "(set)")
            self.say(f"warning: train.trackers: {name} is off: {reason[:MOST_LETTERS]}")


def refuse_missing(names: Iterable[str]) -> None:
    """Raise InputError if a tracker's package is not installed.

    If the variable TRACKERS_DIR is set, first add the folder that it names to the end of sys.path.
    """
    folder = os.environ.get(FOLDER)
    if folder and names:
        sys.path.append(os.path.abspath(folder))
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"train.trackers: {name} is not installed; install it: {INSTALL}")
