"""Same or different: a repeat against its record byte for byte, and variants against each other with intervals.

python report.py compare seed0 out/seed0-20260101-120000     a repeat of a run against its record
python report.py compare baseline aqn_weak aqn_strong        groups of seeds: each variant against the first
"""

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import data_gsm8k
from input_files import InputError
from knobs import DataConfig
from lab import statistics as paired
from lab.markdown import points
from lab.records import GOLD, Record, Run, evaluated, file_of, from_run, scores
from lab.store import differing, load_groups
from reward_gsm8k import gold_answer

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
    if a.config_hash != b.config_hash or a.layout != b.layout or a.fault != b.fault:
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
    margin: float  # an effect whose interval lies within it is equal to none

    @property
    def decided(self) -> bool:
        return len(self.seeds) >= paired.MIN_SEEDS

    @property
    def direction(self) -> str:
        """better or worse; empty unless the p-value is small and there are enough seeds."""
        if not (self.decided and self.p < ALPHA):
            return ""
        return "better" if self.effect.mean > 0 else "worse"

    @property
    def equal(self) -> bool:
        """Whether the interval lies within the margin. A difference can be that small and still be no chance."""
        return self.decided and float(max(map(abs, self.effect.interval()))) < self.margin

    @property
    def verdict(self) -> str:
        if not self.decided:
            return f"not decided: {len(self.seeds)} paired seed{'s' * (len(self.seeds) > 1)} of {paired.MIN_SEEDS}"
        margin = f"within {100 * self.margin:g} points"
        if self.direction:
            return f"different: {self.other} is {self.direction}" + f", {margin}" * self.equal
        return f"equal {margin}" if self.equal else "not different: inside the noise"


def gain(group: list[Run], kind: str) -> paired.Effect:
    """Last evaluation minus first, over the seeds and questions of one variant."""
    return _effect(group, [scores(run, kind) - scores(run, kind, 0) for run in group])


def compare(groups: dict[str, list[Run]], kind: str = "sampled", margin: float = 0.0) -> list[Comparison]:
    """Each group against the first, paired by seed; p-values corrected by Holm over all of them."""
    (base_name, base), *others = groups.items()
    found = []
    for name, group in others:
        pairs = _pairs(base_name, base, name, group)
        if kind == "curve":
            _same_evaluations(pairs)
        differences = [scores(b, kind) - scores(a, kind) for a, b in pairs]
        effect = _effect([a for a, _ in pairs], differences)
        better, worse = (np.array([(sign * each > 0).sum() for each in differences]) for sign in (1, -1))
        exact, seeds = paired.mcnemar_exact(better, worse), [a.record.seed for a, _ in pairs]
        found.append(
            Comparison(
                base=base_name,
                other=name,
                changed=differing(pairs[0][0].record, pairs[0][1].record),
                seeds=seeds,
                questions=len(differences[0]),
                effect=effect,
                p=float(effect.p_value()),
                num_comparisons=1,
                detectable=0.0,
                by_seed=list(zip(seeds, better.tolist(), worse.tolist(), exact.tolist(), strict=True)),
                notes=_notes(base, group, pairs),
                margin=margin,
            )
        )
    return corrected(found, len(found))


def corrected(family: list[Comparison], announced: int) -> list[Comparison]:
    """The comparisons with p-values and minimum detectable effects for a family of ``announced`` ones (Holm).

    Comparisons of the family that have not been made count as if they had the largest p-values.
    """
    p_values = [float(one.effect.p_value()) for one in family]
    adjusted = paired.holm(p_values + [1.0] * (announced - len(family)))
    return [
        replace(
            one,
            p=p,
            num_comparisons=announced,
            detectable=paired.detectable(float(one.effect.error), float(one.effect.freedom), ALPHA / announced),
        )
        for one, p in zip(family, adjusted, strict=False)
    ]


def _pairs(base_name: str, base: list[Run], name: str, group: list[Run]) -> list[tuple[Run, Run]]:
    """The runs with the same seed; InputError if there are none, or if a pair was asked different questions."""
    partners = {run.record.seed: run for run in group}
    pairs = [(run, partners[run.record.seed]) for run in base if run.record.seed in partners]
    if not pairs:
        raise InputError(f"{base_name}, {name}: no common seed; needed: runs of both with the same train.seed")
    for a, b in pairs:
        gold, other = (run.rows[0].get(GOLD, []) for run in (a, b))
        if gold != other:
            raise InputError(
                f"{a.record.id}, {b.record.id}: other questions ({len(gold)} and {len(other)}); "
                "needed: the same data and eval.num_questions"
            )
    return pairs


