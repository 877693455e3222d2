"""Whether the records are true: what they say of themselves, and what only the history of git tells about them.

`check` compares each record with itself and with the others. `faults` looks up the commits of the records: their plan,
and whether their program accepts the configurations. `history` compares the records with every version that git has,
and `against` with those of one commit. The last three need git; without it, or in a shallow clone, they say what they
left out.
"""

import hashlib
import io
import itertools
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inputs.files import InputError, parse_yaml, read_text, shown
from lab.records import Record, Run, summary
from lab.store import (
    Content,
    clash,
    content_of,
    contradictions,
    files,
    load_benchmarks,
    load_groups,
    load_runs,
    load_weights,
    sealed,
)
from run_record import git, variant_name

PLAN = "plan.yaml"
# A program that runs beside knobs.py of another commit: which of the configurations {id: configuration} does it refuse?
VALIDATE = """
import json, sys
sys.path.insert(0, "")
from knobs import Config
refused = {}
for name, configuration in json.load(sys.stdin).items():
    try:
        Config.model_validate(configuration)
    except ValueError as error:
        refused[name] = " ".join(str(error).split())[:200]
print(json.dumps(refused))
"""
LATER = {"seeds": None, "missing": None, "sweep": None}  # what an entry may be given after its runs
Read = Callable[[str], str]  # a path relative to results/ -> the text of the file, empty if there is none


def check(results: Path) -> list[str]:
    """One sentence for each record that contradicts itself or another one, and for each file that was edited."""
    faults = [
        f"{results}: a kept file of a model was edited: its name is not its sha256 ({name[:12]})"
        for name, content in load_weights(results).items()
        if hashlib.sha256(content).hexdigest() != name
    ]
    known: list[Record] = []
    for run in load_runs(results).values():
        record = run.record
        try:
            if record != record.model_copy(update=summary(run.rows, record.steps)):
                faults.append(f"{record.id}: not what its steps say")
            faults += [f"{record.id}: {fault}" for fault in [*contradictions(run), clash(record, known)] if fault]
            known.append(record)
        except (InputError, KeyError, TypeError) as error:
            faults.append(f"{record.id}: {error}")
    return faults


def faults(results: Path) -> tuple[list[str], str]:
    """One sentence for each run or benchmark whose commit or announcement is missing; and what was looked up."""
    groups, (known, compared) = load_groups(results), _history(results)
    named = {f"run {run.record.id}": run.record.commit for runs in groups.values() for run in runs}
    named |= {f"benchmark {name}": one.commit for name, one in load_benchmarks(results).items()}
    found = [
        f"{results}: {name}: commit: {commit} is not in the history of HEAD; needed: the commit that was run"
        for name, commit in named.items()
        if known and commit not in known
    ]
    runs = [run for each in groups.values() for run in each if run.record.commit in known]
    return [*found, *_refused(results, runs), *_not_as_announced(results, groups, known)], compared


def _refused(results: Path, runs: list[Run]) -> list[str]:
    """One sentence for each run whose configuration the program of its commit refuses: it cannot have made the run."""
    found, root = [], Path(git("rev-parse", "--show-toplevel", folder=results).decode().strip())
    for commit in sorted({run.record.commit for run in runs}):
        chosen = {run.record.id: run.record.config for run in runs if run.record.commit == commit}
        archive = git("archive", "--format=zip", commit, "--", "*.py", folder=root)
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(io.BytesIO(archive)) as files_of_commit:
                files_of_commit.extractall(folder)
            command = [sys.executable, "-c", VALIDATE]
            done = subprocess.run(command, cwd=folder, input=json.dumps(chosen), capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip() or "no message").splitlines()[-1]
            found.append(f"{results}: the configurations of commit {commit[:7]} cannot be checked: {said}")
            continue
        found += [
            f"{results}: run {name}: the program of commit {commit[:7]} refuses its configuration: {said}"
            for name, said in json.loads(done.stdout).items()
        ]
    return found


def _history(results: Path) -> tuple[set[str], str]:
    """The commits up to HEAD, empty if not all are here; and a sentence about it."""
    known = set(git("rev-list", "HEAD", folder=results).decode().split())
    if not known:
        return set(), "no git: commits of runs not looked up"
    if git("rev-parse", "--is-shallow-repository", folder=results).strip() == b"true":
        return set(), "a shallow clone: commits of runs not looked up"
    return known, "commits of runs found"


# ----------------------------------------------------------------------------------------------------- announcements


def _working_tree(results: Path) -> Read:
    return lambda name: read_text(path) if (path := results / name).is_file() else ""


def _revision(results: Path, commit: str) -> Read:
    return lambda name: git("show", f"{commit}:./{name}", folder=results).decode()


