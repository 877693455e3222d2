"""Writes the generated parts of RESULTS.md, docs/benchmark.md and the READMEs, and draws the figures of RESULTS.md."""

import ast
import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from facts.exits import InputError
from inputs.files import first_three, read_text, write_atomically
from lab import comparisons, records
from lab.comparisons import Comparison, Entry, Finding, Plan

if TYPE_CHECKING:
    import pandas

BEGIN, END = "<!-- report.py build writes the text below -->", "<!-- report.py build writes the text above -->"
CURVES, RECOVERED, TURNS, ARRIVAL = (
    f"figures/{name}.png" for name in ("learning_curves", "recovered", "turns", "arrival")
)  # in results/
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito


def build(results: Path, page: Path) -> None:
    """Write the pages and the figures. Raises InputError if there are no records."""
    plan, steps, made = read(results)
    for path, text in wanted(results, page, plan, steps, made).items():
        write_atomically(path, text)
    (results / "figures").mkdir(exist_ok=True)
    learning_curves(plan, steps, results / CURVES)
    recovered(made, results / RECOVERED)
    if plan.turns:
        turns(plan, steps, results / TURNS)
    if plan.arrival:
        arrival(plan.arrival, steps, results / ARRIVAL)


def stale(results: Path, page: Path) -> list[str]:
    """Return a message for each page that differs from the text generated from the records and the docstrings."""
    edited = [path for path, text in wanted(results, page, *read(results)).items() if read_text(path) != text]
    return [f"{path}: differs from what report.py build writes; run report.py build" for path in edited]


def read(results: Path) -> tuple[Plan, "pandas.DataFrame", list[Comparison]]:
    """Return the plan, the steps of all records, and the comparisons."""
    path = results / "plan.yaml"
    plan, steps = comparisons.read_plan(path), records.load(results)
    comparisons.refuse_unfillable(plan, path, {*steps["variant"]})
    return plan, steps, comparisons.compare(steps, plan)


def wanted(results: Path, page: Path, plan: Plan, steps: "pandas.DataFrame", made: list[Comparison]) -> dict[Path, str]:
    """Return the whole text of each page by path, with its generated part between the marks BEGIN and END."""
    root = page.parent
    generated = {
        page: results_page(plan, made, steps),
        root / "docs" / "benchmark.md": benchmark_page(made),
        results / "README.md": files_table(steps),
        root / "README.md": tree(root),
        root / "README.zh.md": tree(root),
    }
    return {path: _between_marks(path, text) for path, text in generated.items() if path == page or path.exists()}


