"""What benchmarks/ measured, kept for good in results/benchmarks/<id>.json and shown in RESULTS.md as it was printed.

results/benchmarks/index.json holds the checksum of every file, in the order of their adding, so that none is edited or
lost unnoticed. No torch.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from input_files import InputError, read_bytes, read_object, read_text
from lab.records import ID, PRIVATE, Part
from run_record import sha256_file, write_atomically


class Benchmark(Part):
    """One file: benchmarks/cases.py writes it."""

    about: str = Field(min_length=1, description="what was measured, a sentence")
    command: str = Field(min_length=1)
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    dirty: bool = Field(description="whether the tree had changes that are in no commit")
    machine: dict[str, Any]
    table: list[dict[str, str | int | float]] = Field(min_length=1, description="rows of equal keys, as printed")
    measured: dict[str, Any] = Field(description="everything that the table was made from")


def load(path: Path) -> Benchmark:
    """InputError unless ``path`` holds what a benchmark stored."""
    try:
        return Benchmark.model_validate_json(read_text(path))
    except FileNotFoundError:
        raise InputError(f"{path}: missing; needed: a file that a benchmark stored") from None
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"])) or "all of it"
        raise InputError(f"{path}: {where}: {fault['msg']}; needed: a file that a benchmark stored") from None


def by_script(results: Path) -> dict[str, dict[str, Benchmark]]:
    """benchmarks/<name>.py -> id -> what it measured, the newest last."""
    found: dict[str, dict[str, Benchmark]] = {}
    for name in _index(results):
        path = results / "benchmarks" / name
        benchmark = load(path)
        script = re.search(r"(\w+)\.py", benchmark.command)
        found.setdefault(script[1] if script else path.stem, {})[path.stem] = benchmark
    return dict(sorted(found.items()))


def add(path: Path, results: Path, name: str = "") -> Path:
    """Copy a benchmark's file to results/benchmarks/<name>.json; its own name, with a number from the second on, by
    default.  -> the copy

    InputError for a tree that was not clean, a file that is there already, a name that exists or is none, and a private
    path in its command.
    """
    found, folder, index, checksum = load(path), results / "benchmarks", _index(results), sha256_file(path)
    if kept := next((kept for kept, known in index.items() if known == checksum), None):
        raise InputError(f"{path}: is {folder / kept} already; needed: a measurement of its own")
    if not name:
        names = itertools.chain([path.stem], (f"{path.stem}-{number}" for number in itertools.count(2)))
        name = next(free for free in names if not (folder / f"{free}.json").exists())
    target = folder / f"{name}.json"
    if not re.fullmatch(ID, name) or name == "index":
        raise InputError(f"--id: found {name!r}; needed: letters, digits, . _ and -, and not index")
    if found.dirty:
        raise InputError(f"{path}: measured with changes that are in no commit; needed: git status clean")
    if target.exists():
        raise InputError(f"{target}: exists; records are never replaced; needed: another id (--id)")
    if private := PRIVATE.search(read_text(path)):
        raise InputError(f"{path}: {private[0]} is a private path; needed: paths inside the checkout")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(target, read_bytes(path))
    write_atomically(folder / "index.json", json.dumps(index | {target.name: sha256_file(target)}, indent=1) + "\n")
    return target


def check(results: Path) -> list[str]:
    """One sentence for each file that was edited, lost, or put there by other means than ``add``."""
    index, present = _index(results), {path.name: path for path in _files(results)}
    faults = [f"{results / 'benchmarks' / name}: was deleted" for name in sorted(index.keys() - present)]
    for name, path in sorted(present.items()):
        if name not in index:
            faults.append(f"{path}: not in index.json; needed: report.py add")
        elif sha256_file(path) != index[name]:
            faults.append(f"{path}: edited: its sha256 is not the one in index.json")
    return faults


def _files(results: Path) -> list[Path]:
    return [path for path in (results / "benchmarks").glob("*.json") if path.name != "index.json"]


def _index(results: Path) -> dict[str, str]:
    path = results / "benchmarks" / "index.json"
    return read_object(path) if path.exists() else {}
