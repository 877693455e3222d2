"""Comparisons with intervals, and the curves of a run."""

from __future__ import annotations

import math
import re
from pathlib import Path

import matplotlib.figure
import numpy as np
import pandas
import pytest
import recorded
from matplotlib.image import imread
from scipy import stats
from source import ROOT

from facts.exits import InputError
from lab import comparisons, curves
from lab.comparisons import Effect, Entry, Family, Plan

# ---------------------------------------------------------------------------------------------------------- comparisons

# Student (1908): hours of sleep gained by ten patients under the second drug over the first.
SLEEP = np.array([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])


# ---------------------------------------------------------------- known values


def test_holm_gives_the_textbook_values_in_the_order_given() -> None:
    assert comparisons.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert comparisons.holm([0.7, 0.9]) == [1.0, 1.0] and comparisons.holm([]) == []


def test_students_sleep_gives_students_interval() -> None:
    found = comparisons.effect(SLEEP / 100)
    assert found[:4] == pytest.approx((1.58, 0.7001142, 2.4598858, 0.002833), abs=1e-6) and found.seeds == 10
    assert str(found) == "+1.6 (+0.7 to +2.5)"


def test_the_detectable_effect_is_cohens() -> None:
    """Cohen (1988), and every table since: d = 0.5 needs 34 pairs for a power of 0.8 at 0.05, two-sided, and not 33."""
    assert comparisons.detectable(33, 0.05) / np.sqrt(34) < 0.5 < comparisons.detectable(32, 0.05) / np.sqrt(33)
    pairs = np.array([1.0, -1.0] * 17) * np.sqrt(33 / 34)  # with a standard deviation of 1
    alone, of_four = (comparisons.effect(pairs / 100, tests).detectable for tests in (1, 4))
    assert alone == pytest.approx(comparisons.detectable(33, 0.05) / np.sqrt(34)) and of_four > alone


def test_the_protocols_numbers_are_those_of_its_formula() -> None:
    """docs/gsm8k_protocol.md: every row of its table of effects, computed again."""
    text = (ROOT / "docs" / "gsm8k_protocol.md").read_text().replace("**", "")
    rows = re.findall(r"^\| (\d) \| (\d+) %[^|]*\| ([\d.]+) \| ([\d.]+)", text, re.M)
    assert len(rows) == 4
    for seeds, discordant, spread, finds in ([*map(float, row)] for row in rows):
        error = np.sqrt((spread / 100) ** 2 / seeds + discordant / 100 / (seeds * 1319))
        assert 100 * error * comparisons.detectable(int(seeds) - 1, 0.05) == pytest.approx(finds, abs=0.051)


def test_one_seed_and_seeds_that_agree() -> None:
    assert np.isnan(comparisons.effect(np.array([0.1])).p)
    assert comparisons.effect(np.array([0.1, 0.1, 0.1]))[:4] == pytest.approx((10, 10, 10, 0))
    assert comparisons.effect(np.zeros(3)).p == 1


@pytest.mark.parametrize("seeds", [3, 18])
def test_of_null_comparisons_one_in_twenty_is_called_different(seeds: int) -> None:
    drawn = np.random.default_rng(0).normal(0, 0.02, (2000, seeds))
    found = [comparisons.effect(differences) for differences in drawn]
    assert np.mean([one.p < 0.05 for one in found]) == pytest.approx(0.05, abs=0.015)
    assert np.mean([one.low <= 0 <= one.high for one in found]) == pytest.approx(0.95, abs=0.015)
    assert [one.p for one in found[:3]] == pytest.approx([stats.ttest_1samp(d, 0).pvalue for d in drawn[:3]])


def test_the_share_of_a_loss_by_hand() -> None:
    """Four of ten points come back; a seed that only one of the two has is left out."""
    loss = pandas.Series([-0.08, -0.12, -0.1, -0.9], index=[0, 1, 2, 3])
    back = pandas.Series([0.03, 0.05, 0.04, 0.9], index=[0, 1, 2, 4])
    share, low, high = comparisons.share_recovered(loss, back)
    assert share == pytest.approx(0.4) and 0.37 < low < share < high < 0.43


# ---------------------------------------------------------------- outcomes and families


def runs(**outcomes: list[float]) -> pandas.DataFrame:
    """Steps of one run a seed: sampled accuracy 0.2 at the start, then twice the outcome."""
    return pandas.DataFrame(
        {
            "variant": name,
            "seed": seed,
            "step": step,
            "id": f"{name}-seed{seed}",
            "eval/num_questions": 100,
            "eval/sampled_accuracy": 0.2 if step == 0 else outcome + (step - 15) / 1000,
            "reward/mean": outcome / 2,
        }
        for name, values in outcomes.items()
        for seed, outcome in enumerate(values)
        for step in (0, 10, 20)
    )


