"""The log of a run, and the records of a start."""

import hashlib
import json
import math
import os
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import saved
import torch
from pytest import MonkeyPatch
from recorded import commit, git
from saved import config_in
from tiers import ci

from facts.exits import InputError
from inputs.files import write_atomically
from knobs import Config
from runlog import log as runlog
from runlog import progress, run_record
from runlog.progress import Heartbeat

# --------------------------------------------------------------------------------------------------------------- runlog


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return config_in(tmp_path)


OpenRun = Callable[..., runlog.RunLog]


@pytest.fixture
def open_run(monkeypatch: MonkeyPatch) -> Iterator[OpenRun]:
    """RunLog.open without the slow look at the environment; what it opened is closed when the test ends."""
    monkeypatch.setattr(run_record, "environment", lambda world_size: {"world_size": world_size})
    logs = []

    def opened(*arguments: object, **named: object) -> runlog.RunLog:
        logs.append(saved.opened(*arguments, **named))
        return logs[-1]

    yield opened
    for log in logs:
        log.close()


@pytest.fixture
def log(cfg: Config, open_run: OpenRun) -> runlog.RunLog:
    return open_run(cfg, world_size=1, rank=0)


def fill(log: runlog.RunLog, first: int, end: int) -> None:
    """The steps after ``first`` up to ``end``, whose numbers depend on the step; an evaluation before, and every 2."""
    if first == 0:
        log.log_eval(0, {"eval/greedy_accuracy": 0.25}, [{"question": q, "greedy": [0]} for q in range(3)])
    for step in range(first + 1, end + 1):
        log.log_completions("step", step, [{"text": f"{step}\n{n}\u2028"} for n in range(2)])
        log.log_rows("moe.jsonl", step, [{"moe/load_max": [step, step / 7]}])
        log.log_step(step, {"reward/mean": step / 7}, {"timing/generate_s": 1.0})
        if step % 2 == 0:
            log.log_completions("eval", step, [{"text": f"answer {step}"}])
            outcomes = [{"question": q, "greedy": [q]} for q in range(3)]
            log.log_eval(step, {"eval/greedy_accuracy": step / 3}, outcomes)


RECORDS = ("metrics.jsonl", "moe.jsonl", "eval.jsonl", "eval_outcomes.jsonl")


def records(run_dir: Path) -> dict[str, bytes]:
    kept = sorted(path.relative_to(run_dir).as_posix() for path in run_dir.glob("completions/*.gz"))
    return {name: (run_dir / name).read_bytes() for name in (*RECORDS, *kept)}


# ---------------------------------------------------------------- the folder


def test_two_runs_of_one_second_get_two_folders(cfg: Config, monkeypatch: MonkeyPatch, open_run: OpenRun) -> None:
    moment = runlog.datetime(2030, 1, 2, 3, 4, 5)
    monkeypatch.setattr(runlog, "datetime", types.SimpleNamespace(now=lambda: moment))
    logs = [open_run(cfg, 1, 0) for _ in range(3)]
    assert [log.run_dir.name for log in logs] == [f"tiny-20300102-030405{suffix}" for suffix in ("", "-2", "-3")]


def test_other_ranks_write_nothing(cfg: Config, open_run: OpenRun) -> None:
    log = open_run(cfg, world_size=2, rank=1)
    fill(log, 0, 2)
    log.rewind(1)
    log.say("quiet")
    log.finish("quiet", {})
    assert log.evaluations() == [] and not Path(cfg.train.out_dir).exists()


# ---------------------------------------------------------------- lines


def test_floats_survive_exactly_keep_their_order_and_are_null_if_not_finite(log: runlog.RunLog) -> None:
    metrics = {"b": 0.1 + 0.2, "a": np.float32(0.1), "tiny": 5e-324, "count": np.int64(3)}
    log.log_step(1, metrics | {"c": math.nan, "d": np.float32("-inf")}, {})
    assert (log.run_dir / "metrics.jsonl").read_text() == (
        '{"step": 1, "b": 0.30000000000000004, "a": 0.10000000149011612, "tiny": 5e-324, "count": 3,'
        ' "c": null, "d": null, "nonfinite": ["c", "d"]}\n'
    )


