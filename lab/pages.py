"""RESULTS.md, results/README.md and two pages of docs/: what is generated of them follows from records and knobs.py.

RESULTS.md holds the findings, the comparisons and the benchmarks. results/README.md holds the tables of variants and
runs, docs/benchmark.md the comparisons of methods, and docs/checks.md the checks of a running job. Text outside the two
marker lines is written by hand and stays as it is. This file needs no torch.
"""

import difflib
import re
import statistics
from collections.abc import Container
from pathlib import Path

import numpy as np

from config import load_config
from inputs.files import InputError, read_text, write_atomically
from knobs import ChecksConfig
from lab import announced, audit, comparisons, figures, store
from lab.announced import Found, Plan, notes, table
from lab.records import Benchmark, Evaluation, Run, evaluated, scores
from tripwires import CHECKS, cannot_judge

CONFIGS = Path(__file__).parents[1] / "configs"
BEGIN = "<!-- report.py build writes the text below: edit results/plan.yaml, or the text outside of the two markers -->"
END = "<!-- report.py build writes the text above -->"
DEVICES = {"cpu": "a CPU", "cuda": "a GPU", "npu": "an NPU"}
GAPS = {  # column -> metric
    "mean of a step": "rollout/logp_gap_mean",
    "of a token": "rollout/logp_gap_max",
    "on the probe, without noise": "aqn/probe_gap",
}
CURVE = "figures/learning_curve.png"  # of the README
FIGURES = {  # of RESULTS.md
    "figures/recovered.png": "The share of a loss that each correction gives back",
    "figures/gap.png": "The gap of sampler and trainer against the points lost",
    "figures/curves.png": "Learning curves",
}
SHOWN_SEEDS = 6  # the table of runs leaves out variants with more


# ----------------------------------------------------------------------------------------------------------- RESULTS.md


def results_page(groups: dict[str, list[Run]], plan: Plan, ready: Found, pictures: Container[str]) -> str:
    """The generated part of RESULTS.md: what was learned, figures, and what was not met or was not run."""
    parts = ["## What was learned", announced.learned(plan, ready, groups)] if plan.learned else []
    parts += [f"![{about}](results/{name})" for name, about in FIGURES.items() if name in pictures]
    parts += ["## Announced, and not as predicted", not_met(ready)] if announced.methods(ready) else []
    used = {run.record.device for runs in groups.values() for run in runs}
    unused = [where for device, where in DEVICES.items() if device not in used]
    parts += [f"No record yet of a run on {' or '.join(unused)}."] if unused else []
    parts += ["## Not run yet, or without a record", not_run(plan, groups)]
    return "\n\n".join(parts)


def training(name: str, runs: list[Run]) -> str:
    """What training did to one variant, in a sentence."""
    row = variant_row(name, runs)
    return (
        f"**Training of `{name}`.** {row['answers'].capitalize()} accuracy on {runs[0].record.last.num_questions:,} "
        f"held-out questions: {row['before, mean']} % before and {row['after, mean']} % after {runs[0].record.steps} "
        f"steps ({row['seeds']} seeds). The gain is {row['gain, points']} points (95 % interval {row['95 %']})."
    )


def not_met(ready: Found) -> str:
    """How many predictions of methods were met, and a line for each of the others."""
    found = [(planned, one, announced.outcome(planned, one, ready)) for planned, one in announced.methods(ready)]
    others = [each for each in found if each[2] != "met"]
    head = f"{len(found) - len(others)} of {len(found)} predictions of the [benchmark](docs/benchmark.md) were met."
    rows = [
        {"comparison": f"{planned.title} (`{one.other}` against `{one.base}`)", "predicted": planned.predicted,
         "found": outcome, "difference, points": f"{one.effect.points} ({one.effect.range})"}
        for planned, one, outcome in others
    ]  # fmt: skip
    return "\n\n".join([head, *([table(rows)] if rows else [])])


def comparison_parts(plan: Plan, ready: Found, groups: dict[str, list[Run]]) -> list[str]:
    """The gains, and the comparisons that belong to no family."""
    parts = [training(name, groups[name]) for name in plan.gains if name in groups]
    if alone := announced.of("", ready):
        parts.append(comparison_table(alone))
        for each in dict.fromkeys(planned for planned, _ in alone):
            parts.append(step_by_step(groups[each.base], {name: groups[name] for name in each.others}))
    return ["## Comparisons", *filter(None, parts)] if parts else []


