"""docs/benchmark.md: what was predicted of each method of the benchmark, what was found, and whether the controls were.

The comparisons are those of the families in results/plan.yaml, the planted faults those of families whose names
begin with "controls".
"""

import statistics
from typing import Any

import numpy as np

from lab import announced, comparisons, figures
from lab.announced import Planned
from lab.comparisons import Comparison
from lab.markdown import point, points, table
from lab.records import Run, scores

FIGURE = "figures/benchmark.png"
Found = dict[Planned, list[Comparison]]


def page(ready: Found, groups: dict[str, list[Run]]) -> str:
    """The generated part of docs/benchmark.md."""
    methods, controls = announced.methods(ready), announced.controls(ready)
    if not methods:
        return "No record yet."
    parts = ["## What was found", f"![Effect of each method](../results/{FIGURE})"]
    for family in dict.fromkeys(planned.family for planned, _ in methods):
        found = announced.of(family, ready)
        parts += [f"### Family {family}", table([method_row(*each, ready) for each in found])]
        parts += comparisons.notes(one for _, one in found)
        parts += filter(None, [announced.by_the_rule_of_today(family, ready)])
    parts += ["## Why it was predicted", table([reason_row(planned) for planned, _ in methods])]
    if controls:
        parts += ["## Planted faults", table([control_row(*each, ready) for each in controls])]
        parts += comparisons.notes(one for _, one in controls)
    parts += ["## The second outcome: accuracy at the end", table([end_row(each, groups) for each, _ in methods])]
    names = dict.fromkeys(name for planned, _ in [*methods, *controls] for name in planned.names)
    parts += ["## All variants", table([variant_row(name, groups[name]) for name in names])]
    return "\n\n".join(parts)


def method_row(planned: Planned, one: Comparison, ready: Found) -> dict[str, str]:
    return {
        "comparison": planned.title,
        "method": f"`{one.other}`",
        "against": f"`{one.base}`",
        "predicted": planned.predicted,
        "difference, points": point(one.effect.mean),
        "95 % interval": points(*one.effect.interval()),
        "p (Holm)": f"{one.p:.2g}",
        "minimum detectable effect, points": f"{100 * one.detectable:.1f}",
        "found": one.verdict.replace(f"different: {one.other} is ", ""),
        "prediction": announced.outcome(planned, one, ready),
    }


def reason_row(planned: Planned) -> dict[str, str]:
    return {
        "comparison": planned.title,
        "predicted": planned.predicted,
        "because": planned.why,
        "its control": f"`{planned.control}`" if planned.control else "none",
    }


def control_row(planned: Planned, one: Comparison, ready: Found) -> dict[str, str]:
    return {
        "fault": planned.title.removeprefix("Control: "),
        "run": f"`{one.other}`",
        "against": f"`{one.base}`",
        "seeds": str(len(one.seeds)),
        "difference, points": point(one.effect.mean),
        "95 % interval": points(*one.effect.interval()),
        "p (Holm)": f"{one.p:.2g}",
        "found": "yes" if one.other in announced.found_controls(ready) else "no",
    }


def end_row(planned: Planned, groups: dict[str, list[Run]]) -> dict[str, str]:
    (one,) = comparisons.compare({name: groups[name] for name in planned.names})
    return {
        "comparison": planned.title,
        "difference, points": point(one.effect.mean),
        "95 % interval": points(*one.effect.interval()),
        "p, not corrected": f"{one.effect.p_value():.2g}",
    }


def variant_row(name: str, runs: list[Run]) -> dict[str, str]:
    """Means of a variant over its seeds, with the standard deviation over the seeds."""
    outcomes = {
        "before": [scores(run, "sampled", 0).mean() for run in runs],
        "along the run": [scores(run, "curve").mean() for run in runs],
        "at the end": [scores(run, "sampled").mean() for run in runs],
        "training reward": [scores(run, "reward").mean() for run in runs],
    }
    seconds = statistics.median(run.record.seconds_per_step for run in runs)
    gap = [run.steps["rollout/logp_gap_mean"][: run.record.steps].mean() for run in runs]
    return {
        "variant": f"`{name}`",
        "seeds": str(len(runs)),
        **{key: _spread([100 * value for value in values]) for key, values in outcomes.items()},
        "sampler against trainer, nats": f"{np.mean(gap):.1e}",
        "s per step": f"{seconds:.2f}",
    }


def _spread(values: list[float]) -> str:
    mean = f"{np.mean(values):.1f}"
    return f"{mean} ({np.std(values, ddof=1):.1f})" if len(values) > 1 else mean


def figure(ready: Found) -> Any:
    """Every method's difference with its interval, and the direction that was predicted."""
    import matplotlib.figure

    methods = announced.methods(ready)
    drawn = matplotlib.figure.Figure(figsize=(9, 0.36 * len(methods) + 1.4), layout="constrained")
    axes = drawn.subplots()
    for place, (planned, one) in enumerate(methods):
        low, high = one.effect.interval()
        color = figures.COLORS[announced.outcome(planned, one, ready) != "met"]
        axes.plot([100 * low, 100 * high], [-place, -place], color=color, lw=2)
        axes.plot(100 * one.effect.mean, -place, color=color, marker="o", ms=5)
    axes.axvline(0, color="black", lw=0.8)
    labels = [f"{planned.title} (predicted: {planned.predicted})" for planned, _ in methods]
    axes.set_yticks([-place for place in range(len(methods))], labels)
    figures.finish(axes, "")
    axes.set_xlabel("difference of the accuracy along the run, points; 95 % interval", fontsize=9)
    axes.set_title("Blue: as predicted. Orange: not, or undecided.", loc="left", fontsize=9)
    return drawn
