"""All plots: the PNG figures of RESULTS.md and of a run; and one HTML page about a run, a record or a sweep.

    python report.py html out/RUN      curves, checks, completions over time, slowest and longest, reward by question

A plot shows each run as a thin line and the running mean over the runs of a variant as a thick line. Evaluations are
points without a line between them, because nothing was measured there. The pixels of a PNG depend on the version of
matplotlib and its fonts. So a figure is checked by the data that it was drawn from: its metadata hold their checksum.

The page needs no network and no script. The files of a run limit what it can show: the first few completions of each
step's first question (more with train.completions_logged), the time of each step, and the score of each held-out
question. There is no time of a single completion, because completions are sampled together.
"""

import hashlib
import html
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from inputs.files import InputError, dump_yaml, read_bytes, read_object, read_text, shown, write_atomically
from lab.records import MARKS, Run, file_of, merged, shares_right
from lab.store import load_runs
from run_record import checks_fired, read_lines, variant_name, why_ended

LABELS = {  # metric -> axis label of the figures
    "reward/mean": "mean reward of a step",
    "actor/entropy": "entropy, nats per token",
    "rollout/logp_gap_mean": "log-prob gap, nats per token",
    "aqn/sigma": "AQN sigma",
}
LOGARITHMIC = {"rollout/logp_gap_mean", "actor/kl_loss"}
SCHEDULES = {"aqn/sigma", "actor/lr"}  # not smoothed: these have no noise
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito
COLORS_OF_A_FIGURE = 64  # a picture takes a quarter of the space of one with all colours
DRAWN = "report.py build"  # how the description of a figure of this file begins
DRAWING = 4  # raise it when the drawing changes, so that --check asks for new figures
CURVES = (
    "reward/mean", "actor/kl_loss", "actor/entropy", "rollout/logp_gap_mean", "response_length/mean", "actor/grad_norm",
    "reward/unparsable_frac", "reward/equal_groups", "aqn/sigma", "timing/step_s", "perf/tokens_per_s",
    "perf/peak_rss_gib",
)  # fmt: skip
LISTED = 10  # rows of the tables of slowest steps and longest completions
MADE = "<!doctype html><!-- report.py html -->\n"  # the first line of a page; a file that begins otherwise is kept
STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1180px;padding:0 1em;color:#222}
h1{font-size:1.4em}h2{font-size:1.15em;margin-top:2em}pre{background:#f6f6f6;padding:.7em;overflow:auto;font-size:12px}
table{border-collapse:collapse}td,th{padding:.15em .7em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}
svg{max-width:100%;height:auto}.right{border-left:4px solid #009e73}.wrong{border-left:4px solid #d55e00}
.cells{line-height:0}.cells i{display:inline-block;width:7px;height:7px;margin:1px}"""
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
    import numpy
    import pandas

    log = key in LOGARITHMIC and any(run.gt(0).any() for runs in lines.values() for run in runs)
    for name, runs in lines.items():
        table = pandas.concat(runs, axis=1)
        table = table.where(table > 0) if log else table
        mean, color = table.mean(axis=1), colors[name]
        alone = mean.notna() & mean.shift().isna() & mean.shift(-1).isna()  # a line through one point is invisible
        if key.startswith("eval/"):
            alone[:], mean = True, mean[:0]
        else:
            axes.plot(table, color=color, lw=0.7, alpha=0.35)
        window = 1 if key in SCHEDULES else max(1, len(table) // 20)
        smooth = mean.rolling(window, center=True, min_periods=1).mean().where(mean.notna())
        axes.plot(table[alone], color=color, marker="o", ms=4, ls="", alpha=0.8)
        axes.plot(smooth, color=color, lw=2, label=name)
    if log:  # whole decades, so that noise within one decade does not fill the panel
        axes.set_yscale("log")
        low, high = numpy.log10(axes.get_ylim())
        axes.set_ylim(10 ** numpy.floor(low), 10 ** numpy.ceil(high))
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:.0e}")
        axes.yaxis.set_minor_formatter(lambda value, place: "")
    finish(axes, key)
    axes.set_xlabel("steps done", fontsize=9)
    axes.locator_params(axis="x", integer=True)


def finish(axes: Any, label: str) -> None:
    """The style that all panels share."""
    axes.set_ylabel(label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def grid(metrics: dict[str, Curves], names: list[str], title: str = "", more: int = 0) -> tuple[Any, list[Any]]:
    """A figure with a panel for each metric, a legend above, and room for ``more`` panels.  -> figure, free axes"""
    import matplotlib.figure
    import matplotlib.lines

    count = len(metrics) + more
    columns = 2 if count in (2, 4) else 3
    rows = -(-count // columns)
    figure = matplotlib.figure.Figure(figsize=(4 * columns, 2.9 * rows), layout="constrained")
    places = [figure.add_subplot(rows, columns, place + 1) for place in range(count)]
    colors = dict(zip(names, itertools.cycle(COLORS), strict=False))
    for axes, (key, lines) in zip(places, metrics.items(), strict=False):
        panel(axes, key, lines, colors)
    if len(names) > 1:
        handles = [matplotlib.lines.Line2D([], [], color=colors[name], lw=2, label=name) for name in names]
        figure.legend(
            handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=8, title=title, alignment="left"
        )
    return figure, places[len(metrics) :]


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
        "training reward, running mean": axes.lines[2 * len(runs)],
        "held-out accuracy, one seed": axes.lines[-2],
    }
    axes.legend(labels.values(), labels, frameon=False, loc="lower right", fontsize=9)
    axes.set_title(
        f"Learning curve of {name}: {len(runs)} seeds, {runs[0].record.steps} steps of GRPO", loc="left", fontsize=11
    )
    axes.set_ylabel("right answers (sampled)" if "sampled" in accuracy else "right answers", fontsize=9)
    axes.yaxis.set_major_formatter(lambda share, place: f"{share:.0%}")
    axes.set_ylim(0, 1.02)
    return figure


def comparison(title: str, groups: dict[str, list[Run]]) -> Any:
    """A panel for each metric that has values in one of the variants, and the final accuracy of every seed."""
    known = {key: lines for key in LABELS if (lines := curves(groups, key))}
    figure, (axes,) = grid(known, list(groups), title, more=1)
    for other, key in zip(figure.axes, known, strict=False):
        other.set_ylabel(LABELS[key], fontsize=9)
    for place, runs in enumerate(groups.values()):
        shares = [100 * getattr(run.record.last, run.record.last.kind).accuracy for run in runs]
        axes.plot([place] * len(runs), shares, color=COLORS[place % len(COLORS)], marker="o", ms=5, ls="", alpha=0.7)
    axes.set_xticks(range(len(groups)), groups, rotation=20, ha="right")
    axes.margins(x=0.2)
    finish(axes, "final accuracy of each seed, %")
    return figure


def slug(title: str) -> str:
    """A title as a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


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


def svg(metrics: dict[str, Curves]) -> str:
    """One inline SVG with a panel for each metric. It refers to nothing outside of itself."""
    names = list(dict.fromkeys(name for lines in metrics.values() for name in lines))
    return _inline(lambda: grid(metrics, names)[0])


def _inline(draw: Callable[[], Any]) -> str:
    import matplotlib

    text = StringIO()
    # Run folders give the names: a "$" in them does not begin a formula. Texts stay texts in the SVG.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "text.parse_math": False}):
        draw().savefig(text, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    drawn = text.getvalue()
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", drawn[drawn.index("<svg") :]).replace("xlink:href", "href")


# ----------------------------------------------------------------------------------------------------- the HTML page


def write(folder: Path, output: Path) -> Path:
    """Write page(folder) to ``output``. InputError if a file is there that is not a page of this function."""
    text = page(folder).encode("utf-8", "backslashreplace")
    if os.path.lexists(output) and not read_bytes(output).startswith(MADE.encode()):
        raise InputError(f"{output}: exists, and is no page of report.py html; needed: another name, or delete it")
    write_atomically(output, text)
    return output


def draw_curves(run: Path) -> None:
    """Write the curves of the page as curves.png. A dotted red line marks a step whose value is not finite."""
    rows = merged(run)
    metrics = _curves(run, rows, run.name)
    figure, _ = grid(metrics, [run.name])
    for axes, key in zip(figure.axes, metrics, strict=True):
        for row in [row for row in rows if key in row.get("nonfinite", ())]:
            axes.axvline(row["step"] + 1, color="red", lw=1, ls=":")
    figure.savefig(run / "curves.png", dpi=110)


def page(folder: Path) -> str:
    """The page about the run, the record or the sweep in ``folder``; InputError for another folder."""
    if (folder / "sweep.json").exists():
        body = _sweep(folder)
    elif not folder.exists() and (run := load_runs(folder.parent).get(folder.name)):
        about = run.record
        body = _run(folder, run.rows, about.result, about.checks_fired, about.command, dump_yaml(about.config))
    elif (folder / "config.yaml").exists():
        finished = read_object(folder / "finished.json") if (folder / "finished.json").exists() else {}
        result, fired = finished.get("result", why_ended(folder)), finished.get("checks", checks_fired(folder))
        if not isinstance(fired, dict) or not isinstance(result, str):
            raise InputError(f"{folder / 'finished.json'}: checks, result: needed: an object and a text")
        command = read_text(folder / "command.txt") if (folder / "command.txt").exists() else ""
        body = _run(folder, merged(folder), result, fired, command, read_text(folder / "config.yaml"))
    else:
        raise InputError(f"{folder}: no config.yaml, no sweep.json; needed: a run, a sweep, or results/ID")
    name = html.escape(folder.name)
    return (
        f'{MADE}<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{name}</h1>\n{body}\n</body></html>\n"
    )


def _run(folder: Path, rows: list[dict], result: str, checks: dict, command: str, config: str) -> str:
    curves = _curves(folder, rows, folder.name)
    fired = [{"check": check, "first warning": warning} for check, warning in checks.items()]
    parts = {
        "Curves": (svg(curves) if curves else "") + _routing(folder / "moe.jsonl"),
        "Checks": _table(fired) or "<p>No check has fired.</p>",
        "Completions over time": "".join(_completions(row) for row in rows if "completions" in row),
        "Slowest steps": _slowest(rows),
        "Longest of the completions kept": _longest(rows),
        "Reward by question": "".join(map(_by_question, rows)),
        "Configuration": f"<pre>{html.escape(config)}</pre>",
    }
    sections = "\n".join(f"<h2>{title}</h2>{text}" for title, text in parts.items())
    return f"<p>{html.escape(result)}</p>\n<pre>{html.escape(command)}</pre>\n{sections}"


def _curves(folder: Path, rows: list[dict], name: str) -> dict[str, Curves]:
    """The accuracies and the metrics of CURVES as grid takes them; the single curve of each is called ``name``.

    null is a gap in a curve: it stands for a number that is not finite. InputError for any other value.
    """
    import pandas

    for row in rows:
        for key in [key for key in row if key in CURVES or key.endswith("_accuracy")]:
            value, where = row[key], folder / file_of(key)
            if value is not None and (type(value) not in (int, float) or abs(value) > 1e300):
                raise InputError(f"{where}, step {row['step']}: {key}: found {shown(value)}; needed: a number")
    steps = pandas.DataFrame(rows).set_index("step") if rows else pandas.DataFrame()
    order = sorted(key for key in steps if key.endswith("_accuracy")) + [key for key in CURVES if key in steps]
    return {key: {name: [by_steps_done(key, pandas.to_numeric(steps[key]))]} for key in order}


def _routing(path: Path) -> str:
    """A heat map of each metric in moe.jsonl, steps to the right and MoE layers down; InputError if it has no list."""
    import matplotlib.figure

    lines = [line for line in read_lines(path) if len(line) > 1]  # a step that trained nothing has no values
    figure, places = matplotlib.figure.Figure(figsize=(12, 6), layout="constrained"), itertools.count(1)
    for key in [key for key in lines[0] if key.startswith("moe/")] if lines else ():
        try:
            layers = [*zip(*([x for x in line[key] if abs(x) < 1e300] for line in lines), strict=True)]
            extent, axes = (0.5, len(lines) + 0.5, len(layers) - 0.5, -0.5), figure.add_subplot(2, 2, next(places))
            figure.colorbar(axes.imshow(layers, aspect="auto", interpolation="none", extent=extent), ax=axes)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: {key}: needed: in each step a list of equally many numbers") from error
        axes.set(title=key, ylabel="MoE layer")
    return _inline(lambda: figure) if figure.axes else ""


def _table(rows: Iterable[dict[str, Any]]) -> str:
    """An HTML table, with all texts escaped; nothing without rows."""
    import pandas

    frame = pandas.DataFrame(list(rows))
    with pandas.option_context("display.max_colwidth", None):
        return "" if frame.empty else frame.to_html(index=False, border=0, na_rep="", float_format="{:g}".format)


def _completions(row: dict) -> str:
    """The completions of a step, which a click shows."""
    first, *_ = answers = row["completions"]
    texts = "".join(
        f'<pre class="{"right" if one["reward"] > 0 else "wrong"}">'
        f"{html.escape(one['completion'])}\n[reward {one['reward']}]</pre>"
        for one in answers
    )
    title = html.escape(f"step {row['step'] + 1}: {first['question']}  (gold {first['gold']})")
    return f"<details><summary>{title}</summary>{texts}</details>\n"


def _slowest(rows: list[dict]) -> str:
    timed = sorted((row for row in rows if row.get("timing/step_s")), key=lambda row: -row["timing/step_s"])
    return _table(
        {"step": row["step"] + 1} | {key.removeprefix("timing/"): row[key] for key in row if key.startswith("timing/")}
        for row in timed[:LISTED]
    )


def _longest(rows: list[dict]) -> str:
    found = [
        {"step": row["step"] + 1} | {key: one[key] for key in ("tokens", "reward", "completion")}
        for row in rows
        for one in row.get("completions", ())
    ]
    return _table(sorted(found, key=lambda one: -one["tokens"])[:LISTED])


def _by_question(row: dict) -> str:
    """One cell per held-out question of an evaluation: green right, red wrong, by the mean of all its answers."""
    greedy, sampled = (row.get(key, "") for key in MARKS.values())
    if not greedy:
        return ""
    shares = shares_right(sampled or greedy, len(greedy))
    cells = "".join(
        f'<i style="background:hsl({120 * share:.0f} 60% 45%)" title="question {question}: {share:g}"></i>'
        for question, share in enumerate(shares)
    )
    return f'<p>after {row["step"]} steps, {len(shares)} questions</p><div class="cells">{cells}</div>'


def _sweep(folder: Path) -> str:
    """All runs of a sweep, one panel per metric and one color per variant; and the state of each job."""
    jobs, wanted = read_object(folder / "sweep.json", ("jobs",))["jobs"], ("state", "attempts", "run", "result")
    for job in jobs.values() if isinstance(jobs, dict) else [None]:
        if not isinstance(job, dict) or not set(wanted) <= job.keys() or not isinstance(job["run"], str):
            raise InputError(f"{folder / 'sweep.json'}: found the job {shown(job)}; needed: what sweep.py writes")
    metrics: dict[str, Curves] = {}
    for name, job in jobs.items():
        run = folder.parent / Path(job["run"]).name  # the runs lie beside the folder of the sweep
        variant = variant_name(name)
        for key, lines in _curves(run, merged(run), variant).items() if job["run"] and run.is_dir() else ():
            metrics.setdefault(key, {}).setdefault(variant, []).extend(lines[variant])
    rows = [{"job": name, **{key: job[key] for key in wanted}} for name, job in jobs.items()]
    return f"<h2>Curves</h2>{svg(metrics) if metrics else ''}<h2>Jobs</h2>{_table(rows)}"
