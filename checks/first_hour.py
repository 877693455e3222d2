"""The first hour on a new machine: seven stages, from the doctor to three steps of the real run, and one report.

    bash first_hour.sh CONFIG [--report FILE] [section.key=value ...]      sets the environment and calls this file

A stage that has passed is not repeated unless the configuration, the number of ranks, the code, the installed packages,
the variables or the files of model and data have changed since. Every stage is a separate process. Nothing here imports
torch.
"""

import argparse
import ctypes
import functools
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
import uuid
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import run_record
from checks.first_hour_stages import ROOT, STAGES, Job, Outcome, Stage, cause
from config import command_line, load_config, to_yaml
from inputs import hf_config
from inputs.files import BAD_INPUT, MOST_RANKS, InputError, read_object, refused, write_atomically
from inputs.layout_rules import check_sides
from knobs import Config
from plan import grid
from plan.machine import Machine

GRACE = 45.0  # seconds to end after a SIGTERM; torchrun gives its ranks 30 of them
WAIT = 60  # seconds for the processes of a killed start to end
WIDTH = 118  # of the report's text
PR_SET_PDEATHSIG = 1  # of Linux's prctl(): the signal that a process gets when its parent dies


# ------------------------------------------------------------------------------------------------ processes


def execute(command: list[str], log: Path, seconds: float, lock: BinaryIO) -> int | None:
    """Exit code of ``command``, which writes to ``log``; None if it took longer than ``seconds`` and was ended.

    The command holds ``lock`` as long as it lives. It gets a SIGTERM when this process dies for any reason.
    """
    mark = uuid.uuid4().hex  # in the environment, which all processes inherit that the command starts
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, pass_fds=(lock.fileno(),),
            env=os.environ | {"FIRST_HOUR_STAGE": mark}, start_new_session=True,
            preexec_fn=functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
            if sys.platform == "linux" else None,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                end(process, mark)


def end(process: subprocess.Popen, mark: str) -> None:
    """End ``process`` by a SIGTERM, and every process with ``mark`` in its environment that is left then."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)
        except OSError:  # it has ended, or belongs to another user
            continue


def hold(folder: Path, report: Path) -> BinaryIO:
    """Make ``folder`` and lock it. InputError if it cannot be written, or another first hour uses it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.parent.mkdir(parents=True, exist_ok=True)
        if report.exists() and "stages" not in read_object(report):
            raise InputError(f"{report}: not a report of an earlier first hour; needed: a new file, or one of these")
        for second in range(WAIT):
            try:
                return run_record.lock_run(folder)
            except BlockingIOError:
                if second == 0:
                    print(f"waiting: processes of an earlier start hold {folder}", flush=True)
                time.sleep(1)
        raise InputError(f"{folder}: another first hour is at work there; end it first")
    except OSError as error:
        raise InputError(f"{error.filename or folder}: {error.strerror}; needed: a place to write") from None


# ------------------------------------------------------------------------------------------------ the stages


def state(job: Job) -> str:
    """sha256 (hex) of everything that the result of a stage depends on."""
    sources = [path for pattern in ("*.py", "*/*.py", "*.sh") for path in ROOT.glob(pattern)]
    code = {str(path.relative_to(ROOT)): run_record.sha256_file(path) for path in sources}
    paths = [Path(path) for path in run_record.data_files(job.cfg).values()]
    if job.cfg.tiny_model is None:
        paths += sorted(Path(job.cfg.model.path).glob("*"))
    files = {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.exists()}
    everything = [to_yaml(job.cfg), job.ranks, job.device, code, files, run_record.environment(job.ranks)]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def run_stage(stage: Stage, job: Job, seconds: float, lock: BinaryIO) -> dict:
    """Run ``stage``; its entry in the report."""
    number = [each.name for each in STAGES].index(stage.name) + 1
    log, command = job.folder / f"{number}-{stage.name}.log", stage.command(job)
    (job.folder / f"{stage.name}.json").unlink(missing_ok=True)
    own = {"steps": "run", "graphs": "graphs"}.get(stage.name, "two_layers")
    shutil.rmtree(job.folder / own, ignore_errors=True)
    begin = time.monotonic()
    if stage.name == "steps" and (reasons := job.verdict().reasons):
        outcome = Outcome(f"preflight.py refuses this run, which was not started: {'; '.join(reasons)}")
    elif (code := execute(command, log, seconds, lock)) is None:
        last = cause(log, 0).removeprefix("exit code 0: ")
        outcome = Outcome(f"ended after {seconds / 60:g} minutes, its limit; in its log: {last}")
    else:
        try:
            outcome = stage.outcome(job, log, code)
        except (OSError, ValueError):  # the command has not written its results
            outcome = Outcome(cause(log, code))
        outcome.wrong = outcome.wrong or (cause(log, code) if code else "")
    return {
        "status": "fail" if outcome.wrong else "pass", "reason": outcome.wrong,
        "seconds": round(time.monotonic() - begin, 1), "lines": outcome.lines, "figures": outcome.figures,
        "command": shlex.join(command), "log": str(log), "when": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
    }  # fmt: skip


