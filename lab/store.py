"""The folder results/: adding runs and benchmarks, reading them, merging their files, and whether they agree.

    results/<name>.parquet      runs, one row a step; or benchmarks, one row each; or start weights, one row a file

Every row of a run has the run's id, and the first one also has its record, in the columns record/*. Lists and mappings
are JSON texts. `add` writes one file for a run or a benchmark, which nobody changes; `compact` merges such files.
`pandas.read_parquet("results/bench.parquet")` reads a file. What was changed or taken away is told by the history of
git alone (lab/audit.py). This file needs no torch.
"""

import functools
import graphlib
import hashlib
import io
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from config import MAY_CHANGE, flatten
from inputs.files import (
    UNFINISHED,
    InputError,
    dump_yaml,
    finish_folder,
    first_names,
    fresh_folder,
    read_bytes,
    read_object,
    shown,
    write_atomically,
)
from lab.records import ID, Benchmark, Record, Run, stated, unmerged, validated
from lab.run_folders import from_run
from run_record import sha256_file

LARGEST_MODEL_MIB = 4  # the tiny model of configs/tiny_cpu.yaml has 1.1
# Settings that differ between the seeds of one variant, and settings that do not change the result. Runs that differ in
# any other setting are different variants.
SEEDS = {"name", "train.seed", "tiny_model.seed", "data.seed"}
BOOKKEEPING = {key for key in MAY_CHANGE if key.split(".")[0] in ("train", "checks", "device")}
PRIVATE = re.compile(r"(?<![\w.~}])/(?:[h]ome|[U]sers|[r]oot)/\w")
ABOUT = "record/"  # how the columns begin that only the first row of a run has
NESTED = {b"content": b"JSON"}  # metadata of a column of JSON texts


class Content(NamedTuple):
    """What a parquet file holds: one of the three."""

    runs: dict[str, Run] = {}
    benchmarks: dict[str, Benchmark] = {}
    weights: dict[str, bytes] = {}  # sha256 -> content of a file of a tiny model


# --------------------------------------------------------------------------------------------------------------- files


def encoded(content: Content) -> bytes:
    """A parquet file with this content; InputError if it would not give back every number as it is."""
    import pyarrow
    from pyarrow import parquet

    rows, arrays, fields = _rows(content), [], []
    columns = graphlib.TopologicalSorter[str]()
    for first, second in dict.fromkeys(pair for row in rows for pair in itertools.pairwise(row)):
        columns.add(second, first)  # stands after it
    try:
        order = list(columns.static_order())
    except graphlib.CycleError as error:
        raise InputError(f"the steps have their metrics in different orders: {error.args[1][:2]}") from None
    for name in order:
        values = [row.get(name) for row in rows]
        if nested := any(isinstance(value, list | dict) for value in values):
            values = [None if value is None else json.dumps(value) for value in values]
        try:
            arrays.append(pyarrow.array(values))
        except (pyarrow.ArrowException, OverflowError, UnicodeError) as error:
            raise InputError(f"{name}: {str(error).splitlines()[0]}; needed: values of one type") from None
        fields.append(pyarrow.field(name, arrays[-1].type, metadata=NESTED if nested else None))
    file, table = io.BytesIO(), pyarrow.table(arrays, schema=pyarrow.schema(fields))
    apart = [  # fractions that hardly repeat take a fifth less room with their bytes apart
        name
        for name, values in zip(order, arrays, strict=True)
        if pyarrow.types.is_floating(values.type) and 2 * len(values.unique()) > len(values)
    ]
    form = {"use_byte_stream_split": apart, "use_dictionary": [name for name in order if name not in apart]}
    parquet.write_table(table, file, compression="zstd", compression_level=19, **form)
    for row, same in zip(rows, _decoded(file.getvalue(), "steps"), strict=True):
        if changed := [key for key in row if repr(row[key]) != repr(same.get(key))]:
            raise InputError(f"{changed}: needed: in all steps whole numbers, or in all fractions")
    return file.getvalue()


def _rows(content: Content) -> list[dict[str, Any]]:
    """The rows of a file."""
    rows: list[dict[str, Any]] = [{"sha256": name, "content": kept} for name, kept in content.weights.items()]
    rows += [{"id": name, **one.model_dump(mode="json")} for name, one in content.benchmarks.items()]
    for name, run in content.runs.items():
        about = {ABOUT + field: value for field, value in run.record.model_dump(mode="json").items()}
        rows += [{"id": name, **(about if place == 0 else {}), **row} for place, row in enumerate(run.rows)]
    return rows


