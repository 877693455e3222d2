"""Variants x seeds, each a run of its own: side by side on Ray, or one after another on this machine.

    python sweep.py configs/sweeps/aqn.yaml [section.key=value ...]     on Ray: a local one, or --address of a cluster
    python sweep.py configs/sweeps/aqn.yaml --local                     without Ray
    python sweep.py configs/sweeps/aqn.yaml --list                      the jobs and where they stand; starts nothing

Start it again after a crash or Ctrl-C: a finished run is not repeated, an interrupted one goes on at its checkpoint.
out/sweep-NAME/ holds sweep.json and every job's output. Nodes of a cluster must share the checkout's file system.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from config import config_hash, load_config
from input_files import BAD_INPUT, MOST_RANKS, InputError, read_file, read_object, refused
from knobs import Config
from run_record import write_atomically
from runlog import lock_run

RAY = "ray==2.60.0"  # the version that has been tried
ROOT = Path(__file__).resolve().parent
BUSY = -1000  # instead of an exit code: another process runs this very job
# As run_cpu.sh: threads change the last bits; no fork of the tokenizer's; a mistyped model path is no download.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Variant(Section):
    overrides: tuple[str, ...] = Field((), strict=False, description="section.key=value")
    processes: int | None = Field(None, ge=1, le=MOST_RANKS, description="ranks, if not the sweep's")


class Sweep(Section):
    """A file of configs/sweeps/."""

    config: str = Field(description="configuration that every job starts from")
    processes: int = Field(ge=1, le=MOST_RANKS, description="ranks of a job")
    seeds: tuple[int, ...] = Field(min_length=1, max_length=1000, strict=False)
    each_seed: tuple[str, ...] = Field(("train.seed={seed}",), strict=False, description="{seed} is replaced")
    overrides: tuple[str, ...] = Field((), strict=False, description="of all jobs")
    variants: dict[str, Variant] = Field(min_length=1, description="name -> what makes it differ")
    resources: dict[str, NonNegativeInt] = Field(description="of one job, for Ray: CPU, GPU, or another's, e.g. NPU")
    retries: int = Field(1, ge=0, le=100, description="how often a job that failed is started again")


@dataclass
class Job:
    name: str
    cfg: Config
    arguments: list[str]  # of train_grpo.py
    processes: int
    state: str = "waiting"  # waiting, running, elsewhere, finished, failed
    attempts: int = 0
    run: Path | None = None  # its run folder, once there is one
    said: str = ""  # the result, or why it failed
    tried_at: float = field(default=0.0, repr=False)

    def look(self) -> None:
        """Find the newest run folder of this name and configuration, and whether it is finished."""
        wanted, found = {"name": self.cfg.name, "config_hash": config_hash(self.cfg)}, []
        for identity in Path(ROOT, self.cfg.train.out_dir).glob(f"{self.cfg.name}-*/run.json"):
            with contextlib.suppress(InputError, OSError):  # killed while it was made: nothing in it to go on with
                if read_object(identity) == wanted:
                    found.append(identity.parent)
        done = [folder for folder in found if (folder / "finished.json").exists()]
        self.run = max(done or found, key=lambda folder: folder.stat().st_mtime, default=None)
        if done:
            self.state, self.said = "finished", str(read_object(self.run / "finished.json", ("result",))["result"])

    def is_alive(self) -> bool:
        """Whether a process writes its run folder: a rank outlives a torchrun that was killed."""
        if self.run is None:
            return False
        try:
            lock_run(self.run).close()
        except BlockingIOError:
            return True
        return False

    def steps_done(self) -> int:
        metrics = self.run / "metrics.jsonl" if self.run else None
        return metrics.read_bytes().count(b"\n") if metrics and metrics.exists() else 0


def read_sweep(path: Path, extra: list[str]) -> tuple[Sweep, list[Job]]:
    """The sweep and its jobs, every configuration checked; InputError for the first that is not right."""
    try:
        sweep = Sweep.model_validate(read_file(path))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise InputError(f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
    if repeated := sorted({seed for seed in sweep.seeds if sweep.seeds.count(seed) > 1}):
        raise InputError(f"{path}: seeds: {repeated[0]} is given twice; needed: each seed once, a run of its own")
    if len(sweep.seeds) > 1 and not any("{seed}" in text for text in sweep.each_seed):
        raise InputError(f"{path}: each_seed: has no {{seed}}, so all {len(sweep.seeds)} seeds would be the same run")
    jobs = []
    for seed in sweep.seeds:  # all variants of one seed first: pairs are complete early
        for name, variant in sweep.variants.items():
            job = f"{name}-seed{seed}"
            overrides = [text.replace("{seed}", str(seed)) for text in sweep.each_seed]
            arguments = [f"name={job}", *sweep.overrides, *variant.overrides, *overrides, *extra]
            try:
                cfg = load_config(ROOT / sweep.config, arguments)
            except InputError as error:
                raise InputError(f"{path}: {job}: {error}") from None
            jobs.append(Job(job, cfg, [sweep.config, *arguments], variant.processes or sweep.processes))
    return sweep, jobs


# ------------------------------------------------------------------------------------------------------------- one job


def run_job(name: str, arguments: list[str], processes: int, folder: str) -> int:
    """Exit code of one training, its output in FOLDER/NAME.log; BUSY if it runs already.

    torchrun holds the job's lock for as long as it lives, also when the sweep that started it does not.
    """
    started = start_job(name, arguments, processes, Path(folder))
    if started is None:
        return BUSY
    try:
        return started.wait()
    finally:
        if started.poll() is None:  # the Ray task was cancelled
            started.terminate()
            started.wait()


def start_job(name: str, arguments: list[str], processes: int, folder: Path) -> subprocess.Popen | None:
    """torchrun of one training; None if another process runs it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    hidden = ("PYTHONPATH", "PYTHONHOME")  # packages from there would hide the pinned ones
    environment = {key: value for key, value in os.environ.items() if key not in hidden} | ENVIRONMENT
    with open(folder / f"{name}.lock", "ab") as lock, open(folder / f"{name}.log", "ab") as log:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        command = [sys.executable, *launcher, f"--nproc_per_node={processes}", "train_grpo.py", *arguments]
        # The child inherits the lock's descriptor, so the lock outlives this one's.
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, pass_fds=[lock.fileno()]
        )


