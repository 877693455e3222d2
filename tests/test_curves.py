"""curves.png of a run shows every metric of its folder, as many steps as were done, and marks what is not finite."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.figure
import pytest
import recorded
from matplotlib.image import imread

from lab import curves


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