def comparison_table(ready: Found) -> str:
    """All comparisons in one table, with the notes about how the pairs were made."""
    rows = [
        {
            "comparison": planned.title,
            "variant": one.other,
            "base": one.base,
            "answers": planned.kind,
            "seeds": str(len(one.seeds)),
            "difference, points": one.effect.points,
            "95 % interval": one.effect.range,
            "p (Holm)": f"{one.p:.2g}",
            "minimum detectable effect, points": f"{100 * one.detectable:.1f}",
            "verdict": one.verdict,
        }
        for planned, one in ready
    ]
    return "\n\n".join([table(rows), *notes(one for _, one in ready)])


def step_by_step(base: list[Run], others: dict[str, list[Run]]) -> str:
    """For variants that differ from ``base`` in their layout only: the differences of the first step, and the first
    step with another reward. Empty for other variants."""
    rows, partners = [], {run.record.seed: run.steps for run in base}
    for name, runs in others.items():
        changed = store.differing(base[0].record, runs[0].record)
        if not all(change.startswith(("parallel.", "ranks:")) for change in changed):
            return ""
        pairs = [(run.steps, partners[run.record.seed]) for run in runs if run.record.seed in partners]
        loss = max(abs(mine["actor/loss"][0] - theirs["actor/loss"][0]) for mine, theirs in pairs)
        norm = max(abs(mine["actor/grad_norm"][0] / theirs["actor/grad_norm"][0] - 1) for mine, theirs in pairs)
        unequal = [
            mine.index[mine["reward/mean"].fillna(0) != theirs["reward/mean"].fillna(0)] for mine, theirs in pairs
        ]
        parted = [str(steps[0] + 1) if len(steps) else "never" for steps in unequal]
        rows.append(
            {
                "layout": name,
                "loss, largest difference": f"{loss:.1e}",
                "gradient norm, relative": f"{norm:.1e}",
                "first step with another reward, by seed": ", ".join(parted),
            }
        )
    return (
        "Layouts: the differences in the first step, and the first step in which rounding changed a reward:\n\n"
        + table(rows)
    )


def benchmarks_by_script(results: Path) -> dict[str, dict[str, Benchmark]]:
    """Name of the script, with its subcommand and its cases if given -> id -> what it measured, the newest last."""
    found: dict[str, dict[str, Benchmark]] = {}
    for name, one in store.load_benchmarks(results).items():
        script = re.search(r"(\w+)\.py( [a-z]\w*)?( --cases( \w+)+)?", one.command)
        key = "".join(part or "" for part in script.groups()[:3]) if script else name
        found.setdefault(key, {})[name] = one
    return dict(sorted(found.items()))


def benchmark_tables(found: dict[str, dict[str, Benchmark]]) -> str:
    """The newest table of each script of benchmarks/, with the command that measures it again."""
    parts = []
    for script, measured in found.items():
        *earlier, (_, newest) = measured.items()
        versions = ", ".join(f"{key} {value}" for key, value in newest.machine.items())
        rows = [{k: f"{x:.4g}" if isinstance(x, float) else str(x) for k, x in row.items()} for row in newest.table]
        old = ", ".join(f"{name} at `{one.commit[:7]}`" for name, one in earlier)
        parts += [
            f"### {script}",
            f"{newest.about} `{newest.command}`, commit `{newest.commit[:7]}`; {versions}.",
            table(rows),
            *([f"Earlier: {old}."] if old else []),
        ]
    return "\n\n".join(parts) or "No record yet."


def not_run(plan: Plan, groups: dict[str, list[Run]]) -> str:
    """The planned runs and comparisons that have no record yet."""
    rows = [
        {"what": row.what, "command": f"`{row.command}`" if row.command else "", "plan": row.plan}
        for row in plan.rows
        if row.group not in groups
    ]
    sweeps: dict[str, tuple[list[str], list[str]]] = {}  # command -> titles of comparisons, and their missing groups
    for planned in plan.comparisons:
        command = f"`python sweep.py {planned.sweep}`" if planned.sweep else ""
        if missing := [name for name in planned.names if name not in groups]:
            titles, absent = sweeps.setdefault(command, ([], []))
            titles.append(planned.title)
            absent += missing
        if planned.missing:
            rows.append({"what": planned.title, "command": "", "plan": f"no record of {'; '.join(planned.missing)}"})
    for command, (titles, missing) in sweeps.items():
        what = titles[0] if len(titles) == 1 else f"{len(titles)} comparisons"
        rows.append({"what": what, "command": command, "plan": f"missing: {', '.join(dict.fromkeys(missing))}"})
    return table(rows) if rows else "Everything that is planned was run."


# ---------------------------------------------------------------------------------------------------- results/README.md


