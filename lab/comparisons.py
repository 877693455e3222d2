"""Same or different: a repeat against its record byte for byte, and variants against each other with intervals.

python report.py compare seed0 out/seed0-20260101-120000     a repeat of a run against its record
python report.py compare baseline aqn_weak aqn_strong        groups of seeds: each variant against the first

Each method is trained with the same S seeds, and each trained policy answers the same n questions. D (S, n) is the
score of the second method minus the score of the first, for each seed and question. D varies with the training seed,
with the questions, and with the sampling of single answers. An interval that ignores the variation over seeds is too
narrow and finds differences that do not exist. No torch is needed.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import data_gsm8k
from inputs.files import InputError, first_names
from knobs import DataConfig
from lab.records import GOLD, Run, evaluated, scores
from lab.run_folders import from_run, of_sweep
from lab.store import differing, load_groups

ALPHA = 0.05
MIN_SEEDS = 3  # fewer seeds do not show the spread between trainings well enough to call a method better
Array = NDArray[np.float64]
Numbers = Array | float


# ---------------------------------------------------------------------------------------------------------- statistics


def mcnemar_exact(better: int, worse: int) -> float:
    """Two-sided p-value of the hypothesis that better and worse are equally likely (McNemar, 1947; exact binomial).

    The test compares two sets of weights, not the methods that trained them.
    """
    from scipy.stats import binomtest

    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for several comparisons (Holm, 1979), in the order given. scipy has no Holm correction."""
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    return np.minimum(1.0, np.maximum.accumulate(steps))[np.argsort(order)].tolist()


@dataclass(frozen=True)
class Effect:
    """Mean of D with its uncertainty. Every field has the leading shape of D."""

    mean: Array
    error: Array  # standard error, over seeds and questions
    freedom: Array  # degrees of freedom of its t distribution

    def p_value(self) -> Array:
        """Two-sided p-value of the hypothesis of no difference."""
        from scipy.stats import t

        return 2 * t.sf(np.abs(self.mean) / self.error, self.freedom)

    def interval(self, confidence: float = 0.95) -> tuple[Array, Array]:
        """Confidence interval of the mean."""
        from scipy.stats import t

        return t.interval(confidence, self.freedom, self.mean, self.error)

    @property
    def points(self) -> str:
        return f"{100 * self.mean:+.1f}"

    @property
    def range(self) -> str:
        """The interval, in points."""
        return "{:+.1f} to {:+.1f}".format(*(100 * end for end in self.interval()))


def effect(differences: Array, answers: int | None = None) -> Effect:
    """Mean of D, with a standard error for the case that seeds and questions are random samples.  (..., S, n) -> (...)

    Seeds and questions are crossed random effects: Var = (MS_seeds + MS_questions - MS_rest) / (S n) from the mean
    squares of the two-way table, but at least max(MS_seeds, MS_questions) / (S n). The degrees of freedom are those of
    Satterthwaite (1946), at least S - 1. With one seed only the questions vary, so the effect is that of these weights
    only. The error has a lower bound, the error of one better and one worse answer, so that no interval has width 0.

    With one number a seed (n = 1) only the seeds vary. Questions that share something, such as operands, are not
    independent; then n counts the clusters (by_cluster). In both cases ``answers`` is the number of questions behind a
    row, for the lower bound. Numbers that are no means of answers have none.
    """
    seeds, questions = differences.shape[-2:]
    mean, least = differences.mean((-2, -1)), math.sqrt(2) / (seeds * (answers or questions))
    if 1 in (seeds, questions):
        units = max(seeds, questions)  # seeds or questions: the others do not vary
        error = differences.std((-2, -1), ddof=1) / math.sqrt(units)
        bounded = np.maximum(error, least) if answers or seeds == 1 else error
        return Effect(mean, bounded, np.full_like(mean, units - 1))
    by_seed = questions * differences.mean(-1).var(-1, ddof=1)
    by_question = seeds * differences.mean(-2).var(-1, ddof=1)
    total = differences.var((-2, -1)) * seeds * questions
    rest = (total - by_seed * (seeds - 1) - by_question * (questions - 1)) / ((seeds - 1) * (questions - 1))
    error, freedom = crossed(seeds, questions, by_seed, by_question, np.maximum(rest, 0.0))  # rounding can make it < 0
    return Effect(mean, np.maximum(error, least), freedom)