def _decoded(content: bytes, where: str | Path) -> list[dict[str, Any]]:
    """The rows of a parquet file, the inverse of `encoded`; InputError for anything else."""
    import pyarrow
    from pyarrow import parquet

    try:
        # Threads of pyarrow that live until the end of the process may abort it there, with exit code 134.
        table = parquet.ParquetFile(io.BytesIO(content), pre_buffer=False).read(use_threads=False)
        nested = {field.name for field in table.schema if (field.metadata or {}).items() >= NESTED.items()}
        return [
            {name: json.loads(value) if name in nested else value for name, value in row.items() if value is not None}
            for row in table.to_pylist()
        ]
    except (pyarrow.ArrowException, OSError, ValueError, TypeError) as error:
        raise InputError(f"{where}: cannot be read: {str(error)[:200]}; needed: what report.py add writes") from None


def content_of(content: bytes, where: str | Path) -> Content:
    """The content of a parquet file of results/; InputError for other content."""
    rows, runs = _decoded(content, where), {}
    if rows and "about" in rows[0]:
        return Content(benchmarks={str(row.pop("id")): validated(Benchmark, row, where) for row in rows})
    if rows and "sha256" in rows[0]:
        return Content(weights={row["sha256"]: row["content"] for row in rows})
    for record_id, steps in itertools.groupby(rows, key=lambda row: row.pop("id", None)):
        first, *rest = steps
        about = {name: first.pop(name) for name in list(first) if name.startswith(ABOUT)}
        record = validated(Record, {name.removeprefix(ABOUT): value for name, value in about.items()}, where)
        if record.id != record_id:
            raise InputError(f"{where}: {record.id}: its rows have other ids; needed: what report.py add writes")
        runs[record.id] = Run(record, [first, *rest])
    return Content(runs)


def sealed(run: Run) -> str:
    """The sha256 of everything that a record holds."""
    content = [run.record.model_dump(mode="json"), run.rows]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------------- reading


@functools.lru_cache(maxsize=1024)  # a sweep adds some hundred files before they are merged
def _file(path: Path, *changed: int) -> Content:
    """What the file at ``path`` holds. ``changed``: its time and size, for the cache."""
    return content_of(read_bytes(path), path)


def files(results: Path) -> dict[Path, Content]:
    """Each parquet file of a folder, with what it holds."""
    about = {path: path.stat() for path in sorted(results.glob("[!.]*.parquet"))}
    return {path: _file(path, stat.st_mtime_ns, stat.st_size) for path, stat in about.items()}


def load_runs(results: Path) -> dict[str, Run]:
    """id -> run. InputError if two files hold different runs of one id; after a killed `compact` they hold the same."""
    found: dict[str, Run] = {}
    for path, content in files(results).items():
        for name, run in content.runs.items():
            if (other := found.setdefault(name, run)) is not run and sealed(other) != sealed(run):
                raise InputError(f"{path}: {name}: another file of this folder holds another run of this id")
    return found


def load_run(results: Path, record_id: str) -> Run:
    """One record with its steps; InputError when it is missing or cannot be read."""
    runs = load_runs(results)
    if record_id not in runs:
        raise InputError(f"{results}: {record_id}: no such record; there are: {first_names(runs)}")
    return runs[record_id]


def load_groups(results: Path) -> dict[str, list[Run]]:
    """Variant -> its runs in order of their seeds."""
    runs = sorted(load_runs(results).values(), key=lambda run: (run.record.group, run.record.seed, run.record.id))
    return {name: list(group) for name, group in itertools.groupby(runs, key=lambda run: run.record.group)}


def load_benchmarks(results: Path) -> dict[str, Benchmark]:
    """id -> benchmark, the newest last."""
    found = {name: one for content in files(results).values() for name, one in content.benchmarks.items()}
    return dict(sorted(found.items(), key=lambda each: each[1].place))


def load_weights(results: Path) -> dict[str, bytes]:
    """sha256 -> content of each file of the tiny models from which runs started and which were kept."""
    return {name: kept for content in files(results).values() for name, kept in content.weights.items()}


# -------------------------------------------------------------------------------------------------------------- adding


def variant(record: Record) -> dict[str, Any]:
    """The settings and the number of ranks, which all seeds of a variant share."""
    dropped = SEEDS | BOOKKEEPING | ({"model.path"} if "tiny_model" in record.config else set())
    settings = {key: value for key, value in flatten(record.config).items() if key not in dropped}
    planted = {"planted fault": record.fault} if record.fault else {}
    return settings | {"ranks": record.layout["ranks"]} | planted


def same_run(first: Record, second: Record) -> bool:
    """Whether two records have the metrics of one run. A fault that is planted into evaluations changes only those."""
    names = ["metrics.jsonl", *(["eval_outcomes.jsonl"] if first.fault != second.fault else [])]
    return all(first.files[name] == second.files[name] for name in names)


