"""One self-contained HTML page about a run, or about a sweep: no network, inline SVG, plain JavaScript.

    python report.py html out/RUN      curves, checks, completions over time, slowest and longest, reward by question

What a run keeps decides what can be shown: the first few completions of every step's first question (more with
train.completions_logged), the time of every step, and the score of every held-out question at every evaluation. The
time of a single completion is not kept: completions are sampled in waves.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from input_files import InputError, read_bytes, read_object, read_text, shown
from run_record import read_lines, variant_name, write_atomically

CURVES = (
    "reward/mean", "actor/kl_loss", "actor/entropy", "rollout/logp_gap_mean", "response_length/mean", "actor/grad_norm",
    "reward/unparsable_frac", "reward/equal_groups", "aqn/sigma", "timing/step_s", "perf/tokens_per_s",
    "perf/peak_rss_gib",
)  # fmt: skip
LOGARITHMIC = {"rollout/logp_gap_mean"}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
WIDTH, HEIGHT, LEFT, BOTTOM = 360, 170, 52, 22  # of one chart, in pixels
SHOWN = 10  # rows of the lists of slowest and longest
MADE = "<!doctype html><!-- report.py html -->\n"  # how a page begins: what begins otherwise is not overwritten

STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1180px;padding:0 1em;color:#222}
h1{font-size:1.4em}h2{font-size:1.15em;margin-top:2em}pre{background:#f6f6f6;padding:.7em;overflow:auto;font-size:12px}
table{border-collapse:collapse}td,th{padding:.15em .7em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}
svg text{font:10px system-ui,sans-serif;fill:#555}.charts{display:flex;flex-wrap:wrap;gap:10px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:1em}.right{border-left:4px solid #009e73}
.wrong{border-left:4px solid #d55e00}.cells{line-height:0}.cells i{display:inline-block;width:7px;height:7px;margin:1px}
input[type=range]{width:100%}"""

SCRIPT = """const shown = JSON.parse(document.getElementById("completions").textContent);
function put(side, place) {
  const box = document.getElementById(side), step = shown[place];
  box.replaceChildren();
  const title = document.createElement("p");
  title.textContent = "step " + (step.step + 1) + ": " + step.question + "  (gold " + step.gold + ")";
  box.append(title);
  for (const one of step.answers) {
    const text = document.createElement("pre");
    text.className = one.reward > 0 ? "right" : "wrong";
    text.textContent = one.text + "\\n[reward " + one.reward + "]";
    box.append(text);
  }
}
for (const side of ["early", "late"]) {
  const slider = document.getElementById(side + "-slider");
  slider.addEventListener("input", () => put(side, Number(slider.value)));
  if (shown.length) put(side, Number(slider.value));
}
document.body.dataset.ready = "yes";"""


def write(folder: Path, output: Path) -> Path:
    """Write page(folder) to ``output``, which is a new file or a page that was written here; InputError otherwise."""
    text = page(folder).encode("utf-8", "backslashreplace")
    if os.path.lexists(output) and not read_bytes(output).startswith(MADE.encode()):
        raise InputError(f"{output}: exists, and is no page of report.py html; needed: another name, or delete it")
    aside = output.with_name(f".{output.name}.tmp")
    if os.path.lexists(aside):
        raise InputError(f"{aside}: in the way of writing {output.name}; needed: another name, or delete it")
    write_atomically(output, text)
    return output


def page(folder: Path) -> str:
    """The page about the run, or the sweep (it has a sweep.json), in ``folder``; InputError if it is neither."""
    if (folder / "sweep.json").exists():
        return _document(folder.name, _sweep(folder))
    if not (folder / "config.yaml").exists():
        raise InputError(f"{folder}: no config.yaml, no sweep.json; needed: the folder of a run or of a sweep")
    return _document(folder.name, _run(folder))


def _document(title: str, body: str) -> str:
    name = html.escape(title)
    return (
        f'{MADE}<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{name}</h1>\n{body}\n</body></html>\n"
    )


# -------------------------------------------------------------------------------------------------------------- charts


