"""The first hour on a new machine: five stages from the doctor to three steps of the real run, and one report.

    bash first_hour.sh CONFIG [--report FILE] [section.key=value ...]      sets the environment and calls this file

A stage that has passed is not repeated unless the configuration, the number of ranks, the code, the installed packages,
the variables or the files of model and data have changed since. No torch: every stage is a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import hf_config
import run_record
import runlog
from config import load_config, to_yaml
from config_rules import check_engine_layout, check_layout
from input_files import BAD_INPUT, MOST_RANKS, InputError, read_object, refused
from knobs import Config
from plan import grid
from plan.first_hour_stages import ROOT, STAGES, Job, Outcome, Stage, said
from plan.machine import Machine
from run_record import write_atomically

MINUTES = "5 15 30 30 90"  # a stage may take
GRACE = 45.0  # seconds: torchrun gives its ranks 30 of them to end
WIDTH = 118  # of the report's text
WAIT = 60.0  # seconds for the processes of a start that was killed


class Interrupted(Exception):
    """Ctrl-C, or a SIGTERM: the stage at work is ended, and comes first next time."""


# ------------------------------------------------------------------------------------------------ processes


def execute(command: list[str], log: Path, seconds: float, lock: BinaryIO) -> int | None:
    """Exit code of ``command``, which writes to ``log``; None if it took longer than ``seconds`` and was ended.

    It holds ``lock`` as long as it lives, and gets a SIGTERM when this process dies, however it does.
    """
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, pass_fds=(lock.fileno(),),
            start_new_session=True, preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                end(process)


LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def end(process: subprocess.Popen) -> None:
    """End ``process`` and what it has started: first by asking it, then what is left of them, each by its number."""
    started = _family(process.pid)
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid, born in started.items():
        if _processes().get(pid, ("", ""))[1] == born:
            os.kill(pid, signal.SIGKILL)


def _processes() -> dict[int, tuple[str, str]]:
    """Process -> (parent, start time); a number that is used again has another start. {} where there is no /proc."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if rest[0] not in "ZX":
            found[int(stat.parent.name)] = (rest[1], rest[19])
    return found


def _family(pid: int) -> dict[int, str]:
    """Start times of the descendants of ``pid``."""
    processes, known = _processes(), {pid}
    while born := {p for p, (parent, _) in processes.items() if int(parent) in known} - known:
        known |= born
    return {p: processes[p][1] for p in known - {pid}}


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


# ------------------------------------------------------------------------------------------------ what has been done


def state(job: Job) -> str:
    """sha256 (hex) of all that a stage's result depends on."""
    code = {
        path.name: run_record.sha256_file(path)
        for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("*.sh")])
    }
    paths = [Path(job.cfg.data.train_path), Path(job.cfg.data.test_path)] if job.cfg.data.source == "gsm8k" else []
    if job.cfg.tiny_model is None:
        paths += sorted(Path(job.cfg.model.path).glob("*"))
    files = {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.exists()}
    everything = [to_yaml(job.cfg), job.ranks, job.device, code, files, run_record.environment(job.ranks)]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def kept(path: Path, now: str) -> dict | None:
    """The result of a stage that has passed under this very state; None if there is none."""
    try:
        result = read_object(path)
    except InputError:
        return None
    return result | {"kept": True} if result.get("state") == now and result.get("status") == "pass" else None


def run_stage(stage: Stage, job: Job, seconds: float, lock: BinaryIO) -> dict:
    """Run ``stage``; what came of it, as the report has it."""
    number = [each.name for each in STAGES].index(stage.name) + 1
    log, command = job.folder / f"{number}-{stage.name}.log", stage.command(job)
    for left in (f"{stage.name}.json", "run" if stage.name == "steps" else "two_layers"):  # of an earlier start
        path = job.folder / left
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    begin = time.monotonic()
    refused = job.plan().reasons if stage.name == "steps" else []
    code = None if refused else execute(command, log, seconds, lock)
    if refused:
        outcome = Outcome(f"preflight.py refuses this run, which was not started: {'; '.join(refused)}")
    elif code is None:
        last = said(log, 0).removeprefix("exit code 0: ")
        outcome = Outcome(f"ended after {seconds / 60:g} minutes, its limit; in its log: {last}")
    else:
        outcome = stage.outcome(job, log, code)
        outcome.wrong = outcome.wrong or (said(log, code) if code else "")
    return {
        "status": "fail" if outcome.wrong else "pass", "reason": outcome.wrong,
        "seconds": round(time.monotonic() - begin, 1), "lines": outcome.lines, "figures": outcome.figures,
        "command": shlex.join(command), "log": str(log), "when": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
    }  # fmt: skip


