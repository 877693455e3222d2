"""Writes the folder of a run, with everything that is needed to check, repeat and resume the run. Only rank 0 writes.

out/<name>-<YYYYmmdd-HHMMSS>/
    config.yaml  environment.json  inputs.json  git.json  git.patch  command.txt  run.json    how it was started
    resume-N/                                                                    the same for each resumed start
    metrics.jsonl  moe.jsonl  eval.jsonl  eval_outcomes.jsonl  completions/      the results, without times
    timing.jsonl  log.txt  curves.png  finished.json  run.lock  checkpoints/
    tensorboard/  wandb/  swanlab/  profile/                                for train.trackers and train.profile_steps
"""

import contextlib
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from facts.exits import InputError
from inputs.files import disk_errors, fsync_path, write_atomically
from knobs import Config
from runlog import completions
from runlog.run_record import checksums, json_line, lock_run, read_lines, whole_lines, write_records
from runlog.trackers import Trackers

PROGRESS = (  # label, metric, and number of decimals (None means two significant digits)
    ("reward", "reward/mean", 3),
    ("kl", "actor/kl_loss", None),
    ("teacher", "actor/teacher_kl", None),
    ("clip", "actor/clip_frac", None),
    ("grad", "actor/grad_norm", None),
    ("gap", "rollout/logp_gap_mean", None),
    ("len", "response_length/mean", 0),
)
LEGEND = (
    f"the line of a step: {', '.join(f'{label} = {key}' for label, key, _ in PROGRESS)}, and seconds (docs/metrics.md)"
)
SHORT_PHASES = {"generate": "gen", "reference": "ref"}


# ---------------------------------------------------------------- the run's folder


def _new_folder(out_dir: Path, name: str, number: int = 1) -> Path:
    """Create a new folder for a run and return it. Runs that start in the same second get different folders."""
    folder = out_dir / f"{name}-{datetime.now():%Y%m%d-%H%M%S}{f'-{number}' if number > 1 else ''}"
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return _new_folder(out_dir, name, number + 1)
    return folder


# ---------------------------------------------------------------- the log


def _progress_line(step: int, steps: int, metrics: dict[str, float], timing: Mapping[str, Any]) -> str:
    """Return the progress line of a step.

    An example is `step 12/200  reward 0.613  kl 0.0021 ...  31.2 s = gen 18.0 + sync 2.1 + ref 6.0 + update 5.1`.
    """

    def number(value: float, decimals: int | None) -> str:
        text = f"{value:.2g}" if decimals is None else f"{value:.{decimals}f}"
        return re.sub(r"e([+-])0*(\d)", lambda found: "e" + found[1].strip("+") + found[2], text)

    parts = [f"step {step}/{steps}"]
    parts += [f"{label} {number(float(metrics[key]), places)}" for label, key, places in PROGRESS if key in metrics]
    phases = {re.sub(r"^timing/|_s$", "", key): value for key, value in timing.items() if key.startswith("timing/")}
    total = phases.pop("step", sum(phases.values()))
    if total - sum(phases.values()) >= 0.05:
        phases["other"] = total - sum(phases.values())
    if phases:
        shares = " + ".join(f"{SHORT_PHASES.get(name, name)} {seconds:.1f}" for name, seconds in phases.items())
        parts.append(f"{total:.1f} s = {shares}")
    return "  ".join(parts)