def chart(
    title: str,
    lines: Sequence[tuple[str, list[tuple[float, float | None]]]],
    log: bool = False,
    colors: Mapping[str, str] | None = None,
) -> str:
    """An SVG of named lines of (x, y) points; what is None, or not above 0 on a log scale, is a gap.

    ``colors``: name -> color; one each if not given.
    """
    kept = [
        (name, [(x, y if y is not None and (y > 0 or not log) else None) for x, y in points]) for name, points in lines
    ]
    known = [(x, y) for _, points in kept for x, y in points if y is not None]
    if not known:
        return ""
    scale = math.log10 if log else float
    x_low, x_high = min(x for x, _ in known), max(x for x, _ in known)
    y_low, y_high = min(scale(y) for _, y in known), max(scale(y) for _, y in known)
    x_span, y_span = (x_high - x_low) or 1, (y_high - y_low) or 1

    def place(x: float, y: float) -> str:
        across = LEFT + (x - x_low) / x_span * (WIDTH - LEFT - 8)
        return f"{across:.1f},{20 + (1 - (scale(y) - y_low) / y_span) * (HEIGHT - BOTTOM - 28):.1f}"

    drawn = []
    colors = colors or dict(zip((name for name, _ in kept), COLORS * len(kept), strict=False))
    for name, points in kept:
        parts: list[list[str]] = [[]]
        for x, y in points:
            if y is None:
                parts.append([])
            else:
                parts[-1].append(place(x, y))
        for part in filter(None, parts):
            spot = part if len(part) > 1 else part * 2  # a single point is a dot
            drawn.append(
                f'<polyline fill="none" stroke="{colors[name]}" stroke-width="1.4" stroke-linecap="round" '
                f'points="{" ".join(spot)}"><title>{html.escape(name)}</title></polyline>'
            )
    low, high = (f"{10**y if log else y:.3g}" for y in (y_low, y_high))
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f'<text x="{LEFT}" y="12">{html.escape(title)}</text><text x="2" y="28">{high}</text>'
        f'<text x="2" y="{HEIGHT - BOTTOM - 6}">{low}</text><text x="{LEFT}" y="{HEIGHT - 6}">{x_low:g}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">{x_high:g}</text>{"".join(drawn)}</svg>'
    )


def _curves(folder: Path) -> dict[str, list[tuple[float, float | None]]]:
    """Metric -> (steps done, value), of the steps and of the evaluations."""
    found: dict[str, list[tuple[float, float | None]]] = {}
    for name in ("metrics", "timing", "eval"):
        for row in read_lines(folder / f"{name}.jsonl"):
            for key in row:
                if key in CURVES or key.endswith("_accuracy"):
                    value = _number(folder / f"{name}.jsonl", row, key)
                    found.setdefault(key, []).append((row["step"], value))
    return found


def _number(path: Path, row: Mapping[str, Any], key: str, default: float | None = None) -> float | None:
    """A finite number of a row; None where the run wrote null for one that was not. InputError for anything else."""
    value = row.get(key, default)
    if value is None or type(value) in (int, float) and abs(value) < 1e300:
        return value
    raise InputError(f"{path}, step {row['step']}: {key}: found {shown(value)}; needed: a number")


def _text_of(path: Path, row: Mapping[str, Any], key: str) -> str:
    """A text of a row; InputError for anything else."""
    if isinstance(value := row.get(key), str):
        return value
    raise InputError(f"{path}, step {row['step']}: {key}: found {shown(value)}; needed: a text")


def _ordered(keys: set[str]) -> list[str]:
    return sorted(key for key in keys if key not in CURVES) + [key for key in CURVES if key in keys]


# --------------------------------------------------------------------------------------------------------------- a run


def _run(folder: Path) -> str:
    finished = read_object(folder / "finished.json") if (folder / "finished.json").exists() else {}
    curves = _curves(folder)
    charts = "".join(chart(key, [(key, curves[key])], key in LOGARITHMIC) for key in _ordered(set(curves)))
    fired, result = finished.get("checks", {}), finished.get("result", "not finished")
    if not isinstance(fired, dict) or not isinstance(result, str):
        raise InputError(f"{folder / 'finished.json'}: checks, result: needed: an object and a text")
    checks = _table(("check", "first warning"), fired.items()) if fired else "<p>No check has fired.</p>"
    return "\n".join(
        [
            f"<p>{html.escape(result)}</p>",
            f"<pre>{html.escape(_text(folder / 'command.txt'))}</pre>",
            f'<h2>Curves</h2><div class="charts">{charts}</div>',
            f"<h2>Checks</h2>{checks}",
            _completions(folder),
            _slowest(folder),
            _longest(folder),
            _by_question(folder),
            f"<h2>Configuration</h2><pre>{html.escape(_text(folder / 'config.yaml'))}</pre>",
        ]
    )


def _text(path: Path) -> str:
    return read_text(path) if path.exists() else ""


