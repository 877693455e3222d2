"""Draws the curves of a run to curves.png in its folder: accuracies, rewards and other metrics over the steps done.

A training run draws them at its end. A panel shows a metric as a thin line and its running mean as a thick line.
Evaluations are points without a line, because nothing was measured between them.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runlog.run_record import read_lines

METRICS = (
    "reward/mean",
    "actor/kl_loss",
    "actor/entropy",
    "rollout/logp_gap_mean",
    "response_length/mean",
    "response_length/truncated_frac",
    "actor/grad_norm",
    "reward/unparsable_frac",
    "reward/equal_groups",
    "aqn/sigma",
    "timing/step_s",
    "perf/tokens_per_s",
    "perf/peak_rss_gib",
)
LOGARITHMIC = {"rollout/logp_gap_mean", "actor/kl_loss"}
COLUMNS = 3
COLOR = "#0072b2"
Curve = dict[int, float]  # maps the number of finished steps to a value


def draw_curves(run: Path) -> None:
    """Draw curves.png in the folder of ``run``. A dotted red line marks a step whose value is not finite."""
    import matplotlib.figure

    curves = read_curves(run)
    rows = math.ceil(len(curves) / COLUMNS)
    figure = matplotlib.figure.Figure(figsize=(4 * COLUMNS, 2.9 * rows), layout="constrained")
    for place, (key, curve) in enumerate(curves.items(), 1):
        draw_panel(figure.add_subplot(rows, COLUMNS, place), key, curve)
    figure.savefig(run / "curves.png", dpi=110)


def read_curves(run: Path, metrics: Sequence[str] = METRICS) -> dict[str, Curve]:
    """Return the curves of the accuracies and of the reward's parts, then those of ``metrics`` that the run has.

    A value that was not finite is NaN.
    """
    curves: dict[str, Curve] = {}
    for name in ("metrics.jsonl", "timing.jsonl", "eval.jsonl"):
        for line in read_lines(run / name):
            for key, value in line.items():
                if key in metrics or key.endswith("_accuracy") or key.startswith("reward/part/"):
                    curve = curves.setdefault(key, {})
                    curve[line["step"]] = math.nan if value is None else value
    first = sorted(key for key in curves if key not in metrics)
    others = [key for key in metrics if key in curves]
    return {key: curves[key] for key in first + others}


def draw_panel(axes: Any, key: str, curve: Curve) -> None:
    """Draw one metric. A step without a value leaves a gap in the line. A small dot shows a value between two gaps."""
    import numpy
    import pandas

    measured = pandas.Series(curve, dtype=float)
    for step in measured.index[measured.isna()]:
        axes.axvline(step, color="red", lw=1, ls=":")
    if key.endswith("_accuracy"):
        axes.plot(measured, color=COLOR, marker="o", ms=4, ls="", alpha=0.8)
    else:
        values = measured.reindex(range(measured.index[0], measured.index[-1] + 1))
        smooth = values.rolling(max(1, len(values) // 20), center=True, min_periods=1).mean().where(values.notna())
        axes.plot(values, color=COLOR, lw=0.7, marker="o", ms=2, alpha=0.35)
        axes.plot(smooth, color=COLOR, lw=2)
    if key in LOGARITHMIC and (measured > 0).any():
        axes.set_yscale("log", nonpositive="mask")
        # The axis has whole decades, so that noise within one decade does not fill the panel.
        low, high = numpy.log10(axes.get_ylim())
        axes.set_ylim(10 ** numpy.floor(low), 10 ** numpy.ceil(high))
    axes.set_ylabel(key, fontsize=9)
    axes.set_xlabel("steps done", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.locator_params(axis="x", integer=True)