class RunLog:
    """The writer of one run's folder. Ranks other than 0 write nothing.

    A method that logs lines writes them to their file before it returns. Before `open` there is no folder, and the log
    only prints.
    """

    def __init__(self, cfg: Config, rank: int) -> None:
        self.cfg, self.rank = cfg, rank
        self.run_dir: Path | None = None
        self.lock: BinaryIO | None = None
        self.bar: tqdm | None = None
        self.trackers: Trackers | None = None
        self.said = self.began = time.monotonic()  # times of the last line, and of the first step of this process
        self.before = self.done = 0  # numbers of steps: before this process, and in total

    def open(
        self, world_size: int, resume: Path | None = None, inputs: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        """Create the folder of a new run, or use the folder ``resume`` of an earlier one.

        After a resume, call ``rewind`` before you log anything. ``inputs`` are the checksums from run_record.inputs, if
        they are already known. Raises InputError if the folder cannot be written, or if another process is writing it.
        """
        if self.rank != 0:
            self.run_dir = resume
            return
        out_dir = Path(self.cfg.train.out_dir)
        with disk_errors(out_dir):
            run_dir = _new_folder(out_dir, self.cfg.name) if resume is None else resume
            problem = ""
            try:
                self.lock = lock_run(run_dir)
            except BlockingIOError:
                raise InputError(
                    f"{run_dir}: another process is writing this run; end it, or start a new run"
                ) from None
            except OSError as error:
                problem = error.strerror
            self.run_dir = run_dir
            if problem:
                self.say(f"{run_dir}/run.lock: {problem}; make sure yourself that no other process writes this run")
            start = run_dir / f"resume-{1 + len(list(run_dir.glob('resume-*')))}" if resume else run_dir
            start.mkdir(exist_ok=start == run_dir)
            write_records(start, self.cfg, world_size, inputs)
            if resume is None:  # last, so that a run with this file has all the others
                write_atomically(run_dir / "run.json", json.dumps({"name": self.cfg.name}) + "\n")

    def open_trackers(self, steps_done: int) -> None:
        """Open the trackers of train.trackers, which will get the steps after ``steps_done``."""
        if self.rank == 0:
            self.trackers = Trackers(self.cfg.train.trackers, self.run_dir, steps_done, self.say)

    def _append(self, name: str, text: str) -> None:
        if self.rank == 0:
            with disk_errors(self.run_dir / name), open(self.run_dir / name, "ab") as file:
                file.write(text.encode(errors="backslashreplace"))

    def _keep(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite a .jsonl file with only the lines that are ``wanted``, and without incomplete lines at its end.

        The lines that are kept stay the same, byte for byte.
        """
        path = self.run_dir / name
        if path.exists():
            with disk_errors(path):
                write_atomically(path, b"".join(line for line, row in whole_lines(path) if wanted(row)))

    def rewind(self, step: int) -> None:
        """Remove everything that was logged after ``step`` finished steps, because the resumed run will log it again.

        Raises InputError if metrics.jsonl lacks one of the earlier steps, or if an evaluation has no accuracies.
        """
        if self.rank != 0:
            return
        with disk_errors(self.run_dir):
            (self.run_dir / "finished.json").unlink(missing_ok=True)
            completions.rewind(self.run_dir, step)
        for name in ("metrics.jsonl", "timing.jsonl", "moe.jsonl", "eval.jsonl"):
            self._keep(name, lambda row: row["step"] <= step)
        kept = self.evaluations()
        if any(type(row.get("eval/greedy_accuracy")) is not float for row in kept):
            raise InputError(f"{self.run_dir / 'eval.jsonl'}: an evaluation has no accuracies; start a new run")
        # A summary is written after its outcomes, so outcomes without a summary are incomplete.
        evaluated = {row["step"] for row in kept}
        self._keep("eval_outcomes.jsonl", lambda row: row["step"] in evaluated)
        found = [row["step"] for row in read_lines(self.run_dir / "metrics.jsonl")]
        if found != list(range(1, step + 1)):
            raise InputError(
                f"{self.run_dir / 'metrics.jsonl'}: {len(found)} whole lines up to step {step}, not one for "
                "each of the steps 1, 2 and so on; the file was cut or edited, so start a new run"
            )
        self.say(f"resumed {self.run_dir.name} after {step} of {self.cfg.train.steps} steps")

    def log_step(self, step: int, metrics: dict[str, float], timing: Mapping[str, float | str]) -> None:
        """Write a line of metrics without times, a line of timing, and the progress line. ``step`` counts from 1."""
        if self.rank != 0:
            return
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        used = {**timing, "perf/peak_rss_gib": round(peak / 2**30, 3)}
        self._append("metrics.jsonl", json_line({"step": step, **metrics}))
        self._append("timing.jsonl", json_line({"step": step, **used}))
        self._track(step, {**metrics, **used})
        self.done = step
        if self.bar is None:  # only a terminal needs a progress bar
            self.before, self.began = step - 1, time.monotonic() - float(timing.get("timing/step_s", 0))
            self.bar = tqdm(total=self.cfg.train.steps, initial=step - 1, unit="step", disable=not sys.stderr.isatty())
        self.say(_progress_line(step, self.cfg.train.steps, metrics, timing) + self.left())
        self.bar.update(step - self.bar.n)

    def left(self) -> str:
        """Return a string such as `  3 h 20 min left`, or "" if less than a minute is left.

        The estimate is based on the steps of this process so far.
        """
        done = self.done - self.before
        seconds = (time.monotonic() - self.began) / done * (self.cfg.train.steps - self.done) if done else 0
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"  {f'{hours} h ' * (hours > 0)}{minutes} min left" if hours or minutes else ""

    def log_eval(self, step: int, summary: dict[str, Any], outcomes: list[dict[str, Any]]) -> None:
        """Write the summary of the evaluation after ``step`` finished steps, and a line for each question."""
        self._append("eval_outcomes.jsonl", "".join(json_line({"step": step, **outcome}) for outcome in outcomes))
        self._append("eval.jsonl", json_line({"step": step, **summary}))
        self._track(step, summary)

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the summaries of all evaluations so far, including those before a resume.

        All ranks except rank 0 return [].
        """
        return read_lines(self.run_dir / "eval.jsonl") if self.rank == 0 else []

    def log_rows(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Append ``rows`` to the .jsonl file ``name``, and add the number of the step to each row."""
        self._append(name, "".join(json_line({"step": step, **row}) for row in rows))

    def log_completions(self, kind: str, step: int, rows: list[completions.Row]) -> None:
        """Write the completions of a step (``kind`` is step) or of the evaluation after it (``kind`` is eval).

        The trackers get a few completions of a step.
        """
        if self.rank != 0 or not rows:
            return
        with disk_errors(self.run_dir / "completions"):
            completions.write(self.run_dir, kind, step, rows)
        if kind == "step" and self.trackers:
            self._track(step, {"completions": completions.telling(rows)})

    def _track(self, step: int, values: dict[str, Any]) -> None:
        if self.trackers:
            self.trackers.log(step, values)

    def reached(self) -> str:
        """Return a message that says how far the run is and how to continue it, or "" if the run has no folder yet.

        A process prints this message when a signal ends it.
        """
        if self.run_dir is None:
            return ""
        saved = max(self.run_dir.glob("checkpoints/step-*"), default=None)
        how = f"{f' with train.resume={self.run_dir}' * (self.cfg.train.resume == 'never')} continues from {saved}"
        return (
            f"after step {len(read_lines(self.run_dir / 'metrics.jsonl'))} of {self.cfg.train.steps}; the same command"
            f"{how if saved else ' starts from the beginning, because there is no checkpoint yet'}"
        )

    def say(self, text: str) -> None:
        """Print a line above the progress bar, and write it with the time to log.txt. Only rank 0 does this."""
        self.said = time.monotonic()
        if self.rank == 0:
            tqdm.write(text)
            sys.stdout.flush()
            self._write_to_log(text)

    def note(self, text: str) -> None:
        """Write ``text``, the reason why the run ends, to log.txt. If this write fails, no error is raised."""
        with contextlib.suppress(InputError):
            self._write_to_log(text)

    def _write_to_log(self, text: str) -> None:
        if self.run_dir:
            self._append("log.txt", f"{datetime.now():%H:%M:%S} {text}\n")

    def finish(self, result_line: str, checks: dict[str, str]) -> None:
        """Write finished.json: the result, the messages of the ``checks`` that warned, and the records' checksums."""
        if self.rank != 0:
            return
        with disk_errors(self.run_dir):
            hashes = checksums(self.run_dir)
            done = {"result": result_line, "checks": checks, "sha256": hashes}
            for name in hashes:
                fsync_path(self.run_dir / name)
            write_atomically(self.run_dir / "finished.json", json.dumps(done, indent=1) + "\n")
        self.close()
        self.say(result_line)

    def close(self) -> None:
        """Close the progress bar and the trackers, and unlock the folder for other processes."""
        for part in (self.bar, self.trackers, self.lock):
            if part is not None:
                part.close()
