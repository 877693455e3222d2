"""A run's folder: what is needed to believe, repeat and resume the run.  Rank 0 writes; elsewhere nothing happens.

out/<name>-<YYYYmmdd-HHMMSS>/
    config.yaml  environment.json  inputs.json  git.json  git.patch  command.txt  run.json    its start
    resume-N/                                                                    the same of each resumed start
    metrics.jsonl  eval.jsonl  eval_outcomes.jsonl  completions.jsonl            what it did: no times, so runs compare
    timing.jsonl  log.txt  curves.png  finished.json  run.lock  checkpoints/
"""

from __future__ import annotations

import fcntl
import json
import numbers
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from config import config_hash
from input_files import InputError
from knobs import Config
from run_record import (
    checks_fired,
    checksums,
    fsync_path,
    json_line,
    read_lines,
    whole_lines,
    write_atomically,
    write_records,
)

PROGRESS = (  # label, metric, decimals (None: two significant digits)
    ("reward", "reward/mean", 3),
    ("kl", "actor/kl_loss", None),
    ("clip", "actor/clip_frac", None),
    ("grad", "actor/grad_norm", None),
    ("gap", "rollout/logp_gap_mean", None),
    ("len", "response_length/mean", 0),
)
SHORT_PHASES = {"generate": "gen", "reference": "ref"}
PANELS = (  # title, metric, log scale
    ("Reward", "reward/mean", False),
    ("KL to the reference (nats a token)", "actor/kl_loss", False),
    ("Entropy (nats a token)", "actor/entropy", False),
    ("Log-prob gap, sampler to trainer", "rollout/logp_gap_mean", True),
    ("Response length (tokens)", "response_length/mean", False),
    ("Gradient norm", "actor/grad_norm", False),
)


# ---------------------------------------------------------------- the run's folder and its lock


@contextmanager
def _disk_errors(where: str | Path) -> Iterator[None]:
    """A full disk or a missing permission is the user's to mend: one line, not a traceback."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{error.filename or where}: {error.strerror}; needed: a folder to write, with room") from None


def lock_run(run_dir: Path) -> BinaryIO:
    """The locked run.lock; closing it, or the end of the process by any means, frees it.

    Raises BlockingIOError when a live process holds it, another OSError where the file system has no locks; InputError
    where a pipe has the name of a file of the run, which would wait for a reader.
    """
    if pipes := [path for path in run_dir.iterdir() if path.is_fifo()]:
        raise InputError(f"{pipes[0]}: found a pipe; needed: a file")
    handle = open(run_dir / "run.lock", "ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise
    return handle


def _new_folder(out_dir: Path, name: str) -> Path:
    """A folder that this process has made: two runs started in the same second get two."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    out_dir.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = out_dir / (f"{name}-{stamp}" if number == 1 else f"{name}-{stamp}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def open_run(cfg: Config, world_size: int, rank: int, resume: Path | None = None) -> RunLog:
    """The log of a new run, or of the run in ``resume`` (call ``rewind`` before logging to it).

    Raises InputError when the folder cannot be written or a live process holds it, or tensorboard is asked for and
    absent (on every rank alike).
    """
    if cfg.train.tensorboard:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise InputError(f"train.tensorboard: {error}; needed: pip install tensorboard, or false") from None
    if rank != 0:
        return RunLog(cfg, resume, rank, None)
    with _disk_errors(cfg.train.out_dir):
        run_dir = _new_folder(Path(cfg.train.out_dir), cfg.name) if resume is None else Path(resume)
        lock, warning = None, ""
        try:
            lock = lock_run(run_dir)
        except BlockingIOError:
            raise InputError(f"{run_dir}: a live process writes this run; end it, or start a new run") from None
        except OSError as error:
            warning = f"{run_dir}/run.lock: {error.strerror}: make sure yourself that no two processes write this run"
        if resume is None:
            write_records(run_dir, cfg, world_size)
            identity = {"name": cfg.name, "config_hash": config_hash(cfg)}
            write_atomically(run_dir / "run.json", json.dumps(identity) + "\n")
        else:
            number = 1 + sum(1 for _ in run_dir.glob("resume-*"))
            (run_dir / f"resume-{number}").mkdir()
            write_records(run_dir / f"resume-{number}", cfg, world_size)
    log = RunLog(cfg, run_dir, rank, lock)
    if warning:
        log.say(warning)
    return log


# ---------------------------------------------------------------- the log


def device_memory(peak: tuple[float, str] | tuple[()]) -> dict[str, float | str]:
    """A step's fullest phase on the fullest rank, for timing.jsonl; nothing where the device does not count."""
    return {"perf/peak_device_gib": round(peak[0], 3), "perf/peak_device_phase": peak[1]} if peak else {}


