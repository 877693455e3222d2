"""The folder results/: adding runs and benchmarks, reading them, and checking that nothing was changed or lost.

    results/<id>/record.json         what ran, on which machine, by which command, and the main results
    results/<id>/steps.jsonl.gz      one line per step: metrics, times, evaluations, and which answers were right
    results/benchmarks/<id>.json     what a script of benchmarks/ measured
    results/weights/<sha256>.*       the files of the tiny models from which runs started (lab/weights.py)
    results/index.json               the sha256 of each of these files, and of the figures

`pandas.read_json("results/<id>/steps.jsonl.gz", lines=True)` reads the steps of a run. This file needs no torch.
"""

import gzip
import hashlib
import io
import itertools
import json
import re
import zlib
from pathlib import Path
from typing import Any

from pydantic import Field

from config import MAY_CHANGE, flatten
from input_files import UNFINISHED, InputError, finish_folder, fresh_folder, read_bytes, read_object, shown
from lab.consistency import contradictions
from lab.records import ID, LARGEST_MIB, Part, Record, Run, from_run, summary, validated
from run_record import RECORDED, git, sha256_file, write_atomically

RECORD, STEPS, METRICS, WEIGHTS = "record.json", "steps.jsonl.gz", "metrics.jsonl", "weights"
KEPT = re.compile(
    rf"(?!figures/|benchmarks/|weights/){ID}/({RECORD}|{STEPS})|benchmarks/{ID}\.json|weights/[0-9a-f]{{64}}\.\w{{1,20}}"
)
FIGURE = re.compile(rf"figures/{ID}\.png")
NO_RECORD = re.compile(rf"benchmarks/README\.md|{ID}/report\.html")  # report.py html writes the page there
# Names in results/ that no record may have.
RESERVED = {"figures", "benchmarks", "weights", "index.json", "plan.yaml", "README.md"}
# Settings that differ between the seeds of one variant, and settings that do not change the result. Runs that differ in
# any other setting are different variants.
SEEDS = {"name", "train.seed", "tiny_model.seed", "data.seed"}
BOOKKEEPING = {key for key in MAY_CHANGE if key.split(".")[0] in ("train", "checks", "device")}
PRIVATE = re.compile(r"(?<![\w.~}])/(?:[h]ome|[U]sers|[r]oot)/\w")
CONVERSION = "Convert the records"  # how the subject of the commit begins that brought the records into this format


class Benchmark(Part):
    """A file that benchmarks/cases.py writes."""

    about: str = Field(min_length=1, description="what was measured, a sentence")
    command: str = Field(min_length=1)
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    dirty: bool = Field(description="whether the tree had changes that are in no commit")
    machine: dict[str, Any]
    table: list[dict[str, str | int | float]] = Field(min_length=1, description="rows of equal keys, as printed")
    measured: dict[str, Any] = Field(description="the measurements behind the table")


# ------------------------------------------------------------------------------------------------------------- reading


def load_run(results: Path, record_id: str) -> Run:
    """One record with its steps; InputError when it is missing or cannot be read."""
    folder = results / record_id
    if not re.fullmatch(ID, record_id) or not (folder / RECORD).exists():
        there = sorted({name.split("/")[0] for name in read_index(results) if name.endswith(RECORD)})
        raise InputError(f"{folder / RECORD}: no such record; there are: {', '.join(there) or 'none'}")
    record = validated(Record, read_object(folder / RECORD), folder / RECORD)
    try:
        with gzip.open(io.BytesIO(read_bytes(folder / STEPS))) as file:
            rows = [json.loads(line) for line in file.read(LARGEST_MIB * 2**20).splitlines()]
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{folder / STEPS}: cannot be read: {error}; needed: what report.py add writes") from None
    return Run(record, rows)


def load_groups(results: Path) -> dict[str, list[Run]]:
    """Variant -> its runs in order of their seeds."""
    found = (load_run(results, path.parent.name) for path in results.glob(f"[!.]*/{RECORD}"))
    runs = sorted(found, key=lambda run: (run.record.group, run.record.seed, run.record.id))
    return {name: list(group) for name, group in itertools.groupby(runs, key=lambda run: run.record.group)}


def benchmarks_by_script(results: Path) -> dict[str, dict[str, Benchmark]]:
    """Name of the script, with its subcommand and its cases if given -> id -> what it measured, the newest last."""
    found: dict[str, dict[str, Benchmark]] = {}
    for name in read_index(results):
        if name.startswith("benchmarks/"):
            benchmark = validated(Benchmark, read_object(results / name), results / name)
            script = re.search(r"(\w+)\.py( [a-z]\w*)?( --cases( \w+)+)?", benchmark.command)
            key = script[1] + (script[2] or "") + (script[3] or "") if script else Path(name).stem
            found.setdefault(key, {})[Path(name).stem] = benchmark
    return dict(sorted(found.items()))