def _same_evaluations(pairs: list[tuple[Run, Run]]) -> None:
    """InputError unless the two runs of a pair were evaluated after the same steps: accuracy grows along a run."""
    for pair in pairs:
        first, second = (evaluated(run) for run in pair)
        if first != second:
            raise InputError(
                f"{pair[0].record.id}, {pair[1].record.id}: evaluations after {first} and {second} steps; needed for "
                "the mean along the run: the same eval.every and train.steps"
            )


def _effect(runs: list[Run], differences: list[np.ndarray]) -> paired.Effect:
    """The effect of differences of S runs with n questions each.  S x (n,)

    Questions that all seeds share are a sample that does not grow with the seeds, so they count, or their clusters do,
    as a random effect. Where each seed has questions of its own, the seeds are the unit.
    """
    n = len(differences[0])
    if n == 1:  # training rewards
        return paired.effect(np.stack(differences))
    if any(run.rows[0].get(GOLD) != runs[0].rows[0].get(GOLD) for run in runs):
        return paired.effect(np.array([[each.mean()] for each in differences]), answers=n)
    clusters = [operand_pairs(run) or range(len(each)) for run, each in zip(runs, differences, strict=True)]
    return paired.effect(paired.by_cluster(differences, clusters), answers=n)


def operand_pairs(run: Run) -> list[tuple[int, int]]:
    """The first two operands of each generated question, which decide whether it is held out.

    The questions are generated again from the run's configuration. Empty for other data, and if the gold answers of the
    record are others.
    """
    data, gold = run.record.config["data"], run.rows[0].get(GOLD, [])
    made = _generated(json.dumps(data))[: len(gold)] if data["source"] == "arithmetic" else []
    return [pair for pair, _ in made] if [answer for _, answer in made] == gold else []


@functools.cache
def _generated(data: str) -> list[tuple[tuple[int, int], str]]:
    """The first two operands, in order of size, and the gold answer of each held-out question of a configuration."""
    pairs, _, _ = data_gsm8k.read(DataConfig.model_validate_json(data), "test")
    found = []
    for _, line in pairs:
        x, y = map(int, re.findall(r"\d+", line)[:2])
        found.append(((min(x, y), max(x, y)), gold_answer(line)))
    return found


def _notes(base: list[Run], group: list[Run], pairs: list[tuple[Run, Run]]) -> list[str]:
    """Limits of the comparison that follow from how the pairs were made."""
    unpaired = len(base) + len(group) - 2 * len(pairs)
    notes = [
        (unpaired, f"{unpaired} runs have no partner of the same seed and are left out"),
        (any(a.record.inputs.model != b.record.inputs.model for a, b in pairs), "the pairs started from other weights"),
        (
            any(a.record.config["data"]["source"] == "arithmetic" and not operand_pairs(a) for a, _ in pairs),
            "the questions cannot be generated again, so they count as independent",
        ),
        (len({run.record.commit for pair in pairs for run in pair}) > 1, "the runs are of several commits"),
    ]
    return [text for holds, text in notes if holds]


def notes(found: Iterable[Comparison]) -> list[str]:
    """The limits of comparisons, a sentence each, with the variants that have it."""
    who: dict[str, dict[str, None]] = {}
    for one in found:
        for note in one.notes:
            who.setdefault(note, {})[one.other] = None
    return [f"Note: {note} ({', '.join(names)})." for note, names in sorted(who.items())]


def sentences(found: Comparison, kind: str) -> str:
    """A comparison as text for a terminal."""
    s, (low, high) = len(found.seeds), found.effect.interval()
    what = {"reward": "mean training reward", "curve": "mean accuracy along the run"}.get(kind, f"{kind} accuracy")
    lines = [
        f"{found.other} against {found.base}: {'; '.join(found.changed) or 'same settings'}",
        f"  {what} {100 * found.effect.mean:+.1f} points, 95 % interval {points(low, high)} "
        f"({s} paired seed{'s' * (s > 1)} x {found.questions:,} questions)",
        f"  standard error {100 * found.effect.error:.2f} points",
        f"  {found.verdict}; p = {found.p:.3g}, Holm over {found.num_comparisons}; minimum detectable effect "
        f"{100 * found.detectable:.1f} points with 80 % power",
    ]
    lines += [
        f"  seed {seed}, these weights only: {better} better, {worse} worse, exact McNemar p = {p:.3g}"
        for seed, better, worse, p in (found.by_seed if kind in ("sampled", "greedy") else [])
    ]
    return "\n".join(lines + [f"  note: {note}" for note in found.notes])
