"""Trackers show the metrics and completions of a run, and keep no secret; a failure of theirs ends no training.

The packages are real and offline; what their servers do with a resumed run is not covered. Failures are a made package.
"""

import getpass
import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from killed import in_child
from pytest import MonkeyPatch
from saved import config_in, opened
from source import ROOT

import train_grpo
from runlog import run_record, trackers
from runlog.log import RunLog

SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def offline(monkeypatch: MonkeyPatch) -> None:
    for package in ("WANDB", "SWANLAB"):
        monkeypatch.setenv(f"{package}_MODE", "offline")
        monkeypatch.setenv(f"{package}_API_KEY", SECRET)


# ------------------------------------------------------------------------------------------------ the real packages


def log_steps(log: RunLog, first: int, end: int) -> None:
    log.open_trackers(first)
    for step in range(first + 1, end + 1):
        log.log_step(step, {"reward/mean": step / 8, "actor/kl_loss": float("nan")}, {"perf/device": "cpu"})
        log.log_eval(step, {"eval/greedy_accuracy": step / 4}, [])
        row = {"id": "train:0", "correct": False, "parsable": True, "finish": "stop", "question": "1 + 1?", "gold": "2"}
        log.log_completions("step", step, [row | {"completion": f"<b>{step}\ud800", "reward": 0.5, "tokens": 3}])
    assert [*log.trackers.open] == [*log.cfg.train.trackers]


@pytest.mark.ci
def test_a_resumed_run_is_shown_under_one_id_without_secrets(
    tmp_path: Path, monkeypatch: MonkeyPatch, tracker_packages: str
) -> None:
    """The run ends after four steps and is resumed after two of them; SwanLab was not asked for at first."""
    monkeypatch.setattr(run_record, "environment", lambda world_size: {"world_size": world_size})
    monkeypatch.setenv("TRACKERS_DIR", tracker_packages)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # wandb keeps a log of its own there
    cfg = config_in(tmp_path, trackers=("tensorboard", "wandb"))
    more = config_in(tmp_path, trackers=("tensorboard", "wandb", "swanlab"))

    def begin() -> None:
        trackers.refuse_missing(trackers.OPEN)
        log = opened(cfg)
        log_steps(log, 0, 4)
        log.close()

    def resume() -> None:
        trackers.refuse_missing(trackers.OPEN)
        log = opened(more, resume=next(Path(cfg.train.out_dir).glob("*-*")))
        log.rewind(2)
        log_steps(log, 2, 6)
        log.finish("done", {})

    assert in_child(begin) == in_child(resume) == 0
    (run_dir,) = Path(cfg.train.out_dir).glob("*-*")
    assert "warning" not in (run_dir / "log.txt").read_text()
    script, reading = ROOT / "tests" / "support" / "tracked.py", os.environ | {"PYTHONPATH": tracker_packages}
    done = subprocess.run([sys.executable, script, run_dir], env=reading, capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout.splitlines()[-1])
    starts = {name: [[*map(int, steps)] for _, steps in found] for name, found in shown.items()}
    assert starts == {
        "tensorboard": [[1, 2, 3, 4, 5, 6]],
        "wandb": [[1, 2, 3, 4], [3, 4, 5, 6]],
        "swanlab": [[3, 4, 5, 6]],
    }
    for step, values in [item for found in shown.values() for _, steps in found for item in steps.items()]:
        assert values.pop("perf/peak_rss_gib") > 0 and f"&lt;b&gt;{step}" in values.pop("completions")
        assert values == {"reward/mean": int(step) / 8, "eval/greedy_accuracy": int(step) / 4}
    own_id = trackers._run_options(run_dir, "WANDB")["id"]
    assert {found_id for name in ("wandb", "swanlab") for found_id, _ in shown[name]} == {own_id}
    recorded = json.loads((run_dir / "finished.json").read_text())["sha256"]
    assert not [name for name in recorded if name.startswith(tuple(trackers.OPEN))]
    private = [SECRET, sys.executable, "git@", "github.com", f'"{getpass.getuser()}"', f'"{socket.gethostname()}"']
    for path in (path for name in trackers.OPEN for path in run_dir.glob(f"{name}/**/*") if path.is_file()):
        content = path.read_bytes().replace(str(tmp_path).encode(), b"")
        assert not [word for word in private if word.encode() in content] and socket.gethostname() not in path.name