def read_index(results: Path) -> dict[str, str]:
    """File below results/ -> sha256, in the order of adding; empty when there is no index."""
    path = results / "index.json"
    index = read_object(path) if path.exists() else {}
    if odd := [name for name in index if not KEPT.fullmatch(name) and not FIGURE.fullmatch(name)]:
        raise InputError(f"{path}: found {shown(odd[0])}; needed: what report.py writes")
    return index


def write_index(results: Path, index: dict[str, str]) -> None:
    write_atomically(results / "index.json", json.dumps(index, indent=1) + "\n")


# -------------------------------------------------------------------------------------------------------------- adding


def variant(record: Record) -> dict[str, Any]:
    """The settings and the number of ranks, which all seeds of a variant share."""
    dropped = SEEDS | BOOKKEEPING | ({"model.path"} if "tiny_model" in record.config else set())
    settings = {key: value for key, value in flatten(record.config).items() if key not in dropped}
    planted = {"planted fault": record.fault} if record.fault else {}
    return settings | {"ranks": record.layout["ranks"]} | planted


def same_run(first: Record, second: Record) -> bool:
    """Whether two records have the metrics of one run. A fault that is planted into evaluations changes only those."""
    files = [METRICS] if first.fault == second.fault else [METRICS, "eval_outcomes.jsonl"]
    return all(first.files[name] == second.files[name] for name in files)


def differing(first: Record, second: Record) -> list[str]:
    """One "key: value -> value" for each setting in which two variants differ."""
    a, b = variant(first), variant(second)
    return [f"{key}: {shown(a.get(key))} -> {shown(b.get(key))}" for key in {**a, **b} if a.get(key) != b.get(key)]


