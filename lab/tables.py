"""The parquet files of results/: runs, benchmarks and start weights as tables, and back, with every number as it was.

A file of runs has one row a step. Every row has the id of its run, and the first row of a run also has its record, in
the columns record/*. Lists and mappings are JSON texts. A file of benchmarks has one row each, a file of start weights
one row for each file of a model.
"""

import graphlib
import hashlib
import io
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from input_files import InputError
from lab.records import Part, Record, Run, validated

ABOUT = "record/"  # how the columns begin that only the first row of a run has
NESTED = {b"content": b"JSON"}  # metadata of a column of JSON texts
Columns = dict[str, list[Any]]


class Benchmark(Part):
    """A file that benchmarks/cases.py writes."""

    place: int = Field(0, ge=0, description="number of benchmarks that were there when it was added")
    about: str = Field(min_length=1, description="what was measured, a sentence")
    command: str = Field(min_length=1)
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    dirty: bool = Field(description="whether the tree had changes that are in no commit")
    machine: dict[str, Any]
    table: list[dict[str, str | int | float]] = Field(min_length=1, description="rows of equal keys, as printed")
    measured: dict[str, Any] = Field(description="the measurements behind the table")


# -------------------------------------------------------------------------------------------------------------- tables


def encoded(columns: Columns) -> bytes:
    """A parquet file with these columns. InputError for a column of values that have no common type."""
    import pyarrow
    from pyarrow import parquet

    arrays, fields = [], []
    for name, values in columns.items():
        nested = any(isinstance(value, list | dict) for value in values)
        texts = [None if value is None else json.dumps(value) for value in values] if nested else values
        try:
            arrays.append(pyarrow.array(texts))
        except (pyarrow.ArrowException, OverflowError, UnicodeError) as error:
            raise InputError(f"{name}: {str(error).splitlines()[0]}; needed: values of one type") from None
        fields.append(pyarrow.field(name, arrays[-1].type, metadata=NESTED if nested else None))
    file = io.BytesIO()
    table = pyarrow.table(arrays, schema=pyarrow.schema(fields))
    parquet.write_table(table, file, compression="zstd", compression_level=19)
    return file.getvalue()


def decoded(content: bytes, where: str | Path) -> Columns:
    """The columns of a parquet file, the inverse of `encoded`; InputError for anything else."""
    import pyarrow
    from pyarrow import parquet

    try:
        # Threads of pyarrow that live until the end of the process may abort it there, with exit code 134.
        table = parquet.ParquetFile(io.BytesIO(content), pre_buffer=False).read(use_threads=False)
        return {
            field.name: [None if value is None else json.loads(value) for value in values]
            if (field.metadata or {}).items() >= NESTED.items()
            else values
            for field, values in zip(table.schema, map(pyarrow.ChunkedArray.to_pylist, table.columns), strict=True)
        }
    except (pyarrow.ArrowException, OSError, ValueError, TypeError) as error:
        raise InputError(f"{where}: cannot be read: {str(error)[:200]}; needed: what report.py add writes") from None


def table_of(runs: list[Run]) -> bytes:
    """A parquet file of runs; InputError if it would not give back every number as it is."""
    rows = [row for run in runs for row in run.rows]
    after: dict[str, dict[str, None]] = {}  # key of a row -> the keys that stand before it
    for keys in dict.fromkeys(map(tuple, rows)):
        for first, second in itertools.pairwise(keys):
            after.setdefault(first, {})
            after.setdefault(second, {})[first] = None
    try:
        order = list(graphlib.TopologicalSorter(after).static_order())
    except graphlib.CycleError as error:
        raise InputError(f"the steps have their metrics in different orders: {error.args[1][:2]}") from None
    columns: Columns = {"id": [run.record.id for run in runs for _ in run.rows]}
    for name in Record.model_fields:
        columns[ABOUT + name] = [
            run.record.model_dump(mode="json", include={name})[name] if place == 0 else None
            for run in runs
            for place in range(len(run.rows))
        ]
    content = encoded(columns | {key: [row.get(key) for row in rows] for key in order})
    again = (row for run in runs_of(decoded(content, "steps"), "steps") for row in run.rows)
    for row, same in zip(rows, again, strict=True):
        if json.dumps(row) != json.dumps(same):
            changed = [key for key in row if json.dumps(row[key]) != json.dumps(same.get(key))]
            raise InputError(f"step {row['step']}: {changed}: needed: in all steps whole numbers, or in all fractions")
    return content


def runs_of(columns: Columns, where: str | Path) -> list[Run]:
    """The runs of a file, in its order; InputError for other content."""
    ids, rows = columns.get("id", []), [{} for _ in columns.get("id", [])]
    about = {name.removeprefix(ABOUT): values for name, values in columns.items() if name.startswith(ABOUT)}
    for name, values in columns.items():
        if name != "id" and not name.startswith(ABOUT):
            for row, value in zip(rows, values, strict=True):
                if value is not None:
                    row[name] = value
    firsts = [place for place, commit in enumerate(about.get("commit", [])) if commit is not None]
    runs = []
    for first, end in itertools.pairwise([*firsts, len(ids)]):
        record = validated(Record, {name: values[first] for name, values in about.items()}, where)
        if {*ids[first:end]} != {record.id}:
            raise InputError(f"{where}: {record.id}: its rows have other ids; needed: what report.py add writes")
        runs.append(Run(record, rows[first:end]))
    if ids and firsts[:1] != [0]:
        raise InputError(f"{where}: the first row has no record; needed: what report.py add writes")
    return runs


def sealed(run: Run) -> str:
    """The sha256 of everything that a record holds."""
    content = [run.record.model_dump(mode="json"), run.rows]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def benchmarks_of(columns: Columns, where: str | Path) -> dict[str, Benchmark]:
    """id -> benchmark, in the order of the file."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return {str(row.pop("id")): validated(Benchmark, row, where) for row in rows}


def table_of_benchmarks(found: dict[str, Benchmark]) -> bytes:
    """A parquet file of benchmarks, one row each."""
    columns: Columns = {"id": list(found)}
    for name in Benchmark.model_fields:
        columns[name] = [one.model_dump(mode="json", include={name})[name] for one in found.values()]
    return encoded(columns)


def table_of_weights(found: dict[str, bytes]) -> bytes:
    """A parquet file of files, each named by the sha256 of its content."""
    return encoded({"sha256": list(found), "content": list(found.values())})


class Content(NamedTuple):
    """What a parquet file holds: one of the three."""

    runs: list[Run] = []
    benchmarks: dict[str, Benchmark] = {}
    weights: dict[str, bytes] = {}  # sha256 -> content


def content_of(content: bytes, where: str | Path) -> Content:
    """The content of a parquet file of results/."""
    columns = decoded(content, where)
    if "about" in columns:
        return Content(benchmarks=benchmarks_of(columns, where))
    if "sha256" in columns:
        return Content(weights=dict(zip(columns["sha256"], columns["content"], strict=True)))
    return Content(runs=runs_of(columns, where))