# ------------------------------------------------------------------------------------------------ their failures

FAILURES = {  # the code of a package at its import, init, log and finish -> what the warning says
    "import": ({"at_import": "raise RuntimeError('broken')"}, "RuntimeError: broken"),
    "another version": ({"at_import": "del Settings"}, "has no attribute 'Settings'"),
    "init exits": ({"at_init": "raise SystemExit('no account')"}, "SystemExit: no account"),
    "key": ({"at_init": "raise ValueError('bad\\nkey ' + os.environ['WANDB_API_KEY'])"}, "ValueError: bad key (set)"),
    "log": ({"at_log": "raise OSError('lost')"}, "OSError: lost"),
    "text": ({"at_import": "del Html"}, "has no attribute 'Html'"),
    "finish": ({"at_finish": "raise OSError('late')"}, "OSError: late"),
}
PACKAGE = """import os
class Settings:
    def __init__(self, **settings): pass
class Html:
    def __init__(self, text): pass
class Run:
    def log(self, values, step):
        {at_log}
    def finish(self):
        {at_finish}
def init(**options):
    {at_init}
    return Run()
{at_import}
"""


@pytest.mark.parametrize("failure", FAILURES)
def test_a_tracker_that_fails_is_off_after_one_warning(failure: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    code, reason = FAILURES[failure]
    lines = dict.fromkeys(("at_import", "at_init", "at_log", "at_finish"), "pass") | code
    (tmp_path / "wandb.py").write_text(PACKAGE.format(**lines))
    monkeypatch.setenv("PLACE", "lost")  # a word of a warning that is no secret
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    said: list[str] = []
    started = trackers.Trackers(["wandb"], tmp_path, 0, said.append)
    row = {"question": "1 + 1?", "gold": "2", "completion": "2", "reward": 1.0, "correct": True, "finish": "stop"}
    for step in (1, 2):
        started.log(step, {"reward/mean": 0.5, "text": "x"})
        started.log(step, {"completions": [row]})
    started.close()
    sys.modules.pop("wandb", None)
    assert len(said) == 1 and said[0].startswith("warning: train.trackers: wandb is off: ") and reason in said[0], said
    assert SECRET not in said[0] and "\n" not in said[0]


def test_a_tracker_is_ended_once(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """The end of a training closes its log again, when finish has done so."""
    ended: list[str] = []
    monkeypatch.setitem(trackers.OPEN, "wandb", lambda *_: SimpleNamespace(finish=lambda: ended.append("once")))
    started = trackers.Trackers(["wandb"], tmp_path, 0, print)
    started.close()
    started.close()
    assert ended == ["once"]


# ------------------------------------------------------------------------------------------------ settings


def test_a_tracker_is_online_only_with_a_key(monkeypatch: MonkeyPatch) -> None:
    modes = []
    for variable in ("none", "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
        modes.append(trackers._run_options(Path("run"), "WANDB")["mode"])
    assert modes == ["offline", "online", "offline"]
    first, moved, second = (trackers._run_options(Path(run), "WANDB")["id"] for run in ("a/x-1", "/b/x-1", "a/x-1-2"))
    assert first == moved != second


def test_a_package_that_is_missing_is_an_error_before_the_training(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TRACKERS_DIR", str(tmp_path / "packages"))
    monkeypatch.setattr(train_grpo, "launch", lambda *_, **__: None)
    given = [str(ROOT / "configs" / "tiny_cpu.yaml"), "train.trackers=[wandb]", "parallel.expert=1"]
    assert train_grpo.main(given) == 2 == train_grpo.main([*given, "--check"])
    line = "train.trackers: wandb is not installed; install it: pip install --no-deps --target FOLDER -r"
    assert capsys.readouterr().err.count(line) == 2
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").touch()
    importlib.invalidate_caches()
    assert train_grpo.main(given) == 0