def test_a_long_run_says_what_is_left_and_a_long_phase_that_it_is_at_work(
    cfg: Config, open_run: OpenRun, monkeypatch: MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """100 steps. The first takes 90 s, and 60 s of an evaluation follow it: 99 more of 150 s are 4 h 8 min."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    log = open_run(cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": 100})}), 1, 0)
    heartbeat = Heartbeat(0, log)

    def later(seconds: float, place: str = "") -> list[str]:
        now[0] += seconds
        heartbeat.beat(place)
        return capsys.readouterr().out.splitlines()

    capsys.readouterr()
    assert (
        later(20, "sync of step 1") == []
        and later(40) == ["still working; last finished: sync of step 1"]
        and later(20) == []
    )
    now[0] += 10
    log.log_step(1, {"reward/mean": 0.5}, {"timing/step_s": 90.0})
    assert capsys.readouterr().out == "step 1/100  reward 0.500  90.0 s = other 90.0  2 h 28 min left\n"
    assert later(60, "3 of 9 questions") == ["still working; last finished: 3 of 9 questions  4 h 8 min left"]
    log.log_step(100, {}, {"timing/step_s": 1.0})
    assert capsys.readouterr().out == "step 100/100  1.0 s = other 1.0\n"
    assert all(key in runlog.LEGEND for label, key, _ in runlog.PROGRESS)


# ---------------------------------------------------------------- finish


def test_finish_hashes_the_records(log: runlog.RunLog, capsys: pytest.CaptureFixture) -> None:
    fill(log, 0, 4)
    log.finish("arithmetic accuracy 25.0 % -> 66.7 %", {"entropy": "step 9: 1e-5"})
    done = json.loads((log.run_dir / "finished.json").read_text())
    assert done["result"] == "arithmetic accuracy 25.0 % -> 66.7 %" and done["checks"] == {"entropy": "step 9: 1e-5"}
    for name in ("metrics.jsonl", "eval.jsonl", "eval_outcomes.jsonl"):
        assert done["sha256"][name] == hashlib.sha256((log.run_dir / name).read_bytes()).hexdigest()
    assert capsys.readouterr().out.splitlines()[-1] == done["result"]


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize(
    ("tear", "back_to"),
    [(b"\x00" * 40, 4), (b'{"step": 5, "x": "\xff', 1), ci(b"", 3), ci(b'{"step": 5, "rew', 2)],
)
def test_a_rewound_run_equals_one_never_stopped(cfg: Config, tear: bytes, back_to: int, open_run: OpenRun) -> None:
    whole = open_run(cfg, 1, 0)
    fill(whole, 0, 6)
    killed = open_run(cfg, 1, 0)
    fill(killed, 0, 4)
    killed.close()
    for name in (*RECORDS, "timing.jsonl"):
        with open(killed.run_dir / name, "ab") as file:
            file.write(tear)
    again = open_run(cfg, 1, 0, resume=killed.run_dir)
    again.rewind(back_to)
    fill(again, back_to, 6)
    assert records(again.run_dir) == records(whole.run_dir)
    assert len(run_record.read_lines(again.run_dir / "timing.jsonl")) == 6
    assert [row["step"] for row in again.evaluations()] == [0, 2, 4, 6]
    assert (again.run_dir / "resume-1" / "environment.json").exists()


def test_outcomes_whose_summary_was_not_written_are_forgotten(cfg: Config, open_run: OpenRun) -> None:
    log = open_run(cfg, 1, 0)
    fill(log, 0, 2)
    before = records(log.run_dir)
    with open(log.run_dir / "eval_outcomes.jsonl", "a") as file:  # killed in the evaluation after step 3
        file.write('{"step": 3, "question": 0}\n')
    log.rewind(2)
    assert records(log.run_dir) == before


# ----------------------------------------------------------------------------------------------------------- run record


def test_command_of_a_torchrun_start_can_be_typed_again(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("HOME", "/data/people/train")
    arguments = ["configs/a b.yaml", "train.steps=3", "model.path=/data/people/train/model"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/train_grpo.py", *arguments])
    run_record.write_records(tmp_path, config_in(tmp_path), world_size=16)
    typed = "train_grpo.py 'configs/a b.yaml' train.steps=3 model.path=$HOME/model"
    expected = f"torchrun --nnodes=2 --nproc_per_node=8 {typed}\n"
    assert (tmp_path / "command.txt").read_text() == expected


def test_environment_names_no_host_user_or_home(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17.cluster")
    for key, value in {
        "HOME": "/data/people/somebody",
        "USER": "somebody",
        "TORCH_HOME": "/data/people/somebody/.cache",
        "ASCEND_HOME_PATH": "/" + "home/another/Ascend:/opt/node-17/x",
        "HCCL_IF_IP": "192.0.2.17",
        "VLLM_API_KEY": "sk-123",
        "NCCL_DEBUG": "INFO",
        "NOT_OURS": "kept out",
    }.items():
        monkeypatch.setenv(key, value)
    text = json.dumps(run_record.environment(world_size=1))
    for private in ("somebody", "another", "node-17", "cluster", "192.0.2.17", "sk-123", "NOT_OURS"):
        assert private not in text
    variables = json.loads(text)["variables"]
    assert variables["TORCH_HOME"] == "$HOME/.cache" and variables["NCCL_DEBUG"] == "INFO"
    assert variables["VLLM_API_KEY"] == "(set)"


def test_git_patch_holds_the_changes_and_untracked_sources(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    source, record = tmp_path / "source", tmp_path / "record"
    source.mkdir()
    record.mkdir()
    monkeypatch.setattr(run_record, "ROOT", source)
    (source / "old.py").write_text("a = 1\n")
    git(source, "init", "-q")
    head = commit(source)
    # In a container, a mounted repository often has another owner. git's own tests pretend it so.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True).returncode != 0
    run_record.write_records(record, config_in(tmp_path), 1)
    assert json.loads((record / "git.json").read_text()) == {"commit": head, "dirty": False}
    monkeypatch.delenv("GIT_TEST_ASSUME_DIFFERENT_OWNER")
    (source / "old.py").write_text("a = 2\n")
    (source / "new.py").write_text("b = 3\n")
    run_record.write_records(record, config_in(tmp_path), 1)
    assert json.loads((record / "git.json").read_text())["dirty"] is True
    patch = (record / "git.patch").read_text()
    assert patch.startswith("# untracked: new.py\n") and "+a = 2" in patch
    git(source, "checkout", "old.py")
    git(source, "apply", str(record / "git.patch"))  # the patch with its heading still applies
    assert (source / "old.py").read_text() == "a = 2\n"


def test_a_start_without_a_commit_says_so(tmp_path: Path, monkeypatch: MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(run_record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    run_record.write_records(tmp_path, config_in(tmp_path), 1)
    assert json.loads((tmp_path / "git.json").read_text()) == {"commit": None, "dirty": None}
    assert capsys.readouterr().out == (
        "note: the git commit of the source is not known, so `report.py add` will refuse this run\n"
    )


def test_an_atomic_write_is_on_the_disk_before_it_has_the_name(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    events: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("replace"), replace(old, new)))
    write_atomically(tmp_path / "a.json", "{}")
    assert events == [str(tmp_path / ".a.json.tmp"), "replace", str(tmp_path)]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_of_two_versions_the_one_that_is_imported_is_recorded(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    for version in ("0.12.1", "0.16.1"):
        folder = tmp_path / version / f"some_package-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some_package\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "0.12.1"), str(tmp_path / "0.16.1")])
    assert run_record.environment(world_size=1)["packages"] == {"some-package": "0.12.1"}


def test_the_name_of_the_cpu_has_the_instructions_that_torch_finds() -> None:
    found = {"AVX2": "avx2", "AVX512": "avx512f"}.get(torch.backends.cpu.get_cpu_capability(), "")
    assert found in run_record.cpu_name() and len(run_record.cpu_name()) > len(found)


def test_inputs_are_the_checksums_of_model_and_data(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "train.jsonl"
    (model / "subfolder").mkdir(parents=True)
    (model / "config.json").write_text("abc")
    data.write_text("")
    source = {"source": "gsm8k", "train_path": [str(data), str(model / "config.json")], "test_path": str(data)}
    cfg = config_in(tmp_path).model_dump() | {"model": {"path": str(model)}, "data": source}
    cfg["eval"] = {"sets": {"math": str(data), "gone": str(tmp_path / "gone.jsonl")}}
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert run_record.inputs(run_record.input_files(Config.model_validate(cfg))) == {
        "model": {"config.json": abc},
        "data": {"train[0]": empty, "train[1]": abc, "test": empty, "eval.sets.math": empty},
    }
    assert run_record.inputs(run_record.input_files(config_in(tmp_path))) == {"model": {}, "data": {}}


def test_checksums_cover_every_record_and_those_of_resumed_starts(tmp_path: Path) -> None:
    sealed = ["config.yaml", "git.patch", "inputs.json", "metrics.jsonl", "resume-1/git.json"]
    for name in [*sealed, "finished.json", "log.txt", "run.lock", "curves.png", "checkpoints/x.json", ".a.json.tmp"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(run_record.checksums(tmp_path)) == sealed


def test_damaged_records_of_inputs_are_one_line_and_may_be_accepted(tmp_path: Path) -> None:
    cfg = config_in(tmp_path)
    for name in ("resume-old", "resume-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "inputs.json").write_text("{")
    changed = run_record.changed_inputs(tmp_path, run_record.input_files(cfg), Path(cfg.model.path))
    with pytest.raises(InputError, match="resume-1/inputs.json: not a record of the run's inputs .* or how"):
        run_record.refuse_changed_inputs(changed, accept=False, how="how")
    assert len(run_record.refuse_changed_inputs(changed, accept=True, how="how")) == 1


def test_checksums_of_inputs_are_those_of_the_files_and_each_beats(tmp_path: Path) -> None:
    """The heartbeat must see that a start lives that reads 60 GB."""
    paths, beats = [tmp_path / name for name in ("first", "second")], []
    for path in paths:
        path.write_bytes(path.name.encode() * 1000)
    sums = run_record.sha256_of_inputs(paths, lambda: beats.append(None))
    assert sums == {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths} and len(beats) == 2
    with pytest.raises(InputError, match="third: cannot be read"):
        run_record.sha256_of_inputs([*paths, tmp_path / "third"])