def _progress_line(step: int, steps: int, metrics: dict[str, float], timing: dict[str, float]) -> str:
    """`step 12/200  reward 0.613  kl 0.0021 ...  31.2 s = gen 18.0 + sync 2.1 + ref 6.0 + update 5.1`"""

    def number(value: float, decimals: int | None) -> str:
        text = f"{value:.2g}" if decimals is None else f"{value:.{decimals}f}"
        return re.sub(r"e([+-])0*(\d)", lambda found: "e" + found[1].strip("+") + found[2], text)

    parts = [f"step {step + 1}/{steps}"]
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
    """Writes one run's folder; a line is in the file before the call returns.  ``run_dir`` is rank 0's."""

    def __init__(self, cfg: Config, run_dir: Path | None, rank: int, lock: BinaryIO | None) -> None:
        self.cfg, self.run_dir, self.rank, self.lock = cfg, run_dir, rank, lock
        self.bar: tqdm | None = None
        self.board: Any = None  # tensorboard's writer

    def _append(self, name: str, text: str) -> None:
        with _disk_errors(self.run_dir / name), open(self.run_dir / name, "a") as file:
            file.write(text)

    def _keep(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite one .jsonl file with the whole lines that are ``wanted``, byte for byte."""
        path = self.run_dir / name
        if path.exists():
            with _disk_errors(path):
                write_atomically(path, b"".join(line for line, row in whole_lines(path) if wanted(row)))

    def rewind(self, step: int) -> None:
        """Forget everything after ``step`` finished steps: what resuming from that checkpoint will log again.

        An evaluation's step is the number of steps done before it, so one at ``step`` is kept.  Raises InputError when
        metrics.jsonl lacks one of the steps before.
        """
        if self.rank != 0:
            return
        with _disk_errors(self.run_dir):
            (self.run_dir / "finished.json").unlink(missing_ok=True)
        for name in ("metrics.jsonl", "timing.jsonl", "completions.jsonl"):
            self._keep(name, lambda row: row["step"] < step)
        self._keep("eval.jsonl", lambda row: row["step"] <= step)
        # A summary is written after its outcomes: outcomes without one were cut short.
        kept = self.evaluations()
        if any(type(row.get("eval/greedy_accuracy")) is not float for row in kept):
            raise InputError(f"{self.run_dir / 'eval.jsonl'}: an evaluation without accuracies; start a new run")
        evaluated = {row["step"] for row in kept}
        self._keep("eval_outcomes.jsonl", lambda row: row["step"] in evaluated)
        found = [row["step"] for row in read_lines(self.run_dir / "metrics.jsonl")]
        if found != list(range(step)):
            raise InputError(
                f"{self.run_dir / 'metrics.jsonl'}: {len(found)} whole lines before step {step}, needed: one a step; "
                "the file was cut or edited: start a new run"
            )
        self.say(f"resumed {self.run_dir.name} after {step} of {self.cfg.train.steps} steps")

    def log_step(self, step: int, metrics: dict[str, float], timing: dict[str, float]) -> None:
        """One line of metrics (no times), one of timing, one on the screen.  ``step`` counts from 0."""
        if self.rank != 0:
            return
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        self._append("metrics.jsonl", json_line({"step": step, **metrics}))
        self._append("timing.jsonl", json_line({"step": step, **timing, "perf/peak_rss_gib": round(peak / 2**30, 3)}))
        self._scalars(step, {**metrics, **timing})
        self.say(_progress_line(step, self.cfg.train.steps, metrics, timing))
        if self.bar is None:  # on a terminal only: in a file a bar is noise
            self.bar = tqdm(total=self.cfg.train.steps, initial=step, unit="step", disable=not sys.stderr.isatty())
        self.bar.update(step + 1 - self.bar.n)

    def log_eval(self, step: int, summary: dict[str, Any], outcomes: list[dict[str, Any]]) -> None:
        """An evaluation after ``step`` finished steps: its summary, and one line a question; a repeat replaces."""
        if self.rank != 0:
            return
        if any(row["step"] == step for row in self.evaluations()):
            for name in ("eval.jsonl", "eval_outcomes.jsonl"):
                self._keep(name, lambda row: row["step"] != step)
        self._append("eval_outcomes.jsonl", "".join(json_line({"step": step, **outcome}) for outcome in outcomes))
        self._append("eval.jsonl", json_line({"step": step, **summary}))
        self._scalars(step, summary)

    def evaluations(self) -> list[dict[str, Any]]:
        """The summaries logged so far, also before a resume; [] on other ranks."""
        return read_lines(self.run_dir / "eval.jsonl") if self.rank == 0 else []

    def log_completions(self, step: int, rows: list[dict[str, Any]]) -> None:
        """One line a completion that was sampled in ``step``."""
        if self.rank == 0:
            self._append("completions.jsonl", "".join(json_line({"step": step, **row}) for row in rows))

    def _scalars(self, step: int, values: dict[str, Any]) -> None:
        if not self.cfg.train.tensorboard:
            return
        if self.board is None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=step)
        for key, value in values.items():
            if isinstance(value, numbers.Real):
                self.board.add_scalar(key, value, step)
        self.board.flush()

    def say(self, text: str) -> None:
        """Print beside the progress bar, and keep the line in log.txt with the time."""
        if self.rank == 0:
            tqdm.write(text)
            sys.stdout.flush()
            self._append("log.txt", f"{datetime.now():%H:%M:%S} {text}\n")

    def finish(self, result_line: str) -> None:
        """Mark the run as done: the result, the checks that warned, the hashes of all its records; then the figure."""
        if self.rank != 0:
            return
        with _disk_errors(self.run_dir):
            hashes = checksums(self.run_dir)
            done = {"result": result_line, "checks": checks_fired(self.run_dir), "sha256": hashes}
            for name in hashes:
                fsync_path(self.run_dir / name)
            write_atomically(self.run_dir / "finished.json", json.dumps(done, indent=1) + "\n")
            try:
                draw_curves(self.run_dir)
            except ModuleNotFoundError as error:
                self.say(f"curves.png not drawn: {error}")
        self.close()
        self.say(result_line)

    def close(self) -> None:
        """End the progress bar and free the folder for another process."""
        for part in (self.bar, self.board, self.lock):
            if part is not None:
                part.close()


# ---------------------------------------------------------------- the figure


def draw_curves(run_dir: Path) -> None:
    """curves.png from metrics.jsonl and eval.jsonl: each step pale, its running mean dark, evaluations as points."""
    import matplotlib.figure
    import matplotlib.ticker
    import numpy

    rows, evaluations = read_lines(run_dir / "metrics.jsonl"), read_lines(run_dir / "eval.jsonl")
    steps = numpy.array([row["step"] for row in rows], dtype=float)  # = steps done when the rollout was sampled
    figure = matplotlib.figure.Figure(figsize=(13, 7), layout="constrained")
    figure.suptitle(run_dir.name, fontsize=13, x=0.01, ha="left")
    for place, (title, key, logarithmic) in enumerate(PANELS):
        axes = figure.add_subplot(2, 3, place + 1)
        values = numpy.array([row.get(key) for row in rows], dtype=float)  # None -> nan: a gap in the line
        lost = [row["step"] for row in rows if key in row.get("nonfinite", ())]
        for step in lost:
            axes.axvline(step, color="red", lw=1, ls=":")
        title += " (red: not finite)" * bool(lost)
        if logarithmic:
            values = numpy.where(values > 0, values, numpy.nan)
        known = numpy.isfinite(values)
        if known.any():
            width = max(1, len(steps) // 20)
            axes.plot(steps, values, color="#0072b2", alpha=0.35 if width > 1 else 1.0, lw=1.2)
            if width > 1:
                kernel = numpy.ones(width)
                count = numpy.convolve(known, kernel, "same")
                mean = numpy.convolve(numpy.where(known, values, 0.0), kernel, "same") / numpy.maximum(count, 1)
                mean = numpy.where(count > 0, mean, numpy.nan)
                axes.plot(steps, mean, color="#0072b2", lw=2, label="reward, running mean")
            if logarithmic:  # whole decades: noise within one should look like noise
                axes.set_yscale("log")
                axes.set_ylim(10 ** numpy.floor(numpy.log10(numpy.nanmin(values))), None)
                axes.set_ylim(None, 10 ** numpy.ceil(numpy.log10(numpy.nanmax(values) * 1.001)))
        if key == "reward/mean":
            marks = zip(("#d55e00", "#009e73", "#cc79a7", "#000000"), "osD^", strict=True)
            names = sorted({name for row in evaluations for name in row if name.endswith("accuracy")})
            for (color, marker), name in zip(marks, names, strict=False):
                label = name.removeprefix("eval/").replace("_", " ")
                points = numpy.array([(row["step"], row.get(name)) for row in evaluations], dtype=float)  # None -> nan
                axes.plot(*points.T, color=color, marker=marker, ls="--", lw=1, label=label)
            axes.set_title("Reward and held-out accuracy" if names else title, fontsize=11, loc="left")
            axes.set_ylim(-0.02, 1.02)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(fontsize=8, frameon=False, loc="lower right")
        else:
            axes.set_title(title, fontsize=11, loc="left")
            if not known.any():
                axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="gray")
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if place >= 3:
            axes.set_xlabel("steps done")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_atomically(run_dir / "curves.png", picture.getvalue())