def _table(head: Sequence[str], rows: Any) -> str:
    lines = ["".join(f"<th>{html.escape(str(cell))}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _completions(folder: Path) -> str:
    """Two sliders over the steps, side by side: what the policy answered early and late."""
    steps: dict[int, dict[str, Any]] = {}
    for row in read_lines(path := folder / "completions.jsonl"):
        about = {key: _text_of(path, row, key) for key in ("question", "gold", "completion")}
        shared = {"step": row["step"], "question": about["question"], "gold": about["gold"]}
        step = steps.setdefault(row["step"], shared)
        answer = {"text": about["completion"], "reward": _number(path, row, "reward", math.nan)}
        step.setdefault("answers", []).append(answer)
    data = json.dumps(list(steps.values())).replace("<", "\\u003c")  # a "</script>" in an answer stays text
    last = max(len(steps) - 1, 0)
    sides = "".join(
        f'<div><input type="range" id="{side}-slider" min="0" max="{last}" value="{value}" aria-label="{side} step">'
        f'<div id="{side}"></div></div>'
        for side, value in (("early", 0), ("late", last))
    )
    return (
        f'<h2>Completions over time</h2><div class="pair">{sides}</div>'
        f'<script type="application/json" id="completions">{data}</script><script>{SCRIPT}</script>'
    )


def _slowest(folder: Path) -> str:
    rows = read_lines(path := folder / "timing.jsonl")
    rows = sorted(rows, key=lambda row: -(_number(path, row, "timing/step_s") or 0))[:SHOWN]
    phases = list(dict.fromkeys(key for row in rows for key in row if key.startswith("timing/")))
    head = ["step", *(key.removeprefix("timing/") for key in phases)]
    body = [[row["step"] + 1, *(row.get(key, "") for key in phases)] for row in rows]
    return f"<h2>Slowest steps</h2>{_table(head, body)}"


def _longest(folder: Path) -> str:
    rows = read_lines(path := folder / "completions.jsonl")
    rows.sort(key=lambda row: -(_number(path, row, "tokens", len(row["completion"])) or 0))
    body = [[row["step"] + 1, row.get("tokens", ""), row["reward"], row["completion"]] for row in rows[:SHOWN]]
    return f"<h2>Longest of the completions kept</h2>{_table(('step', 'tokens', 'reward', 'completion'), body)}"


def _by_question(folder: Path) -> str:
    """A cell a held-out question, a row an evaluation: green right, red wrong; by the mean of all its answers."""
    by_step: dict[int, list[tuple[int, float]]] = {}
    for row in read_lines(path := folder / "eval_outcomes.jsonl"):
        answers = row.get("sampled") or [row.get("greedy")]
        if not isinstance(answers, list) or not all(type(x) in (int, float) and 0 <= x <= 1 for x in answers):
            raise InputError(f"{path}, step {row['step']}: found the scores {shown(answers)}; needed: 0 to 1")
        scored = (_number(path, row, "question", math.nan), sum(answers) / len(answers))
        by_step.setdefault(row["step"], []).append(scored)
    parts = ["<h2>Reward by question</h2>"]
    for step, scores in by_step.items():
        cells = "".join(
            f'<i style="background:hsl({120 * score:.0f} 60% 45%)" title="question {question}: {score:g}"></i>'
            for question, score in sorted(scores)
        )
        parts.append(f'<p>after {step} steps, {len(scores)} questions</p><div class="cells">{cells}</div>')
    return "".join(parts)


# ------------------------------------------------------------------------------------------------------------- a sweep


def _sweep(folder: Path) -> str:
    """Every run of a sweep over each other, one chart a metric, a color a variant; and where each job stands."""
    jobs, wanted = read_object(folder / "sweep.json", ("jobs",))["jobs"], ("state", "attempts", "run", "result")
    for job in jobs.values() if isinstance(jobs, dict) else [None]:
        if not isinstance(job, dict) or not set(wanted) <= job.keys() or not isinstance(job["run"], str):
            raise InputError(f"{folder / 'sweep.json'}: found the job {shown(job)}; needed: what sweep.py writes")
    runs = {name: folder.parent / Path(job["run"]).name for name, job in jobs.items() if job["run"]}  # beside it
    curves = {name: _curves(run) for name, run in runs.items() if run.is_dir()}
    variants = {name: variant_name(name) for name in curves}
    legend = dict(zip(dict.fromkeys(variants.values()), COLORS * len(curves), strict=False))
    colors = {name: legend[variant] for name, variant in variants.items()}
    charts = "".join(
        chart(key, [(name, found[key]) for name, found in curves.items() if key in found], key in LOGARITHMIC, colors)
        for key in _ordered({key for found in curves.values() for key in found})
    )
    names = " ".join(f'<span style="color:{color}">{html.escape(name)}</span>' for name, color in legend.items())
    rows = [[name, job["state"], job["attempts"], job["run"], job["result"]] for name, job in jobs.items()]
    return (
        f'<h2>Curves</h2><p>{names}</p><div class="charts">{charts}</div>'
        f"<h2>Jobs</h2>{_table(('job', 'state', 'attempts', 'run', 'result'), rows)}"
    )
