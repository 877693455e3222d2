"""A sweep runs every variant with every seed once: what is finished is not repeated, what was interrupted goes on."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import agents
import apart
import launched
import pytest
import recorded
import training
from killed import in_child, must_succeed

import preflight
import runlog
import sweep
from lab import curves, run_folders
from run_record import checksums

CONFIG = f"""
name: unnamed
device: cpu
model: {{path: none, dtype: fp32}}
tiny_model: {json.dumps({"architecture": "qwen3_moe", **training.SIZES})}
data: {{source: arithmetic, max_prompt_tokens: 96, num_train: 40, num_test: 9, operand_high: 20}}
rollout: {{prompts_per_step: 4, group_size: 2, max_new_tokens: 8}}
lora: {{rank: 4, alpha: 8.0}}
optim: {{lr: 1e-2, warmup_steps: 1, prompts_per_update: 4, tokens_per_micro_batch: 1024}}
eval: {{samples: 1, batch_size: 9}}
train: {{steps: 3, checkpoint_every: 1}}
"""


@pytest.fixture
def write_sweep(tmp_path: Path):
    """A sweep of random tiny models in tmp_path; its jobs take seconds."""

    def write(seeds: list[int], resources: str = "{CPU: 1}", **variants: list[str]) -> Path:
        (tmp_path / "tiny.yaml").write_text(CONFIG)
        folder = f"[train.out_dir={tmp_path / 'out'}, 'model.path={tmp_path / 'model'}{{seed}}', tiny_model.seed=0]"
        text = f"config: {tmp_path / 'tiny.yaml'}\nprocesses: 1\nseeds: {seeds}\nresources: {resources}\n"
        text += f"each_seed: ['train.seed={{seed}}', *]\nvariants: {json.dumps(variants)}\n".replace("*", folder[1:-1])
        path = tmp_path / "trial.yaml"
        path.write_text(text)
        return path

    return write


def variant(*overrides: str) -> dict[str, list[str]]:
    return {"overrides": list(overrides)}


# ---------------------------------------------------------------- what a sweep is


def test_every_variant_meets_every_seed_and_seeds_come_first(write_sweep) -> None:
    """But the job that may make the model of a seed comes half a seed early."""
    variants = {name: variant(f"lora.rank={4 + place}") for place, name in enumerate("abcd")}
    _, jobs = sweep.read_sweep(write_sweep([0, 1, 2], **variants), ["train.steps=2"])
    order = [job.name.replace("-seed", "") for job in jobs]
    assert order == ["a0", "b0", "c0", "a1", "d0", "b1", "c1", "a2", "d1", "b2", "c2", "d2"]
    (job,) = (job for job in jobs if job.name == "d-seed2")
    assert (job.cfg.train.seed, job.cfg.lora.rank, job.cfg.train.steps, job.cfg.model.path[-6:]) == (2, 7, 2, "model2")


def test_only_jobs_that_need_nothing_but_cpus_run_side_by_side() -> None:
    for resources, cores, jobs in (({"CPU": 2}, 5, 2), ({"CPU": 4}, 2, 1), ({"CPU": 1, "NPU": 16}, 64, 1)):
        assert sweep.jobs_at_once(resources, cores) == jobs


def test_a_control_runs_the_script_that_plants_its_fault(write_sweep) -> None:
    _, (base, broken) = sweep.read_sweep(
        write_sweep([3], base=variant(), broken=variant() | {"fault": "reversed_clip"}), []
    )
    assert base.arguments[0] == "train_grpo.py" and base.arguments[2] == "name=base-seed3"
    assert broken.arguments[:2] == ["benchmarks/planted_fault.py", "reversed_clip"]


def test_a_sweep_that_cannot_run_is_refused_before_anything_starts(write_sweep, tmp_path: Path, capsys) -> None:
    for old, new, said in (
        ("lora.rank=8", "lora.rnak=8", "b-seed0: override lora.rnak: unknown key"),
        ("lora.rank=8", "name=a-seed0", "b-seed0: override name: found a-seed0; needed: none"),
        ("reversed_clip", "reversed_clap", "c-seed0: fault: found 'reversed_clap'; needed: one of inverted"),
        ("train.seed={seed}", "data.seed={seed}", "a-seed1: train.seed: found 0; needed: 1 (each_seed: train.seed="),
        ("seeds: [0, 1]", "seeds: [0, 1, 0]", "seeds: 0 is given twice"),
        ("seeds: [0, 1]", f"seeds: {list(range(1000))}", "trial.yaml: 3 variants x 1000 seeds; needed: at most 2000"),
        ("{seed}", "7", "each_seed: has no {seed}, so all 2 seeds would be the same run"),
        ("processes: 1", "processes: 100000000000", "processes: Input should be less than or equal to 65536"),
        ("{CPU: 1}", "{CPU: -1}", "resources.CPU: Input should be greater than or equal to 0"),
    ):
        path = write_sweep([0, 1], a=variant(), b=variant("lora.rank=8"), c=variant() | {"fault": "reversed_clip"})
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        assert sweep.main([str(path), "--local"]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_an_address_that_is_none_is_refused_in_one_line(write_sweep, capfd) -> None:
    path = str(write_sweep([0], a=variant()))
    for address in ("not an address", "127.0.0.1:1", "[::1]:99999"):
        assert sweep.main([path, "--address", address]) == 2
        assert capfd.readouterr().err.splitlines()[-1].startswith(f"error: --address: found {address!r}: ")
    assert sweep.main([path, "--local", "--address", "127.0.0.1:1"]) == 2
    assert "--address: not read with --local" in capfd.readouterr().err


def test_a_run_folder_that_cannot_be_read_is_no_run_of_the_sweep(write_sweep, tmp_path: Path) -> None:
    path, folder = write_sweep([0], base=variant()), tmp_path / "out" / "base-seed0-20300101-000000"
    folder.mkdir(parents=True)
    for content in (b"", b"[]", b"[" * 99999, b'"\xff"'):
        (folder / "run.json").write_bytes(content)
        assert sweep.main([str(path), "--list"]) == 0


def test_the_list_has_the_hours_and_the_disk_space_of_the_plan(capsys) -> None:
    """14.3 GiB a checkpoint of Qwen3-30B-A3B, of which two are kept; the hours that preflight.py prints."""
    path = str(recorded.ROOT / "configs/sweeps/gsm8k_qwen3.yaml")
    assert sweep.main([path, "--list"]) == 0
    *jobs, total = capsys.readouterr().out.splitlines()
    assert preflight.main([str(recorded.ROOT / "configs/qwen3.yaml"), "--json"]) == 0
    hours = sum(json.loads(capsys.readouterr().out)["run_seconds"].values()) / 3600
    assert len(jobs) == 10 and all(f"0/77 steps  {hours:.1f} h, 28.6 GiB  16 ranks" in line for line in jobs), jobs
    assert total == f"by the plan: {10 * hours:.0f} h of runs that are not finished; 286 GiB of checkpoints"
    assert sweep.main([path, "--list", "train.checkpoint_every=0"]) == 0
    assert "143 GiB of checkpoints" in capsys.readouterr().out  # only the last step is saved
    assert sweep.main([str(recorded.ROOT / "configs/sweeps/aqn.yaml"), "--list"]) == 0
    assert "by the plan" not in capsys.readouterr().out  # on a CPU


@pytest.mark.nightly
def test_the_sweeps_of_the_repository_load_and_their_jobs_have_names_of_their_own() -> None:
    """A baseline that several sweeps share is run once; so its name must mean the same everywhere."""
    seen: dict[str, str] = {}
    for path in recorded.ROOT.glob("configs/sweeps/*.yaml"):
        read, jobs = sweep.read_sweep(path, [])
        hashes = {job.name: sweep.config_hash(job.cfg) for job in jobs}
        assert all(seen.setdefault(name, found) == found for name, found in hashes.items()), path
        kinds = {(hashes[job.name], job.processes, sweep.planted_fault(" ".join(job.arguments))) for job in jobs}
        assert len(kinds) == len(jobs) == len(read.seeds) * len(read.variants), f"{path}: two jobs are the same"
        assert len(read.seeds) >= 3, f"{path}: fewer seeds decide nothing"


# ---------------------------------------------------------------- who runs when, without processes


def run_scripted(path: Path, tmp_path: Path, codes: dict, log: str = "", day: str = "02", most: int = 9) -> tuple:
    """The jobs that a sweep started, the largest number that ran in parallel, and all jobs after its end.

    A job ends with the next of the exit codes written for it, 0 by default.
    """
    read, jobs = sweep.read_sweep(path, [])
    for job in jobs:
        job.look()
        (tmp_path / f"{job.name}.log").write_text(log)
    started, running = {}, []

    def start(job: sweep.Job) -> mock.Mock:
        """A process that has ended at the second look at it."""
        code = codes.get(job.name, [0]).pop(0)
        started[job.name] = process = mock.Mock(**{"poll.side_effect": [None, code]})
        running.append(sum(each.poll.call_count < 2 for each in started.values()))
        if code == 0:
            folder = tmp_path / "out" / f"{job.cfg.name}-203001{day}-030405"
            folder.mkdir(parents=True)
            identity = {"name": job.cfg.name, "config_hash": sweep.config_hash(job.cfg)}
            (folder / "run.json").write_text(json.dumps(identity))
            (folder / "finished.json").write_text('{"result": "done"}')
        return process

    with mock.patch.object(sweep.time, "sleep"):
        sweep.run_sweep(read, jobs, start, most, tmp_path)
    return [*started], max(running), jobs


def test_at_most_so_many_jobs_run_in_parallel(write_sweep, tmp_path: Path) -> None:
    _, most, jobs = run_scripted(write_sweep([0, 1, 2], a=variant()), tmp_path, {}, most=2)
    assert most == 2 and [job.state for job in jobs] == ["finished"] * 3


def test_a_failed_job_is_tried_again_reported_and_does_not_stop_the_others(write_sweep, tmp_path) -> None:
    path = write_sweep([0, 1], a=variant(), b=variant("lora.rank=8"))
    _, _, jobs = run_scripted(path, tmp_path, {"a-seed0": [1, 0], "b-seed0": [1, 1]}, "RuntimeError: lost")
    assert {job.name: (job.state, job.attempts) for job in jobs} == {
        "a-seed0": ("finished", 2), "b-seed0": ("failed", 2), "a-seed1": ("finished", 1), "b-seed1": ("finished", 1),
    }  # fmt: skip
    written = json.loads((tmp_path / "sweep.json").read_text())["jobs"]
    assert written["b-seed0"]["result"] == "exit code 1: RuntimeError: lost"
    again, _, (_, job, *_) = run_scripted(
        path, tmp_path, {"b-seed0": [1, 0]}, "stopped: checks.entropy: gone\nW1120 torch"
    )
    assert again == ["b-seed0"]  # what is finished is not repeated, and a tripwire is not tried again
    assert (job.state, job.attempts, job.said) == ("failed", 1, "stopped: checks.entropy: gone")
    other, *_ = run_scripted(write_sweep([0], a=variant("lora.rank=8")), tmp_path, {}, day="03")
    assert other == ["a-seed0"]  # a run of another configuration does not count


def test_a_job_that_another_process_runs_is_left_alone(write_sweep, tmp_path: Path) -> None:
    with open(tmp_path / "a-seed0.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep.start_job("a-seed0", [], 1, tmp_path) is None
        assert sweep.run_job("a-seed0", [], 1, str(tmp_path)) == sweep.BUSY
    assert not (tmp_path / "a-seed0.log").exists()


def test_without_ray_or_its_resources_one_line_says_what_is_needed(write_sweep, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    path = str(write_sweep([0], resources="{CPU: 1, NPU: 16}", a=variant()))
    assert sweep.main([path]) == 2
    error = capsys.readouterr().err
    assert f"pip install {sweep.RAY}" in error and "--local" in error
    assert sweep.RAY in (sweep.ROOT / "requirements" / "test.txt").read_text(), "the version that the tests run"
    there = SimpleNamespace(init=lambda **options: None, cluster_resources=lambda: {"CPU": 2.0})
    monkeypatch.setitem(sys.modules, "ray", there)
    assert sweep.main([path]) == 2
    assert "resources.NPU: 16 a job; Ray reports 0 in all" in capsys.readouterr().err


def test_an_interrupted_sweep_ends_its_job_and_says_how_to_go_on(
    write_sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Ctrl-C, or SIGTERM from a scheduler, while a job runs; and once more while the sweep waits for its end."""
    sleeper = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(sleeper, "terminate", lambda: [sleeper.send_signal(signal.SIGTERM), *again()])
    monkeypatch.setattr(sweep, "start_job", lambda *arguments: sleeper)
    monkeypatch.setattr(sweep.time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def again() -> list[None]:
        return [os.kill(os.getpid(), number) for number in handlers]

    try:
        assert sweep.main([str(write_sweep([0], a=variant())), "--local"]) == 130
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sleeper.kill()
    assert sleeper.returncode == -signal.SIGTERM and "the same command continues the sweep" in capsys.readouterr().err
    assert json.loads((tmp_path / "out/sweep-trial/sweep.json").read_text())["jobs"]["a-seed0"]["state"] == "running"


def test_a_job_gets_the_environment_of_the_run_script_of_its_device(tmp_path: Path, monkeypatch) -> None:
    """On a CPU, that of run_cpu.sh; on an NPU, CANN's packages stay and npu_env.sh is read, as launch.sh does."""
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\nenv\n")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    for name, value in {"PYTHONPATH": "/cann/python", "ASCEND_HOME_PATH": "/cann", "HCCL_BUFFSIZE": "77"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for device, needed, absent in (
        ("cpu", {"OMP_NUM_THREADS=1"}, "PYTHONPATH"),
        (
            "npu",
            {"PYTHONPATH=/cann/python", "OMP_NUM_THREADS=4", "HCCL_CONNECT_TIMEOUT=1800", "HCCL_BUFFSIZE=77"},
            "NCCL_",
        ),
        ("cuda", {"TORCH_NCCL_ASYNC_ERROR_HANDLING=1"}, "HCCL_CONNECT_TIMEOUT"),
    ):
        assert sweep.start_job(device, ["train_grpo.py"], 1, tmp_path, device).wait(30) == 0
        lines = (tmp_path / f"{device}.log").read_text().splitlines()
        assert needed | {"HF_HUB_OFFLINE=1"} <= {*lines}, device
        assert not [line for line in lines if line.startswith(absent)], device


