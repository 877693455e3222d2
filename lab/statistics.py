"""How large a difference between two trained policies is, and whether it is more than noise.  No torch.

Both policies answer the same n questions, after S trainings each whose seeds are paired: D (S, n) is, for each seed and
question, what the second scored minus what the first scored. Three kinds of chance are in it: the training's (seeds),
the questions', and each answer's. Few seeds make the first one large: an interval that counts questions only is too
narrow, and names winners that are none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_SEEDS = 3  # with fewer, the spread between trainings is not known well enough to call a method better
Array = NDArray[np.float64]


def mcnemar_exact(better: int | Array, worse: int | Array) -> Array:
    """Two-sided p-value that ``better`` and ``worse`` questions are as a fair coin's (McNemar, 1947; exact binomial).

    It compares two policies, the very weights, not the methods that trained them. For scores that are means of several
    answers it is the sign test.
    """
    from scipy.stats import binom

    better, worse = np.asarray(better), np.asarray(worse)
    return np.minimum(1.0, 2 * binom.cdf(np.minimum(better, worse), better + worse, 0.5))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for having made several comparisons (Holm, 1979), in the order given."""
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return corrected.tolist()


@dataclass(frozen=True)
class Effect:
    """Mean of D with its uncertainty; every field has the leading shape of D."""

    mean: Array
    error: Array  # standard error, over seeds and questions
    freedom: Array  # degrees of freedom of the t distribution that goes with it

    def p_value(self) -> Array:
        """Two-sided, of no difference."""
        from scipy.stats import t

        return 2 * t.sf(np.abs(self.mean) / self.error, self.freedom)

    def interval(self, confidence: float = 0.95) -> tuple[Array, Array]:
        """Confidence interval of the mean."""
        from scipy.stats import t

        half = t.ppf(0.5 + confidence / 2, self.freedom) * self.error
        return self.mean - half, self.mean + half


def effect(differences: Array) -> Effect:
    """The mean difference over seeds and questions, both of them samples.  (..., S, n) -> (...)

    Seeds and questions are crossed random effects: Var = (MS_seeds + MS_questions - MS_rest) / (S n) from the mean
    squares of the two-way table, never under the larger of the first two; Satterthwaite's (1946) degrees of freedom,
    at least S - 1. One seed leaves the questions' part alone: such an effect is of these weights only. Scores are
    shares: the error is never under what one answer better and one worse make, so that no interval has width 0.
    """
    seeds, questions = differences.shape[-2:]
    mean = differences.mean((-2, -1))
    least = math.sqrt(2) / (seeds * questions)
    if seeds == 1:
        error = differences[..., 0, :].std(-1, ddof=1) / math.sqrt(questions)
        return Effect(mean, np.maximum(error, least), np.full_like(mean, questions - 1))
    by_seed = questions * differences.mean(-1).var(-1, ddof=1)
    by_question = seeds * differences.mean(-2).var(-1, ddof=1)
    free_seeds, free_questions = seeds - 1, questions - 1
    total = differences.var((-2, -1)) * seeds * questions
    rest = (total - by_seed * free_seeds - by_question * free_questions) / (free_seeds * free_questions)
    rest = np.maximum(rest, 0.0)  # rounding
    variance = np.maximum(by_seed + by_question - rest, np.maximum(by_seed, by_question))
    spread = by_seed**2 / free_seeds + by_question**2 / free_questions + rest**2 / (free_seeds * free_questions)
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = np.fmax(np.where(spread > 0, variance**2 / spread, free_seeds), free_seeds)
    return Effect(mean, np.maximum(np.sqrt(variance / (seeds * questions)), least), freedom)


def bootstrap_weights(seeds: int, questions: int, draws: int, seed: int = 0) -> tuple[Array, Array]:
    """How often each draw takes each seed and each question.  -> (draws, S), (draws, n), rows that sum to 1

    A draw takes one fewer than there are: so the variance of the drawn means is unbiased (Hesterberg, 2015). A single
    seed is always taken.
    """
    generator = np.random.default_rng(seed)
    parts = []
    for count in (seeds, questions):
        taken = max(count - 1, 1)
        parts.append(generator.multinomial(taken, np.full(count, 1 / count), size=draws) / taken)
    return parts[0], parts[1]


def bootstrap_error(differences: Array, weights: tuple[Array, Array]) -> Array:
    """Standard error of the mean by drawing seeds and questions anew, each question with all its answers.  (..., S, n)

    The two-level (pigeonhole) bootstrap of Owen (2007): it counts the chance of single answers up to three times, so
    it errs to the wide side, most where seeds agree. Shown as a second opinion; ``effect`` decides.
    """
    by_question = differences @ weights[1].T  # (..., S, draws)
    return np.einsum("...sd,ds->...d", by_question, weights[0]).std(-1, ddof=1)


def power(true_effect: float, error: float, freedom: float, alpha: float = 0.05) -> float:
    """Chance that a true effect of this size is called different, two-sided at ``alpha`` (noncentral t)."""
    from scipy.stats import nct, t

    critical, shift = t.ppf(1 - alpha / 2, freedom), true_effect / error
    return float(nct.sf(critical, freedom, shift) + nct.sf(critical, freedom, -shift))


def detectable(error: float, freedom: float, alpha: float = 0.05, wanted: float = 0.8) -> float:
    """The smallest true effect that is called different with chance ``wanted``; same unit as ``error``."""
    from scipy.optimize import brentq
    from scipy.stats import t

    about = t.ppf(1 - alpha / 2, freedom) + t.ppf(wanted, freedom)  # exact for many degrees of freedom
    return error * float(brentq(lambda size: power(size, 1.0, freedom, alpha) - wanted, 0.0, 2 * about))


def planned(seeds: int, questions: int, discordant: float, seed_spread: float) -> tuple[float, float]:
    """Standard error and degrees of freedom that a design will have, before it is run.

    ``discordant``: share of questions that one policy answers and the other does not (the variance of one entry of D);
    ``seed_spread``: standard deviation of the true difference from training to training. Questions that one method
    answers in every training and the other in none would add to it.
    """
    if seeds == 1:
        return math.sqrt(discordant / questions), questions - 1.0
    by_seed, rest = questions * seed_spread**2 + discordant, discordant
    free_seeds, free_questions = seeds - 1, questions - 1
    spread = by_seed**2 / free_seeds + rest**2 / free_questions + rest**2 / (free_seeds * free_questions)
    return math.sqrt(by_seed / (seeds * questions)), max(by_seed**2 / spread, free_seeds)
