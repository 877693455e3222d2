"""The PNG figures of RESULTS.md; lab/curves.py draws the curves of one run.

A plot shows each run as a thin line and the running mean over the runs of a variant as a thick line. Evaluations are
points without a line between them, because nothing was measured there. The pixels of a PNG depend on the version of
matplotlib and its fonts. So a figure is checked by the data that it was drawn from: its metadata hold their checksum.
"""

import hashlib
import itertools
import json
import statistics
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from inputs.files import read_bytes, write_atomically
from lab.records import Run

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito
FOUND, HARM, NEITHER = COLORS[0], COLORS[1], "#999999"  # what an interval shows: as meant, the opposite, nothing
COLORS_OF_A_FIGURE = 64  # a picture takes a quarter of the space of one with all colours
DRAWN = "report.py build"  # how the description of a figure of this file begins
DRAWING = 6  # raise it when the drawing changes, so that --check asks for new figures
Curves = dict[str, list[Any]]  # variant -> one pandas.Series per run: step -> value
# File of a figure below results/ -> its title, the variants whose data it shows, and the function that draws it.
Wanted = dict[str, tuple[str, dict[str, list[Run]], Callable[[str, dict[str, list[Run]]], Any]]]


def curves(groups: dict[str, list[Run]], key: str) -> Curves:
    """The values of one column by the steps done; runs in which all are missing or 0 are left out."""
    found = {
        name: [by_steps_done(key, run.steps[key].dropna()) for run in runs if key in run.steps]
        for name, runs in groups.items()
    }
    return {name: runs for name, runs in found.items() if any(run.any() for run in runs)}


def by_steps_done(key: str, values: Any) -> Any:
    """A column of the rows of a run as a curve: the metrics of a row are those of the step after ``step`` steps."""
    return values if key.startswith("eval/") else values.set_axis(values.index + 1)


def panel(axes: Any, key: str, lines: Curves, colors: dict[str, str]) -> None:
    """Draw one metric: a thin line for each run, and a thick running mean for each variant. Evaluations are points."""
    import pandas

    for name, runs in lines.items():
        table = pandas.concat(runs, axis=1)
        if key.startswith("eval/"):
            axes.plot(table, color=colors[name], marker="o", ms=4, ls="", alpha=0.8)
        else:
            smooth = table.mean(axis=1).rolling(max(1, len(table) // 20), center=True, min_periods=1).mean()
            axes.plot(table, color=colors[name], lw=0.7, alpha=0.35)
            axes.plot(smooth, color=colors[name], lw=2, label=name)
    finish(axes, key)
    axes.set_xlabel("steps done", fontsize=9)
    axes.locator_params(axis="x", integer=True)


def finish(axes: Any, label: str) -> None:
    """The style that all panels share."""
    axes.set_ylabel(label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


# --------------------------------------------------------------------------------------------------------- PNG figures


def learning_curve(name: str, groups: dict[str, list[Run]]) -> Any:
    """The training reward of one variant's seeds, with the held-out accuracy of the evaluations."""
    import matplotlib.figure

    runs = groups[name]
    figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes, accuracy = figure.subplots(), f"eval/{runs[0].record.last.kind}_accuracy"
    for key, color in (("reward/mean", COLORS[0]), (accuracy, COLORS[1])):
        panel(axes, key, curves({name: runs}, key), {name: color})
    labels = {
        "training reward, one seed": axes.lines[0],
        "training reward, running mean": axes.lines[len(runs)],
        "held-out accuracy, one seed": axes.lines[-1],
    }
    axes.legend(labels.values(), labels, frameon=False, loc="lower right", fontsize=9)
    axes.set_title(
        f"Learning curve of {name}: {len(runs)} seeds, {runs[0].record.steps} steps of GRPO", loc="left", fontsize=11
    )
    axes.set_ylabel("right answers (sampled)" if "sampled" in accuracy else "right answers", fontsize=9)
    axes.yaxis.set_major_formatter(lambda share, place: f"{share:.0%}")
    axes.set_ylim(0, 1.02)
    return figure


def gap(runs: list[Run]) -> float:
    """The difference of the log-probs of sampler and trainer, the mean over all steps of all runs, nats."""
    return statistics.fmean(run.steps["rollout/logp_gap_mean"][: run.record.steps].mean() for run in runs)


def learning_curves(labels: dict[str, str], groups: dict[str, list[Run]]) -> Any:
    """The held-out accuracy of several variants, means over their seeds, each named at its end."""
    import matplotlib.figure
    import pandas

    figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, label), color in zip(labels.items(), itertools.cycle(COLORS)):
        runs = curves({name: groups[name]}, "eval/sampled_accuracy")[name]
        mean = 100 * pandas.concat(runs, axis=1).mean(axis=1).dropna()
        axes.plot(mean, color=color, lw=2, marker="o", ms=3)
        axes.annotate(
            label, (mean.index[-1], mean.iloc[-1]), xytext=(6, -3), textcoords="offset points", color=color, fontsize=9
        )
    axes.set_xlim(0, 1.35 * mean.index[-1])
    finish(axes, "right sampled answers, %")
    axes.set_xlabel("steps done", fontsize=9)
    return figure


def described(title: str, groups: dict[str, list[Run]], pixels: bytes) -> str:
    """The metadata of a figure: checksums of its data (title, names, metrics and evaluations) and its pixels."""
    files = ("metrics.jsonl", "eval.jsonl")
    parts = [[name, [[run.record.files[file] for file in files] for run in runs]] for name, runs in groups.items()]
    data = json.dumps([DRAWING, title, parts]).encode()
    return f"{DRAWN} {hashlib.sha256(data).hexdigest()} {hashlib.sha256(pixels).hexdigest()}"


def draw_all(wanted: Wanted, results: Path) -> None:
    """Draw the figures that are not up to date, and remove those that are not wanted."""
    from PIL import Image, PngImagePlugin

    stale = faults(wanted, results)
    for name in stale - wanted.keys():
        (results / name).unlink(missing_ok=True)
    for name in stale & wanted.keys():
        title, groups, draw = wanted[name]
        drawn, picture, about = BytesIO(), BytesIO(), PngImagePlugin.PngInfo()
        draw(title, groups).savefig(drawn, format="png", dpi=110)
        image = Image.open(drawn).convert("RGB").quantize(COLORS_OF_A_FIGURE, dither=Image.Dither.NONE)
        about.add_text("Description", described(title, groups, image.convert("RGB").tobytes()))
        image.save(picture, format="png", optimize=True, pnginfo=about)
        (results / name).parent.mkdir(exist_ok=True)
        write_atomically(results / name, picture.getvalue())


def faults(wanted: Wanted, results: Path) -> set[str]:
    """The figures that draw_all() would draw or remove: missing, edited, drawn from other data, or not wanted.

    A picture that this file has not drawn is somebody else's, and stays.
    """
    there = {f"figures/{path.name}": _read(path) for path in results.glob("figures/*.png")}
    stale = {
        name
        for name, (title, groups, _) in wanted.items()
        if name not in there or there[name][0] != described(title, groups, there[name][1])
    }
    return stale | {name for name, (about, _) in there.items() if about.startswith(DRAWN) and name not in wanted}


def _read(path: Path) -> tuple[str, bytes]:
    """The description and the pixels of a picture; empty for what is none."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(read_bytes(path))) as image:
            return str(image.info.get("Description", "")), image.convert("RGB").tobytes()
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        return "", b""