def differing(first: Record, second: Record) -> list[str]:
    """One "key: value -> value" for each setting in which two variants differ."""
    a, b = variant(first), variant(second)
    return [f"{key}: {shown(a.get(key))} -> {shown(b.get(key))}" for key in {**a, **b} if a.get(key) != b.get(key)]


def clash(record: Record, others: Iterable[Record]) -> str:
    """What one of the other records contradicts in ``record``, a sentence; empty if they can stand together."""
    for other in others:
        if same_run(other, record):
            return f"its metrics are those of {other.id}; needed: a run of its own"
        if other.group == record.group and (changed := differing(other, record)):
            return f"no seed of {record.group}: {'; '.join(changed)}; needed: another id (--id)"
        if other.group == record.group and other.seed == record.seed:
            return f"seed {record.seed} of {record.group} is there: {other.id}"
    return ""


def add_run(run_dir: Path, results: Path, record_id: str = "") -> Path:
    """Write the record of a finished run to results/<id>.parquet. A refused run leaves nothing behind.  -> the file

    The id is the run's name by default. Of the completions, those of the first and the last step are kept as a sample.
    InputError for a run that may not become a record, for the id of another record, and for a seed of a variant whose
    other seeds have other settings. The same run may be added again, and then nothing changes.
    """
    whole = from_run(run_dir, record_id or str(read_object(run_dir / "run.json").get("name")))
    record, sample = whole.record, (0, whole.record.steps - 1)
    kept = [{key: row[key] for key in row if key != "completions" or row["step"] in sample} for row in whole.rows]
    run = Run(record, kept)
    if faults := contradictions(run):
        raise InputError(f"{run_dir}: {faults[0]}")
    there = load_runs(results)
    if record.id in there and sealed(there[record.id]) == sealed(run):
        return results / f"{record.id}.parquet"
    target = _free(results, record.id, {*there, *load_benchmarks(results)})
    if fault := clash(record, [other.record for other in there.values()]):
        raise InputError(f"{record.id}: {fault}")
    return _write(target, encoded(Content({record.id: run})), record.model_dump_json())


def add_benchmark(path: Path, results: Path, name: str = "") -> Path:
    """Write a benchmark's file to results/<name>.parquet.  -> the new file

    The name is the file's own by default, with a number from the second measurement on. InputError for a tree that was
    not clean, a measurement that is there under another name, a name of something else or an unusable one, and a
    private path. The same measurement may be added again, and then nothing changes.
    """
    there = load_benchmarks(results)
    found = validated(Benchmark, read_object(path) | {"place": len(there)}, path)
    if found.dirty:
        raise InputError(f"{path}: measured with changes that are in no commit; needed: git status clean")
    if same := [known for known, one in there.items() if one.model_copy(update={"place": found.place}) == found]:
        if name not in ("", *same):
            raise InputError(f"{path}: is {same[0]} already; needed: another measurement")
        return results / f"{name or same[0]}.parquet"
    numbered = itertools.chain([path.stem], (f"{path.stem}-{number}" for number in itertools.count(2)))
    name = name or next(each for each in numbered if each not in there)
    target = _free(results, name, {*there, *load_runs(results)})
    return _write(target, encoded(Content(benchmarks={name: found})), found.model_dump_json())


def _free(results: Path, name: str, taken: set[str]) -> Path:
    """The new file of a record; InputError if its name is taken or none."""
    target = results / f"{name}.parquet"
    if not re.fullmatch(ID, name):
        raise InputError(f"--id: found {name!r}; needed: letters, digits, . _ and -")
    if name in taken or target.exists():
        raise InputError(f"{target}: {name} exists; records are never replaced; needed: another id (--id)")
    return target


def _write(target: Path, content: bytes, text: str) -> Path:
    """Write a new file; InputError if ``text``, its record as JSON, names a private path."""
    if private := PRIVATE.search(text):
        raise InputError(f"{target}: {private[0]} is a private path; needed: paths inside the checkout")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, content)
    return target


def compact(results: Path, name: str, beginnings: list[str]) -> Path:
    """Merge the files whose names begin with one of ``beginnings`` into results/<name>.parquet.  -> the new file

    By default the names begin with ``name`` and then _ or -. InputError for files of several kinds. If the command is
    killed, the same command completes it: until the merged files are removed, their contents are there twice.
    """
    target, begins = results / f"{name}.parquet", tuple(beginnings or (f"{name}_", f"{name}-"))
    chosen = {path: kept for path, kept in files(results).items() if path == target or path.stem.startswith(begins)}
    merged: list[dict[str, Any]] = [
        {key: one for kept in chosen.values() for key, one in kept[kind].items()} for kind in range(3)
    ]
    runs, benchmarks, weights = merged
    if sum(map(bool, merged)) != 1:
        raise InputError(
            f"compact: found {len(runs)} runs, {len(benchmarks)} benchmarks and {len(weights)} files of models whose "
            f"names begin with {' or '.join(begins)}; needed: only one of these kinds"
        )
    load_runs(results)  # refuses two runs of one id
    runs = dict(sorted(runs.items(), key=lambda each: (each[1].record.group, each[1].record.seed)))
    write_atomically(target, encoded(Content(runs, benchmarks, weights)))
    for path in chosen.keys() - {target}:
        path.unlink()
    return target