def _between_marks(path: Path, generated: str) -> str:
    before, begin, rest = read_text(path).partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise InputError(f"{path}: the marks between which report.py build writes are missing; add {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{generated}\n\n{END}{after}"


def table(rows: list[dict[str, str]]) -> str:
    """Return a Markdown table with the keys of the first row as its header, or "" if there are no rows."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# ----------------------------------------------------------------------------------------------------------- RESULTS.md


def results_page(plan: Plan, made: list[Comparison], steps: "pandas.DataFrame") -> str:
    """Return the generated text of RESULTS.md.

    It has the findings, the comparisons of each section, and those that are withheld, stopped or not as predicted.
    """
    parts = [
        "## What was found",
        table([finding_row(one, made, steps) for one in plan.findings]),
        f"![Learning curves](results/{CURVES})"
        + f"\n![Shares of the lost accuracy that corrections recover](results/{RECOVERED})"
        + f"\n![Accuracy and turns with a calculator](results/{TURNS})" * bool(plan.turns),
    ]
    for section, text in plan.sections.items():
        own = [one for one in made if one.family.section == section and not one.is_control]
        shown = [comparison_row(one) for one in own if is_stated(one)]
        parts += [f"## {section}", text, table(shown)]
    parts += ["## Not as predicted, withheld, or stopped", table(unmet_rows(plan, made))]
    return "\n\n".join(filter(None, parts))


def is_stated(one: Comparison) -> bool:
    """Return whether a section of RESULTS.md has the comparison.

    It does if the prediction was met, or if there was none and the comparison is not withheld.
    """
    return one.outcome == "met" or (not one.entry.predicted and one.outcome != comparisons.WITHHELD)


def unmet_rows(plan: Plan, made: list[Comparison]) -> list[dict[str, str]]:
    """Return a row for each prediction that is undecided or not met, and for each withheld comparison.

    The rows of comparisons with runs that could not be finished come last.
    """
    rows = [
        other_row(one.entry, one.outcome, str(one.effect)) for one in made if not is_stated(one) and not one.is_control
    ]
    for family in plan.families:
        rows += [other_row(entry, entry.missing) for entry in family.entries + family.controls if entry.missing]
    return rows


def finding_row(finding: Finding, made: list[Comparison], steps: "pandas.DataFrame") -> dict[str, str]:
    """Return a row with a question, its answer in words, the measured difference, and the number of seeds.

    Raises InputError unless the method of the finding has a comparison that has records and is not withheld.
    """
    points, seeds = "", ""
    if finding.gain:
        before, after, effect = comparisons.gain(steps, finding.gain)
        points, seeds = f"{100 * before:.1f} -> {100 * after:.1f} %: {effect}", str(effect.seeds)
    elif finding.method:
        named = [one for one in made if one.entry.method == finding.method and one.outcome != comparisons.WITHHELD]
        found = [one for one in named if finding.against in ("", one.entry.base)]
        if not found:
            raise InputError(f"findings: {finding.method}: no comparison has records and controls as predicted")
        points, seeds = str(found[0].effect), str(found[0].effect.seeds)
        if found[0].share:
            points += f"; {_share(found[0])} of the lost accuracy"
    return {"question": finding.asked, "answer": finding.answer, "points (95 % interval)": points, "seeds": seeds}


def other_row(entry: Entry, found: str, points: str = "") -> dict[str, str]:
    return {
        "comparison": f"{entry.title} (`{entry.method}` against `{entry.base}`)",
        "predicted": entry.predicted,
        "found": found,
        "points (95 % interval)": points,
    }


def comparison_row(one: Comparison) -> dict[str, str]:
    return {
        "comparison": one.entry.title,
        "against": f"`{one.entry.base}`",
        "seeds": str(one.effect.seeds),
        "points (95 % interval)": str(one.effect),
        "outcome": f"{one.said}, as predicted" if one.entry.predicted else one.said,
        "share of the lost accuracy recovered": _share(one),
    }


def _share(one: Comparison) -> str:
    """Return the share of the lost accuracy that a method recovers, with its interval, or "" if there is no share."""
    return "{:.0f} % ({:.0f} to {:.0f})".format(*one.share) if one.share else ""


# --------------------------------------------------------------------------------------------- pages besides RESULTS.md


def benchmark_page(made: list[Comparison]) -> str:
    """Return the number of predictions that were met, and a table of all comparisons, by family."""
    announced = [one for one in made if not one.is_control and one.entry.predicted]
    met = sum(one.outcome == "met" for one in announced)
    return f"{met} of {len(announced)} predictions were met.\n\n{table([full_row(one) for one in made])}"


def full_row(one: Comparison) -> dict[str, str]:
    return {
        "family": f"controls of {one.family.name}" if one.is_control else one.family.name,
        "comparison": one.entry.title,
        "method": f"`{one.entry.method}`",
        "against": f"`{one.entry.base}`",
        "seeds": str(one.effect.seeds),
        "points (95 % interval)": str(one.effect),
        "p (Holm)": f"{one.p:.2g}",
        "detectable": f"{one.effect.detectable:.1f}",
        "predicted": one.entry.predicted,
        "outcome": one.outcome,
    }


def files_table(steps: "pandas.DataFrame") -> str:
    """Return a table of the record files, with their numbers of variants and runs, their steps and their commits."""
    rows = []
    for file, own in steps.groupby("file"):
        commits = sorted({commit[:7] for commit in own["record/commit"].dropna()})
        rows.append({
            "file": f"`{file}`",
            "variants": str(own["variant"].nunique()),
            "runs": str(own["id"].nunique()),
            "steps of a run": str(own["step"].max()),
            "commits": first_three(commits),
        })  # fmt: skip
    return table(rows)


# ------------------------------------------------------------------------------------------------ the tree of README.md


def tree(root: Path) -> str:
    """Return a code block with a line for each top-level Python file and each room of a checkout.

    A room is a folder with Python code. The line of a file has the first sentence of its docstring. The line of a room
    has the docstring of its __init__.py, which is its rule. The commands, which are the files that can be started, come
    first.
    """
    method, rooms = "the method (its numbered steps are those of train_grpo.py)", "rooms (folders with one rule each)"
    groups: dict[str, dict[str, str]] = {"commands": {}, method: {}, rooms: {}}
    for path in sorted(root.glob("*.py")):
        text = read_text(path)
        kind = "commands" if 'if __name__ == "__main__":' in text else method
        groups[kind][path.name] = re.split(r"(?<=[.?])\s", docstring(text), maxsplit=1)[0]
    for path in sorted(root.glob("*/__init__.py")):
        groups[rooms][f"{path.parent.name}/"] = docstring(read_text(path))
    lines = []
    for kind, phrases in groups.items():
        lines.append(f"# {kind}")
        lines += [f"{name:<18} {phrase}" for name, phrase in phrases.items()]
    return "\n".join(["```", *lines, "```"])


def docstring(source: str) -> str:
    """Return the docstring of a module with single spaces; "" if there is none."""
    return " ".join((ast.get_docstring(ast.parse(source)) or "").split())


# ------------------------------------------------------------------------------------------------------------- figures


def learning_curves(plan: Plan, steps: "pandas.DataFrame", path: Path) -> None:
    """Draw the held-out accuracy of the variants in plan.curves, averaged over seeds, in one panel per run length.

    Each curve has its label at its end. If a run was evaluated only before and after training, a thin line between the
    two points shows the training reward.
    """
    import matplotlib.figure

    measured = steps[steps["variant"].isin([*plan.curves]) & steps["eval/sampled_accuracy"].notna()]
    means = 100 * measured.groupby(["variant", "step"])["eval/sampled_accuracy"].mean()
    lengths = means.reset_index().groupby("variant")["step"].max()
    panels = sorted(set(lengths), reverse=True)
    figure = matplotlib.figure.Figure(figsize=(5 * max(1, len(panels)), 4), layout="constrained")
    for place, length in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        names = [name for name in plan.curves if lengths.get(name) == length]
        for name, color in zip(names, itertools.cycle(COLORS), strict=False):
            curve = means[name]
            if len(curve) > 2:
                axes.plot(curve, color=color, lw=2, marker="o", ms=3)
            else:
                rewards = steps[steps["variant"] == name].groupby("step")["reward/mean"].mean()
                axes.plot(100 * rewards, color=color, lw=1)
                axes.plot(curve, color=color, marker="o", ls="")
            axes.annotate(
                plan.curves[name], (curve.index[-1], curve.iloc[-1]), xytext=(6, -3), textcoords="offset points",
                color=color, fontsize=9,
            )  # fmt: skip
        axes.set_xlim(0, 1.45 * length)
        axes.set_xlabel("steps done")
        axes.set_ylabel("held-out accuracy, sampled answers, %")
        axes.set_ylim(0)
        _finish(axes)
    figure.savefig(path, dpi=110)


def turns(plan: Plan, steps: "pandas.DataFrame", path: Path) -> None:
    """Draw the held-out accuracy and the turns per completion of the variants in plan.turns, averaged over seeds."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(10, 3.5), layout="constrained")
    shown = {
        "eval/sampled_accuracy": "held-out accuracy, sampled answers",
        "environment/turns_mean": "turns of the policy per completion",
    }
    for axes, (metric, label) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        for (variant, name), color in zip(plan.turns.items(), COLORS, strict=False):
            means = steps[steps["variant"] == variant].groupby("step")[metric].mean()
            axes.plot(means.dropna(), color=color, label=name)
        axes.set_xlabel("steps done")
        axes.set_ylabel(label)
        _finish(axes)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def arrival(shown: comparisons.Arrival, steps: "pandas.DataFrame", path: Path) -> None:
    """Draw the difference in accuracy between each variant and shown.base over the share of the update that arrives.

    The figure shows the interval of each difference. The share is the mean of fault/update_share over all pushes except
    the first, which has no update. A line joins the variants of each label.
    """
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    outcome, _ = comparisons.scores(steps, "curve")
    shares = steps[steps["step"] > 0].groupby("variant")["fault/update_share"].mean()
    for (label, variants), color in zip(shown.lines.items(), COLORS, strict=False):
        effects = [comparisons.effect((outcome.loc[name] - outcome.loc[shown.base]).dropna()) for name in variants]
        means = [one.mean for one in effects]
        bars = [[one.mean - one.low for one in effects], [one.high - one.mean for one in effects]]
        axes.errorbar(100 * shares[variants], means, bars, color=color, marker="o", ms=5, capsize=3, label=label)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xlabel("share of the update that arrives in a push, %, averaged over the run")
    axes.set_ylabel("points against no rounding")
    axes.legend(fontsize=8)
    _finish(axes)
    figure.savefig(path, dpi=110)


def recovered(made: list[Comparison], path: Path) -> None:
    """Draw the share of the accuracy lost by a mismatch that each correction recovers, with its interval."""
    import matplotlib.figure

    shares = {one.entry.title: one.share for one in made if one.share}
    ordered = sorted(shares.items(), key=lambda each: each[1])
    figure = matplotlib.figure.Figure(figsize=(8, 0.32 * len(ordered) + 1.1), layout="constrained")
    axes = figure.subplots()
    for title, (share, low, high) in ordered:
        color = COLORS[0] if low > 0 else COLORS[1] if high < 0 else "#999999"
        axes.plot([low, high], [title, title], color=color, lw=2)
        axes.plot([share], [title], color=color, marker="o", ms=5)
    for x in (0, 100):
        axes.axvline(x, color="black", lw=0.8)
    axes.set_title("Blue: it helps. Grey: no effect was found. Orange: it does harm.", loc="left", fontsize=9)
    axes.set_xlabel("share of the lost accuracy that is recovered, %, with its 95 % interval")
    _finish(axes)
    figure.savefig(path, dpi=110)


def _finish(axes: Any) -> None:
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
