"""Train each variant with each seed, in parallel on Ray or one run after another on this machine.

    python sweep.py configs/sweeps/aqn.yaml [section.key=value ...]     on Ray: a local one, or --address of a cluster
    python sweep.py configs/sweeps/aqn.yaml --local                     without Ray, as many jobs at once as have CPUs
    python sweep.py configs/sweeps/aqn.yaml --list                      print state, hours and disk; start nothing

After a crash or Ctrl-C, start the same command again: finished runs are not repeated, and an interrupted run resumes
from its checkpoint. out/sweep-NAME/ holds sweep.json and the output of each job. All nodes of a cluster must share the
file system of the checkout.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# PYTHONSAFEPATH and `python -P` leave the folder of this file out.
sys.path.insert(0, __file__.rpartition("/")[0])

from pydantic import Field, NonNegativeInt

from benchmarks.planted_fault import FAULTS
from config import command, config_hash, load_config
from inputs.environment import ON_CPU
from inputs.files import (
    LINES_MIB,
    MOST_RANKS,
    InputError,
    one_line,
    read_bytes,
    read_file,
    read_object,
    read_text,
    shown,
    write_atomically,
)
from knobs import Config
from lab.records import Part, planted_fault, validated
from plan import whole_run
from plan.memory import GIB
from run_record import lock_file, lock_run, read_lines

RAY = "ray==2.60.0"  # the version that has been tried
ROOT = Path(__file__).resolve().parent
MOST_JOBS = 2000  # of a sweep; the largest one that was run has 306
BUSY = -1000  # in place of an exit code: another process runs this job


class Variant(Part):
    overrides: tuple[str, ...] = Field((), strict=False, description="section.key=value")
    fault: str = Field("", description="of benchmarks/planted_fault.py: train with this fault, as a control")
    processes: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="number of ranks; by default that of the sweep"
    )


class Sweep(Part):
    """A file of configs/sweeps/."""

    config: str = Field(description="the configuration of all jobs, before overrides")
    processes: int = Field(ge=1, le=MOST_RANKS, description="number of ranks of a job")
    seeds: tuple[int, ...] = Field(min_length=1, max_length=1000, strict=False)
    each_seed: tuple[str, ...] = Field(("train.seed={seed}",), strict=False, description="{seed} is replaced")
    overrides: tuple[str, ...] = Field((), strict=False, description="of all jobs")
    variants: dict[str, Variant] = Field(min_length=1, description="name -> its overrides")
    resources: dict[str, NonNegativeInt] = Field(
        description="what Ray reserves for a job: CPU, GPU, or other names such as NPU"
    )
    retries: int = Field(1, ge=0, le=100, description="how often a failed job is started again")


@dataclass
class Job:
    name: str
    cfg: Config
    arguments: list[str]  # of torchrun: the script and its arguments
    processes: int
    state: str = "waiting"  # waiting, running, elsewhere (another process runs it), finished, failed
    attempts: int = 0
    run: Path | None = None  # its run folder, once there is one
    said: str = ""  # the result, or the reason of the failure
    process: Any = None  # while it runs: has poll(), terminate() and wait(), as Popen

    def look(self) -> None:
        """Find the newest run folder with this name and configuration, and see whether the run is finished."""
        wanted, found = {"name": self.cfg.name, "config_hash": config_hash(self.cfg)}, []
        fault = planted_fault(" ".join(self.arguments))
        for identity in Path(ROOT, self.cfg.train.out_dir).glob(f"{self.cfg.name}-*/run.json"):
            with contextlib.suppress(InputError, OSError):  # the run was killed before it could write anything
                command = identity.with_name("command.txt")
                planted = planted_fault(read_text(command) if command.exists() else "")
                if read_object(identity) == wanted and planted == fault:
                    found.append(identity.parent)
        done = [folder for folder in found if (folder / "finished.json").exists()]
        self.run = max(done or found, key=lambda folder: folder.stat().st_mtime, default=None)
        if done:
            self.state, self.said = "finished", str(read_object(self.run / "finished.json", ("result",))["result"])

    def is_alive(self) -> bool:
        """Whether a process still writes to its run folder. A rank can outlive a torchrun that was killed."""
        try:
            if self.run:
                lock_run(self.run).close()
        except BlockingIOError:
            return True
        return False


def read_sweep(path: Path, extra: list[str]) -> tuple[Sweep, list[Job]]:
    """The sweep and its jobs with checked configurations; InputError for the first configuration with a fault."""
    sweep = validated(Sweep, read_file(path), path)
    if repeated := sorted({seed for seed in sweep.seeds if sweep.seeds.count(seed) > 1}):
        raise InputError(f"{path}: seeds: {repeated[0]} is given twice; needed: each seed once, a run of its own")
    if len(sweep.seeds) > 1 and not any("{seed}" in text for text in sweep.each_seed):
        raise InputError(f"{path}: each_seed: has no {{seed}}, so all {len(sweep.seeds)} seeds would be the same run")
    if len(sweep.seeds) * len(sweep.variants) > MOST_JOBS:
        found = f"{len(sweep.variants)} variants x {len(sweep.seeds)} seeds"
        raise InputError(f"{path}: {found}; needed: at most {MOST_JOBS} jobs")
    jobs = []
    for seed, (name, variant) in itertools.product(sweep.seeds, sweep.variants.items()):
        script = ["benchmarks/planted_fault.py", variant.fault] if variant.fault else ["train_grpo.py"]
        job = f"{name}-seed{seed}"
        arguments = [
            f"name={job}",
            *sweep.overrides,
            *variant.overrides,
            *(text.replace("{seed}", str(seed)) for text in sweep.each_seed),
            *extra,
        ]
        try:
            if variant.fault and variant.fault not in FAULTS:
                raise InputError(f"fault: found {shown(variant.fault)}; needed: one of {', '.join(FAULTS)}")
            cfg = load_config(ROOT / sweep.config, arguments)
            if cfg.name != job:  # two jobs of one name would write, and resume, each other's runs
                raise InputError(f"override name: found {cfg.name}; needed: none, because a sweep names its jobs")
            if cfg.train.seed != seed:  # the name says the seed, and a record must have that one
                raise InputError(f"train.seed: found {cfg.train.seed}; needed: {seed} (each_seed: train.seed={{seed}})")
        except InputError as error:
            raise InputError(f"{path}: {job}: {error}") from None
        jobs.append(Job(job, cfg, [*script, sweep.config, *arguments], variant.processes or sweep.processes))
    return sweep, in_order(jobs, len(sweep.variants))


def in_order(jobs: list[Job], variants: int) -> list[Job]:
    """All variants of a seed before the next seed, so that pairs are complete early. But the first job of a seed, which
    may have to make a tiny model, comes half a seed earlier, so that no other job waits for the model."""
    places = (index if index % variants else index - variants // 2 for index in range(len(jobs)))
    return [job for _, job in sorted(zip(places, jobs, strict=True), key=lambda pair: pair[0])]


# ------------------------------------------------------------------------------------------------------------- one job


def start_job(
    name: str, arguments: list[str], processes: int, folder: Path, device: str = "cpu"
) -> subprocess.Popen | None:
    """Start torchrun for one training, with its output in FOLDER/NAME.log; None if another process runs this job.

    The environment is that of the run_*.sh scripts for the ``device`` of the configuration. On an NPU it keeps
    PYTHONPATH, in which CANN puts its packages.
    torchrun inherits the lock of the job and holds it as long as it lives, even if the sweep has ended before.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost",
        f"--nproc_per_node={processes}", *arguments,
    ]  # fmt: skip
    # On a CPU, packages found in the folders of these two variables would replace the pinned ones.
    environment = {key: x for key, x in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")} | ON_CPU
    if device in ("npu", "cuda"):
        shell = ["bash", "-euo", "pipefail", "-c", 'source "$0"; exec "$@"', f"./{device}_env.sh"]  # the file is $0
        command, environment = [*shell, *command], dict(os.environ)
    try:
        lock = lock_file(folder / f"{name}.lock")
    except BlockingIOError:
        return None
    with lock, open(folder / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, pass_fds=[lock.fileno()]
        )


def run_job(name: str, arguments: list[str], processes: int, folder: str, device: str = "cpu") -> int:
    """The work of a Ray task: one training.  -> its exit code, or BUSY"""
    started = start_job(name, arguments, processes, Path(folder), device)
    if started is None:
        return BUSY
    try:
        return started.wait()
    finally:
        started.terminate()  # the Ray task may have been cancelled
        started.wait()


@dataclass
class RayTask:
    """A job on Ray, with the methods of Popen that a sweep uses."""

    ray: Any
    reference: Any

    def poll(self) -> int | None:
        if not self.ray.wait([self.reference], timeout=0)[0]:
            return None
        try:
            return self.ray.get(self.reference)
        except self.ray.exceptions.RayError as error:  # its node or its worker is lost
            print(str(error).splitlines()[0], flush=True)
            return 1

    def terminate(self) -> None:
        self.ray.cancel(self.reference)

    def wait(self) -> None:
        self.ray.wait([self.reference], timeout=60)


def connect_ray(folder: Path, resources: dict[str, int], address: str | None) -> Callable[[Job], RayTask]:
    """A function that starts a job on Ray, which starts as many jobs in parallel as their resources allow."""
    try:
        import ray
    except ImportError:
        raise InputError(f"sweep: ray is not installed; needed: pip install {RAY}, or --local") from None
    if found := re.search(r"([^/@]+):(\d+)$", address or ""):  # ray.init tries for minutes
        try:
            socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=10).close()
        except (OSError, OverflowError, UnicodeError) as error:
            raise InputError(f"--address: found {shown(address)}: {one_line(error)}; needed: a head of Ray") from None
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
    except Exception as error:  # Ray raises ValueError, ConnectionError, RuntimeError and a plain Exception
        raise InputError(f"--address: found {shown(address)}: Ray does not start: {one_line(error)}") from None
    there = ray.cluster_resources()
    for name, number in resources.items():
        if there.get(name, 0) < number:
            raise InputError(f"resources.{name}: {number} a job; Ray reports {there.get(name, 0):g} in all")
    print("ray: " + ", ".join(f"{there[name]:g} {name}" for name in resources), flush=True)
    task = ray.remote(run_job).options(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        resources={name: number for name, number in resources.items() if name not in ("CPU", "GPU")},
        max_retries=0,
    )
    return lambda job: RayTask(
        ray, task.remote(job.name, job.arguments, job.processes, str(folder.resolve()), job.cfg.device)
    )