class Local:
    """One job after another, on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.job, self.process = folder, None, None

    def has_room(self) -> bool:
        return self.process is None

    def start(self, job: Job) -> bool:
        self.process = start_job(job.name, job.arguments, job.processes, self.folder)
        self.job = job
        return self.process is not None

    def ended(self) -> list[tuple[Job, int]]:
        if self.process is None or self.process.poll() is None:
            return []
        code, self.process = self.process.returncode, None
        return [(self.job, code)]

    def stop(self) -> None:
        """Ask torchrun to end its processes, and wait until it has."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


class OnRay:
    """Jobs as Ray tasks: Ray starts as many at once as their resources allow."""

    def __init__(self, folder: Path, resources: dict[str, int], address: str | None) -> None:
        try:
            import ray
        except ImportError:
            raise InputError(f"sweep: ray is not installed; needed: pip install {RAY}, or --local") from None
        self.ray, self.folder, self.tasks = ray, folder, {}
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
        there = ray.cluster_resources()
        for name, number in resources.items():
            if there.get(name, 0) < number:
                raise InputError(f"resources.{name}: {number} a job; Ray reports {there.get(name, 0):g} in all")
        print("ray: " + ", ".join(f"{there[name]:g} {name}" for name in resources), flush=True)
        others = {name: number for name, number in resources.items() if name not in ("CPU", "GPU")}
        self.task = ray.remote(run_job).options(
            num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), resources=others, max_retries=0
        )

    def has_room(self) -> bool:
        return True

    def start(self, job: Job) -> bool:
        task = self.task.remote(job.name, job.arguments, job.processes, str(self.folder.resolve()))
        self.tasks[task] = job
        return True

    def ended(self) -> list[tuple[Job, int]]:
        found = []
        for task in self.ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=0)[0] if self.tasks else ():
            try:
                code = self.ray.get(task)
            except self.ray.exceptions.RayError as error:  # its node or its worker is gone
                print(f"{self.tasks[task].name}: {str(error).splitlines()[0]}", flush=True)
                code = 1
            found.append((self.tasks.pop(task), code))
        return found

    def stop(self) -> None:
        """Interrupt the tasks; torchrun ends its processes when its own is asked to end."""
        for task in self.tasks:
            self.ray.cancel(task)
        if self.tasks:
            self.ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=60)
        self.ray.shutdown()


# ----------------------------------------------------------------------------------------------------------- the sweep


