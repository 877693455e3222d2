"""Trackers show the numbers of metrics.jsonl, once each, and keep no secret; no fault of theirs reaches the training.

The packages are real and offline; what their servers do with a resumed run is not covered. Faults are a made package.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pytest import MonkeyPatch
from saved import config_in
from source import ROOT

import run_record
import runlog
from lab import trackers

SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def short_ends(monkeypatch: MonkeyPatch) -> None:
    for key in ("WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.setenv(key, "offline")
    for key in ("WANDB_API_KEY", "SWANLAB_API_KEY"):
        monkeypatch.setenv(key, SECRET)


# ------------------------------------------------------------------------------------------------ the real packages


def log_steps(log: runlog.RunLog, first: int, end: int) -> None:
    for step in range(first + 1, end + 1):
        log.log_step(step, {"reward/mean": step / 8, "actor/kl_loss": float("nan")}, {"timing/step_s": 1.5})
        log.log_eval(step, {"eval/greedy_accuracy": step / 4}, [])


def test_a_resumed_run_is_shown_once_under_one_id_without_secrets(
    tmp_path: Path, monkeypatch: MonkeyPatch, tracker_packages: str
) -> None:
    """The run is killed after four steps and resumed after two of them; SwanLab was not asked for at first."""
    monkeypatch.setattr(run_record, "environment", lambda world_size: {"world_size": world_size})
    monkeypatch.setenv("TRACKERS_DIR", tracker_packages)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # wandb keeps a log of its own there
    cfg = config_in(tmp_path)
    killed = runlog.open_run(cfg, 1, 0)
    killed.trackers = trackers.start(("tensorboard", "wandb"), killed.run_dir, killed.say)
    log_steps(killed, 0, 4)
    killed.close()
    again = runlog.open_run(cfg, 1, 0, resume=killed.run_dir)
    again.rewind(2)
    again.trackers = trackers.start(("tensorboard", "wandb", "swanlab"), again.run_dir, again.say)
    log_steps(again, 2, 6)
    again.finish("done")
    assert "warning" not in (again.run_dir / "log.txt").read_text()

    own_id = trackers.run_id(again.run_dir)
    script = ROOT / "tests" / "support" / "tracked.py"
    reading = os.environ | {"PYTHONPATH": tracker_packages}
    done = subprocess.run(
        [sys.executable, script, again.run_dir], env=reading, capture_output=True, text=True, check=True
    )
    shown = json.loads(done.stdout.splitlines()[-1])
    expected = {
        str(step): {"reward/mean": step / 8, "timing/step_s": 1.5, "eval/greedy_accuracy": step / 4}
        for step in range(1, 7)
    }
    for name, (*earlier, (run, steps)) in shown.items():
        assert all(each.pop("perf/peak_rss_gib") > 0 for each in steps.values())
        assert steps == expected, name
        assert [len(steps) for _, steps in earlier] == [4] * (name == "wandb")
        assert {each for each, _ in (*earlier, (run, steps))} == {None if name == "tensorboard" else own_id}
    recorded = json.loads((again.run_dir / "finished.json").read_text())["sha256"]
    assert not [name for name in recorded if name.startswith(tuple(trackers.OPEN))]
    command = f"{sys.executable} -m lab.trackers {getpass.getuser()}@{socket.gethostname()}"
    private = [SECRET.encode(), sys.executable.encode(), b"git@", b"github.com"]
    private += [f'"{word}"'.encode() for word in re.split("[ @]", command)]
    for path in (path for name in trackers.OPEN for path in again.run_dir.glob(f"{name}/**/*") if path.is_file()):
        content = path.read_bytes().replace(str(tmp_path).encode(), b"")
        assert not [word for word in private if word in content] and socket.gethostname() not in path.name, path


# ------------------------------------------------------------------------------------------------ their faults

FAULTS = {  # the code of a package at its import, init, log and finish -> what the warning says
    "import": ({"at_import": "raise RuntimeError('broken')"}, "RuntimeError: broken"),
    "another version": ({"at_import": "del Settings"}, "has no attribute 'Settings'"),
    "init": ({"at_init": "raise SystemExit('no account')"}, "no account"),
    "init exits": ({"at_init": "raise SystemExit"}, "exit code 0"),
    "init asks": ({"at_init": "input()"}, "EOF"),
    "key": ({"at_init": "raise ValueError('bad key ' + os.environ['WANDB_API_KEY'])"}, "ValueError: bad key (set)"),
    "log": ({"at_log": "step == 1 and os._exit(7)"}, "exit code 7"),
    "log killed": ({"at_log": "os.kill(os.getpid(), 9)"}, "exit code -9"),
    "log hangs": ({"at_log": "time.sleep(60); open(os.environ['ENDED'], 'w').close()"}, "did not end within 1 s"),
    "finish": ({"at_finish": "raise BaseException('late')"}, "BaseException: late"),
    "finish hangs": ({"at_finish": "time.sleep(600)"}, "did not end within 1 s"),
}
PACKAGE = """import os, time
class Settings:
    def __init__(self, **settings): pass