def test_outcomes_by_hand() -> None:
    steps = runs(base=[0.5, 0.6])
    assert comparisons.scores(steps, "sampled").outcome.loc["base"].tolist() == pytest.approx([0.505, 0.605])
    assert comparisons.scores(steps, "curve").outcome.loc["base"].tolist() == pytest.approx([0.5, 0.6])
    assert comparisons.scores(steps, "reward").outcome.loc["base"].tolist() == pytest.approx([0.25, 0.3])
    assert comparisons.gain(steps, "base")[:2] == pytest.approx((0.2, 0.555))
    with pytest.raises(InputError, match="--kind greedy: no run has eval/greedy_accuracy"):
        comparisons.scores(steps, "greedy")


def a_plan(*entries: Entry, controls: tuple[Entry, ...] = (), **settings: object) -> Plan:
    family = Family(name="f", section="s", sweep="x", entries=entries, controls=controls, **settings)
    return Plan(sections={"s": "text"}, families=(family,))


def entry(method: str, base: str = "base", **more: object) -> Entry:
    return Entry(method=method, base=base, title=method, **more)


BASE = [0.50, 0.52, 0.48, 0.51, 0.49]
BETTER, SAME = (
    [value + 0.1 + i / 1000 for i, value in enumerate(BASE)],
    [v + (-1) ** i / 1000 for i, v in enumerate(BASE)],
)


def test_a_family_is_corrected_as_a_whole_also_before_all_of_it_was_run() -> None:
    steps = runs(base=BASE, better=BETTER, same=SAME)
    alone = comparisons.compare(steps, a_plan(entry("better")))[0]
    plan = a_plan(entry("better"), entry("same"), entry("not_run"), margin=1)
    better, same = comparisons.compare(steps, plan)
    assert better.p == pytest.approx(3 * alone.effect.p) and better.effect.detectable > alone.effect.detectable
    assert (better.found, same.found) == ("larger", "equal") and alone.p == alone.effect.p
    apart = comparisons.compare(steps, a_plan(entry("better"), entry("same"), apart=True))
    assert [one.p for one in apart] == [one.effect.p for one in apart]


@pytest.mark.parametrize(
    ("low", "high", "p", "seeds", "said"),
    [
        (-0.9, 0.9, 0.9, 5, "equal"),
        (0.1, 0.9, 0.01, 5, "equal"),  # a difference within the margin
        (-0.5, 1.5, 0.3, 5, "undecided"),
        (0.5, 1.5, 0.06, 5, "undecided"),
        (0.5, 1.5, 0.04, 5, "larger"),
        (-1.5, -0.5, 0.04, 5, "smaller"),
        (0.5, 1.5, 0.001, 2, "undecided"),  # fewer than three seeds
    ],
)
def test_what_was_found_by_the_announced_rule(low, high, p, seeds, said) -> None:
    assert comparisons.verdict(Effect((low + high) / 2, low, high, p, seeds, 1.0), p, 1.0) == said


def test_a_prediction_is_judged_and_without_its_control_nothing_is_said() -> None:
    steps = runs(base=BASE, better=BETTER, same=SAME, control=[v - 0.2 - i / 1000 for i, v in enumerate(BASE)])
    entries = (entry("better", predicted="larger"), entry("same", predicted="larger"))

    def outcomes(predicted: str, **more: object) -> list[str]:
        control = entry("control", predicted=predicted)
        plan = a_plan(*entries, controls=(control,), control=("control",), margin=1, **more)
        return [one.outcome for one in comparisons.compare(steps, plan)]

    assert outcomes("smaller") == ["met", "not met: equal within 1", "met"]
    assert outcomes("equal") == ["withheld: a control is not as predicted"] * 2 + ["not met: smaller"]


def test_only_stated_losses_of_a_mismatch_can_come_back() -> None:
    steps = runs(base=BASE, worse=[v - 0.1 - i / 1000 for i, v in enumerate(BASE)], back=SAME)
    entries = (entry("worse"), entry("back", base="worse"))
    ((loss, back),) = comparisons.losses(comparisons.compare(steps, a_plan(*entries, mismatch=True)))
    assert (loss.entry.method, back.entry.method) == ("worse", "back")
    assert not comparisons.losses(comparisons.compare(steps, a_plan(*entries)))


