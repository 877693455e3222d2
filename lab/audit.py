"""What only the history tells about the records: commits that exist, runs that were announced, nothing taken away.

`faults` looks up the commits of the records, and the plan as it was at these commits. `against` compares the records
with those of an earlier commit. Both need git; without it, or in a shallow clone, the first says what it left out.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from input_files import InputError, parse_yaml, read_bytes, read_text, shown
from lab.records import Run
from lab.store import KEPT, Benchmark, benchmarks_by_script, load_groups, read_index
from run_record import git

PLAN = "plan.yaml"
Read = Callable[[str], str]  # a path relative to results/ -> the text of the file, empty if there is none


def faults(results: Path) -> tuple[list[str], str]:
    """One sentence for each run or benchmark whose commit or announcement is missing; and what was looked up."""
    groups, benchmarks = load_groups(results), benchmarks_by_script(results)
    named: dict[str, Run | Benchmark] = {}
    for measured in benchmarks.values():
        named |= {f"benchmarks/{name}.json": one for name, one in measured.items()}
    named |= {f"{run.record.id}/record.json": run for runs in groups.values() for run in runs}
    commits = {name: one.record.commit if isinstance(one, Run) else one.commit for name, one in named.items()}
    known, compared = _history(results)
    found = []
    if known:
        found += [
            f"{results / name}: commit: {commit} is not in the history of HEAD; needed: the commit that was run"
            for name, commit in commits.items()
            if commit not in known
        ]
    return found + _not_as_announced(results, groups, known), compared


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
    today, found = announced(_working_tree(results)), []
    ran = {run.record.commit for runs in groups.values() for run in runs} & known
    sweeps = sorted({entry["sweep"] for entry in today if entry.get("sweep")})
    plans = {}
    for commit in ran:
        read = _revision(results, commit)
        plans[commit] = announced(read) + [entry for sweep in sweeps for entry in _of_sweep(read, sweep)]
    found += _changed_families(results, today, groups, plans)
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
    return found


def _changed_families(
    results: Path, today: list[dict[str, Any]], groups: dict[str, list[Run]], plans: dict[str, list[dict[str, Any]]]
) -> list[str]:
    """One sentence for each family whose entries are others than when its runs were made.

    The number of its entries decides how p-values are corrected, and its predictions are worth something only if they
    are older than the runs. Seeds may be announced, and reasons of missing runs given, later.
    """

    def entries(plan: list[dict[str, Any]], family: str) -> list[dict[str, Any]]:
        later = {"seeds": None, "missing": None, "sweep": None}
        return sorted((entry | later for entry in plan if entry.get("family") == family), key=str)

    found = []
    for family in sorted({entry["family"] for entry in today if entry.get("family")}):
        now = entries(today, family)
        ran = {run.record.commit for entry in now for name in entry["others"] for run in groups.get(name, ())}
        found += [
            f"{results / PLAN}: family {family}: not as announced at commit {commit[:7]}, which made its runs"
            for commit in sorted(ran & plans.keys())
            if entries(plans[commit], family) != now
        ]
    return found


def _seeds(plan: list[dict[str, Any]], name: str) -> set[int]:
    """The seeds that the comparisons of a plan announce for a group."""
    return {seed for entry in plan if name in (entry["base"], *entry["others"]) for seed in entry["seeds"] or ()}


# -------------------------------------------------------------------------------------------- against an earlier commit


def against(results: Path, revision: str) -> list[str]:
    """One sentence for each record, index line or begun comparison of ``revision`` that was changed or taken away.

    InputError if the revision is not in this repository.
    """
    commit = git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", folder=results).decode().strip()
    if not commit:
        raise InputError(f"--against: found {revision!r}; needed: a commit of this repository (not of a shallow clone)")
    found, where = [], f"{commit[:7]} ({revision})"
    for entry in git("ls-tree", "-r", "-z", commit, "--", ".", folder=results).decode().split("\0")[:-1]:
        about, name = entry.split("\t", 1)
        if KEPT.fullmatch(name):
            path, blob = results / name, about.split()[2]
            if not path.is_file():
                found.append(f"{path}: was deleted; it is in {where}")
            elif _blob(read_bytes(path), blob) != blob:
                found.append(f"{path}: edited; it is another file in {where}")
    read, index = _revision(results, commit), read_index(results)
    before = json.loads(read("index.json") or "{}")
    found += [
        f"{results / 'index.json'}: the line of {name} is not the one in {where}"
        for name in before
        if KEPT.fullmatch(name) and index.get(name) != before[name]
    ]
    recorded = {name.split("/")[0] for name in before if name.endswith("/record.json")}
    variants = {re.sub(r"-seed\d+$", "", name) for name in recorded}
    today = [entry | {"missing": None} for entry in announced(_working_tree(results))]  # reasons may be added later
    found += [
        f"{results / PLAN}: {entry['title']}: not as announced in {where}, and its runs exist"
        for entry in announced(read)
        if begun(entry, variants) and entry | {"missing": None} not in today
    ]
    return found


def _blob(content: bytes, like: str) -> str:
    """The name that git gives to a file of this content, by the hash function that made ``like``."""
    kind = hashlib.sha1 if len(like) == 40 else hashlib.sha256
    return kind(b"blob %d\0" % len(content) + content).hexdigest()