def records_page(groups: dict[str, list[Run]], plan: Plan, ready: Found, results: Path) -> str:
    """The generated part of results/README.md: all comparisons, variants, runs and benchmarks."""
    parts = comparison_parts(plan, ready, groups)
    for device, where in DEVICES.items():
        here = {name: runs for name, runs in groups.items() if runs[0].record.device == device}
        if here:
            runs = [run for each in here.values() for run in each]
            parts += [f"## Measured on {where}", "\n".join(sorted({_machine(run) for run in runs}))]
            parts += ["### Variants", table([variant_row(name, each) for name, each in here.items()])]
            parts += ["### Sampler against trainer", table([gap_row(name, each) for name, each in here.items()])]
            shown = [run for each in here.values() if len(each) <= SHOWN_SEEDS for run in each]
            parts += [
                "### Runs",
                f"Variants of at most {SHOWN_SEEDS} seeds; the files of this folder have the others.",
            ]
            parts += [table([run_row(run) for run in shown])] if shown else []
    return "\n\n".join([*parts, "## Benchmarks", benchmark_tables(benchmarks_by_script(results))])


def _machine(run: Run) -> str:
    m = run.record.environment
    versions = ", ".join(f"{name} {version}" for name, version in m.versions.items())
    return f"- {m.cpu}, {m.cores_usable} cores, {m.memory_gib:.0f} GiB; Python {m.python}, {versions}"


def variant_row(name: str, runs: list[Run]) -> dict[str, str]:
    """Means of one variant over its seeds, and its gain with an interval."""
    kind = runs[0].record.last.kind
    before, after = (
        [100 * getattr(getattr(run.record, when), kind).accuracy for run in runs] for when in ("first", "last")
    )
    found = comparisons.gain(runs, kind)
    return {
        "variant": name,
        "answers": kind,
        "seeds": str(len(runs)),
        "before, mean": f"{statistics.fmean(before):.1f}",
        "after, mean": f"{statistics.fmean(after):.1f}",
        "after, range": f"{min(after):.1f}-{max(after):.1f}" if len(runs) > 1 else "one seed",
        "gain, points": found.points,
        "95 %": found.range + " (these weights only)" * (len(runs) == 1),
        "s.d. before, after": f"{statistics.stdev(before):.1f}, {statistics.stdev(after):.1f}" if len(runs) > 1 else "",
        "along the run": mean_and_spread([100 * np.mean([scores(r, kind, n) for n in evaluated(r)]) for r in runs]),
        "training reward": mean_and_spread([100 * float(scores(run, "reward")[0]) for run in runs]),
        "s per step": f"{statistics.median(run.record.seconds_per_step for run in runs):.2f}",
    }


def mean_and_spread(values: list[float]) -> str:
    """`42.7 (4.0)`: the mean over the seeds and the standard deviation, or the value of one seed."""
    spread = f" ({statistics.stdev(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def gap_row(name: str, runs: list[Run]) -> dict[str, str]:
    """The gap between sampler and trainer over all steps of all seeds: its mean, and the largest ones."""
    steps = [run.steps[: run.record.steps] for run in runs]
    noisy = sum(int(each["aqn/sigma"].gt(0).sum()) for each in steps if "aqn/sigma" in each)
    row = {"variant": name, "steps": f"{sum(map(len, steps)):,}", "noisy steps": f"{noisy:,}" if noisy else "none"}
    for head, key in GAPS.items():
        gaps = [each[key].max() for each in steps if key in each]
        row[head] = f"{max(gaps):.1e}" if gaps else ""
    row["mean of all steps"] = f"{statistics.fmean(each['rollout/logp_gap_mean'].mean() for each in steps):.1e}"
    return row


def percent(evaluation: Evaluation) -> str:
    """`94.3 (92.7-95.6)`, or nothing without sampled answers."""
    share = evaluation.sampled
    return f"{100 * share.accuracy:.1f} ({100 * share.low:.1f}-{100 * share.high:.1f})" if share else ""


def run_row(run: Run) -> dict[str, str]:
    r = run.record
    return {
        "run": r.id,
        "seed": str(r.seed),
        "n": f"{r.last.num_questions:,}",
        "sampled before": percent(r.first),
        "sampled after": percent(r.last),
        "greedy before -> after": f"{100 * r.first.greedy.accuracy:.1f} -> {100 * r.last.greedy.accuracy:.1f}",
        "steps": str(r.steps),
        "s per step": f"{r.seconds_per_step:.2f}",
        "tokens/s": f"{r.tokens_per_second:,.0f}",
        "memory, GiB": f"{r.peak_memory_gib:.2f}",
        "ranks": str(r.layout["ranks"]),
        "checks fired": ", ".join(r.checks_fired) or "none",
        "commit": f"`{r.commit[:7]}`",
    }


