"""Same or different: a repeat against its record byte for byte, and variants against each other with intervals.

python report.py compare seed0 out/seed0-20260101-120000     a repeat of a run against its record
python report.py compare baseline aqn_weak aqn_strong        groups of seeds: each variant against the first
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from input_files import InputError
from lab import statistics as paired
from lab.records import GOLD, Record, Run, file_of, from_run, scores
from lab.store import differing, load_groups

ALPHA = 0.05


def find(results: Path, name: str) -> list[Run]:
    """The record, the group of records, or the run folder that ``name`` names, ordered by seed."""
    groups = load_groups(results)
    runs = {run.record.id: [run] for group in groups.values() for run in group}
    if found := runs.get(name) or groups.get(name):
        return found
    if (Path(name) / "finished.json").exists():
        return [from_run(Path(name), Path(name).name)]
    there = ", ".join(sorted({*groups, *runs})) or "no records"
    raise InputError(f"{name}: no record, group or finished run; there are: {there}")


# -------------------------------------------------------------------------------------------------------- byte for byte


def repeat(first: Run, second: Run) -> tuple[str, int] | None:
    """How a run and its repeat compare, and the exit code; None when another configuration or layout was run.

    On a CPU the same configuration, layout, versions and processor must give the same bytes. Anything else is a defect.
    """
    a, b = first.record, second.record
    if a.config_hash != b.config_hash or a.layout != b.layout:
        return None
    if a.files["metrics.jsonl"] == b.files["metrics.jsonl"]:
        if a.files["eval_outcomes.jsonl"] == b.files["eval_outcomes.jsonl"]:
            return f"same: the metrics of all {a.steps} steps and the answers to all questions are byte-identical", 0
        return "different, and it should not be: the metrics are byte-identical, the answers to questions are not", 1
    where = _first_difference(first, second)
    if reasons := _reasons(a, b):
        return f"not byte-identical ({where}), which is allowed because of: {'; '.join(reasons)}", 0
    return f"different, and it should not be: {where}; configuration, layout, versions and processor are the same", 1


def _reasons(a: Record, b: Record) -> list[str]:
    """Differences that may change the last bits of two runs of one configuration."""
    old, new = a.environment, b.environment
    reasons = {
        f"devices {a.device}, {b.device}: accelerators add in any order": {a.device, b.device} != {"cpu"},
        f"cpu {old.cpu}, {new.cpu}": old.cpu != new.cpu,
        f"python {old.python}, {new.python}": old.python != new.python,
        f"versions {_changed(old.versions, new.versions)}": old.versions != new.versions,
        f"variables {_changed(old.variables, new.variables)}": old.variables != new.variables,
        f"commits {a.commit[:7]}, {b.commit[:7]}": a.commit != b.commit,
        "other model or data files": a.inputs != b.inputs,
    }
    return [text for text, holds in reasons.items() if holds]


def _changed(old: dict[str, str], new: dict[str, str]) -> str:
    return ", ".join(sorted({name for name, _ in old.items() ^ new.items()}))


def _first_difference(first: Run, second: Run) -> str:
    for a, b in zip(first.rows, second.rows, strict=False):
        for key in {**a, **b}:
            if file_of(key) == "metrics.jsonl" and key != "completions" and a.get(key) != b.get(key):
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
    effect: paired.Effect  # of this comparison alone
    p: float  # corrected for the number of comparisons
    num_comparisons: int
    detectable: float  # minimum detectable effect: 80 % power at the corrected level
    by_seed: list[tuple[int, int, int, float]]  # seed, questions better, worse, p-value of exact McNemar
    notes: list[str]

    @property
    def verdict(self) -> str:
        """In words. A variant is called better or worse only with a small p-value and with enough seeds."""
        if len(self.seeds) < paired.MIN_SEEDS:
            return f"not decided: {len(self.seeds)} paired seed{'s' * (len(self.seeds) > 1)} of {paired.MIN_SEEDS}"
        if self.p < ALPHA:
            return f"different: {self.other} is {'better' if self.effect.mean > 0 else 'worse'}"
        return "not different: inside the noise"


def gain(group: list[Run], kind: str) -> paired.Effect:
    """Last evaluation minus first, over the seeds and questions of one variant."""
    return paired.effect(np.stack([scores(run, kind) - scores(run, kind, 0) for run in group]))


def compare(groups: dict[str, list[Run]], kind: str = "sampled") -> list[Comparison]:
    """Each group against the first, paired by seed and question; p-values corrected by Holm over all of them."""
    (base_name, base), *others = groups.items()
    tables = [paired_differences(base_name, base, name, group, kind) for name, group in others]
    corrected = paired.holm([float(paired.effect(differences).p_value()) for _, differences in tables])
    found = []
    for (name, group), (pairs, differences), p in zip(others, tables, corrected, strict=True):
        effect, seeds = paired.effect(differences), [a.record.seed for a, _ in pairs]
        better, worse = (differences > 0).sum(1), (differences < 0).sum(1)
        exact = paired.mcnemar_exact(better, worse)
        found.append(
            Comparison(
                base=base_name,
                other=name,
                changed=differing(pairs[0][0].record, pairs[0][1].record),
                seeds=seeds,
                questions=differences.shape[1],
                effect=effect,
                p=p,
                num_comparisons=len(others),
                detectable=paired.detectable(float(effect.error), float(effect.freedom), ALPHA / len(others)),
                by_seed=list(zip(seeds, better.tolist(), worse.tolist(), exact.tolist(), strict=True)),
                notes=_notes(base, group, pairs),
            )
        )
    return found


def paired_differences(
    base_name: str, base: list[Run], name: str, group: list[Run], kind: str
) -> tuple[list[tuple[Run, Run]], np.ndarray]:
    """The pairs of runs with the same seed, and the scores of the second minus those of the first.  -> pairs, (S, n)"""
    partners = {run.record.seed: run for run in group}
    pairs = [(run, partners[run.record.seed]) for run in base if run.record.seed in partners]
    if not pairs:
        raise InputError(f"{base_name}, {name}: no common seed; needed: runs of both with the same train.seed")
    first = pairs[0][0]
    for run in itertools.chain(*pairs):
        gold, other = (one.rows[0].get(GOLD, []) for one in (first, run))
        if gold != other:
            raise InputError(
                f"{first.record.id}, {run.record.id}: other questions ({len(gold)} and {len(other)}); "
                "needed: the same data and eval.num_questions"
            )
    return pairs, np.stack([scores(b, kind) - scores(a, kind) for a, b in pairs])


def _notes(base: list[Run], group: list[Run], pairs: list[tuple[Run, Run]]) -> list[str]:
    """Limits of the comparison that follow from how the pairs were made."""
    unpaired = len(base) + len(group) - 2 * len(pairs)
    notes = [
        (unpaired, f"{unpaired} runs have no partner of the same seed and are left out"),
        (any(a.record.inputs.model != b.record.inputs.model for a, b in pairs), "the pairs started from other weights"),
        (len({run.record.commit for pair in pairs for run in pair}) > 1, "the runs are of several commits"),
    ]
    return [text for holds, text in notes if holds]


def sentences(found: Comparison, kind: str) -> str:
    """A comparison as text for a terminal."""
    s, (low, high) = len(found.seeds), found.effect.interval()
    lines = [
        f"{found.other} against {found.base}: {'; '.join(found.changed) or 'same settings'}",
        f"  {kind} accuracy {100 * found.effect.mean:+.1f} points, 95 % interval {100 * low:+.1f} to "
        f"{100 * high:+.1f} ({s} paired seed{'s' * (s > 1)} x {found.questions:,} questions)",
        f"  standard error {100 * found.effect.error:.2f} points",
        f"  {found.verdict}; p = {found.p:.3g}, Holm over {found.num_comparisons}; minimum detectable effect "
        f"{100 * found.detectable:.1f} points with 80 % power",
    ]
    lines += [
        f"  seed {seed}, these weights only: {better} better, {worse} worse, exact McNemar p = {p:.3g}"
        for seed, better, worse, p in found.by_seed
    ]
    return "\n".join(lines + [f"  note: {note}" for note in found.notes])