def _mapping(text: str, where: str) -> dict[str, Any]:
    """The mapping in a YAML text, empty for an empty text; InputError for anything else."""
    if not isinstance(tree := parse_yaml(text, where) or {}, dict):
        raise InputError(f"{where}: expected a mapping, found {shown(tree)}")
    return tree


def announced(read: Read) -> list[dict[str, Any]]:
    """The comparisons of a plan, each with its seeds: its own, or those of its sweep, or None if it names neither.

    The plan may be of an older version, so only the fields that are needed here are read.
    """
    entries = []
    for entry in _mapping(read(PLAN), PLAN).get("comparisons") or ():
        seeds = entry.get("seeds")
        if seeds is None and entry.get("sweep"):
            seeds = _mapping(read(f"../{entry['sweep']}"), entry["sweep"]).get("seeds", [])
        entries.append(entry | {"seeds": seeds})
    return entries


def _of_sweep(read: Read, sweep: str) -> list[dict[str, Any]]:
    """A sweep file as an announcement of its variants and seeds; none if there was no such file."""
    tree = _mapping(read(f"../{sweep}"), sweep)
    names = list(tree.get("variants") or ())
    return [{"base": names[0], "others": names[1:], "seeds": tree["seeds"]}] if names else []


def begun(entry: dict[str, Any], groups: dict[str, Any] | set[str]) -> list[str]:
    """The groups of a comparison that have records; none before the first record of a group other than the base."""
    return [name for name in (entry["base"], *entry["others"]) if name in groups] * any(
        name in groups for name in entry["others"]
    )


def _not_as_announced(results: Path, groups: dict[str, list[Run]], known: set[str]) -> list[str]:
    """Seeds that were announced and have no record, and records that were not announced when they ran.

    What was announced is in the plan and the sweeps of today, and in those at the commits that were run; the latter
    count, because a plan that was changed after the run announces nothing.
    """
    now, found = _working_tree(results), []
    today = announced(now)
    sweeps = sorted({entry["sweep"] for entry in today if entry.get("sweep")})
    plans = {}
    for commit in {run.record.commit for runs in groups.values() for run in runs} & known:
        read = _revision(results, commit)
        plans[commit] = announced(read) + [entry for sweep in sweeps for entry in _of_sweep(read, sweep)]
        found += _shorter_gains(results, read, now, commit[:7])
    for entry in today:
        family = entry.get("family")
        ran = {run.record.commit for name in entry["others"] for run in groups.get(name, ())} & plans.keys()
        found += [
            f"{results / PLAN}: {f'family {family}' if family else entry['title']}: not as announced at commit "
            f"{commit[:7]}, which made its runs"
            for commit in sorted(ran)
            if not _as_announced(entry, today, plans[commit])
        ]
    missing = {line.partition(":")[0] for entry in today for line in entry.get("missing", ())}
    for name in dict.fromkeys(name for entry in today for name in begun(entry, groups)):
        runs = groups[name]
        then = [plans[run.record.commit] for run in runs if run.record.commit in plans]
        needed = _seeds([entry for plan in (today, *then) for entry in plan if begun(entry, groups)], name)
        there = {run.record.seed for run in runs}
        found += [
            f"{results / f'{name}-seed{seed}'}: no record of an announced seed; needed: the record, or the reason in "
            f"{results / PLAN} (missing)"
            for seed in sorted(needed - there)
            if f"{name}-seed{seed}" not in missing
        ]
        for run in runs:
            plan = plans.get(run.record.commit, today)
            where = f"at commit {run.record.commit[:7]}" if run.record.commit in plans else "today"
            if not any(name in (entry["base"], *entry["others"]) for entry in plan):
                found.append(f"{results / run.record.id}: {PLAN} and its sweeps did not announce {name} {where}")
            elif (seeds := _seeds(plan, name)) and run.record.seed not in seeds:
                found.append(
                    f"{results / run.record.id}: seed: found {run.record.seed}; announced {where}: {sorted(seeds)}"
                )
    return list(dict.fromkeys(found))


def _as_announced(entry: dict[str, Any], today: list[dict[str, Any]], then: list[dict[str, Any]]) -> bool:
    """Whether a comparison, or the whole family to which it belongs, is what it was in the plan of its runs.

    The number of the entries of a family decides how p-values are corrected, and its predictions are worth something
    only if they are older than the runs. Seeds may be announced, and reasons of missing runs given, later.
    """
    if entry.get("family"):
        now, before = (
            sorted((each | LATER for each in plan if each.get("family") == entry["family"]), key=str)
            for plan in (today, then)
        )
        return now == before
    similar = [
        each | LATER | {"title": None}
        for each in then
        if "title" in each and each["base"] == entry["base"] and {*each["others"]} & {*entry["others"]}
    ]
    return not similar or entry | LATER | {"title": None} in similar


