"""How large a difference between two training methods is, and whether it is more than noise. No torch is needed.

Each method is trained with the same S seeds, and each trained policy answers the same n questions. D (S, n) is the
score of the second method minus the score of the first, for each seed and question. D varies with the training seed,
with the questions, and with the sampling of single answers. An interval that ignores the variation over seeds is too
narrow and finds differences that do not exist.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_SEEDS = 3  # fewer seeds do not show the spread between trainings well enough to call a method better
Array = NDArray[np.float64]


def mcnemar_exact(better: int | Array, worse: int | Array) -> Array:
    """Two-sided p-value of the hypothesis that better and worse are equally likely (McNemar, 1947; exact binomial).

    The test compares two sets of weights, not the methods that trained them. For scores that are means of several
    answers it is the sign test.
    """
    from scipy.stats import binom

    better, worse = np.asarray(better), np.asarray(worse)
    return np.minimum(1.0, 2 * binom.cdf(np.minimum(better, worse), better + worse, 0.5))


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
    mean = differences.mean((-2, -1))
    if questions == 1 and seeds > 1:
        error = differences[..., 0].std(-1, ddof=1) / math.sqrt(seeds)
        error = np.maximum(error, math.sqrt(2) / (seeds * answers)) if answers else error
        return Effect(mean, error, np.full_like(mean, seeds - 1))
    least = math.sqrt(2) / (seeds * (answers or questions))
    if seeds == 1:
        error = differences[..., 0, :].std(-1, ddof=1) / math.sqrt(questions)
        return Effect(mean, np.maximum(error, least), np.full_like(mean, questions - 1))
    by_seed = questions * differences.mean(-1).var(-1, ddof=1)
    by_question = seeds * differences.mean(-2).var(-1, ddof=1)
    free_seeds, free_questions = seeds - 1, questions - 1
    total = differences.var((-2, -1)) * seeds * questions
    # Rounding can make the difference negative.
    rest = np.maximum(total - by_seed * free_seeds - by_question * free_questions, 0.0) / (free_seeds * free_questions)
    variance = np.maximum(by_seed + by_question - rest, np.maximum(by_seed, by_question))
    spread = by_seed**2 / free_seeds + by_question**2 / free_questions + rest**2 / (free_seeds * free_questions)
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = np.fmax(np.where(spread > 0, variance**2 / spread, free_seeds), free_seeds)
    return Effect(mean, np.maximum(np.sqrt(variance / (seeds * questions)), least), freedom)


def by_cluster(differences: Sequence[Array], clusters: Sequence[Sequence[Hashable]]) -> Array:
    """D by clusters of questions, so that the mean of a row is the mean of its questions.  S x (n,) -> (S, clusters)

    ``clusters`` names the cluster of each question, for each seed. A seed may have other questions than the next one.
    An entry is the mean of D over all seeds, plus the scaled sum of the cluster's deviations from it: a sum of D itself
    would vary with the sizes of the clusters.
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(itertools.chain(*clusters)))}
    centre = float(np.mean([each.mean() for each in differences]))
    table = np.full((len(differences), len(places)), centre)
    for row, scores, names in zip(table, differences, clusters, strict=True):
        np.add.at(row, [places[name] for name in names], (scores - centre) * (len(places) / len(scores)))
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


def planned(seeds: int, questions: int, discordant: float, seed_spread: float) -> tuple[float, float]:
    """Standard error and degrees of freedom to expect of a design before it is run.

    ``discordant``: share of questions that exactly one of the two policies answers right (the variance of one entry of
    D). ``seed_spread``: standard deviation of the true difference between trainings. The error is larger if one method
    answers some questions in every training and the other method never does.
    """
    if seeds == 1:
        return math.sqrt(discordant / questions), questions - 1.0
    by_seed, rest = questions * seed_spread**2 + discordant, discordant
    free_seeds, free_questions = seeds - 1, questions - 1
    spread = by_seed**2 / free_seeds + rest**2 / free_questions + rest**2 / (free_seeds * free_questions)
    return math.sqrt(by_seed / (seeds * questions)), max(by_seed**2 / spread, free_seeds)
