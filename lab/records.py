"""Records of finished runs: results/<name>.parquet, one file per sweep, written once and never changed.

A run has one row per step, with the evaluation after ``step`` steps and the metrics of the step that follows it. The
first row also describes how the run was made, in the columns record/*. Lists and mappings are stored as JSON strings.
report.py --check finds changed and removed records with git. This file needs no torch.
"""

import functools
import itertools
import json
import re
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict

from facts.exits import InputError
from inputs.config import MAY_CHANGE, changed_keys
from inputs.files import (
    first_names,
    one_line,
    read_file,
    read_object,
    read_text,
    shown,
    whole_folder,
    write_atomically,
)
from runlog import completions
from runlog.run_record import checksums, of_last_start, read_lines, variant_name

if TYPE_CHECKING:
    import pandas

Given = ParamSpec("Given")
Result = TypeVar("Result")
ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,149}"
PRIVATE = re.compile(r"(?<![\w.~}])/(?:[h]ome|[U]sers|[r]oot)/\w")
# Settings that differ between the seeds of a variant. BOOKKEEPING has settings that do not change the result.
SEEDS = {"name", "train.seed", "tiny_model.seed", "data.seed"}
BOOKKEEPING = {key for key in MAY_CHANGE if key.split(".")[0] in ("train", "checks", "device")}
STAYS_BEHIND = ("sync/", "timing/")  # diagnostics of the machine that stay in the run's folder, except timing/step_s
WEIGHTS = "weights.parquet"  # by sha256, the files of the tiny models from which some runs started


class Part(BaseModel):
    """A part of a file that people write. Missing fields, unknown fields and values of the wrong type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def of_others(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Wrap ``function``, which reads files that others may have written, so that a damaged file gives a one-line error.

    If a value is missing or has the wrong type, the wrapped function raises InputError. The message names the arguments
    and the function of this code that failed.
    """

    @functools.wraps(function)
    def guarded(*arguments: Given.args, **named: Given.kwargs) -> Result:
        try:
            return function(*arguments, **named)
        except InputError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            *_, place = traceback.extract_tb(error.__traceback__)
            given = ", ".join(str(one) for one in arguments if isinstance(one, str | Path | list))
            raise InputError(
                f"{given}: damaged, or not written by this program ({type(error).__name__} in {place.name}: "
                f"{one_line(error)}); give the files of a run or record as they were written"
            ) from error

    return guarded


def planted_fault(command: str) -> str:
    """Return the faults that a command plants on purpose (checks/planted_fault.py), or "" for any other command."""
    found = re.search(r"\bplanted_fault\.py (\S+)", command)
    return found[1] if found else ""


class Record(NamedTuple):
    """The settings and origin of a run."""

    id: str
    seed: int
    commit: str
    command: str
    result: str  # the last line that it printed
    checks: dict[str, str]  # maps a check to its first warning
    resumed: int
    config: dict[str, Any]
    inputs: dict[str, dict[str, str]]  # for model and data, maps a file to its sha256
    environment: dict[str, Any]
    files: dict[str, str]  # maps a file of the run's folder to its sha256

    @property
    def variant(self) -> str:
        """The id without the seed at its end."""
        return variant_name(self.id)

    @property
    def fault(self) -> str:
        """The fault that was planted into the run on purpose; "" for any other run."""
        return planted_fault(self.command)


class Run(NamedTuple):
    """A finished run: its record, and a row per step."""

    record: Record
    rows: list[dict[str, Any]]


# ------------------------------------------------------------------------------------------------- the folder of a run