def run_all(job: Job, minutes: list[float], lock: BinaryIO) -> list[dict]:
    """The results of all stages, in order. Prints a line when a stage begins and when it ends."""
    now, results = state(job), []
    for number, (stage, limit) in enumerate(zip(STAGES, minutes, strict=True), start=1):
        path, label = job.folder / f"stage-{stage.name}.json", f"{number}/{len(STAGES)} {stage.name}"
        earlier = _passed_before(path, now)
        lacking = [r["name"] for r in results if r["name"] in stage.needs and r["status"] != "pass"]
        reason = stage.unneeded(job) if stage.unneeded else ""
        if lacking:
            reason = f"needs {' and '.join(lacking)}, which {'has' if len(lacking) == 1 else 'have'} not passed"
        if reason:
            result = {"status": "skipped", "reason": reason, "seconds": 0.0, "lines": [], "figures": {}}
        elif earlier:
            result = earlier | {"kept": True}
        else:
            print(f"{label}: at most {limit:g} minutes ...", flush=True)
            result = run_stage(stage, job, limit * 60, lock)
            write_atomically(path, json.dumps(result | {"state": now}, indent=1) + "\n")
        mark = "(kept from an earlier start)" if result.get("kept") else f"in {result['seconds']:.1f} s"
        print(f"{label}: {result['status']} {mark}", flush=True)
        about = {"name": stage.name, "proves": stage.proves, "todo": stage.todo, "needed": not stage.unneeded}
        results.append(about | result)
    return results


def _passed_before(path: Path, now: str) -> dict | None:
    """The stored result of a stage that has passed in this state; None if there is none."""
    try:
        result = read_object(path)
    except InputError:
        return None
    return result if result.pop("state", None) == now and result.get("status") == "pass" else None


# ------------------------------------------------------------------------------------------------ the report


def as_json(job: Job, results: list[dict]) -> dict:
    """The report as one object."""
    git = run_record.git_state()[0]
    report = {
        "passed": all(result["status"] == "pass" for result in results if result["needed"]),
        "config": job.config, "overrides": list(job.overrides), "ranks": job.ranks, "device": job.device,
        "folder": str(job.folder), "commit": git["commit"], "dirty": git["dirty"],
        "when": f"{datetime.now():%Y-%m-%d %H:%M:%S}", "stages": results,
    }  # fmt: skip
    return json.loads(run_record.json_line(report))  # strict: a figure that is not finite becomes null


def indented(text: str, hanging: int = 0) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  " + " " * hanging)


