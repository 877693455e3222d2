"""The curves of a run as curves.png, and one HTML page about a run, a record or a sweep.

    python report.py html out/RUN      curves, checks, completions over time, slowest and longest, reward by question

The page needs no network and no script. The files of a run limit what it can show: the first few completions of each
step's first question (more with train.completions_logged), the time of each step, and the score of each held-out
question. There is no time of a single completion, because completions are sampled together.
"""

import html
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from inputs.files import InputError, dump_yaml, read_bytes, read_object, read_text, shown, write_atomically
from lab import comparisons
from lab.figures import Curves, by_steps_done, grid, inline, svg
from lab.records import MARKS, file_of, shares_right
from lab.run_folders import merged, of_sweep, sweep_jobs
from lab.store import load_runs
from run_record import checks_fired, read_lines, variant_name, why_ended

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
    figure = grid(metrics, [run.name])
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
    return inline(lambda: figure) if figure.axes else ""


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
    """All runs of a sweep, one panel per metric and one color per variant; their comparison; the state of each job."""
    jobs = sweep_jobs(folder)
    metrics: dict[str, Curves] = {}
    for name, job in jobs.items():
        run = folder.parent / Path(job["run"]).name  # the runs lie beside the folder of the sweep
        variant = variant_name(name)
        for key, lines in _curves(run, merged(run), variant).items() if job["run"] and run.is_dir() else ():
            metrics.setdefault(key, {}).setdefault(variant, []).extend(lines[variant])
    states = _table({"job": name, **job} for name, job in jobs.items())
    curves = f"<h2>Curves</h2>{svg(metrics) if metrics else ''}"
    return f"{curves}<h2>Variants against the first, points</h2>{_compared(folder)}<h2>Jobs</h2>{states}"


def _compared(folder: Path) -> str:
    """The table of the comparisons of a sweep, or why there is none."""
    try:
        groups = of_sweep(folder)
        kind = comparisons.kind_of(groups)
        rows = comparisons.rows(comparisons.compare(groups, kind), kind) if len(groups) > 1 else []
        return _table(rows) or "<p>Fewer than two variants have finished runs.</p>"
    except (InputError, ModuleNotFoundError) as error:
        return f"<p>{html.escape(str(error))}</p>"