# ----------------------------------------------------------------------------------------------------------- the sweep


def run_sweep(sweep: Sweep, jobs: list[Job], start: Callable[[Job], Any], most: int, folder: Path) -> None:
    """Start the unfinished jobs, at most ``most`` in parallel, and wait until every job is finished or failed.

    ``start`` returns the job's process, or None if another process runs the job.
    """
    shown: dict[str, tuple] = {}
    while any(job.state not in ("finished", "failed") for job in jobs):
        for job in jobs:
            room = sum(other.state == "running" for other in jobs) < most
            if job.state not in ("finished", "failed"):
                advance(job, start, room, sweep.retries, folder)
            if job.state != "waiting" and shown.get(job.name) != (job.state, job.attempts):
                print(f"{job.name}: {job.state}  {job.said}".rstrip(), flush=True)
                shown[job.name] = (job.state, job.attempts)
        save(jobs, folder)
        time.sleep(1)


def jobs_at_once(resources: dict[str, int], cores: int) -> int:
    """Number of jobs that this machine runs side by side: one if a job reserves more than CPUs, such as NPUs."""
    needed = resources.get("CPU", 0)
    return max(1, cores // needed) if needed and set(resources) == {"CPU"} else 1


def advance(job: Job, start: Callable[[Job], Any], room: bool, retries: int, folder: Path) -> None:
    """Bring a job to its next state. A waiting job starts if there is ``room``; a running job can end."""
    if not job.process and not room:
        return
    code = job.process.poll() if job.process else None  # first: a process that has ended no longer writes to its run
    job.look()
    if job.process and code is None:
        job.state = "running"  # until its process has ended
        return
    job.process = None
    if job.state == "finished":
        return
    if code is None:
        job.process = None if job.is_alive() else start(job)
        job.state = "running" if job.process else "elsewhere"
        job.attempts += job.state == "running"
    elif code == BUSY:
        job.state, job.attempts = "elsewhere", job.attempts - 1
    else:
        lines = read_bytes(folder / f"{job.name}.log", LINES_MIB).decode(errors="replace").splitlines()
        final = [line for line in lines if line.startswith(("error: ", "stopped: "))]  # a repeat would end like this
        errors = [line for line in lines if re.match(r"(?!.*ChildFailedError)[\w.]*(Error|Exception)\b", line)]
        job.said = final[-1] if final else f"exit code {code}: {(errors or lines or ['no output'])[-1]}"
        job.state = "failed" if final or job.attempts > retries else "waiting"


def save(jobs: list[Job], folder: Path) -> None:
    """Write sweep.json, the state of every job."""
    rows = {
        job.name: {
            "state": job.state,
            "attempts": job.attempts,
            "run": os.path.relpath(job.run, ROOT) if job.run else "",
            "result": job.said,
        }
        for job in jobs
    }
    path, text = folder / "sweep.json", json.dumps({"jobs": rows}, indent=1) + "\n"
    if not path.exists() or read_bytes(path) != text.encode():
        write_atomically(path, text)


def print_list(jobs: list[Job]) -> None:
    """Print the state of every job, and what the plan says of its hours and its disk space."""
    all_hours = all_gib = 0.0
    for job in jobs:
        steps = len(read_lines(job.run / "metrics.jsonl")) if job.run else 0
        planned = whole_run.of_config(job.cfg, job.processes)
        hours, gib = (planned.hours, planned.kept_bytes / GIB) if planned else (0.0, 0.0)
        plan = f"{hours:.1f} h, {gib:.1f} GiB  " if gib else ""
        state = f"{job.state}  {steps}/{job.cfg.train.steps} steps  {plan}{job.processes} ranks"
        print(f"{job.name}  {state}  {' '.join(job.arguments)}")
        all_hours, all_gib = all_hours + hours * (job.state != "finished"), all_gib + gib
    if all_gib:
        print(f"by the plan: {all_hours:.0f} h of runs that are not finished; {all_gib:.0f} GiB of checkpoints")


@command
def main(arguments: list[str]) -> int:
    """Run the command.  -> 0: all jobs are finished; 1: some have failed; 2: unusable input; 130: interrupted"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="a file of configs/sweeps/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of all jobs")
    parser.add_argument(
        "--local", action="store_true", help="without Ray; jobs that reserve nothing but CPUs run side by side"
    )
    parser.add_argument("--address", help="address of a Ray cluster; by default a local Ray is started")
    parser.add_argument("--list", action="store_true", help="print the state of the jobs and start nothing")
    args = parser.parse_intermixed_args(arguments)
    jobs: list[Job] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's SIGTERM ends a sweep as Ctrl-C does
    try:
        if args.local and args.address is not None:
            raise InputError("--address: not read with --local; needed: one of the two")
        sweep, jobs = read_sweep(args.sweep, args.overrides)
        for job in jobs:
            job.look()
        if args.list:
            print_list(jobs)
            return 0
        folder = Path(ROOT, jobs[0].cfg.train.out_dir) / f"sweep-{args.sweep.stem}"
        folder.mkdir(parents=True, exist_ok=True)
        if args.local:
            most = jobs_at_once(sweep.resources, len(os.sched_getaffinity(0)))
            run_sweep(
                sweep,
                jobs,
                lambda job: start_job(job.name, job.arguments, job.processes, folder, job.cfg.device),
                most,
                folder,
            )
        else:
            run_sweep(sweep, jobs, connect_ray(folder, sweep.resources, args.address), len(jobs), folder)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one must not end the wait for the jobs
            signal.signal(number, signal.SIG_IGN)
        print("interrupted, waiting for the jobs to end; the same command continues the sweep", file=sys.stderr)
        return 130
    finally:
        running = [job.process for job in jobs if job.process]
        for process in running:
            process.terminate()
        for process in running:  # torchrun ends its processes before itself
            process.wait()
    failed = [job for job in jobs if job.state == "failed"]
    print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs finished; {folder}/sweep.json")
    for job in failed:
        print(f"{job.name}: {job.said}\n  output: {folder / job.name}.log", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