def _seeds(plan: list[dict[str, Any]], name: str) -> set[int]:
    """The seeds that the comparisons of a plan announce for a group."""
    return {seed for entry in plan if name in (entry["base"], *entry["others"]) for seed in entry["seeds"] or ()}


# ----------------------------------------------------------------------------------------------- what was there before


def seals(content: Content) -> dict[str, str]:
    """A name for each run and benchmark of a file, and the sha256 of everything that it holds."""
    texts = {f"benchmark {name}": one.model_dump_json() for name, one in content.benchmarks.items()}
    found = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    return found | {f"run {name}": sealed(run) for name, run in content.runs.items()}


def _today(results: Path) -> dict[str, str]:
    return {name: seal for content in files(results).values() for name, seal in seals(content).items()}


def _lost(today: dict[str, str], before: dict[str, str]) -> dict[str, str]:
    """What became of each earlier record that is not in the folder as it was."""
    return {name: "changed" if name in today else "not here" for name in before if today.get(name) != before[name]}


def history(results: Path) -> tuple[list[str], str]:
    """Compare the records with every version that git has of them.  -> (one sentence per fault, what was compared)

    A record may be added, and never changed or deleted afterwards: in a commit, in a merge, or in the working tree. A
    file may be merged with others. A shallow clone is compared as far as its commits reach.
    """
    options = ["-m", "--raw", "--no-abbrev", "--no-renames", "--format=%x00%h"]  # -m: a merge against each parent
    log = git("log", *options, "HEAD", "--", "*.parquet", folder=results).decode()
    if not log:
        return [], "no git history to compare with"
    commits = [text.splitlines() for text in log.split("\0")[1:]]
    blobs: dict[str, str] = {}  # name that git gives to a version of a file -> the newest commit that has or removes it
    for commit, *lines in commits:
        for blob in itertools.chain(*(line.split()[2:4] for line in lines)):
            blobs.setdefault(blob, commit)
    today, found = _today(results), {}
    for blob, commit in blobs.items():
        if blob.strip("0"):
            before = seals(content_of(git("cat-file", "blob", blob, folder=results), f"commit {commit}"))
            found |= {
                name: f"{results}: {name}: {fault}; it is in the history until commit {commit}"
                for name, fault in _lost(today, before).items()
            }
    shallow = git("rev-parse", "--is-shallow-repository", folder=results).strip() == b"true"
    return [*found.values()], f"commits compared: {len(commits)}{', a shallow clone has no older ones' * shallow}"


def against(results: Path, revision: str) -> list[str]:
    """One sentence for each record or begun comparison of ``revision`` that was changed or taken away.

    InputError if the revision is not in this repository.
    """
    commit = git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", folder=results).decode().strip()
    if not commit:
        raise InputError(f"--against: found {revision!r}; needed: a commit of this repository (not of a shallow clone)")
    where, before = f"{commit[:7]} ({revision})", _records_at(results, commit)
    found = [f"{results}: {name}: {fault}; it is in {where}" for name, fault in _lost(_today(results), before).items()]
    read, now = _revision(results, commit), _working_tree(results)
    variants = {variant_name(name.removeprefix("run ")) for name in before}
    entries = [entry | {"missing": None} for entry in announced(now)]  # reasons may be added later
    found += [
        f"{results / PLAN}: {entry['title']}: not as announced in {where}, and its runs exist"
        for entry in announced(read)
        if begun(entry, variants) and entry | {"missing": None} not in entries
    ]
    return found + _shorter_gains(results, read, now, where)


def _shorter_gains(results: Path, read: Read, now: Read, where: str) -> list[str]:
    """A group whose gain was to be stated stays among the findings, whatever its runs found."""
    before, today = (_mapping(each(PLAN), PLAN).get("gains") or () for each in (read, now))
    return [f"{results / PLAN}: gains: {name} is not here; it is in {where}" for name in before if name not in today]


def _records_at(results: Path, commit: str) -> dict[str, str]:
    """The seals of the records of a commit. InputError for a commit of before version 0.2, which had other files."""
    names = git("ls-tree", "--name-only", commit, folder=results).decode().split("\n")
    if "index.json" in names:
        raise InputError(
            f"--against: {commit[:7]} has its records in folders; needed: a commit of version 0.2 or later"
        )
    contents = {name: git("show", f"{commit}:./{name}", folder=results) for name in names if name.endswith(".parquet")}
    return {name: seal for file, content in contents.items() for name, seal in seals(content_of(content, file)).items()}