def packed(run: Run) -> dict[str, bytes]:
    """The two files of a record. Of the completions, those of the first and the last step are kept as a sample."""
    sample = (0, run.record.steps - 1)
    lines = [{key: row[key] for key in row if key != "completions" or row["step"] in sample} for row in run.rows]
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    record = json.dumps(run.record.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"
    return {RECORD: record.encode(), STEPS: gzip.compress(text.encode(), 9, mtime=0)}  # the same run, the same bytes


def add_run(run_dir: Path, results: Path, record_id: str = "") -> Path:
    """Write the record of a finished run to results/<id>/. A refused run leaves nothing behind.  -> the folder

    The id is the run's name by default. InputError for a run that may not become a record, for the id of another
    record, and for a seed of a variant whose other seeds have other settings. A run whose record is there already may
    be added again: a process that was killed may have written it without the index.
    """
    size = sum(path.stat().st_size for each in RECORDED for path in run_dir.glob(each) if path.is_file()) / 2**20
    if size > LARGEST_MIB:
        raise InputError(f"{run_dir}: {size:.0f} MiB of records; at most {LARGEST_MIB}: fewer train.completions_logged")
    run = from_run(run_dir, record_id or str(read_object(run_dir / "run.json").get("name")))
    record, target = run.record, results / run.record.id
    if record.id in RESERVED:
        raise InputError(f"{record.id}: {target} is for other things than records; needed: another id (--id)")
    files = packed(run)
    is_there = all(_holds(target / name, content) for name, content in files.items())
    if target.exists() and not is_there:
        raise InputError(f"{target}: exists; records are never replaced; needed: another id (--id)")
    _refuse_private(files[RECORD], run_dir)
    if faults := contradictions(run):
        raise InputError(f"{run_dir}: {faults[0]}")
    for other in (other.record for group in load_groups(results).values() for other in group):
        if other.id != record.id and same_run(other, record):
            raise InputError(f"{record.id}: the metrics are those of {other.id}; needed: a run of its own")
        if other.group == record.group and (changed := differing(other, record)):
            raise InputError(f"{record.id}: no seed of {record.group}: {'; '.join(changed)}; needed: another id (--id)")
        if other.group == record.group and other.id != record.id and other.seed == record.seed:
            raise InputError(f"{record.id}: seed {record.seed} of {record.group} is there: {other.id}")
    if not is_there:
        aside = results / f".adding-{record.id}"
        fresh_folder(aside)
        for name, content in files.items():
            write_atomically(aside / name, content)
        finish_folder(aside, target)
    (target / UNFINISHED).unlink(missing_ok=True)
    write_index(results, read_index(results) | {f"{record.id}/{name}": sha256_file(target / name) for name in files})
    return target


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and read_bytes(path) == content


def add_benchmark(path: Path, results: Path, name: str = "") -> Path:
    """Copy a benchmark's file to results/benchmarks/<name>.json.  -> the copy

    The name is the file's own by default, with a number from the second measurement on. InputError for a tree that was
    not clean, a file that is there under another name, a name of another file or an unusable one, and a private path.
    As with add_run, the same file may be added again.
    """
    found, content = validated(Benchmark, read_object(path), path), read_bytes(path)
    folder, index, checksum = results / "benchmarks", read_index(results), hashlib.sha256(content).hexdigest()
    numbered = (folder / f"{path.stem}-{number}.json" for number in itertools.count(2))
    names = itertools.chain([folder / path.name], numbered)
    target = folder / f"{name}.json" if name else next(p for p in names if not p.exists() or _holds(p, content))
    if not re.fullmatch(ID, target.stem):
        raise InputError(f"--id: found {target.stem!r}; needed: letters, digits, . _ and -")
    if found.dirty:
        raise InputError(f"{path}: measured with changes that are in no commit; needed: git status clean")
    same = [results / kept for kept, known in index.items() if known == checksum]
    if same and target not in same:
        raise InputError(f"{path}: is {same[0]} already; needed: another measurement")
    if target.exists() and not _holds(target, content):
        raise InputError(f"{target}: exists; records are never replaced; needed: another id (--id)")
    _refuse_private(content, path)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(target, content)
    write_index(results, index | {f"benchmarks/{target.name}": checksum})
    return target


def _refuse_private(content: bytes, where: Path) -> None:
    if private := PRIVATE.search(content.decode()):
        raise InputError(f"{where}: {private[0]} is a private path; needed: paths inside the checkout")


# ------------------------------------------------------------------------------------------------------------ checking


def check(results: Path) -> list[str]:
    """One sentence for each record or benchmark that was edited, lost, or added without this file."""
    index = {name: checksum for name, checksum in read_index(results).items() if KEPT.fullmatch(name)}
    present = {
        path.relative_to(results).as_posix() for path in results.glob("[!.]*/*") if path.parent.name != "figures"
    }
    faults = [f"{results / name}: was deleted" for name in sorted(index.keys() - present)]
    faults += [
        f"{results / name}: edited: its sha256 is not the one in index.json"
        for name in sorted(present & index.keys())
        if sha256_file(results / name) != index[name]
    ]
    faults += [
        f"{results / name}: not in index.json; needed: report.py add"
        for name in sorted(present - index.keys())
        if not NO_RECORD.fullmatch(name)
    ]
    faults += [
        f"{results / name}: its name is not the sha256 of its content"
        for name, checksum in index.items()
        if name.startswith(f"{WEIGHTS}/") and Path(name).stem != checksum
    ]
    seen: dict[str, list[Record]] = {}  # sha256 of metrics -> the records that have them
    first_seed: dict[str, Record] = {}  # variant -> its first record
    for name in [name for name in index if name.endswith(RECORD)] if not faults else ():
        try:
            run = load_run(results, folder := Path(name).parent.name)
            if run.record != run.record.model_copy(update=summary(run.rows, run.record.steps)):
                faults.append(f"{results / name}: not what {STEPS} says")
            if run.record.id != folder:
                faults.append(f"{results / name}: id: found {run.record.id}; needed: {folder}, the name of the folder")
            faults += [f"{results / name}: {fault}" for fault in contradictions(run)]
            if changed := differing(first_seed.setdefault(run.record.group, run.record), run.record):
                faults.append(f"{results / name}: no seed of {run.record.group}: {'; '.join(changed)}")
            others = seen.setdefault(run.record.files[METRICS], [])
            if repeated := [other.id for other in others if same_run(other, run.record)]:
                faults.append(f"{results / name}: its metrics are those of {repeated[0]}; needed: a run of its own")
            others.append(run.record)
        except (InputError, KeyError, TypeError) as error:
            faults.append(f"{results / name}: {error}")
    return faults


def history(results: Path) -> tuple[list[str], str]:
    """Compare the records with the commits of this repository.  -> (one sentence per fault, what was compared)

    A record may be added, and never changed or deleted afterwards, in a commit or in the working tree. The comparison
    starts at the oldest commit whose subject begins with CONVERSION, which brought all older records into this format.
    A shallow clone is compared as far as its commits reach.
    """
    log = git("log", "--format=%H %s", "--", ".", folder=results).decode()
    if not log:
        return [], "no git history to compare with"
    conversions = [line.split()[0] for line in log.splitlines() if line.partition(" ")[2].startswith(CONVERSION)]
    commits = f"{conversions[-1]}..HEAD" if conversions else "HEAD"
    changes = ["-c", "--no-renames", "--relative", "--name-status"]  # -c: of a merge, what differs from all its parents
    listed = git("log", *changes, "--format=commit %h", commits, "--", ".", folder=results).decode()
    unsaved = git("diff", "HEAD", *changes[1:], "--", ".", folder=results).decode()
    faults, where = [], ""
    for line in [*listed.splitlines(), "the working tree", *unsaved.splitlines()]:
        status, tab, name = line.rpartition("\t")
        if not tab:
            where = line or where
        elif KEPT.fullmatch(name) and status.strip("A"):
            faults.append(f"{results / name}: changed or deleted by {where}; records are never replaced")
    number = sum(line.startswith("commit ") for line in listed.splitlines())
    shallow = git("rev-parse", "--is-shallow-repository", folder=results).strip() == b"true"
    return faults, f"commits compared: {number}{', a shallow clone has no older ones' if shallow else ''}"
