"""The folder results/: adding runs and benchmarks, reading them, and merging their files.

    results/<name>.parquet      runs, one row a step; or benchmarks, one row each; or start weights, one row a file

`add` writes one file for a run or a benchmark, which nobody changes; `compact` merges such files into one.
lab/tables.py says what the columns are, and `pandas.read_parquet("results/bench.parquet")` reads a file. What was
changed or taken away is told by the history of git alone (lab/audit.py). This file needs no torch.
"""

import functools
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

from config import MAY_CHANGE, flatten, hash_of
from input_files import (
    UNFINISHED,
    InputError,
    dump_yaml,
    finish_folder,
    fresh_folder,
    read_bytes,
    read_object,
    shown,
)
from lab.records import AXES, GOLD, ID, LARGEST_MIB, MARKS, RIGHT, Record, Run, file_of, from_run, summary, validated
from lab.tables import Benchmark, Content, content_of, sealed, table_of, table_of_benchmarks, table_of_weights
from run_record import RECORDED, json_line, sha256_file, write_atomically

LARGEST_MODEL_MIB = 4  # the tiny model of configs/tiny_cpu.yaml has 1.1
# Settings that differ between the seeds of one variant, and settings that do not change the result. Runs that differ in
# any other setting are different variants.
SEEDS = {"name", "train.seed", "tiny_model.seed", "data.seed"}
BOOKKEEPING = {key for key in MAY_CHANGE if key.split(".")[0] in ("train", "checks", "device")}
PRIVATE = re.compile(r"(?<![\w.~}])/(?:[h]ome|[U]sers|[r]oot)/\w")


# ------------------------------------------------------------------------------------------------------------- reading


@functools.lru_cache(maxsize=64)
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
        for run in content.runs:
            if (other := found.setdefault(run.record.id, run)) is not run and sealed(other) != sealed(run):
                raise InputError(f"{path}: {run.record.id}: another file of this folder holds another run of this id")
    return found


def load_run(results: Path, record_id: str) -> Run:
    """One record with its steps; InputError when it is missing or cannot be read."""
    runs = load_runs(results)
    if record_id not in runs:
        raise InputError(f"{results}: {record_id}: no such record; there are: {', '.join(sorted(runs)) or 'none'}")
    return runs[record_id]


def load_groups(results: Path) -> dict[str, list[Run]]:
    """Variant -> its runs in order of their seeds."""
    runs = sorted(load_runs(results).values(), key=lambda run: (run.record.group, run.record.seed, run.record.id))
    return {name: list(group) for name, group in itertools.groupby(runs, key=lambda run: run.record.group)}


def load_benchmarks(results: Path) -> dict[str, Benchmark]:
    """id -> benchmark, the newest last."""
    found = {name: one for content in files(results).values() for name, one in content.benchmarks.items()}
    return dict(sorted(found.items(), key=lambda each: each[1].place))


def benchmarks_by_script(results: Path) -> dict[str, dict[str, Benchmark]]:
    """Name of the script, with its subcommand and its cases if given -> id -> what it measured, the newest last."""
    found: dict[str, dict[str, Benchmark]] = {}
    for name, benchmark in load_benchmarks(results).items():
        script = re.search(r"(\w+)\.py( [a-z]\w*)?( --cases( \w+)+)?", benchmark.command)
        key = script[1] + (script[2] or "") + (script[3] or "") if script else name
        found.setdefault(key, {})[name] = benchmark
    return dict(sorted(found.items()))


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