# ------------------------------------------------------------------------------------------------------- docs/checks.md


def checks_page() -> str:
    """The generated part of docs/checks.md: the checks of tripwires.py.

    A check that cannot judge a file of configs/ names the file and the reason.
    """
    files: dict[str, dict[str, list[str]]] = {}  # check -> reason -> configurations
    for path in sorted(CONFIGS.glob("*.yaml")):
        for check, reason in cannot_judge(load_config(path)).items():
            files.setdefault(check, {}).setdefault(reason, []).append(path.stem)
    rows, default = [], ChecksConfig()
    for check, fires in CHECKS.items():
        reasons = [f"{reason}: {', '.join(names)}" for reason, names in files.get(check, {}).items()]
        rows.append({
            "check": f"`{check}`",
            "by default it": "stops" if default.stops(check) else "warns",
            "fires when": fires,
            "cannot judge": "; ".join(reasons),
        })  # fmt: skip
    return table(rows)


# ------------------------------------------------------------------------------------------------ writing and checking


def _fresh(path: Path, generated: str) -> str:
    """The file at ``path`` with ``generated`` between its markers."""
    text = read_text(path)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InputError(f"{path}: needed: the lines {BEGIN!r} and {END!r}, once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{generated}\n\n{END}{rest.split(END)[1]}"


def _wanted(results: Path, page: Path) -> tuple[dict[Path, str], figures.Wanted]:
    """The texts of the pages, and the figures.

    InputError for a folder without records: its pages would replace what is written with nothing.
    """
    if not store.load_runs(results):
        raise InputError(f"{results}: no records; needed: the folder that report.py add has filled")
    groups, plan = store.load_groups(results), announced.read_plan(results)
    ready = announced.compared(plan, groups)
    pictures = _pictures(groups, plan, ready)
    generated = {
        page: results_page(groups, plan, ready, pictures),
        results / "README.md": records_page(groups, plan, ready, results),
        page.parent / "docs" / "benchmark.md": announced.page(ready, groups),
        page.parent / "docs" / "checks.md": checks_page(),
    }
    texts = {path: _fresh(path, text) for path, text in generated.items() if path == page or path.exists()}
    return texts, pictures


def _pictures(groups: dict[str, list[Run]], plan: Plan, ready: Found) -> figures.Wanted:
    pictures: figures.Wanted = {}
    if alone := announced.of("", ready):
        base = alone[0][0].base
        pictures[CURVE] = (base, {base: groups[base]}, figures.learning_curve)
    if plan.drawn.keys() <= groups.keys() and plan.drawn:
        variants = {name: groups[name] for name in plan.drawn}
        pictures["figures/curves.png"] = (
            str(plan.drawn),
            variants,
            lambda _, groups: figures.learning_curves(plan.drawn, groups),
        )
    if methods := announced.methods(ready):
        names = dict.fromkeys(name for planned, _ in methods for name in planned.names)
        drawn = [
            (planned.title, planned.predicted, announced.outcome(planned, one, ready), one.effect.range)
            for planned, one in methods
        ]
        variants = {name: groups[name] for name in names}
        pictures[announced.FIGURE] = (str(drawn), variants, lambda title, groups: announced.figure(ready))
        if announced.losses(ready):
            pictures["figures/recovered.png"] = (str(drawn), variants, lambda *_: announced.figure_recovered(ready))
            pictures["figures/gap.png"] = (str(drawn), variants, lambda _, groups: announced.figure_gap(ready, groups))
    return pictures


def build(results: Path, page: Path) -> None:
    """Write the pages and the figures. InputError for records that were changed: nothing may rest on them."""
    if faults := audit.check(results):
        raise InputError("; ".join(faults))
    texts, pictures = _wanted(results, page)
    figures.draw_all(pictures, results)
    for path, text in texts.items():
        write_atomically(path, text)


def stale(results: Path, page: Path) -> list[str]:
    """One sentence for each page and figure that does not follow from the records, which audit.check has accepted."""
    (texts, pictures), faults = _wanted(results, page), []
    for path, text in texts.items():
        if text != (written := read_text(path)):
            changed = [line[:100] for line in difflib.ndiff(written.splitlines(), text.splitlines()) if line[0] in "+-"]
            faults.append(
                f"{path}: stale: {len(changed)} lines differ, the first: {changed[0]}; python report.py build"
            )
    return faults + [
        f"{results / name}: missing, edited, stale or not wanted; python report.py build"
        for name in sorted(figures.faults(pictures, results))
    ]
