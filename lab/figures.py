"""Learning curves of variants with the spread over their seeds, as PNG in results/figures/.

Pixels depend on the version of matplotlib and its fonts, so a figure is checked by what it was drawn from:
figures.json holds, for each, the checksums of the runs' metrics and of the picture itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

from input_files import InputError, read_object, shown
from lab.comparisons import Source
from run_record import read_lines, sha256_file, write_atomically

PANELS = (  # title, metric, log scale
    ("Reward (line) and held-out accuracy (points)", "reward/mean", False),
    ("Log-prob gap, sampler to trainer (nats a token)", "rollout/logp_gap_mean", True),
    ("AQN sigma", "aqn/sigma", False),
    ("Entropy (nats a token)", "actor/entropy", False),
)
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito
DRAWING = 1  # raise it when the drawing changes, so that --check asks for new figures


def slug(title: str) -> str:
    """A title as a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def source_hash(variants: dict[str, list[Source]]) -> str:
    """What a figure is drawn from: the names, and the checksums of metrics and evaluations."""
    parts = [
        [name, [[one.record.files[file] for file in ("metrics.jsonl", "eval.jsonl")] for one in group]]
        for name, group in variants.items()
    ]
    return hashlib.sha256(json.dumps([DRAWING, parts]).encode()).hexdigest()


def draw(variants: dict[str, list[Source]]) -> bytes:
    """PNG of four panels: of each variant the mean over its seeds, and the range that they span."""
    import matplotlib.figure
    import matplotlib.ticker
    import numpy

    figure = matplotlib.figure.Figure(figsize=(11, 6.5), layout="constrained")
    all_axes = figure.subplots(2, 2).flat
    for axes, (title, key, logarithmic) in zip(all_axes, PANELS, strict=True):
        shown = False
        for color, (name, group) in zip(COLORS * len(variants), variants.items(), strict=False):
            runs = [read_lines(one.folder / "metrics.jsonl") for one in group]
            length = min(map(len, runs))
            values = numpy.array([[row.get(key) for row in rows[:length]] for rows in runs], dtype=float)  # (S, steps)
            if not numpy.isfinite(values).all(1).any():
                continue
            shown = True
            steps = numpy.arange(length)
            label = f"{name}, {len(group)} seed{'s' * (len(group) > 1)}"
            axes.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.2, lw=0)
            axes.plot(steps, values.mean(0), color=color, lw=1.5, label=label)
            if key == "reward/mean":
                for one in group:
                    axes.plot(*_evaluations(one), color=color, marker="o", ms=4, ls="")
        if logarithmic and shown:  # whole decades: noise within one should look like noise
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(10 ** numpy.floor(numpy.log10(low)), 10 ** numpy.ceil(numpy.log10(high)))
        if key == "reward/mean":
            axes.set_ylim(-0.02, 1.02)
            axes.legend(fontsize=8, frameon=False, loc="lower right")
        if not shown:
            axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color="gray")
        axes.set_title(title, fontsize=10, loc="left")
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axes.set_xlabel("steps done")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=100, metadata={"Software": None})  # no version, no date
    return picture.getvalue()


def _evaluations(one: Source) -> tuple[list[int], list[float]]:
    kind = "sampled" if one.record.last.sampled else "greedy"
    rows = read_lines(one.folder / "eval.jsonl")
    return [row["step"] for row in rows], [row[f"eval/{kind}_accuracy"] for row in rows]


def _known(folder: Path) -> dict[str, dict[str, str]]:
    path = folder / "figures.json"
    known = read_object(path) if path.exists() else {}
    for name, about in known.items():  # draw_all removes the figures of this list that nothing asks for
        if not re.fullmatch(r"[\w.-]+", name) or not isinstance(about, dict) or len(about) != 2:
            raise InputError(f"{path}: found {shown(name)}; needed: what report.py build writes")
    return known


def draw_all(wanted: dict[str, dict[str, list[Source]]], folder: Path) -> None:
    """Draw what is not up to date, and remove what nothing asks for any more."""
    stale, known = set(check_each(wanted, folder)), _known(folder)
    if not wanted and not known:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in known.keys() - wanted.keys():
        (folder / f"{name}.png").unlink(missing_ok=True)
    index: dict[str, Any] = {name: known[name] for name in wanted.keys() - stale}
    for name in sorted(stale & wanted.keys()):
        write_atomically(folder / f"{name}.png", draw(wanted[name]))
        index[name] = {"drawn_from": source_hash(wanted[name]), "sha256": sha256_file(folder / f"{name}.png")}
    write_atomically(folder / "figures.json", json.dumps(dict(sorted(index.items())), indent=1) + "\n")


def check_each(wanted: dict[str, dict[str, list[Source]]], folder: Path) -> dict[str, str]:
    """Figure -> what is wrong with it, for those that are missing, edited, stale, or not asked for."""
    known, faults = _known(folder), {}
    for name in sorted(wanted.keys() | known.keys()):
        path = folder / f"{name}.png"
        if name not in wanted:
            faults[name] = "not asked for"
        elif name not in known or not path.exists():
            faults[name] = "missing"
        elif known[name]["drawn_from"] != source_hash(wanted[name]):
            faults[name] = "stale"
        elif known[name]["sha256"] != sha256_file(path):
            faults[name] = "edited"
    return faults


def check(wanted: dict[str, dict[str, list[Source]]], folder: Path) -> list[str]:
    """A sentence for each figure that is not what ``draw_all`` would leave."""
    found = check_each(wanted, folder).items()
    return [f"{folder / name}.png: {fault}; python report.py build" for name, fault in found]
