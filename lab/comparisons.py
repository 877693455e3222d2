"""Same or different, and why: a repeat against its record byte for byte, variants against each other with intervals.

python report.py compare seed0 out/seed0-20260101-120000     a repeat of a run against its record
python report.py compare baseline aqn_weak aqn_strong        groups of seeds: each variant against the first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from input_files import InputError
from lab import records
from lab import statistics as paired
from lab.records import Record
from run_record import read_lines

ALPHA = 0.05
DRAWS = 2000  # of the bootstrap


@dataclass(frozen=True)
class Source:
    """A record and the folder that holds its files."""

    record: Record
    folder: Path


def find(results: Path, name: str) -> list[Source]:
    """The record, the group of records, or the run folder that ``name`` names, ordered by seed."""
    known = records.load_all(results)
    found = [r for r in known if r.id == name] or [r for r in known if r.group == name]
    if not found and (Path(name) / "finished.json").exists():
        return [Source(records.derive(Path(name), Path(name).name), Path(name))]
    if not found:
        there = sorted({r.group for r in known} | {r.id for r in known})
        raise InputError(f"{name}: no record, group or finished run; there are: {', '.join(there) or 'no records'}")
    return [Source(record, results / record.id) for record in found]


# -------------------------------------------------------------------------------------------------------- byte for byte


def repeat(first: Source, second: Source) -> tuple[str, int] | None:
    """What two runs of one computation say, and the exit code; None when something allows them to differ.

    On a CPU the same configuration, layout, versions and processor must give the same bytes: anything else is a defect.
    """
    a, b = first.record, second.record
    if a.config_hash != b.config_hash or a.layout != b.layout:
        return None
    if a.files["metrics.jsonl"] == b.files["metrics.jsonl"]:
        if a.files["eval_outcomes.jsonl"] == b.files["eval_outcomes.jsonl"]:
            return f"same: the metrics of all {a.steps} steps and the answers to all questions are byte-identical", 0
        return "different, and it should not be: the metrics are byte-identical, the answers to questions are not", 1
    where = _first_difference(first, second)
    if excuses := _excuses(a, b):
        return f"not byte-identical ({where}), as may be: {'; '.join(excuses)}", 0
    return f"different, and it should not be: {where}; configuration, layout, versions and processor are the same", 1


def _excuses(a: Record, b: Record) -> list[str]:
    """What may change the last bits of two runs of one configuration."""
    found = []
    if "cpu" not in (a.machine.device, b.machine.device) or a.machine.device != b.machine.device:
        found.append(f"devices {a.machine.device}, {b.machine.device}: accelerators add in any order")
    for what in ("cpu", "python", "versions", "variables"):
        old, new = getattr(a.machine, what), getattr(b.machine, what)
        if old != new:
            changed = sorted(k for k in {**old, **new} if old.get(k) != new.get(k)) if isinstance(old, dict) else []
            found.append(f"{what} {', '.join(changed) or f'{old}, {new}'}")
    if a.commit != b.commit:
        found.append(f"commits {a.commit[:7]}, {b.commit[:7]}")
    if a.inputs != b.inputs:
        found.append("other model or data files")
    return found


def _first_difference(first: Source, second: Source) -> str:
    pairs = zip(*(read_lines(source.folder / "metrics.jsonl") for source in (first, second)), strict=False)
    for a, b in pairs:
        for key in {**a, **b}:
            if a.get(key) != b.get(key):
                return f"first at step {a['step'] + 1}, {key}: {a.get(key)} and {b.get(key)}"
    return "in how the numbers are written"


# ------------------------------------------------------------------------------------------------------- with intervals


@dataclass(frozen=True)
class Comparison:
    """One variant against the base, in shares of questions (0.01 is one point)."""

    base: str
    other: str
    changed: list[str]  # settings in which they differ
    seeds: list[int]  # paired: trained under both
    questions: int
    mean: float
    low: float  # 95 % interval of this comparison alone
    high: float
    bootstrap_error: float
    error: float
    p: float  # corrected for the number of comparisons
    num_comparisons: int
    detectable: float  # smallest effect that is found with 80 % power, at the corrected level
    by_seed: list[tuple[int, int, int, float]]  # seed, questions better, worse, p-value of exact McNemar
    notes: list[str]

    @property
    def verdict(self) -> str:
        """In words; a winner only where the corrected p-value and the number of seeds allow one."""
        if len(self.seeds) < paired.MIN_SEEDS:
            return f"not decided: {len(self.seeds)} paired seed{'s' * (len(self.seeds) > 1)} of {paired.MIN_SEEDS}"
        if self.p < ALPHA:
            return f"different: {self.other} is {'better' if self.mean > 0 else 'worse'}"
        return "not different: inside the noise"


def scores(source: Source, kind: str, step: int | None = None) -> np.ndarray:
    """Score of every question after ``step`` steps (the last by default).  -> (n,)"""
    found = records.outcomes(source.folder, source.record.steps if step is None else step)
    if kind not in found:
        raise InputError(f"{source.record.id}: no {kind} answers (eval.samples is 0); there are: greedy")
    return np.array(found[kind], dtype=float)


def gain(group: Sequence[Source], kind: str) -> paired.Effect:
    """What training did: last evaluation minus first, over the seeds and questions of one variant."""
    return paired.effect(np.stack([scores(one, kind) - scores(one, kind, 0) for one in group]))


def compare(groups: dict[str, list[Source]], kind: str = "sampled") -> list[Comparison]:
    """Every group against the first, paired by seed and question; p-values corrected by Holm over all of them."""
    (base_name, base), *others = groups.items()
    drafts = [_draft(base_name, base, name, group, kind, len(others)) for name, group in others]
    corrected = paired.holm([p for _, p in drafts])
    return [Comparison(**fields, p=p) for (fields, _), p in zip(drafts, corrected, strict=True)]


def _draft(base_name: str, base: list[Source], name: str, group: list[Source], kind: str, m: int):
    """The fields of a Comparison but the corrected p-value, and the p-value."""
    by_seed = [{one.record.seed: one for one in side} for side in (base, group)]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    if not seeds:
        raise InputError(f"{base_name}, {name}: no common seed; needed: runs of both with the same train.seed")
    pairs = [(by_seed[0][seed], by_seed[1][seed]) for seed in seeds]
    rows = []
    for a, b in pairs:
        _same_questions(a, b)
        rows.append(scores(b, kind) - scores(a, kind))
    _same_questions(pairs[0][0], pairs[-1][0])
    differences = np.stack(rows)  # (S, n)
    found = paired.effect(differences)
    low, high = found.interval()
    error, freedom = float(found.error), float(found.freedom)
    better, worse = (differences > 0).sum(1), (differences < 0).sum(1)
    weights = paired.bootstrap_weights(*differences.shape, draws=DRAWS)
    exact = paired.mcnemar_exact(better, worse)
    fields = dict(
        base=base_name,
        other=name,
        changed=records.differing(pairs[0][0].record, pairs[0][1].record),
        seeds=seeds,
        questions=differences.shape[1],
        mean=float(found.mean),
        low=float(low),
        high=float(high),
        error=error,
        bootstrap_error=float(paired.bootstrap_error(differences, weights)),
        num_comparisons=m,
        detectable=paired.detectable(error, freedom, ALPHA / m),
        by_seed=list(zip(seeds, better.tolist(), worse.tolist(), exact.tolist(), strict=True)),
        notes=_notes(base, group, pairs),
    )
    return fields, float(found.p_value())


def _same_questions(a: Source, b: Source) -> None:
    """InputError unless both were asked the same questions: else there is nothing to pair."""
    gold = [
        [row["gold"] for row in read_lines(one.folder / "eval_outcomes.jsonl") if row["step"] == one.record.steps]
        for one in (a, b)
    ]
    if gold[0] != gold[1]:
        raise InputError(
            f"{a.record.id}, {b.record.id}: other questions ({len(gold[0])} and {len(gold[1])}); needed: the same data "
            "and eval.num_questions"
        )


def _notes(base: list[Source], group: list[Source], pairs: list[tuple[Source, Source]]) -> list[str]:
    """What a reader must know of how the pairs were made."""
    notes = []
    if unpaired := len(base) + len(group) - 2 * len(pairs):
        notes.append(f"{unpaired} runs have no partner of the same seed and are left out")
    if any(a.record.inputs.model != b.record.inputs.model for a, b in pairs):
        notes.append("the pairs started from other weights")
    if len({one.record.commit for pair in pairs for one in pair}) > 1:
        notes.append("the runs are of several commits")
    return notes


def sentences(found: Comparison, kind: str) -> str:
    """A comparison as text for a terminal."""
    s = len(found.seeds)
    lines = [
        f"{found.other} against {found.base}: {'; '.join(found.changed) or 'same settings'}",
        f"  {kind} accuracy {100 * found.mean:+.1f} points, 95 % interval {100 * found.low:+.1f} to "
        f"{100 * found.high:+.1f} ({s} paired seed{'s' * (s > 1)} x {found.questions:,} questions)",
        f"  standard error {100 * found.error:.2f} points; two-level bootstrap {100 * found.bootstrap_error:.2f}",
        f"  {found.verdict}; p = {found.p:.3g}, Holm over {found.num_comparisons}; the design finds "
        f"{100 * found.detectable:.1f} points or more with 80 % power",
    ]
    for seed, better, worse, p in found.by_seed:
        lines.append(f"  seed {seed}, these weights only: {better} better, {worse} worse, exact McNemar p = {p:.3g}")
    return "\n".join(lines + [f"  note: {note}" for note in found.notes])