def run_all(job: Job, minutes: list[float], lock: BinaryIO) -> list[dict]:
    """The results of all stages, in order; one line on the screen when a stage begins and ends."""
    now, results = state(job), []
    for stage, limit in zip(STAGES, minutes, strict=True):
        head = {"name": stage.name, "proves": stage.proves, "todo": stage.todo}
        path = job.folder / f"stage-{stage.name}.json"
        lacking = [r["name"] for r in results if r["name"] in stage.needs and r["status"] != "pass"]
        if lacking:
            reason = f"needs {' and '.join(lacking)}, which {'has' if len(lacking) == 1 else 'have'} not passed"
            result = {"status": "skipped", "reason": reason, "seconds": 0.0, "lines": [], "figures": {}}
        elif (result := kept(path, now)) is None:
            print(f"{len(results) + 1}/{len(STAGES)} {stage.name}: at most {limit:g} minutes ...", flush=True)
            result = run_stage(stage, job, limit * 60, lock)
            write_atomically(path, json.dumps(result | {"state": now}, indent=1) + "\n")
        mark = " (kept from an earlier start)" if result.get("kept") else f" in {result['seconds']:.1f} s"
        print(f"{len(results) + 1}/{len(STAGES)} {stage.name}: {result['status']}{mark}", flush=True)
        results.append(head | {key: value for key, value in result.items() if key != "state"})
    return results


# ------------------------------------------------------------------------------------------------ telling


def as_json(job: Job, results: list[dict]) -> dict:
    """The report as one object."""
    git = run_record.git_state()[0]
    report = {
        "passed": all(result["status"] == "pass" for result in results),
        "config": job.config, "overrides": list(job.overrides), "ranks": job.ranks, "device": job.device,
        "folder": str(job.folder), "commit": git["commit"], "dirty": git["dirty"],
        "when": f"{datetime.now():%Y-%m-%d %H:%M:%S}", "stages": results,
    }  # fmt: skip
    return json.loads(run_record.json_line(report))  # strict: a figure that is not finite is null