def as_text(report: dict, path: Path) -> str:
    """The report for a reader."""
    commit = f"{report['commit'][:12]}{' with changes' * bool(report['dirty'])}" if report["commit"] else "no git"
    lines = [
        "",
        f"first hour: {report['config']}, {report['ranks']} ranks on {report['device']}, {report['when']}, {commit}",
    ]
    for number, stage in enumerate(report["stages"], start=1):
        again = f"  (kept: passed on {stage['when']}, nothing has changed since)" if stage.get("kept") else ""
        status = stage["status"].replace("fail", "FAIL")
        lines += ["", f"{number} {stage['name']:<10} {status:<8}{stage['seconds']:8.1f} s{again}"]
        lines += indented(stage["proves"])
        lines += [f"    {line}" for line in stage["lines"]]
        if stage["status"] == "skipped":
            lines.append(f"  because it {stage['reason']}")
        elif stage["status"] == "fail":
            lines.append(f"  why: {stage['reason']}")
            lines += indented(f"do:  {stage['todo']}", hanging=5)
            lines += [f"  log: {stage['log']}", f"  by hand: {stage['command']}"]
    failed, skipped = (", ".join(stage["name"] for stage in report["stages"] if stage["status"] == status)
                       for status in ("fail", "skipped"))  # fmt: skip
    verdict = f"failed: {failed}" + f"; skipped: {skipped}" * bool(skipped)
    if report["passed"]:
        verdict = "all passed" + f" that the run needs; failed: {failed}" * bool(failed)
    return "\n".join([
        *lines,
        "",
        f"result: {verdict}. The same as JSON: {path}",
        "The same command repeats only what has not passed or has changed. To start from the beginning: "
        f"rm -r {shlex.quote(report['folder'])}",
    ])  # fmt: skip


# ------------------------------------------------------------------------------------------------ the command


def default_ranks(cfg: Config, device: str) -> int:
    """The number of visible devices of this machine; on a CPU the fewest ranks that the layout divides."""
    if device == "cpu":
        return grid.default_ranks(cfg, device, 16)
    if visible := os.environ.get({"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}[device]):
        return len(visible.split(","))
    return len(Machine(run=cfg).device_nodes({"npu": "davinci", "cuda": "nvidia"}[device])) or 16


def read(args: argparse.Namespace) -> tuple[Job, list[float]]:
    """The job, and the minutes of each stage; InputError for what cannot be used."""
    cfg = load_config(args.config, args.overrides)
    device = grid.device_of(cfg)
    try:
        ranks = int(args.ranks) if args.ranks else default_ranks(cfg, device)
        minutes = [float(part) for part in args.minutes.split()] or [stage.minutes for stage in STAGES]
    except ValueError:
        ranks, minutes = 0, []
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"RANKS, MINUTES: found {args.ranks!r}, {args.minutes!r}; needed: whole numbers of 1 or more")
    if len(minutes) != len(STAGES) or not all(0 < limit < 1e6 for limit in minutes):
        raise InputError(f"MINUTES: found {args.minutes!r}; needed: {len(STAGES)} numbers above 0, one a stage")
    arch = hf_config.planned(cfg)[0]
    try:
        check_sides(cfg, arch, ranks)
    except InputError as error:
        raise InputError(f"{ranks} ranks (RANKS=N for another number): {error}") from None
    job = Job(
        args.config, tuple(args.overrides), cfg, ranks, device, Path(cfg.train.out_dir) / f"first_hour-{cfg.name}"
    )
    load_config(args.config, job.steps())  # InputError now, not in the last stage
    return job, minutes


def explained() -> str:
    """The stages for --help: number, name, limit, and what each one proves."""
    lines = ["stages:"]
    for number, stage in enumerate(STAGES, start=1):
        lines += [f"  {number} {stage.name:<10} at most {stage.minutes} minutes", *indented(stage.proves)]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: all stages passed. 1: a stage failed. 2: the input cannot be used. 130: interrupted."""
    parser = command_line("first_hour.sh", __doc__)
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, explained()
    parser.add_argument("--report", metavar="FILE", help="the report as JSON; default: report.json among the results")
    parser.add_argument("--ranks", default="", help="RANKS of the script: processes on this machine")
    parser.add_argument("--minutes", default="", help="MINUTES of the script: limits of the stages")
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
    except KeyboardInterrupt:  # the current stage has been ended, and is the first one of the next start
        print("interrupted: the same command continues with this stage", file=sys.stderr)
        return 130
    print(as_text(report, path))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, signal.default_int_handler)
    sys.exit(main())