# -------------------------------------------------------------------------------------------------------- start weights


def keep_weights(results: Path, record: Record, folder: Path) -> Path:
    """Keep the tiny model of a run, whose files must be those from which the run started.  -> the new file

    Another processor makes other last bits in 1,200 supervised steps, so a repeat elsewhere needs these weights.
    InputError for another model, and for one of more than LARGEST_MODEL_MIB.
    """
    wanted = record.inputs.model
    if not all((folder / name).is_file() and sha256_file(folder / name) == wanted[name] for name in wanted):
        raise InputError(f"{folder}: does not hold the files from which {record.id} started; needed: that model")
    found = {checksum: read_bytes(folder / name) for name, checksum in wanted.items()}
    if (size := sum(map(len, found.values())) / 2**20) > LARGEST_MODEL_MIB:
        raise InputError(f"{folder}: {size:.1f} MiB; needed: a model of at most {LARGEST_MODEL_MIB}")
    target = results / f"weights-{hashlib.sha256(''.join(sorted(found)).encode()).hexdigest()[:12]}.parquet"
    write_atomically(target, encoded(Content(weights=found)))
    return target


def has_weights(results: Path, record: Record) -> bool:
    """Whether the model from which the run started was kept."""
    return {*record.inputs.model.values()} <= load_weights(results).keys()


def restore_weights(results: Path, record: Record, folder: Path) -> None:
    """Write the model from which the run started to ``folder``; InputError if it was not kept or was changed."""
    if folder.exists() and not (folder / UNFINISHED).exists():
        raise InputError(f"{folder}: exists; needed: a new folder for the model of {record.id}")
    kept, contents = load_weights(results), {}
    for name, checksum in record.inputs.model.items():
        if Path(name).name != name:
            raise InputError(f"{record.id}: inputs.model: found {name!r}; needed: the name of a file")
        if hashlib.sha256(kept.get(checksum, b"")).hexdigest() != checksum:
            fault = "edited" if checksum in kept else "not kept"
            raise InputError(f"{results}: {name} of {record.id}: {fault}; needed: the model from which the run started")
        contents[name] = kept[checksum]
    aside = folder.with_name(f".restoring-{folder.name}")
    fresh_folder(aside)
    for name, content in contents.items():
        write_atomically(aside / name, content)
    finish_folder(aside, folder)


# ------------------------------------------------------------------------------------------------------------ checking


def contradictions(run: Run) -> list[str]:
    """One sentence for each statement of a record that another part of it contradicts.

    An edited record no longer has its checksums. A record whose checksums were edited, too, counts as another record:
    only the history tells that it was not there first (lab/audit.py).
    """
    record, config = run.record, run.record.config
    needed = stated(config, record.environment.world_size)
    faults = [
        f"{field}: found {found}; needed: {value}, from the configuration"
        for field, value in needed.items()
        if (found := getattr(record, field)) != value
    ]
    if (seed := re.search(r"-seed(\d+)$", record.id)) and int(seed[1]) != record.seed:
        faults.append(f"id: found {seed[1]}; needed: {record.seed}, the seed")
    texts = {
        "config.yaml": dump_yaml(config),
        "command.txt": record.command + "\n",
        "environment.json": json.dumps(record.environment.model_dump(mode="json"), indent=1) + "\n",
        "inputs.json": json.dumps(record.inputs.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n",
        "git.json": json.dumps({"commit": record.commit, "dirty": False}) + "\n",
        "run.json": json.dumps({"name": config["name"], "config_hash": record.config_hash}) + "\n",
        "git.patch": "",  # of a clean source
        **{name: "" for name in record.files if name.endswith("/git.patch")},
        **unmerged(run.rows, record.first_step),
    }
    faults += [
        f"{name}: the record does not give the file whose sha256 it holds"
        for name, text in texts.items()
        if record.files.get(name) != hashlib.sha256(text.encode()).hexdigest()
    ]
    data = record.inputs.data
    trained = {checksum for use, checksum in data.items() if use.startswith("train")}
    if trained & {checksum for use, checksum in data.items() if use.startswith(("test", "eval.sets."))}:
        faults.append("inputs: the training data are the test data; needed: other questions")
    return faults