def as_text(report: dict, path: Path) -> str:
    """The report for a reader."""
    commit = f"{report['commit'][:12]}{' with changes' * bool(report['dirty'])}" if report["commit"] else "no git"
    head = f"first hour: {report['config']}, {report['ranks']} ranks on {report['device']}, {report['when']}, {commit}"
    lines = ["", head]
    for number, stage in enumerate(report["stages"], start=1):
        again = f"  (kept: passed on {stage['when']}, nothing has changed since)" if stage.get("kept") else ""
        shown = {"pass": "pass", "fail": "FAIL", "skipped": "skipped"}[stage["status"]]
        lines += ["", f"{number} {stage['name']:<10} {shown:<8}{stage['seconds']:8.1f} s{again}"]
        lines += textwrap.wrap(stage["proves"], WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines += [f"    {line}" for line in stage["lines"]]
        if stage["reason"]:
            lines.append(f"  {'why:' if stage['status'] == 'fail' else 'because it'} {stage['reason']}")
        if stage["status"] == "fail":
            lines += textwrap.wrap(f"do:  {stage['todo']}", WIDTH, initial_indent="  ", subsequent_indent="       ")
            lines += [f"  log: {stage['log']}", f"  by hand: {stage['command']}"]
    names = {s: ", ".join(r["name"] for r in report["stages"] if r["status"] == s) for s in ("fail", "skipped")}
    failed, skipped = f"failed: {names['fail']}", f"; skipped: {names['skipped']}" * bool(names["skipped"])
    verdict = "all passed" if report["passed"] else failed + skipped
    lines += [
        "",
        f"result: {verdict}. The same as JSON: {path}",
        "The same command repeats only what has not passed, or what has changed; from the beginning: "
        f"rm -r {shlex.quote(report['folder'])}",
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ the command


def default_ranks(cfg: Config, device: str) -> int:
    """Every device that this machine shows; on a CPU the fewest ranks that the layout divides."""
    machine = Machine(run=cfg)
    shown = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}.get(device)
    if shown and os.environ.get(shown):
        return len(os.environ[shown].split(","))
    nodes = machine.device_nodes({"npu": "davinci", "cuda": "nvidia"}[device]) if shown else []
    return len(nodes) or grid.default_ranks(cfg, device, 16)


def read(args: argparse.Namespace) -> tuple[Job, list[float]]:
    """What is to be done, and the minutes of each stage; InputError for what cannot be."""
    cfg = load_config(args.config, args.overrides)
    device = grid.device_of(cfg)
    try:
        ranks = int(args.ranks) if args.ranks else default_ranks(cfg, device)
        minutes = [float(part) for part in args.minutes.split()]
    except ValueError:
        ranks, minutes = 0, []
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"RANKS, MINUTES: found {args.ranks!r}, {args.minutes!r}; needed: whole numbers of 1 or more")
    if len(minutes) != len(STAGES) or not all(0 < limit < 1e6 for limit in minutes):
        raise InputError(f"MINUTES: found {args.minutes!r}; needed: {len(STAGES)} numbers above 0, one a stage")
    arch = hf_config.planned(cfg)[0]
    try:
        check_layout(cfg, arch, ranks)
        check_engine_layout(cfg, arch, ranks)
    except InputError as error:
        raise InputError(f"{ranks} ranks (RANKS=N for another number): {error}") from None
    folder = Path(cfg.train.out_dir) / f"first_hour-{cfg.name}"
    job = Job(args.config, tuple(args.overrides), cfg, ranks, device, folder)
    load_config(args.config, job.steps())
    return job, minutes


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: all passed; 1: a stage has failed; 2: unusable input, one line; 130: interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("config", help="YAML file, e.g. configs/qwen3.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--report", metavar="FILE", help="the report as JSON; default: report.json among the results")
    parser.add_argument("--ranks", default="", help="processes on this machine; default: its devices")
    parser.add_argument("--minutes", default=MINUTES, help=f"limit of each stage; default: {MINUTES}")
    parser.add_argument("--device", action="store_true", help="only print which device the configuration is for")
    args = parser.parse_intermixed_args(arguments)
    try:
        job, minutes = read(args)
        if args.device:
            print(job.device)
            return 0
        path = Path(args.report) if args.report else job.folder / "report.json"
        with hold(job.folder, path) as lock:
            print(f"{job.config}: {job.ranks} ranks on {job.device}; logs and results: {job.folder}", flush=True)
            report = as_json(job, run_all(job, minutes, lock))
            write_atomically(path, json.dumps(report, indent=1) + "\n")
    except BAD_INPUT as error:
        return refused(error)
    except Interrupted:
        print("interrupted: the same command goes on with this stage", file=sys.stderr)
        return 130
    print(as_text(report, path))
    return 0 if report["passed"] else 1


def hold(folder: Path, report: Path) -> BinaryIO:
    """The lock on ``folder``, which is made; InputError if nothing can be written there, or others are at work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.parent.mkdir(parents=True, exist_ok=True)
        if report.exists() and "stages" not in read_object(report):
            raise InputError(f"{report}: not a report of an earlier first hour; needed: a new file, or one of these")
        deadline = time.monotonic() + WAIT
        while True:
            try:
                return runlog.lock_run(folder)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InputError(f"{folder}: another first hour is at work there; end it first") from None
                if deadline - time.monotonic() > WAIT - 1:
                    print(f"waiting: processes of an earlier start hold {folder}", flush=True)
                time.sleep(1)
    except OSError as error:
        raise InputError(f"{error.filename or folder}: {error.strerror}; needed: a place to write") from None


if __name__ == "__main__":
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, _interrupt)
    sys.exit(main())