def run_sweep(sweep: Sweep, jobs: list[Job], launcher: Local | OnRay, folder: Path, table: Any) -> None:
    """Start what is not finished, look after what runs, until every job is finished or failed."""
    while any(job.state in ("waiting", "running", "elsewhere") for job in jobs):
        for job in jobs:
            if job.state == "elsewhere" and time.monotonic() - job.tried_at > 1:
                job.state = "waiting"
            if job.state == "waiting" and launcher.has_room() and not _waits_for_model(job, jobs):
                job.look()  # an orphan of an earlier sweep may have finished it meanwhile
                if job.state == "waiting":
                    job.tried_at = time.monotonic()
                    job.state = "running" if not job.is_alive() and launcher.start(job) else "elsewhere"
                    job.attempts += job.state == "running"
        for job, code in launcher.ended():
            _settle(job, code, sweep.retries, folder)
        for job in jobs:
            if job.state == "running":
                job.look()
                job.state = "running"  # until its process has ended
        save(jobs, folder)
        table.show(jobs)
        time.sleep(0.2)


def _waits_for_model(job: Job, jobs: list[Job]) -> bool:
    """A tiny model that is not there yet is made by one job, and the others that need it wait."""
    path = job.cfg.model.path
    if job.cfg.tiny_model is None or Path(ROOT, path).exists():
        return False
    return any(other.cfg.model.path == path for other in jobs if other.state in ("running", "elsewhere"))


def _settle(job: Job, code: int, retries: int, folder: Path) -> None:
    """What the end of a job's process means: finished, once more, or failed with the reason."""
    if code == BUSY:
        job.state, job.attempts = "elsewhere", job.attempts - 1
        return
    job.state = "waiting"
    job.look()
    if job.state == "finished":
        return
    lines = (folder / f"{job.name}.log").read_text(errors="replace").splitlines()
    final = [line for line in lines if line.startswith(("error: ", "stopped: "))]  # would end the same way again
    job.said = final[-1] if final else f"exit code {code}: {lines[-1] if lines else 'no output'}"
    job.state = "failed" if final or job.attempts > retries else "waiting"


def save(jobs: list[Job], folder: Path) -> None:
    """sweep.json: where every job stands."""
    rows = {
        job.name: {
            "state": job.state,
            "attempts": job.attempts,
            "run": os.path.relpath(job.run, ROOT) if job.run else "",
            "result": job.said,
        }
        for job in jobs
    }
    text = json.dumps({"jobs": rows}, indent=1) + "\n"
    if not (folder / "sweep.json").exists() or (folder / "sweep.json").read_text() != text:
        write_atomically(folder / "sweep.json", text)


class Table:
    """The jobs: a table that is redrawn on a terminal, a line for each change elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console()
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self.seen: dict[str, tuple] = {}
        if self.live:
            self.live.start()

    def show(self, jobs: list[Job]) -> None:
        from rich.table import Table as Grid

        if self.live:
            grid = Grid("job", "state", "steps", "attempts", "result")
            for job in jobs:
                steps = f"{job.steps_done()}/{job.cfg.train.steps}"
                grid.add_row(job.name, job.state, steps, str(job.attempts), job.said)
            self.live.update(grid, refresh=True)
            return
        for job in jobs:
            now = (job.state, job.attempts)
            if job.state != "waiting" and self.seen.get(job.name) != now:
                print(f"{job.name}: {job.state}  {job.said}".rstrip(), flush=True)
            self.seen[job.name] = now

    def close(self) -> None:
        if self.live:
            self.live.stop()


def main(arguments: list[str]) -> int:
    """Exit code 0: every job is finished; 1: some have failed; 2: unusable input; 130: interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="a file of configs/sweeps/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of every job")
    parser.add_argument("--local", action="store_true", help="one job after another, without Ray")
    parser.add_argument("--address", help="of a Ray cluster; a local Ray is started without it")
    parser.add_argument("--list", action="store_true", help="print the jobs and where they stand")
    args = parser.parse_intermixed_args(arguments)
    launcher, table = None, None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended by a scheduler or by Ctrl-C: all the same
    try:
        sweep, jobs = read_sweep(args.sweep, args.overrides)
        for job in jobs:
            job.look()
        if args.list:
            print("\n".join(f"{j.name}  {j.state}  {j.processes} ranks  {' '.join(j.arguments)}" for j in jobs))
            return 0
        folder = Path(ROOT, jobs[0].cfg.train.out_dir) / f"sweep-{args.sweep.stem}"
        folder.mkdir(parents=True, exist_ok=True)
        launcher = Local(folder) if args.local else OnRay(folder, sweep.resources, args.address)
        table = Table()
        run_sweep(sweep, jobs, launcher, folder, table)
    except BAD_INPUT as error:
        return refused(error)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    finally:
        if table:
            table.close()
        if launcher:
            launcher.stop()
    failed = [job for job in jobs if job.state == "failed"]
    print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs finished; {folder}/sweep.json")
    for job in failed:
        print(f"{job.name}: {job.said}\n  output: {folder / job.name}.log", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