class Run:
    starting_step = 0
    def log(self, values, step):
        {at_log}
    def finish(self):
        {at_finish}
        open(os.environ["ENDED"], "w").close()
def init(**options):
    {at_init}
    return Run()
{at_import}
"""


def make_package(folder: Path, monkeypatch: MonkeyPatch, **code: str) -> None:
    lines = dict.fromkeys(("at_import", "at_init", "at_log", "at_finish"), "pass") | code
    (folder / "wandb.py").write_text(PACKAGE.format(**lines))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("ENDED", str(folder / "ended"))


@pytest.mark.parametrize("fault", [*FAULTS, "no folder"])
def test_a_tracker_that_fails_is_off_after_one_warning(fault: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    code, reason = FAULTS.get(fault, ({}, "File exists"))
    make_package(tmp_path, monkeypatch, **code)
    if fault == "no folder":
        (tmp_path / "wandb").write_text("")
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 1 if "hangs" in fault else 60)
    said: list[str] = []
    started = trackers.start(["wandb"], tmp_path, said.append)
    for tracker in started * 3:
        tracker.log(1, {"reward/mean": 0.5, "text": "x" * 10**6})  # more than a pipe holds
    if fault == "log hangs":
        assert not (tmp_path / "ended").exists(), "the training has waited for the package"
    for tracker in started * 2:
        tracker.close()
    assert len(said) == 1 and said[0].startswith("warning: train.trackers: wandb is off: ") and reason in said[0], said
    assert SECRET not in said[0] and all(tracker.process.poll() is not None for tracker in started)


def test_a_tracker_ends_well_when_the_training_is_killed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """And outlives the Ctrl-C that ends the training; a row that was handed over is logged."""
    make_package(tmp_path, monkeypatch, at_log="open(os.environ['ENDED'] + '-log', 'w').close()")
    program = (
        "import os, sys, time\nfrom pathlib import Path\nfrom lab import trackers\n"
        f"started = trackers.start(['wandb'], Path({str(tmp_path)!r}), print)[0].log(0, {{'a': 1.0}})\n"
        f"while not Path({str(tmp_path / 'ended-log')!r}).exists(): time.sleep(0.02)\n"
        "print('logged', flush=True); time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as training:
        assert training.stdout.readline() == "logged\n"
        os.killpg(training.pid, signal.SIGINT)
        training.kill()
    for _ in range(500):
        if (tmp_path / "ended").exists():
            return
        time.sleep(0.02)
    pytest.fail("the tracker did not finish")


# ------------------------------------------------------------------------------------------------ settings


def test_a_tracker_is_online_only_with_a_key_and_a_missing_one_is_noted(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    modes = []
    for variable in ("none", "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
        modes.append(trackers._run_options(Path("run"), "WANDB")["mode"])
    assert modes == ["offline", "online", "offline"]
    monkeypatch.setenv("TRACKERS_DIR", str(tmp_path))
    (note,) = trackers.notes(["wandb"])
    assert "wandb is not installed" in note and "-r requirements/trackers.txt, and TRACKERS_DIR=" in note
    (tmp_path / "wandb.py").touch()
    assert trackers.notes(["wandb"]) == []
    first, moved, second = map(trackers.run_id, (Path("a/tiny-1"), Path("/b/tiny-1"), Path("a/tiny-1-2")))
    assert first == moved != second
