"""Comparisons of variants: paired differences over seeds, with intervals and corrected p-values.

Each variant is trained with the same seeds, so the seeds are the units of a paired t-test. With fewer than three seeds,
a comparison is undecided. A family is a group of comparisons whose p-values are corrected together (Holm, 1979).
results/plan.yaml announces families before their runs. A prediction is met, not met or undecided. If a control is not
as predicted, the results of its comparisons are withheld.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from facts.exits import InputError
from facts.root import ROOT
from inputs.files import read_file, validated
from lab.records import Part

if TYPE_CHECKING:
    import pandas

ALPHA, POWER, MIN_SEEDS = 0.05, 0.8, 3
# Maps a kind of outcome to its column, and to whether the outcome is the mean over all evaluations of the run, except
# the one before the first step.
KINDS = {
    "sampled": ("eval/sampled_accuracy", False),
    "greedy": ("eval/greedy_accuracy", False),
    "curve": ("eval/sampled_accuracy", True),
}
WITHHELD = "withheld: a control is not as predicted"  # the outcome of a comparison from which no conclusion is drawn
Kind = Literal["sampled", "greedy", "curve"]


# ---------------------------------------------------------------------------------------------------------- statistics


class Effect(NamedTuple):
    """A paired difference between two variants, in percentage points."""

    mean: float
    low: float  # of the 95 % interval
    high: float
    p: float  # two-sided p-value for the hypothesis of no difference
    seeds: int
    detectable: float  # the smallest true difference that 80 of 100 repetitions would find

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


def effect(differences: np.ndarray, tests: int = 1) -> Effect:
    """Return the Effect for ``differences``, which are fractions of 1, one for each of S seeds.

    ``tests`` is the number of comparisons in the family.  (S,)
    """
    from scipy import stats

    n, mean = len(differences), 100 * float(differences.mean())
    if n == 1:
        return Effect(mean, math.nan, math.nan, math.nan, n, math.nan)
    error = 100 * float(differences.std(ddof=1)) / math.sqrt(n)
    if error == 0:
        return Effect(mean, mean, mean, float(mean == 0), n, 0.0)
    low, high = stats.t.interval(1 - ALPHA, n - 1, mean, error)
    p = 2 * stats.t.sf(abs(mean / error), n - 1)
    return Effect(mean, float(low), float(high), float(p), n, error * detectable(n - 1, ALPHA / tests))


def detectable(freedom: int, alpha: float) -> float:
    """Return the smallest effect, in standard errors, that a t-test finds with probability POWER (noncentral t).

    The test has ``freedom`` degrees of freedom and the level ``alpha``.
    """
    from scipy import optimize, stats

    critical = stats.t.ppf(1 - alpha / 2, freedom)

    def missing(size: float) -> float:
        return float(stats.nct.sf(critical, freedom, size) + stats.nct.sf(critical, freedom, -size)) - POWER

    return float(optimize.brentq(missing, 0.0, 2 * (critical + stats.t.ppf(POWER, freedom))))


def holm(p_values: list[float]) -> list[float]:
    """Return p-values corrected for their number (Holm, 1979), in the same order. scipy has no Holm correction."""
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    return np.minimum(1.0, np.maximum.accumulate(steps))[np.argsort(order)].tolist()


def share_recovered(loss: "pandas.Series", back: "pandas.Series") -> tuple[float, float, float]:
    """Return the share of the lost accuracy that a correction recovers, in %, and its 95 % interval.

    ``loss`` has the differences, by seed, between the variant that loses accuracy and its base. ``back`` has those
    between the corrected variant and the variant that loses accuracy. The interval comes from 10,000 bootstrap draws.
    """
    import pandas

    pairs = pandas.concat([loss, back], axis=1).dropna().to_numpy()
    drawn = pairs[np.random.default_rng(0).integers(len(pairs), size=(10_000, len(pairs)))].mean(1)
    low, high = np.quantile(-drawn[:, 1] / drawn[:, 0], [0.025, 0.975])
    return -100 * pairs[:, 1].mean() / pairs[:, 0].mean(), 100 * low, 100 * high


# ------------------------------------------------------------------------------------------------------------ the plan


class Entry(Part):
    """A comparison: the variant `method` minus the variant `base`."""

    method: str
    base: str
    title: str
    predicted: Literal["equal", "larger", "smaller", ""] = ""
    why: str = ""  # the mechanism behind the prediction
    control: list[str] = []  # replaces the controls of the family
    missing: str = ""  # runs that could not be finished, with the reason


class Family(Part):
    """Comparisons that are announced together and whose p-values are corrected together."""

    name: str
    section: str  # heading of RESULTS.md
    sweep: str
    kind: Kind = "curve"
    margin: float = 0  # points; "equal" means that the interval is within the margin
    apart: bool = False  # each entry is a separate family
    mismatch: bool = False  # the sampling and the trained policy differ; a correction can recover lost accuracy
    control: list[str] = []  # variants that must be as predicted; otherwise no conclusion is drawn
    entries: list[Entry]
    controls: list[Entry] = []  # a separate family


class Finding(Part):
    """A row of the first table in RESULTS.md."""

    asked: str
    answer: str
    method: str = ""  # the method whose comparison is shown
    against: str = ""  # the base of this comparison, if the method has several
    gain: str = ""  # a variant whose accuracy before and after training is shown


class Arrival(Part):
    """The settings of the figure that shows the accuracy lost by rounding in a push."""

    base: str  # the variant without rounding
    lines: dict[str, list[str]]  # maps a label to its variants, which a line joins


class Plan(Part):
    """The content of results/plan.yaml."""

    findings: list[Finding]
    sections: dict[str, str]  # maps a heading of RESULTS.md to its paragraph
    curves: dict[str, str]  # maps a variant to its label in the figure
    turns: dict[str, str] = {}  # the same for the figure about an environment
    arrival: Arrival | None = None  # the figure about rounding
    families: list[Family]


def refuse_unfillable(plan: Plan, path: Path, recorded: set[str]) -> None:
    """Raise InputError if a family without records names a variant that is neither in its sweep nor in a record.

    ``path`` is the file of the plan, and ``recorded`` has the variants of all records. A sweep is a file in this
    checkout, or `FILE of COMMIT`. In the second case it is not read, and the family is not checked.
    """
    for family in plan.families:
        entries = family.entries + family.controls
        if " of " in family.sweep or recorded & {entry.method for entry in entries}:
            continue
        known = recorded | {*(read_file(ROOT / family.sweep).get("variants") or {})}
        for entry in entries:
            for key, name in {"method": entry.method, "base": entry.base}.items():
                if name not in known:
                    raise InputError(
                        f"{path}: {family.name}: {key}: {name} is no variant of {family.sweep} and no record; name "
                        "one of its variants"
                    )


def read_plan(path: Path) -> Plan:
    plan = validated(Plan, read_file(path), path)
    controls = {entry.method for family in plan.families for entry in family.controls}
    for family in plan.families:
        if wrong := {*family.control, *(name for entry in family.entries for name in entry.control)} - controls:
            raise InputError(
                f"{path}: {family.name}: control: {min(wrong)} is not a method of `controls`; name one of them"
            )
        if family.section not in plan.sections:
            raise InputError(f"{path}: {family.name}: section: there is no {family.section!r}; name one of `sections`")
    return plan


# -------------------------------------------------------------------------------------------------------- comparisons


@dataclass
class Comparison:
    entry: Entry
    family: Family
    is_control: bool
    differences: Any  # pandas.Series by seed, fractions of 1
    effect: Effect
    p: float  # corrected
    found: str  # equal, larger, smaller or undecided
    outcome: str = ""  # whether the prediction was met
    share: tuple[float, float, float] | None = None  # of the lost accuracy that it recovers, in %, with its interval

    @property
    def said(self) -> str:
        """The result in words, with the margin if the two variants are equal."""
        return f"equal within {self.family.margin:g}" if self.found == "equal" else self.found


def scores(steps: "pandas.DataFrame", kind: str) -> tuple["pandas.DataFrame", "pandas.DataFrame"]:
    """Return two tables by variant and seed: the outcome of each run, and a description of its evaluations.

    ``kind`` is a key of KINDS. The description has the evaluated steps and the number of questions. Raises InputError
    if no run has the outcome.
    """
    column, along = KINDS[kind]
    measured = steps[steps[column].notna()] if column in steps else steps[:0]
    if along:
        measured = measured[measured["step"] > 0]
    if measured.empty:
        raise InputError(f"--kind {kind}: no run has {column}; choose one of {', '.join(KINDS)}")
    grouped = measured.sort_values("step").groupby(["variant", "seed"])
    outcome = grouped[column].mean() if along else grouped[column].last()
    questions = grouped["eval/num_questions"].last().astype(str)
    evaluated = grouped["step"].agg(lambda found: str(found.tolist() if along else found.max()))
    return outcome.unstack(), (evaluated + questions).unstack()


def gain(steps: "pandas.DataFrame", variant: str) -> tuple[float, float, Effect]:
    """Return the sampled accuracy before and after training, averaged over the seeds, and the Effect of training."""
    measured = steps[(steps["variant"] == variant) & steps["eval/sampled_accuracy"].notna()].sort_values("step")
    grouped = measured.groupby("seed")["eval/sampled_accuracy"]
    first, last = grouped.first(), grouped.last()
    return float(first.mean()), float(last.mean()), effect((last - first).to_numpy())


def compare(steps: "pandas.DataFrame", plan: Plan) -> list[Comparison]:
    """Return the announced comparisons for which there are records, with their outcomes and recovered shares."""
    tables = {kind: scores(steps, kind) for kind in {family.kind for family in plan.families}}
    made = []
    for family in plan.families:
        groups = [[entry] for entry in family.entries] if family.apart else [family.entries]
        for group, is_control in [*((group, False) for group in groups), (family.controls, True)]:
            made += of_family(*tables[family.kind], family, group, is_control)
    good = {one.entry.method for one in made if one.is_control and one.found == one.entry.predicted}
    for one in made:
        one.outcome = _outcome(one, good)
    _add_shares_(made)
    return made


def _add_shares_(made: list[Comparison]) -> None:
    """Set the share of the lost accuracy that each method recovers, if its base was found to lose accuracy."""
    stated = [one for one in made if one.family.mismatch and not one.is_control and one.outcome != WITHHELD]
    lost = {one.entry.method: one for one in reversed(stated) if one.found == "smaller"}
    for one in stated:
        if loss := lost.get(one.entry.base):
            one.share = share_recovered(loss.differences, one.differences)


def of_family(
    outcome: "pandas.DataFrame", measured: "pandas.DataFrame", family: Family, entries: list[Entry], is_control: bool
) -> list[Comparison]:
    """Return the comparisons of those ``entries`` of a family that have records.

    ``outcome`` and ``measured`` are the tables that `scores` returns. In the correction of p-values, an entry without
    records counts with a p-value of 1. Raises InputError if two variants have no common seed. It also raises InputError
    if their runs were evaluated differently, because accuracy grows during a run.
    """
    ready = [entry for entry in entries if {entry.base, entry.method} <= {*outcome.index}]
    by_seed = []
    for entry in ready:
        both = outcome.loc[[entry.base, entry.method]].dropna(axis=1)
        if both.empty:
            raise InputError(
                f"{entry.base}, {entry.method}: there is no common seed; compare runs with the same train.seed"
            )
        first, second = measured.loc[[entry.base, entry.method], both.columns].to_numpy()
        if (other := first != second).any():
            raise InputError(
                f"{entry.base}, {entry.method}: seed {both.columns[other][0]}: was evaluated differently; use the same "
                "eval.num_questions, eval.every and train.steps"
            )
        by_seed.append(both.loc[entry.method] - both.loc[entry.base])
    effects = [effect(each.to_numpy(), len(entries)) for each in by_seed]
    known = [1.0 if math.isnan(one.p) else one.p for one in effects]
    corrected = holm(known + [1.0] * (len(entries) - len(known)))
    return [
        Comparison(entry, family, is_control, each, one, p, verdict(one, p, family.margin))
        for entry, each, one, p in zip(ready, by_seed, effects, corrected, strict=False)
    ]


def verdict(one: Effect, p: float, margin: float) -> str:
    """Return "equal" if the interval is within the margin, and "larger" or "smaller" if p is less than ALPHA.

    Otherwise, or with fewer than MIN_SEEDS seeds, return "undecided".
    """
    if one.seeds < MIN_SEEDS:
        return "undecided"
    if max(abs(one.low), abs(one.high)) < margin:
        return "equal"
    if p >= ALPHA:
        return "undecided"
    return "larger" if one.mean > 0 else "smaller"


def _outcome(one: Comparison, good: set[str]) -> str:
    """Return in words whether the prediction was met.

    ``good`` has the methods of the controls that are as predicted.
    """
    if {*(one.entry.control or one.family.control)} - good and not one.is_control:
        return WITHHELD
    if not one.entry.predicted or one.found == one.entry.predicted:
        return "met" if one.entry.predicted else one.said
    return one.found if one.found == "undecided" else f"not met: {one.said}"