def crossed(seeds: int, questions: int, by_seed: Numbers, by_question: Numbers, rest: Numbers) -> tuple[Array, Array]:
    """Standard error and degrees of freedom from the mean squares of a two-way table, as `effect` says."""
    free_seeds, free_questions = seeds - 1, questions - 1
    variance = np.maximum(by_seed + by_question - rest, np.maximum(by_seed, by_question))
    spread = by_seed**2 / free_seeds + by_question**2 / free_questions + rest**2 / (free_seeds * free_questions)
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = np.fmax(np.where(spread > 0, variance**2 / spread, free_seeds), free_seeds)
    return np.sqrt(variance / (seeds * questions)), freedom


def by_cluster(differences: Sequence[Array], clusters: Sequence[Sequence[Hashable]]) -> Array:
    """D by clusters of questions, so that the mean of a row is the mean of its questions.  S x (n,) -> (S, clusters)

    ``clusters`` names the cluster of each question, for each seed. A seed may have other questions than the next one.
    An entry is the mean of D over all seeds, plus the scaled sum of the cluster's deviations from it: a sum of D itself
    would vary with the sizes of the clusters.
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(itertools.chain(*clusters)))}
    centre = float(np.mean([each.mean() for each in differences]))
    table = np.full((len(differences), len(places)), centre)
    for row, each, names in zip(table, differences, clusters, strict=True):
        np.add.at(row, [places[name] for name in names], (each - centre) * (len(places) / len(each)))
    return table


def power(true_effect: float, error: float, freedom: float, alpha: float = 0.05) -> float:
    """Probability that a true effect of this size is called different, two-sided at ``alpha`` (noncentral t)."""
    from scipy.stats import nct, t

    critical, shift = t.ppf(1 - alpha / 2, freedom), true_effect / error
    return float(nct.sf(critical, freedom, shift) + nct.sf(critical, freedom, -shift))


def detectable(error: float, freedom: float, alpha: float = 0.05, wanted: float = 0.8) -> float:
    """Minimum detectable effect: called different with probability ``wanted``. Unit of ``error``; NaN of one seed."""
    from scipy.optimize import brentq
    from scipy.stats import t

    if not freedom > 0:
        return math.nan
    about = t.ppf(1 - alpha / 2, freedom) + t.ppf(wanted, freedom)  # exact for infinitely many
    return error * float(brentq(lambda size: power(size, 1.0, freedom, alpha) - wanted, 0.0, 2 * about))


# ------------------------------------------------------------------------------------------------------- what is named


def find(results: Path, name: str) -> dict[str, list[Run]]:
    """What ``name`` names, ordered by seed: a record, a group of records, a run folder, or the variants of a sweep."""
    groups = load_groups(results)
    runs = {run.record.id: [run] for group in groups.values() for run in group}
    if found := runs.get(name) or groups.get(name):
        return {name: found}
    if (Path(name) / "sweep.json").exists():
        return of_sweep(Path(name))
    if (Path(name) / "finished.json").exists():
        return {name: [from_run(Path(name), Path(name).name, to_keep=False)]}
    there = first_names({*groups, *runs})
    raise InputError(f"{name}: no record, group, finished run or sweep; records and groups: {there}")


# ------------------------------------------------------------------------------------------------------- with intervals


@dataclass(frozen=True)
class Comparison:
    """One variant against the base, in shares of questions (0.01 is one point)."""

    base: str
    other: str
    changed: list[str]  # settings in which they differ
    seeds: list[int]  # paired: trained under both
    questions: int
    effect: Effect  # of this comparison alone
    by_seed: list[tuple[int, int, int, float]]  # seed, questions better, worse, p-value of exact McNemar
    notes: list[str]
    margin: float  # an effect whose interval lies within it is equal to none
    p: float = math.nan  # corrected for the number of comparisons
    num_comparisons: int = 1
    detectable: float = math.nan  # minimum detectable effect: 80 % power at the corrected level
    differences: tuple[float, ...] = ()  # of each seed, means over its questions

    @property
    def decided(self) -> bool:
        return len(self.seeds) >= MIN_SEEDS

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
            return f"not decided: {len(self.seeds)} paired seed{'s' * (len(self.seeds) > 1)} of {MIN_SEEDS}"
        margin = f"within {100 * self.margin:g} points"
        if self.direction:
            return f"different: {self.other} is {self.direction}" + f", {margin}" * self.equal
        return f"equal {margin}" if self.equal else "not different: inside the noise"


def recovered(loss: Comparison, back: Comparison) -> tuple[float, float, float]:
    """The share of a loss that a correction, compared with the loser, gives back, and its 95 % interval.

    The interval is the bootstrap's over the seeds that both have, 10,000 draws.
    """
    of_back = dict(zip(back.seeds, back.differences, strict=True))
    pairs = np.array(
        [(d, of_back[seed]) for seed, d in zip(loss.seeds, loss.differences, strict=True) if seed in of_back]
    )
    drawn = pairs[np.random.default_rng(0).integers(len(pairs), size=(10_000, len(pairs)))].mean(1)
    low, high = np.quantile(-drawn[:, 1] / drawn[:, 0], [0.025, 0.975])
    return -pairs[:, 1].mean() / pairs[:, 0].mean(), low, high


def gain(group: list[Run], kind: str) -> Effect:
    """Last evaluation minus first, over the seeds and questions of one variant."""
    return _effect(group, [scores(run, kind) - scores(run, kind, 0) for run in group])


def kind_of(groups: dict[str, list[Run]]) -> str:
    """The answers to compare: sampled if every run has them, else greedy."""
    return "sampled" if all(run.record.last.sampled for runs in groups.values() for run in runs) else "greedy"


def compare(groups: dict[str, list[Run]], kind: str = "sampled", margin: float = 0.0) -> list[Comparison]:
    """Each group against the first, paired by seed; p-values corrected by Holm over all of them."""
    (base_name, base), *others = groups.items()
    found = []
    for name, group in others:
        pairs = _pairs(base_name, base, name, group, kind)
        differences = [scores(b, kind) - scores(a, kind) for a, b in pairs]
        effect = _effect([a for a, _ in pairs], differences)
        seeds = [a.record.seed for a, _ in pairs]
        counts = [(int((each > 0).sum()), int((each < 0).sum())) for each in differences]
        found.append(
            Comparison(
                base=base_name,
                other=name,
                changed=differing(pairs[0][0].record, pairs[0][1].record),
                seeds=seeds,
                questions=len(differences[0]),
                effect=effect,
                by_seed=[(seed, *both, mcnemar_exact(*both)) for seed, both in zip(seeds, counts, strict=True)],
                notes=_notes(base, group, pairs),
                margin=margin,
                differences=tuple(float(each.mean()) for each in differences),
            )
        )
    return corrected(found, len(found))


def corrected(family: list[Comparison], announced: int) -> list[Comparison]:
    """The comparisons with p-values and minimum detectable effects for a family of ``announced`` ones (Holm).

    Comparisons of the family that have not been made count as if they had the largest p-values.
    """
    p_values = [float(one.effect.p_value()) for one in family]
    adjusted = holm(p_values + [1.0] * (announced - len(family)))
    return [
        replace(
            one,
            p=p,
            num_comparisons=announced,
            detectable=detectable(float(one.effect.error), float(one.effect.freedom), ALPHA / announced),
        )
        for one, p in zip(family, adjusted, strict=False)
    ]


def _pairs(base_name: str, base: list[Run], name: str, group: list[Run], kind: str) -> list[tuple[Run, Run]]:
    """The runs with the same seed. InputError if there are none, and for a pair that was asked different questions or,
    for a mean along the run, was evaluated after different steps: accuracy grows along a run."""
    partners = {run.record.seed: run for run in group}
    pairs = [(run, partners[run.record.seed]) for run in base if run.record.seed in partners]
    if not pairs:
        raise InputError(f"{base_name}, {name}: no common seed; needed: runs of both with the same train.seed")
    for a, b in pairs:
        ids, gold, steps = f"{a.record.id}, {b.record.id}", a.rows[0].get(GOLD, []), evaluated(a)
        if gold != (other := b.rows[0].get(GOLD, [])):
            raise InputError(
                f"{ids}: other questions ({len(gold)} and {len(other)}); needed: the same data and eval.num_questions"
            )
        if kind == "curve" and steps != evaluated(b):
            raise InputError(
                f"{ids}: evaluations after {steps} and {evaluated(b)} steps; needed: one eval.every and train.steps"
            )
    return pairs


def _effect(runs: list[Run], differences: list[np.ndarray]) -> Effect:
    """The effect of differences of S runs with n questions each.  S x (n,)

    Questions (or their clusters) that all seeds share are a sample that does not grow with the seeds: a random effect.
    Where each seed has questions of its own, the seeds are the unit.
    """
    n = len(differences[0])
    if n == 1:  # training rewards
        return effect(np.stack(differences))
    if any(run.rows[0].get(GOLD) != runs[0].rows[0].get(GOLD) for run in runs):
        return effect(np.array([[each.mean()] for each in differences]), answers=n)
    clusters = [operand_pairs(run) or range(len(each)) for run, each in zip(runs, differences, strict=True)]
    return effect(by_cluster(differences, clusters), answers=n)


def operand_pairs(run: Run) -> list[tuple[int, int]]:
    """The first two operands of each generated question, which decide whether it is held out.

    The questions are generated again from the run's configuration. Empty for other data, and if the gold answers of the
    record are others.
    """
    gold, data = run.rows[0].get(GOLD, []), run.record.config["data"]
    data = {key: value for key, value in data.items() if key in DataConfig.model_fields}  # also of an older version
    made = _generated(json.dumps(data))[: len(gold)] if data["source"] == "arithmetic" else []
    return [pair for pair, _ in made] if [answer for _, answer in made] == gold else []


@functools.cache
def _generated(data: str) -> list[tuple[tuple[int, int], str]]:
    """The first two operands, in order of size, and the gold answer of each held-out question of a configuration."""
    rows, _, _ = data_gsm8k.read(DataConfig.model_validate_json(data), "test")
    pairs = [sorted(map(int, re.findall(r"\d+", row.answer)[:2])) for row in rows]
    return [((x, y), row.gold) for (x, y), row in zip(pairs, rows, strict=True)]


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


def sentences(found: Comparison, kind: str) -> str:
    """A comparison as text for a terminal."""
    s = len(found.seeds)
    outcomes = {"reward": "training reward", "repeated": "repeated completions", "curve": "accuracy along the run"}
    what = f"mean {outcomes[kind]}" if kind in outcomes else f"{kind} accuracy"
    lines = [
        f"{found.other} against {found.base}: {'; '.join(found.changed) or 'same settings'}",
        f"  {what} {found.effect.points} points, 95 % interval {found.effect.range} "
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


def rows(found: Sequence[Comparison], kind: str) -> list[dict[str, Any]]:
    """The comparisons as rows of a table, with numbers in points."""
    return [
        {
            "variant": one.other,
            "base": one.base,
            "changed": "; ".join(one.changed),
            "answers": kind,
            "seeds": len(one.seeds),
            "questions": one.questions,
            "difference": round(100 * float(one.effect.mean), 2),
            "low": round(100 * float(one.effect.interval()[0]), 2),
            "high": round(100 * float(one.effect.interval()[1]), 2),
            "p (Holm)": float(f"{one.p:.3g}"),
            "minimum detectable effect": round(100 * one.detectable, 2),
            "verdict": one.verdict,
        }
        for one in found
    ]
