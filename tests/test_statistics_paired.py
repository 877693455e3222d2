"""The statistics of comparisons against textbook values, and by simulation: how often they find what is not there."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from tiers import nightly

import report
from lab import comparisons

# Student (1908): hours of sleep gained by ten patients under the second drug over the first.
SLEEP = np.array([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])


# ---------------------------------------------------------------- known values


def test_exact_mcnemar_is_the_binomial_sum() -> None:
    """By hand, from Pascal's triangle: 2 (1 + 6) / 2^6; 2 / 2^6; 2 (1 + 10 + 45) / 2^10; no difference at all."""
    for better, worse, p in ((5, 1, 14 / 64), (0, 6, 2 / 64), (8, 2, 112 / 1024), (3, 3, 1.0), (0, 0, 1.0)):
        assert comparisons.mcnemar_exact(better, worse) == pytest.approx(p)


def test_holm_gives_the_textbook_values_in_the_order_given() -> None:
    assert comparisons.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert comparisons.holm([0.7, 0.9]) == [1.0, 1.0] and comparisons.holm([]) == []


def test_students_sleep_gives_students_interval() -> None:
    """Ten seeds whose two questions agree are ten numbers: the paired t-test, t = 4.0621 with 9 degrees of freedom."""
    found = comparisons.effect(np.stack([SLEEP, SLEEP], axis=1))
    assert found.mean == pytest.approx(1.58) and found.freedom == pytest.approx(9)
    assert found.mean / found.error == pytest.approx(4.0621, abs=1e-4)
    assert found.p_value() == pytest.approx(0.002833, abs=1e-6)
    assert found.interval() == (pytest.approx(0.7001142, abs=1e-6), pytest.approx(2.4598858, abs=1e-6))


def test_questions_alone_give_the_t_test_over_questions() -> None:
    """Seeds that agree on every question add nothing but certainty about the same questions."""
    for table in (np.stack([SLEEP, SLEEP, SLEEP]), SLEEP[None]):
        assert comparisons.effect(table).p_value() == pytest.approx(stats.ttest_1samp(SLEEP, 0).pvalue)


def test_mean_squares_of_a_table_by_hand() -> None:
    """(2 seeds, 3 questions): rows 1 2 6, 3 4 2; means 3, 3; columns 2 3 4; all 3. Squares: 16 = 0 + 4 + 12.

    Mean squares 0, 2 and 6: the difference is negative, so the larger of the first two, 2, over 6 entries.
    """
    found = comparisons.effect(np.array([[1.0, 2.0, 6.0], [3.0, 4.0, 2.0]]))
    assert found.mean == 3 and found.error == pytest.approx(math.sqrt(2 / 6))


@pytest.mark.parametrize("seeds", [1, 3])
def test_nothing_that_differs_is_no_difference_but_no_certainty_either(seeds: int) -> None:
    """No change in n answers bounds the rate of changes by about 3 / n (the rule of three), not by 0."""
    found = comparisons.effect(np.zeros((seeds, 100)))
    low, high = found.interval()
    assert found.p_value() == 1 and low == -high and high >= 0.9 * 3 / (100 * seeds)


def test_smallest_detectable_effect_is_cohens() -> None:
    """Cohen (1988), and every table since: d = 0.5 needs 34 pairs for a power of 0.8 at 0.05, two-sided, and not 33."""
    assert comparisons.detectable(1 / math.sqrt(34), 33) < 0.5 < comparisons.detectable(1 / math.sqrt(33), 32)
    assert comparisons.power(0.5, 1 / math.sqrt(34), 33) == pytest.approx(0.8078, abs=1e-4)
    assert comparisons.power(0.0, 1.0, 10) == pytest.approx(0.05)


# ---------------------------------------------------------------- simulation


def outcomes(
    number: int, seeds: int, questions: int, spread: float, taste: float, gain: float = 0.0, seed: int = 0
) -> np.ndarray:
    """D of many comparisons of two methods.  -> (comparisons, S, n)

    Questions have difficulties; each training shifts its accuracy by ``spread``; each method likes some questions more
    than others (``taste``), none in the mean; the second method is better by ``gain``.
    """
    generator = np.random.default_rng(seed)
    ease = generator.uniform(0.3, 0.7, (number, 1, questions))
    liked = generator.uniform(-taste, taste, (number, 1, questions)) / 2
    pair = []
    for side in (-1, 1):
        shift = generator.normal(0, spread, (number, seeds, 1)) if spread else 0.0
        chance = ease + side * (liked + gain / 2) + shift
        pair.append((generator.random((number, seeds, questions)) < chance).astype(np.float32))
    return (pair[1] - pair[0]).astype(np.float64)


REGIMES = {  # spread of a training, taste of a method
    "answers alone differ": (0.0, 0.0),
    "methods like other questions": (0.0, 0.4),
    "trainings differ somewhat": (0.01, 0.1),
    "trainings differ much": (0.05, 0.1),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seeds", [3, nightly(5)])
def test_of_null_comparisons_at_most_one_in_twenty_is_called_different(regime: str, seeds: int) -> None:
    found = comparisons.effect(outcomes(1000, seeds, 500, *REGIMES[regime]))
    assert np.mean(found.p_value() < 0.05) <= 0.05 + 0.015
    low, high = found.interval()
    assert np.mean((low <= 0) & (0 <= high)) >= 0.95 - 0.015  # no method is better: 0 is the truth


def test_an_interval_that_counts_questions_only_would_find_winners_in_noise() -> None:
    """Why all this: one long list of answers, seeds ignored, calls a third of the null comparisons different."""
    differences = outcomes(1000, 5, 500, *REGIMES["trainings differ much"])
    flat = differences.reshape(1000, 1, -1)
    assert np.mean(comparisons.effect(flat).p_value() < 0.05) > 0.3


@pytest.mark.parametrize("regime", [*[*REGIMES][-1:], *map(nightly, [*REGIMES][:-1])])
def test_the_interval_holds_a_true_effect(regime: str) -> None:
    found = comparisons.effect(outcomes(1000, 4, 500, *REGIMES[regime], gain=0.06, seed=1))
    low, high = found.interval()
    assert np.mean((low <= 0.06) & (0.06 <= high)) >= 0.95 - 0.015


@pytest.mark.parametrize("spread", [0.03, nightly(0.01)])
def test_power_is_what_the_plan_states(spread: float) -> None:
    """An effect of the planned size is found as often as stated, within what simulation and rounding leave."""
    null = outcomes(200, 5, 500, spread, 0.0, seed=2)
    error, freedom = report.expected(5, 500, discordant=float(np.mean(null != 0)), seed_spread=spread * math.sqrt(2))
    size = comparisons.detectable(error, freedom)
    found = comparisons.effect(outcomes(1000, 5, 500, spread, 0.0, gain=size, seed=3))
    assert np.mean((found.p_value() < 0.05) & (found.mean > 0)) == pytest.approx(0.8, abs=0.06)