# ---------------------------------------------------------------- real processes


def forked_sweep(path: Path, killed: str = "") -> int:
    """The exit code of sweep.py with jobs that are forked. All processes are killed in the last step of one job."""
    sweeping = os.getpid()

    def kill_all() -> None:
        os.kill(sweeping, signal.SIGKILL)
        os.killpg(0, signal.SIGKILL)

    def start_job(name: str, arguments: list[str], processes: int, folder: Path, device: str) -> SimpleNamespace:
        def plant(patch: pytest.MonkeyPatch) -> None:
            patch.setattr(curves, "draw_curves", lambda *_: None)
            if name == killed:
                apart.arm(patch, [(runlog.RunLog, "log_step", 3)], kill_all)

        process, _ = agents.start(processes, *arguments, log=folder / f"{name}.log", plant=plant, light=False)
        return SimpleNamespace(poll=lambda: process.exitcode, terminate=process.terminate, wait=process.join)

    sweep.start_job = start_job
    return sweep.main([str(path), "--local"])


@pytest.mark.ci
@pytest.mark.parametrize("executed", [False, pytest.param(True, marks=[pytest.mark.nightly, pytest.mark.slow])])
def test_a_killed_sweep_goes_on_and_repeats_nothing(executed, write_sweep, tmp_path: Path) -> None:
    """Three jobs; all processes are killed in the second one, after a checkpoint; then the same command again."""
    variants = {"a": variant("lora.rank=4"), "b": variant("lora.rank=8"), "c": variant("lora.rank=2")}
    path = write_sweep([0], "{CPU: 10000}", **variants)  # one job after another
    out = tmp_path / "out"
    assert in_child(lambda: forked_sweep(path, "b-seed0")) == -signal.SIGKILL
    untouched = {file: file.stat().st_mtime_ns for file in out.glob("a-seed0-*/**/*") if file.is_file()}
    (torn,) = out.glob("b-seed0-*")
    assert len(training.metrics(torn)) == 2 and not (torn / "finished.json").exists()

    if executed:
        subprocess.run([sys.executable, "sweep.py", path, "--local"], cwd=recorded.ROOT, check=True, timeout=400)
    else:
        assert in_child(lambda: must_succeed(lambda: forked_sweep(path))) == 0
    folders = sorted(out.glob("*-seed*-*"))
    assert [folder.name[:7] for folder in folders] == ["a-seed0", "b-seed0", "c-seed0"]
    assert untouched and all(file.stat().st_mtime_ns == time for file, time in untouched.items())
    assert (torn / "resume-1").is_dir() and len(training.metrics(torn)) == 3
    jobs = json.loads((out / "sweep-trial" / "sweep.json").read_text())["jobs"]
    assert [(job["state"], job["attempts"]) for job in jobs.values()] == [
        ("finished", 0),
        ("finished", 1),
        ("finished", 1),
    ]
    for folder in folders:  # what real runs leave is what a record needs, whether or not this checkout is clean
        for start_of in (folder, *folder.glob("resume-*")):
            (start_of / "git.json").write_text(json.dumps({"commit": recorded.COMMIT, "dirty": False}))
            (start_of / "git.patch").write_text("")
        finished = json.loads((folder / "finished.json").read_text())
        sealed = finished["sha256"] | {name: checksums(folder)[name] for name in finished["sha256"]}
        (folder / "finished.json").write_text(json.dumps(finished | {"sha256": sealed}))
        assert run_folders.from_run(folder, "x").record.resumed == (folder == torn)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=f"needs Ray: pip install {sweep.RAY}")
def test_jobs_run_on_ray(write_sweep, tmp_path: Path) -> None:
    path = write_sweep([0], a=variant(), b=variant("lora.rank=8"))
    with launched.started(sys.executable, "sweep.py", path, log=tmp_path / "log") as sweeping:
        assert sweeping.wait(400) == 0, sweeping.text
    assert len(list((tmp_path / "out").glob("*-seed0-*/finished.json"))) == 2
