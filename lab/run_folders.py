"""Runs and sweeps in their own folders: their rows, the record of a finished run, the runs of a sweep."""

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

from inputs.files import InputError, read_file, read_object, read_text, shown
from lab.records import GOLD, MARKS, RIGHT, WRONG, Answers, Completion, Record, Run, of_set, stated, summary, validated
from run_record import checksums, read_lines


def merged(folder: Path) -> list[dict[str, Any]]:
    """One row per step from the .jsonl files of a run's folder, which need not be finished. InputError for other rows.

    A row holds the evaluation after ``step`` steps, if there was one, and the metrics, times and completions of the
    step that follows it. The last evaluation has a row of its own. In eval/greedy_right and eval/sampled_right, + is a
    right answer and - a wrong one, question by question (of eval.sets: in eval/NAME/greedy_right). The first
    evaluation also holds the gold answers.
    """
    rows: dict[int, dict[str, Any]] = {}
    metrics, timing, evaluations = (read_lines(folder / f"{name}.jsonl") for name in ("metrics", "timing", "eval"))
    first = first_step(metrics)
    for lines_of, before in ((metrics, first), (timing, first), (evaluations, 0)):
        for line in lines_of:
            rows.setdefault(step := line["step"] - before, {}).update(line, step=step)
    path = folder / "eval_outcomes.jsonl"
    outcomes = [validated(Answers, line, path) for line in read_lines(path)]
    for (step, name), group in itertools.groupby(outcomes, key=lambda answers: (answers.step, answers.set)):
        row, lines = rows.setdefault(step, {"step": step}), list(group)
        if [line.question for line in lines] != list(range(len(lines))) or len({len(x.sampled) for x in lines}) > 1:
            raise InputError(f"{path}, step {step}: needed: the questions 0, 1, 2 and so on, with equally many answers")
        if step == outcomes[0].step:
            row[of_set(GOLD, name)] = [line.gold for line in lines]
        marks = [RIGHT if score else WRONG for line in lines for score in line.sampled]
        row[of_set(MARKS["greedy"], name)] = "".join(RIGHT if line.greedy else WRONG for line in lines)
        row[of_set(MARKS["sampled"], name)] = "".join(marks)
    for line in read_lines(path := folder / "completions.jsonl"):
        validated(Completion, line, path)
        row = rows.setdefault(line["step"] - first, {"step": line["step"] - first})
        row.setdefault("completions", []).append({key: value for key, value in line.items() if key != "step"})
    return [rows[step] for step in sorted(rows)]


def first_step(metrics: list[dict[str, Any]]) -> int:
    """The number of the first step in the files of a run: 1, or 0 before version 0.2."""
    return metrics[0]["step"] if metrics else 1


def from_run(folder: Path, record_id: str, to_keep: bool = True) -> Run:
    """The finished run in ``folder`` as a record; InputError for a run that may not become one.

    Without ``to_keep`` its source may have had changes that are in no commit.
    """
    try:
        finished, config, rows = _sealed(folder), read_file(folder / "config.yaml"), merged(folder)
        commit, inputs = _origin(folder, to_keep)
        environment = read_object(folder / "environment.json")
        record = stated(config, environment["world_size"]) | {
            "id": record_id,
            "commit": commit,
            "date": _date(folder),
            "command": read_text(folder / "command.txt").strip(),
            "result": finished.get("result", ""),
            "checks_fired": finished.get("checks", {}),
            "first_step": first_step(read_lines(folder / "metrics.jsonl")),
            "resumed": sum(1 for _ in folder.glob("resume-*")),
            "config_hash": read_object(folder / "run.json")["config_hash"],
            "config": config,
            "inputs": inputs,
            "environment": environment,
            "files": finished["sha256"],
        }
        return Run(validated(Record, record | summary(rows, config["train"]["steps"]), folder), rows)
    except InputError as error:
        raise error if str(folder) in str(error) else InputError(f"{folder / str(error)}") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # The checksums are right, and the content is not.
        raise InputError(
            f"{folder}: no record: a file of it holds something else than a run writes: {error!r}"
        ) from None


def _sealed(folder: Path) -> dict[str, Any]:
    """finished.json; InputError that names a file whose checksum is another one."""
    if not (folder / "finished.json").exists():
        raise InputError(f"{folder}: no finished.json: the run has not ended; needed: a finished run")
    finished, found = read_object(folder / "finished.json", ("sha256",)), checksums(folder)
    if changed := sorted({name for name, _ in found.items() ^ finished["sha256"].items()}):
        raise InputError(f"{folder / changed[0]}: missing, altered or added: not the sha256 in finished.json")
    return finished


def _origin(folder: Path, to_keep: bool) -> tuple[str, dict[str, Any]]:
    """The commit and inputs.json. InputError unless they were the same at every start, and ``to_keep`` a clean commit.

    Otherwise a checksum of the changed source stands for the commit, so that runs of other sources differ in it.
    """
    starts = [folder, *sorted(folder.glob("resume-*"))]
    git, inputs = ([read_object(start / name) for start in starts] for name in ("git.json", "inputs.json"))
    commit, clean = git[0].get("commit"), git[0].get("dirty") is False
    if not (commit and clean) and to_keep:
        raise InputError(f"{folder / 'git.json'}: found {shown(git[0])}; needed: a run of a commit, git status clean")
    for start, *origin in zip(starts, git, inputs, strict=True):
        if origin != [git[0], inputs[0]]:
            raise InputError(f"{start}: differs from the first start; needed: one commit, model and data")
    source = f"{commit} {read_text(folder / 'git.patch')}"
    return commit if commit and clean else hashlib.sha1(source.encode()).hexdigest(), inputs[0]


def _date(folder: Path) -> str:
    """The day in the name of a run's folder, NAME-YYYYMMDD-HHMMSS."""
    found = re.search(r"-(\d{4})(\d\d)(\d\d)-\d{6}(-\d+)?$", folder.resolve().name)
    if not found:
        raise InputError(f"{folder}: found another name than the run's own; needed: NAME-YYYYMMDD-HHMMSS")
    return "-".join(found.groups()[:3])


def sweep_jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """Job -> its state, attempts, run and result, from the file that sweep.py writes; InputError for another file."""
    jobs, wanted = read_object(folder / "sweep.json", ("jobs",))["jobs"], ("state", "attempts", "run", "result")
    for job in jobs.values() if isinstance(jobs, dict) else [None]:
        if not isinstance(job, dict) or not set(wanted) <= job.keys() or not isinstance(job["run"], str):
            raise InputError(f"{folder / 'sweep.json'}: found the job {shown(job)}; needed: what sweep.py writes")
    return {name: {key: job[key] for key in wanted} for name, job in jobs.items()}


def of_sweep(folder: Path) -> dict[str, list[Run]]:
    """The finished runs of a sweep's folder by variant, in the order of its file; no record is made of them."""
    found: dict[str, list[Run]] = {}
    for name, job in sweep_jobs(folder).items():
        if job["state"] == "finished":
            run = from_run(folder.parent / Path(job["run"]).name, name, to_keep=False)
            found.setdefault(run.record.group, []).append(run)
    return {name: sorted(runs, key=lambda run: run.record.seed) for name, runs in found.items()}