def add_run(run_dir: Path, results: Path, record_id: str = "") -> Path:
    """Write the record of a finished run to results/<id>.parquet. A refused run leaves nothing behind.  -> the file

    The id is the run's name by default. Of the completions, those of the first and the last step are kept as a sample.
    InputError for a run that may not become a record, for the id of another record, and for a seed of a variant whose
    other seeds have other settings. The same run may be added again, and then nothing changes.
    """
    size = sum(path.stat().st_size for each in RECORDED for path in run_dir.glob(each) if path.is_file()) / 2**20
    if size > LARGEST_MIB:
        raise InputError(f"{run_dir}: {size:.0f} MiB; needed: at most {LARGEST_MIB} (train.completions_logged)")
    run = from_run(run_dir, record_id or str(read_object(run_dir / "run.json").get("name")))
    record, sample = run.record, (0, run.record.steps - 1)
    rows = [{key: row[key] for key in row if key != "completions" or row["step"] in sample} for row in run.rows]
    run = Run(record, rows)
    content, target = table_of([run]), results / f"{record.id}.parquet"
    _refuse_private(json.dumps(record.model_dump(mode="json")), run_dir)
    if faults := contradictions(run):
        raise InputError(f"{run_dir}: {faults[0]}")
    there = load_runs(results)
    if record.id in there and sealed(there[record.id]) == sealed(run):
        return target
    _refuse_another(target, record.id, {*there, *load_benchmarks(results)})
    for other in (other.record for other in there.values()):
        if same_run(other, record):
            raise InputError(f"{record.id}: the metrics are those of {other.id}; needed: a run of its own")
        if other.group == record.group and (changed := differing(other, record)):
            raise InputError(f"{record.id}: no seed of {record.group}: {'; '.join(changed)}; needed: another id (--id)")
        if other.group == record.group and other.seed == record.seed:
            raise InputError(f"{record.id}: seed {record.seed} of {record.group} is there: {other.id}")
    results.mkdir(parents=True, exist_ok=True)
    write_atomically(target, content)
    return target


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
    same = [known for known, one in there.items() if one.model_copy(update={"place": found.place}) == found]
    numbered = (f"{path.stem}-{number}" for number in itertools.count(2))
    free = (each for each in itertools.chain([path.stem], numbered) if each not in there)
    name = name or next(iter(same), "") or next(free)
    target = results / f"{name}.parquet"
    if not re.fullmatch(ID, name):
        raise InputError(f"--id: found {name!r}; needed: letters, digits, . _ and -")
    if name in same:
        return target
    if same:
        raise InputError(f"{path}: is {same[0]} already; needed: another measurement")
    _refuse_another(target, name, {*there, *load_runs(results)})
    _refuse_private(json.dumps(found.model_dump(mode="json")), path)
    results.mkdir(parents=True, exist_ok=True)
    write_atomically(target, table_of_benchmarks({name: found}))
    return target


def _refuse_another(target: Path, name: str, taken: set[str]) -> None:
    if name in taken or target.exists():
        raise InputError(f"{target}: {name} exists; records are never replaced; needed: another id (--id)")


def _refuse_private(text: str, where: Path) -> None:
    if private := PRIVATE.search(text):
        raise InputError(f"{where}: {private[0]} is a private path; needed: paths inside the checkout")


def compact(results: Path, name: str, beginnings: list[str]) -> Path:
    """Merge the files whose names begin with one of ``beginnings`` into results/<name>.parquet.  -> the new file

    By default the names begin with ``name`` and then _ or -. InputError for files of several kinds. If the command is
    killed, the same command completes it: until the merged files are removed, their contents are there twice.
    """
    target, begins = results / f"{name}.parquet", tuple(beginnings or (f"{name}_", f"{name}-"))
    chosen = {path: kept for path, kept in files(results).items() if path == target or path.stem.startswith(begins)}
    runs = {run.record.id: run for kept in chosen.values() for run in kept.runs}
    benchmarks = {each: one for kept in chosen.values() for each, one in kept.benchmarks.items()}
    weights = {each: file for kept in chosen.values() for each, file in kept.weights.items()}
    if sum(map(bool, (runs, benchmarks, weights))) != 1:
        raise InputError(
            f"compact: found {len(runs)} runs, {len(benchmarks)} benchmarks and {len(weights)} files of models whose "
            f"names begin with {' or '.join(begins)}; needed: only one of these kinds"
        )
    load_runs(results)  # refuses two runs of one id
    order = sorted(runs.values(), key=lambda run: (run.record.group, run.record.seed))
    content = table_of(order) if runs else table_of_benchmarks(benchmarks) if benchmarks else table_of_weights(weights)
    write_atomically(target, content)
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
    write_atomically(target, table_of_weights(found))
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


