"""Trains each variant with each seed, in parallel, on Ray or on this machine.

    python sweep.py configs/sweeps/stale.yaml [section.key=value ...]     use Ray here, or the cluster at --address
    python sweep.py configs/sweeps/stale.yaml --local                     use no Ray; run as many jobs as the CPUs allow
    python sweep.py configs/sweeps/stale.yaml --list                      count the steps of each job and start nothing

After a crash or Ctrl-C, start the same command again. It does not repeat finished runs, and an interrupted run resumes
from its checkpoint. out/sweep-NAME/ contains the output of each job, and sweep.json there lists the runs of the sweep.
All nodes of a cluster must share the file system of the checkout.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, NoReturn

# PYTHONSAFEPATH and `python -P` leave the folder of this file out.
sys.path.insert(0, __file__.rpartition("/")[0])

from pydantic import Field, NonNegativeInt

from checks.planted_fault import named_faults, refuse_idle
from facts.exits import InputError, Tripped
from facts.root import ROOT
from facts.variables import ON_CPU
from inputs.config import changed_keys, command, load_config, path_option, to_dict
from inputs.files import (
    MOST_RANKS,
    one_line,
    read_file,
    read_object,
    read_text,
    shown,
    usable_cores,
    validated,
    write_atomically,
)
from knobs import Config, OnePath
from lab.records import Part, planted_fault
from runlog.progress import ending_signals
from runlog.run_record import lock_file, of_last_start, read_lines

RAY = "ray==2.60.0"  # the version that was tested
FINAL = {InputError.exit_code, Tripped.exit_code}  # exit codes after which another try would not help


class Variant(Part):
    overrides: list[str] = Field([], description="section.key=value")
    fault: str = Field("", description="train with this fault of checks/planted_fault.py, as a control")


class Sweep(Part):
    """The content of a file in configs/sweeps/."""

    config: OnePath = Field(description="the configuration of all jobs, before overrides")
    processes: int = Field(ge=1, le=MOST_RANKS, description="number of ranks per job")
    seeds: list[int] = Field(min_length=1, max_length=1000)
    each_seed: list[str] = Field(["train.seed={seed}"], description="{seed} is replaced")
    overrides: list[str] = Field([], description="of all jobs")
    variants: dict[str, Variant] = Field(min_length=1, description="name -> its overrides")
    resources: dict[str, NonNegativeInt] = Field(
        description="numbers that Ray reserves per job: CPU, GPU, or other names such as NPU"
    )
    retries: int = Field(1, ge=0, le=100, description="number of times that a failed job is started again")


class Job(NamedTuple):
    """A variant with one seed."""

    name: str
    cfg: Config
    arguments: list[str]  # torchrun's arguments: the script and its own arguments
    processes: int

    def look(self) -> tuple[Path | None, str]:
        """Return the finished run with the name, the configuration and the fault of this job, and the run's result.

        If no such run is finished, return the newest run and "". If there is no such run, return (None, "").
        """
        wanted, fault = to_dict(self.cfg), planted_fault(" ".join(self.arguments))
        newest = None
        for run in sorted(Path(ROOT, self.cfg.train.out_dir).glob(f"{self.cfg.name}-*")):
            with contextlib.suppress(InputError, OSError):  # the run was killed before it could write anything
                found = read_file(of_last_start(run, "config.yaml"))
                its_fault = planted_fault(read_text(run / "command.txt"))
                if found.get("name") != self.cfg.name or changed_keys(found, wanted) or its_fault != fault:
                    continue
                newest = run
                if (run / "finished.json").exists():
                    return run, str(read_object(run / "finished.json", ("result",))["result"]) or "finished"
        return newest, ""


def read_sweep(path: Path, extra: list[str]) -> tuple[Sweep, list[Job]]:
    """Return the sweep and its jobs.

    All variants of a seed come before the next seed, so that pairs of runs are complete early. Raises InputError for
    the first job whose configuration is not valid.
    """
    sweep = validated(Sweep, read_file(path), path)
    if len(set(sweep.seeds)) < len(sweep.seeds):
        raise InputError(f"{path}: seeds: found {shown(sweep.seeds)}; give each seed only once")
    jobs = []
    for seed in sweep.seeds:
        for name, variant in sweep.variants.items():
            try:
                jobs.append(_job(sweep, f"{name}-seed{seed}", variant, seed, extra))
            except InputError as error:
                raise InputError(f"{path}: {name}-seed{seed}: {error}") from None
    return sweep, jobs


def _job(sweep: Sweep, name: str, variant: Variant, seed: int, extra: list[str]) -> Job:
    if variant.fault:
        named_faults(variant.fault)
    script = ["checks/planted_fault.py", variant.fault] if variant.fault else ["train_grpo.py"]
    of_seed = [text.replace("{seed}", str(seed)) for text in sweep.each_seed]
    overrides = [f"name={name}", *sweep.overrides, *variant.overrides, *of_seed, *extra]
    cfg = load_config(ROOT / sweep.config, overrides)
    refuse_idle(variant.fault, cfg)
    if cfg.name != name:  # two jobs with one name would write and resume each other's runs
        raise InputError(f"override name: found {cfg.name}; remove it, because a sweep names its jobs")
    if cfg.train.seed != seed:  # the name contains the seed, which must be the record's
        raise InputError(f"train.seed: must be {seed}, not {cfg.train.seed}; add train.seed={{seed}} to each_seed")
    return Job(name, cfg, [*script, sweep.config, *overrides], sweep.processes)


# ------------------------------------------------------------------------------------------------------------- one job


def run_job(job: Job, folder: Path, retries: int, stop: threading.Event | None = None) -> str:
    """Run a training job, and start it again up to ``retries`` times if it fails. When ``stop`` is set, end the job.

    Returns the result of the run, or "failed: " and the reason. The output goes to FOLDER/NAME.log.
    """
    stop = stop or threading.Event()
    log = folder / f"{job.name}.log"
    said = "interrupted"
    try:
        lock = lock_file(folder / f"{job.name}.lock")
    except BlockingIOError:  # another sweep, or a torchrun that outlived its sweep
        return "failed: another process is training it; start the sweep again when that process has ended"
    with lock:
        for _ in range(1 + retries):
            if stop.is_set() or job.look()[1]:
                break
            before = log.stat().st_size if log.exists() else 0
            process = start_training(job, log, lock.fileno())
            try:
                while process.poll() is None and not stop.wait(0.2):
                    pass
            finally:  # also if a Ray task is cancelled
                process.terminate()
                code = process.wait()  # torchrun ends its ranks before itself
            said = f"exit code {code}: {last_error(log.read_bytes()[before:])}"
            if code in FINAL:
                break
    return job.look()[1] or f"failed: {said}"


def start_training(job: Job, log: Path, lock: int) -> subprocess.Popen:
    """Start torchrun for ``job`` and append its output to ``log``.

    torchrun inherits the file descriptor ``lock``. It keeps the lock while it runs, even if the sweep ends earlier.
    The environment is that of the run_*.sh scripts for the device of the configuration. On an NPU or a GPU it keeps
    PYTHONPATH, because CANN adds its packages there.
    """
    command = [
        sys.executable,
        "launch/first_code.py",
        "--standalone",
        "--local-addr=localhost",
        f"--nproc_per_node={job.processes}",
        *job.arguments,
    ]
    # On a CPU, packages found in the folders of these two variables would replace the pinned ones.
    environment = {key: x for key, x in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")} | ON_CPU
    if job.cfg.device in ("npu", "cuda"):
        variables = f"launch/{job.cfg.device}_env.sh"  # this is $0 of the bash below
        command = ["bash", "-euo", "pipefail", "-c", 'source "$0"; exec "$@"', variables, *command]
        environment = dict(os.environ)
    with open(log, "ab") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, pass_fds=[lock]
        )


def last_error(output: bytes) -> str:
    """Return the line of a training run's output that gives the reason for its end."""
    lines = output.decode(errors="replace").splitlines()
    errors = [line for line in lines if re.match(r"error: |stopped: |[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["no output"])[-1]


# ------------------------------------------------------------------------------------------------------ where jobs run


Submit = Callable[[Job, Path, int], Future]  # takes run_job's arguments and returns a Future of its result


@contextlib.contextmanager
def local(resources: dict[str, int]) -> Iterator[Submit]:
    """Run jobs in threads in this block: side by side if they reserve only CPUs, otherwise one after another.

    The end of the block ends the training runs that were started in it, and no other process.
    """
    stop = threading.Event()
    pool = ThreadPoolExecutor(jobs_at_once(resources, usable_cores()))
    try:
        yield lambda job, folder, retries: pool.submit(run_job, job, folder, retries, stop)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def jobs_at_once(resources: dict[str, int], cores: int) -> int:
    """Return the number of jobs that this machine runs side by side.

    The number is 1 if a job reserves anything but CPUs, such as NPUs.
    """
    needed = resources.get("CPU", 0)
    return max(1, cores // needed) if needed and set(resources) == {"CPU"} else 1


@contextlib.contextmanager
def on_ray(resources: dict[str, int], address: str | None) -> Iterator[Submit]:
    """Run jobs as Ray tasks in this block, as many at once as resources allow. A task whose node is lost runs again."""
    try:
        import ray
    except ImportError:
        raise InputError(f"sweep: ray is not installed; install it (pip install {RAY}), or use --local") from None
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
    except Exception as error:  # Ray raises ValueError, ConnectionError, RuntimeError and a plain Exception
        raise InputError(f"--address: Ray does not start with {shown(address)}: {one_line(error)}") from None
    there = ray.cluster_resources()
    for name, number in resources.items():
        if there.get(name, 0) < number:
            raise InputError(
                f"resources.{name}: a job needs {number}, but Ray reports only {there.get(name, 0):g} in all"
            )
    others = {name: number for name, number in resources.items() if name not in ("CPU", "GPU")}
    options = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": others}
    tasks = []

    def submit(job: Job, folder: Path, retries: int) -> Future:
        tasks.append(ray.remote(run_job).options(**options, max_retries=retries).remote(job, folder, retries))
        return tasks[-1].future()

    try:
        yield submit
    finally:
        for task in tasks:
            ray.cancel(task)
        ray.wait(tasks, num_returns=len(tasks), timeout=60)


# ----------------------------------------------------------------------------------------------------------- the sweep


def run_sweep(jobs: list[Job], submit: Submit, folder: Path, retries: int) -> dict[str, str]:
    """Run the jobs that are not finished, and return the reasons of the failed jobs by job name."""
    write_index(jobs, folder)
    failed: dict[str, str] = {}
    started = {submit(job, folder, retries): job.name for job in jobs if not job.look()[1]}
    for done in as_completed(started):
        name = started[done]
        try:
            said = done.result()
        except Exception as error:  # Ray's, or the disk's
            said = f"failed: {one_line(error)}"
        print(f"{name}: {said}", flush=True)
        if said.startswith("failed: "):
            failed[name] = said
        write_index(jobs, folder)
    return failed


def write_index(jobs: list[Job], folder: Path) -> None:
    """Write sweep.json, which lists the runs of the sweep for `report.py compare`. No sweep reads it."""
    rows = {}
    for job in jobs:
        run, result = job.look()
        state = "finished" if result else "not finished"
        rows[job.name] = {"state": state, "run": os.path.relpath(run, ROOT) if run else "", "result": result}
    write_atomically(folder / "sweep.json", json.dumps({"jobs": rows}, indent=1) + "\n")


def print_list(jobs: list[Job]) -> None:
    """Print the state, the number of finished steps, the ranks and the arguments of every job."""
    for job in jobs:
        run, result = job.look()
        steps = len(read_lines(run / "metrics.jsonl")) if run else 0
        state = f"{'finished' if result else 'not finished'}  {steps}/{job.cfg.train.steps} steps"
        print(f"{job.name}  {state}  {job.processes} ranks  {' '.join(job.arguments)}")


def interrupt(number: int, frame: object) -> NoReturn:
    """Raise KeyboardInterrupt with the number of the signal, as Ctrl-C does."""
    raise KeyboardInterrupt(number)


@command
def main(arguments: list[str]) -> int:
    """Run the command, and return the exit code.

    The code is 0 if all jobs are finished, 1 if some failed, and 2 for unusable input. After a signal, it is 128 + the
    number of the signal.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=path_option, help="a file of configs/sweeps/")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="overrides for all jobs")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--local", action="store_true", help="run without Ray; jobs that reserve only CPUs run side by side"
    )
    where.add_argument("--address", help="address of a Ray cluster (default: start a local Ray)")
    parser.add_argument("--list", action="store_true", help="count the steps of each job and start nothing")
    args = parser.parse_intermixed_args(arguments)
    sweep, jobs = read_sweep(args.sweep, args.overrides)
    if args.list:
        print_list(jobs)
        return 0
    folder = Path(ROOT, jobs[0].cfg.train.out_dir) / f"sweep-{args.sweep.stem}"
    folder.mkdir(parents=True, exist_ok=True)
    for number in ending_signals():
        signal.signal(number, interrupt)
    with local(sweep.resources) if args.local else on_ray(sweep.resources, args.address) as submit:
        try:
            failed = run_sweep(jobs, submit, folder, sweep.retries)
        except KeyboardInterrupt as interrupted:
            for number in ending_signals():  # a second signal must not end the wait, and a job must not inherit SIG_IGN
                signal.signal(number, lambda number, frame: None)
            print("interrupted; waiting for the jobs to end; the same command continues the sweep", file=sys.stderr)
            return 128 + interrupted.args[0]
    print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs finished; {folder}/sweep.json")
    for name, said in failed.items():
        print(f"{name}: {said}\n  output: {folder / name}.log", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