@of_others
def read_run(folder: Path, to_keep: bool = True) -> Run:
    """Read the finished run in ``folder``. Raises InputError if it has not ended or was altered afterwards.

    All starts of the run must have the same commit, model and data. With ``to_keep``, the git status must also
    have been clean, and the record must contain no private path. Otherwise this function also raises InputError.
    """
    if not (folder / "finished.json").exists():
        raise InputError(f"{folder}: no finished.json, so the run has not ended; give a finished run")
    finished, found = read_object(folder / "finished.json", ("sha256",)), checksums(folder)
    if changed := sorted({file for file, _ in found.items() ^ finished["sha256"].items()}):
        raise InputError(
            f"{folder / changed[0]}: missing, altered or added; its sha256 is not the one in finished.json"
        )
    starts = [folder, *sorted(folder.glob("resume-*"))]
    git, inputs = ([read_object(start / file) for start in starts] for file in ("git.json", "inputs.json"))
    for start, *origin in zip(starts, git, inputs, strict=True):
        if origin != [git[0], inputs[0]]:
            raise InputError(f"{start}: differs from the first start; add runs of one commit, model and data")
    if to_keep and git[0].get("dirty") is not False:
        raise InputError(f"{folder / 'git.json'}: found {shown(git[0])}; add a run of a commit with a clean git status")
    config = read_file(of_last_start(folder, "config.yaml"))  # a resume may ask for more steps
    record = Record(
        id=config["name"],
        seed=config["train"]["seed"],
        commit=str(git[0].get("commit")),
        command=read_text(of_last_start(folder, "command.txt")).strip(),
        result=finished.get("result", ""),
        checks=finished.get("checks", {}),
        resumed=len(starts) - 1,
        config=config,
        inputs=inputs[0],
        environment=read_object(folder / "environment.json", ("world_size",)),
        files=finished["sha256"],
    )
    if to_keep and (private := PRIVATE.search(json.dumps(record))):
        raise InputError(f"{folder}: {private[0]} is a private path; use paths inside the checkout")
    return Run(record, _rows(folder))


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Return one row per step and one for the last evaluation.

    The rows of the first and the last step with logged completions also have a few of these completions.
    """
    rows: dict[int, dict[str, Any]] = {}
    for file, before in (("metrics", 1), ("timing", 1), ("eval", 0)):
        for line in read_lines(folder / f"{file}.jsonl"):
            kept = {key: x for key, x in line.items() if key == "timing/step_s" or not key.startswith(STAYS_BEHIND)}
            rows.setdefault(step := line["step"] - before, {}).update(kept, step=step)
    kept = completions.files(folder, "step")
    for step in (min(kept, default=0), max(kept, default=0)):
        if step - 1 in rows:
            rows[step - 1]["completions"] = completions.telling(completions.read(kept[step]))
    return [rows[step] for step in sorted(rows)]


# -------------------------------------------------------------------------------------------------------- the results


def files(results: Path) -> list[Path]:
    """Return the files of records in ``results``."""
    return [path for path in sorted(results.glob("[!.]*.parquet")) if path.name != WEIGHTS]


@of_others
def load(results: Path) -> "pandas.DataFrame":
    """Return all rows of all records, with the columns `file`, `variant` and `seed`."""
    import pandas

    tables = [read_table(path).assign(file=path.name) for path in files(results)]
    if not tables:
        raise InputError(f"{results}: there is no record; add runs with report.py add")
    steps = pandas.concat(tables, ignore_index=True)
    seeds = steps.set_index("id")["record/seed"].dropna().astype(int)
    if not seeds.index.is_unique:
        raise InputError(f"{results}: {seeds.index[seeds.index.duplicated()][0]}: two records have this id")
    return steps.assign(variant=steps["id"].map(variant_name), seed=steps["id"].map(seeds))


def frame(runs: list[Run]) -> "pandas.DataFrame":
    """Return the rows of ``runs`` as a table, with the columns of `load` that a comparison reads."""
    import pandas

    about = [{"id": run.record.id, "variant": run.record.variant, "seed": run.record.seed} for run in runs]
    return pandas.DataFrame([one | row for one, run in zip(about, runs, strict=True) for row in run.rows])


def of_sweep(folder: Path) -> list[Run]:
    """Return the finished runs of the sweep in ``folder``, in the order of its sweep.json.

    The runs need not meet the conditions for a record (``to_keep`` of read_run).
    """
    path = folder / "sweep.json"
    jobs = read_object(path, ("jobs",))["jobs"].values()
    done = [Path(job["run"]).name for job in jobs if job["state"] == "finished"]
    if not done:
        raise InputError(f"{path}: no job is finished; run the sweep first")
    return [read_run(folder.parent / run, to_keep=False) for run in done]


def read_table(path: Path) -> "pandas.DataFrame":
    """Read a file of records as a table. Raises InputError if report.py add did not write the file."""
    from pyarrow import ArrowException, parquet

    try:
        # If threads of pyarrow still run when the process ends, they may abort it, with exit code 134.
        read = parquet.ParquetFile(path, pre_buffer=False).read(use_threads=False)
        table = read.to_pandas(use_threads=False)
        table[["id", "step", *(f"record/{field}" for field in Record._fields if field != "id")]]  # or LookupError
    except (ArrowException, OSError, ValueError, LookupError) as error:
        raise InputError(f"{path}: cannot be read: {str(error)[:200]}; give a file that report.py add wrote") from None
    return table


def records_of(steps: "pandas.DataFrame") -> dict[str, Record]:
    """Return the records by id. ``steps`` is the table that `load` returns."""
    first = steps[steps["record/commit"].notna()]
    return {
        row["id"]: Record(row["id"], *(_value(row[f"record/{field}"]) for field in Record._fields[1:]))
        for row in first.to_dict("records")
    }


def _value(stored: Any) -> Any:
    """Return the value of a stored field. A string that begins with { is the JSON string of a mapping."""
    if isinstance(stored, str):
        return json.loads(stored) if stored.startswith("{") else stored
    return int(stored)


@of_others
def load_record(results: Path, name: str) -> Record:
    """Return the record ``name``. Raises InputError if the record does not exist."""
    records = records_of(load(results))
    if name not in records:
        raise InputError(f"{results}: {name}: there is no such record; choose from: {first_names(records)}")
    return records[name]


def clash(record: Record, others: Iterable[Record]) -> str:
    """Return a sentence about the first contradiction between ``record`` and the others, or "" if there is none."""
    for other in others:
        # A fault that is planted into evaluations changes only the evaluations.
        compared = ["metrics.jsonl", *(["eval_outcomes.jsonl"] if record.fault != other.fault else [])]
        if all(other.files.get(file) == record.files.get(file) for file in compared):
            return f"its metrics are those of {other.id}; add a run with its own metrics"
        if other.variant == record.variant and (changed := differing(other, record)):
            return f"differs from other seeds of {record.variant}: {'; '.join(changed)}; give the run another name"
        if other.id == record.id or (other.variant, other.seed) == (record.variant, record.seed):
            return f"seed {record.seed} of {record.variant} already exists: {other.id}; records are never replaced"
    return ""


def differing(first: Record, second: Record) -> list[str]:
    """Return a line "key: value -> value" for each setting in which two records differ.

    The number of ranks and the planted fault count as settings. The settings in SEEDS and BOOKKEEPING, and the path of
    a tiny model, do not count. A missing key counts as having its default value.
    """
    apart = SEEDS | BOOKKEEPING | ({"model.path"} if "tiny_model" in first.config else set())
    lines = changed_keys(first.config, second.config, apart)
    ranks = [each.environment["world_size"] for each in (first, second)]
    for what, (a, b) in {"ranks": ranks, "planted fault": (first.fault, second.fault)}.items():
        if a != b:
            lines.append(f"{what}: {shown(a)} -> {shown(b)}")
    return lines


@of_others
def add(folders: list[Path], results: Path, name: str = "") -> Path:
    """Write the runs in ``folders`` to results/<name>.parquet, which must be a new file, and return its path.

    If there is only one run, its id is the default name. Raises InputError, and writes nothing, if a run cannot become
    a record (`read_run`) or contradicts another record (`clash`).
    """
    runs = [read_run(folder) for folder in folders]
    name = name or (runs[0].record.id if len(runs) == 1 else "")
    target = results / f"{name}.parquet"
    if not re.fullmatch(ID, name):
        raise InputError(f"--id: {name!r} cannot be used; give a name for {len(runs)} runs: letters, digits, . _ and -")
    if target.exists():
        raise InputError(f"{target}: already exists, and records are never replaced; give another name (--id)")
    there = list(records_of(load(results)).values()) if files(results) else []
    for run in runs:
        if fault := clash(run.record, there):
            raise InputError(f"{run.record.id}: {fault}")
        there.append(run.record)
    write_table(target, runs)
    return target


def _stored(value: Any) -> Any:
    """Return the value as a column stores it: lists and mappings become JSON strings."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def write_table(target: Path, runs: list[Run]) -> None:
    """Write ``runs`` to the parquet file ``target``."""
    import pyarrow
    from pyarrow import parquet

    rows = []
    for run in runs:
        own = [{"id": run.record.id} | row for row in run.rows]
        own[0] |= {f"record/{field}": value for field, value in run.record._asdict().items() if field != "id"}
        rows += own
    names = dict.fromkeys(itertools.chain(*rows))
    table = pyarrow.table({name: [_stored(row.get(name)) for row in rows] for name in names})
    repeated = [field.name for field in table.schema if not pyarrow.types.is_floating(field.type)]
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", compression_level=19, use_dictionary=repeated)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, sink.getvalue().to_pybytes())


# -------------------------------------------------------------------------------------------------------- start weights


@of_others
def start_weights(results: Path, record: Record) -> dict[str, bytes] | None:
    """Return the files of the tiny model from which the run started, or None if they were not kept.

    The supervised steps give slightly different weights on another processor. So to repeat the run there, you need
    these files.
    """
    import pandas

    if not (results / WEIGHTS).exists():
        return None
    kept = dict(pandas.read_parquet(results / WEIGHTS)[["sha256", "content"]].to_numpy().tolist())
    if not {*record.inputs["model"].values()} <= kept.keys():
        return None
    return {name: kept[checksum] for name, checksum in record.inputs["model"].items()}


def restore_weights(results: Path, record: Record, folder: Path) -> None:
    """Write to ``folder`` the model from which the run started.

    Raises InputError if the model was not kept, or if ``folder`` already exists.
    """
    contents = start_weights(results, record)
    if contents is None:
        raise InputError(f"{results}: the model from which {record.id} started was not kept")
    with whole_folder(folder) as aside:
        for name, content in contents.items():
            (aside / Path(name).name).write_bytes(content)