def test_runs_without_a_partner_or_with_other_evaluations_are_not_compared() -> None:
    steps = runs(base=BASE, other=BETTER)
    late = steps[(steps["variant"] == "base") | (steps["step"] < 20)]
    for wrong, kind in (
        (late, "curve"),
        (late, "sampled"),
        (steps.assign(**{"eval/num_questions": steps.index}), "curve"),
    ):
        with pytest.raises(InputError, match="base, other: seed 0: evaluated otherwise"):
            comparisons.compare(wrong, a_plan(entry("other"), kind=kind))
    with pytest.raises(InputError, match="no common seed"):
        comparisons.compare(steps[(steps["variant"] == "base") == (steps["seed"] < 2)], a_plan(entry("other")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("families: [{name: f}]", "families.0.section: Field required"),
        (
            "sections: {s: t}\nfamilies: [{name: f, section: s, sweep: x, entries: [], control: [c]}]",
            "control: found c",
        ),
        ("families: [{name: f, section: s, sweep: x, entries: []}]", "section: found 's'"),
        ("learned: [x]", "learned: Extra inputs are not permitted"),
    ],
)
def test_a_plan_with_a_fault_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(InputError) as refusal:
        comparisons.read_plan(tmp_path / "plan.yaml")
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


# --------------------------------------------------------------------------------------------------------------- curves


def panel(key: str, curve: curves.Curve) -> matplotlib.figure.Axes:
    axes = matplotlib.figure.Figure().subplots()
    curves.draw_panel(axes, key, curve)
    return axes


def test_the_curves_of_a_run_are_not_blank(tmp_path: Path) -> None:
    """Every panel has a curve, and a value that is not finite has its mark."""
    run = recorded.make_run(tmp_path, "base-seed0", questions=20)
    path = run / "metrics.jsonl"
    lost = '"nonfinite": ["actor/entropy"], "actor/entropy": null'
    path.write_text(path.read_text().replace('"actor/entropy": 0.5', lost))
    curves.draw_curves(run)
    picture = imread(run / "curves.png")[..., :3]
    height, width = (size // 3 for size in picture.shape[:2])
    for place in range(9):
        top, left = place // 3 * height, place % 3 * width
        window = picture[top : top + height, left : left + width]
        assert (window[..., 2] - window[..., 0] > 0.3).sum() > 5, "blue"
        marks = (window[..., 0] - window[..., 2] > 0.5).sum()
        assert (marks > 5) == (place == 3), "a red mark in the panel of the entropy alone"


def test_curves_count_steps_as_the_console_does(tmp_path: Path) -> None:
    """The reward of the first of four steps stands at 1; the evaluation before it at 0, the last one at 4."""
    read = curves.read_curves(recorded.make_run(tmp_path, "base-seed0", questions=20))
    assert [*read][:3] == ["eval/greedy_accuracy", "eval/sampled_accuracy", "reward/mean"]
    assert [*read["reward/mean"]] == [1, 2, 3, 4] and [*read["eval/sampled_accuracy"]] == [0, 4]
    assert "actor/loss" not in read


@pytest.mark.parametrize(("values", "points"), [([1, math.nan, 3, 4], [1]), ([math.nan, 2, math.nan], [2])])
def test_a_curve_has_gaps_where_nothing_was_measured(values: list[float], points: list[float]) -> None:
    """A value between two gaps is a point, because a line through it alone would be invisible."""
    axes = panel("reward/mean", dict(enumerate(values, 1)))
    *marks, line, smooth, dots = axes.lines
    assert len(marks) == sum(map(math.isnan, values)) and [*dots.get_ydata()] == points
    assert [*map(math.isnan, line.get_ydata())] == [*map(math.isnan, smooth.get_ydata())] == [*map(math.isnan, values)]
    skipped = panel("actor/kl_loss", {1: 1.0, 3: 2.0})  # a step that trained nothing has no such value
    assert math.isnan(skipped.lines[0].get_ydata()[1])


def test_evaluations_are_points_and_a_logarithmic_panel_has_whole_decades() -> None:
    (dots,) = panel("eval/greedy_accuracy", {0: 0.25, 40: 0.5}).lines
    assert dots.get_linestyle() == "None" and [*dots.get_ydata()] == [0.25, 0.5]
    axes = panel("rollout/logp_gap_mean", {1: 2e-8, 2: 3e-8, 3: 0.0})
    assert axes.get_yscale() == "log" and axes.get_ylim() == pytest.approx((1e-8, 1e-7))
    assert panel("rollout/logp_gap_mean", {1: 0.0, 2: 0.0}).get_yscale() == "linear"