def check(results: Path) -> list[str]:
    """One sentence for each record that contradicts itself or another one, and for each file that was edited."""
    faults = [
        f"{results}: a kept file of a model was edited: its name is not its sha256 ({name[:12]})"
        for name, content in load_weights(results).items()
        if hashlib.sha256(content).hexdigest() != name
    ]
    seen: dict[str, list[Record]] = {}  # sha256 of metrics -> the records that have them
    first_seed: dict[str, Record] = {}  # variant -> its first record
    for run in load_runs(results).values():
        record = run.record
        try:
            if record != record.model_copy(update=summary(run.rows, record.steps)):
                faults.append(f"{record.id}: not what its steps say")
            faults += [f"{record.id}: {fault}" for fault in contradictions(run)]
            if changed := differing(first_seed.setdefault(record.group, record), record):
                faults.append(f"{record.id}: no seed of {record.group}: {'; '.join(changed)}")
            others = seen.setdefault(record.files["metrics.jsonl"], [])
            if repeated := [other.id for other in others if same_run(other, record)]:
                faults.append(f"{record.id}: its metrics are those of {repeated[0]}; needed: a run of its own")
            others.append(record)
        except (InputError, KeyError, TypeError) as error:
            faults.append(f"{record.id}: {error}")
    return faults


def contradictions(run: Run) -> list[str]:
    """One sentence for each statement of a record that another part of it contradicts.

    An edited record no longer has its checksums. A record whose checksums were edited, too, counts as another record:
    only the history tells that it was not there first (lab/audit.py).
    """
    record = run.record
    config, train = record.config, record.config["train"]
    seed = re.search(r"-seed(\d+)$", record.id)
    said: dict[str, tuple[Any, Any]] = {  # field -> what it holds, what follows from the rest of the record
        "config_hash": (record.config_hash, hash_of(config)),
        "seed": (record.seed, train["seed"]),
        "id": (int(seed[1]) if seed else record.seed, record.seed),
        "steps": (record.steps, train["steps"]),
        "device": (record.device, config["device"]),
        "layout": (record.layout, _layout(record.environment.world_size, config["parallel"])),
    }
    faults = [
        f"{field}: found {found}; needed: {needed}, from the configuration"
        for field, (found, needed) in said.items()
        if found != needed
    ]
    texts = {
        "config.yaml": dump_yaml(config),
        "command.txt": record.command + "\n",
        "environment.json": json.dumps(record.environment.model_dump(mode="json"), indent=1) + "\n",
        "inputs.json": json.dumps(record.inputs.model_dump(mode="json"), indent=1) + "\n",
        "git.json": json.dumps({"commit": record.commit, "dirty": False}) + "\n",
        "run.json": json.dumps({"name": config["name"], "config_hash": record.config_hash}) + "\n",
        **unmerged(run.rows),
    }
    for name, text in texts.items():
        if record.files.get(name) != hashlib.sha256(text.encode()).hexdigest():
            faults.append(f"{name}: the record does not give the file whose sha256 it holds")
    data = record.inputs.data
    if "train" in data and data["train"] == data.get("test"):
        faults.append("inputs: the training data are the test data; needed: other questions")
    clean = hashlib.sha256(b"").hexdigest()
    patches = {"git.patch": None} | {name: known for name, known in record.files.items() if name.endswith("git.patch")}
    faults += [
        f"{name}: not the empty patch of a clean source; needed: a run of a commit without changes"
        for name, known in patches.items()
        if known != clean
    ]
    return faults


def _layout(ranks: int, parallel: dict[str, int]) -> dict[str, int]:
    return {"ranks": ranks} | {axis: parallel.get(axis, 1) for axis in AXES}


def unmerged(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The inverse of records.merged: the files of a run's folder that hold numbers, from the rows of its record."""
    texts = dict.fromkeys(("metrics.jsonl", "timing.jsonl", "eval.jsonl", "eval_outcomes.jsonl"), "")
    for row in rows:
        for name in ("metrics.jsonl", "timing.jsonl", "eval.jsonl"):
            line = {key: row[key] for key in row if file_of(key) == name and key not in ("step", "completions")}
            texts[name] += json_line({"step": row["step"], **line}) if line else ""
        greedy, sampled = (row.get(key, "") for key in MARKS.values())
        count = len(sampled) // max(len(greedy), 1)
        for place, answer in enumerate(greedy):
            samples = [float(mark == RIGHT) for mark in sampled[place * count : (place + 1) * count]]
            line = {"step": row["step"], "question": place, "gold": rows[0][GOLD][place]}
            texts["eval_outcomes.jsonl"] += json_line(line | {"greedy": float(answer == RIGHT), "sampled": samples})
    return texts
