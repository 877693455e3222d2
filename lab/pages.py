"""RESULTS.md between its two markers, from results/: every number there is read or computed from a record.

results/plan.yaml says beforehand which comparisons will be made, so that their number is known and corrected for, and
which rows are wanted and not run yet. Text outside the markers is people's and stays as it is. No torch.
"""

from __future__ import annotations

import difflib
import statistics
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from input_files import InputError, read_file, read_text
from lab import benchmark_records, comparisons, figures, records
from lab.comparisons import Comparison, Source
from lab.records import Evaluation, Part, Record
from run_record import read_lines, write_atomically

BEGIN = "<!-- report.py build writes from here: edit results/plan.yaml, or the text outside -->"
END = "<!-- report.py build wrote up to here -->"
DEVICES = {"cpu": "Measured on a CPU", "cuda": "Measured on a GPU", "npu": "Measured on an NPU"}

REPEAT = """## How to repeat a row

A row is a record in `results/<id>/`: configuration, environment, checksums of model and data, every step's metrics,
every answer's score. `python report.py rerun ID` prints checkout, installation and command (`--run` executes them), and
`python report.py compare ID out/<run>` says whether the repeat is the same. On a CPU it must be, to the last bit, with
the same versions and processor; elsewhere the answers are compared with intervals. `python report.py --check` fails
when a record was edited or lost, or when this page does not follow from the records."""

READING = """Accuracies in % of the held-out questions; intervals are 95 %. Of a run: Wilson's, which counts questions.
Of a variant: the gain from its first to its last evaluation with seeds and questions both as samples
(lab/statistics.py). Times and speed are medians over the steps; memory is the largest resident memory of rank 0.
The generated word problems share pairs of operands, so what intervals owe to the questions is somewhat too narrow."""


GAPS = """The largest differences between the sampler's and the trainer's log-prob of a sampled token, in nats. At noisy
steps the two policies differ on purpose; the probe is answered before the noise goes in."""


class Planned(Part):
    title: str
    sweep: str = Field("", description="configs/sweeps/ file that makes the runs")
    base: str = Field(description="group of records that the others are held against")
    others: tuple[str, ...] = Field(min_length=1, strict=False)
    kind: str = Field("sampled", pattern="^(sampled|greedy)$")


class Row(Part):
    group: str = Field(description="name of the records-to-be; the row leaves this list when they exist")
    what: str
    command: str
    plan: str


class Plan(Part):
    comparisons: tuple[Planned, ...] = Field((), strict=False)
    rows: tuple[Row, ...] = Field((), strict=False)


def read_plan(results: Path) -> Plan:
    """results/plan.yaml; empty when there is none."""
    path = results / "plan.yaml"
    try:
        return Plan.model_validate(read_file(path) if path.exists() else {})
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise InputError(f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None


# -------------------------------------------------------------------------------------------------------------- tables


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def percent(evaluation: Evaluation, kind: str = "sampled") -> str:
    """`94.3 (92.7-95.6)`"""
    share = getattr(evaluation, kind)
    return "" if share is None else f"{100 * share.accuracy:.1f} ({100 * share.low:.1f}-{100 * share.high:.1f})"


def run_table(rows: list[Record]) -> str:
    head = ["run", "seed", "n", "sampled before", "sampled after", "greedy before -> after", "steps"]
    head += ["s a step", "tokens/s", "memory, GiB", "ranks", "checks fired", "commit"]
    return table(
        head,
        (
            [
                f"[{r.id}](results/{r.id})",
                str(r.seed),
                f"{r.last.num_questions:,}",
                percent(r.first),
                percent(r.last),
                f"{100 * r.first.greedy.accuracy:.1f} -> {100 * r.last.greedy.accuracy:.1f}",
                str(r.steps),
                f"{r.seconds_per_step:.2f}",
                f"{r.tokens_per_second:,.0f}",
                f"{r.peak_memory_gib:.2f}",
                str(r.layout.ranks),
                ", ".join(r.checks_fired) or "none",
                f"`{r.commit[:7]}`",
            ]
            for r in rows
        ),
    )


def group_row(name: str, group: list[Source]) -> list[str]:
    """One variant: means over its seeds, and its gain with an interval if the seeds suffice for one."""
    kind = "sampled" if group[0].record.last.sampled else "greedy"
    before, after = (
        [100 * getattr(getattr(one.record, when), kind).accuracy for one in group] for when in ("first", "last")
    )
    found = comparisons.gain(group, kind)
    low, high = found.interval()
    spread = f"{min(after):.1f}-{max(after):.1f}" if len(group) > 1 else "one seed"
    interval = f"{100 * low:+.1f} to {100 * high:+.1f}" + " (these weights only)" * (len(group) == 1)
    means = [f"{statistics.fmean(before):.1f}", f"{statistics.fmean(after):.1f}"]
    return [name, kind, str(len(group)), *means, spread, f"{100 * found.mean:+.1f}", interval, figure_link(name)]


def gap_row(name: str, group: list[Source]) -> list[str]:
    """Sampler against trainer over all steps of all seeds: mean of a step, largest of a token, largest on the probe."""
    rows = [row for one in group for row in read_lines(one.folder / "metrics.jsonl")]
    cells = []
    for key in ("rollout/logp_gap_mean", "rollout/logp_gap_max", "aqn/probe_gap"):
        found = [row[key] for row in rows if row.get(key) is not None]
        cells.append(f"{max(found):.1e}" if found else "")
    noisy = sum(row.get("aqn/sigma", 0.0) > 0 for row in rows)
    return [name, f"{len(rows):,}", f"{noisy:,}" if noisy else "none", *cells]


def figure_link(name: str) -> str:
    return f"[curves](results/figures/{name}.png)"


def device_section(title: str, groups: dict[str, list[Source]]) -> str:
    """Everything measured on one kind of device; says so when that is nothing."""
    if not groups:
        return f"## {title}\n\nNo record yet."
    rows = [one.record for group in groups.values() for one in group]
    machines = sorted({_machine(record) for record in rows})
    head = ["variant", "answers", "seeds", "before, mean", "after, mean", "after, range"]
    head += ["gain, points", "95 %", "figure"]
    parts = [f"## {title}", "\n".join(f"- {machine}" for machine in machines)]
    parts += ["### Variants", table(head, (group_row(name, group) for name, group in groups.items()))]
    parts += ["### Runs", run_table(rows), "### Sampler against trainer", GAPS]
    head = ["variant", "steps", "noisy steps", "mean of a step", "of a token", "on the probe, without noise"]
    return "\n\n".join([*parts, table(head, (gap_row(name, group) for name, group in groups.items()))])


def _machine(record: Record) -> str:
    m = record.machine
    versions = ", ".join(f"{name} {version}" for name, version in m.versions.items())
    return f"{m.cpu}, {m.cores_usable} cores, {m.memory_gib:.0f} GiB; Python {m.python}, {versions}"


def comparison_section(planned: Planned, found: list[Comparison]) -> str:
    head = ["variant", "seeds", "difference, points", "95 %", "p (Holm)", "could have found, points", "verdict"]
    rows = [
        [
            c.other,
            str(len(c.seeds)),
            f"{100 * c.mean:+.1f}",
            f"{100 * c.low:+.1f} to {100 * c.high:+.1f}",
            f"{c.p:.2g}",
            f"{100 * c.detectable:.1f}",
            c.verdict,
        ]
        for c in found
    ]
    notes: dict[str, list[str]] = {}  # note -> the variants that it is about
    for c in found:
        for note in dict.fromkeys(c.notes):
            notes.setdefault(note, []).append(c.other)
    about = f"Against {planned.base}, {planned.kind} answers, paired by seed and question."
    parts = [
        f"### {planned.title}",
        about,
        table(head, rows),
        *(f"Note: {', '.join(who)}: {note}." for note, who in sorted(notes.items())),
    ]
    return "\n\n".join([*parts, f"![{planned.title}](results/figures/{figures.slug(planned.title)}.png)"])


def benchmark_section(results: Path) -> str:
    """What the benchmarks printed, with the command that gives it."""
    parts = ["## Benchmarks"]
    for script, measured in benchmark_records.by_script(results).items():
        *earlier, newest = measured
        found = measured[newest]
        versions = ", ".join(f"{key} {value}" for key, value in found.machine.items())
        rows = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in found.table]
        parts += [f"### {script}", f"{found.about} `{found.command}`, commit `{found.commit[:7]}`; {versions}."]
        parts.append(table(found.table[0], rows))
        links = (f"[{name}](results/benchmarks/{name}.json) at `{measured[name].commit[:7]}`" for name in earlier)
        parts += [f"Before: {', '.join(links)}."] if earlier else []
    return "\n\n".join(parts if len(parts) > 1 else [*parts, "No record yet."])


def step_by_step(base: list[Source], others: dict[str, list[Source]]) -> str:
    """Of variants that are the same method in another layout: the first step's differences, and when answers part.

    Empty if one of them differs from ``base`` in more than its layout.
    """
    rows = []
    by_seed = {one.record.seed: read_lines(one.folder / "metrics.jsonl") for one in base}
    for name, group in others.items():
        changed = records.differing(base[0].record, group[0].record)
        if not all(change.startswith(("parallel.", "ranks:")) for change in changed):
            return ""
        loss = norm = 0.0
        parted = []
        for one in group:
            mine, theirs = read_lines(one.folder / "metrics.jsonl"), by_seed.get(one.record.seed)
            if theirs is None:
                continue
            loss = max(loss, abs(mine[0]["actor/loss"] - theirs[0]["actor/loss"]))
            norm = max(norm, abs(mine[0]["actor/grad_norm"] / theirs[0]["actor/grad_norm"] - 1))
            same = (a["reward/mean"] == b["reward/mean"] for a, b in zip(mine, theirs, strict=True))
            parted.append(next((str(step) for step, equal in enumerate(same, 1) if not equal), "never"))
        rows.append([name, f"{loss:.1e}", f"{norm:.1e}", ", ".join(parted)])
    head = ["variant", "loss, largest difference", "gradient norm, relative", "first step with other rewards, by seed"]
    said = "The first step of each seed (same questions, same random numbers), and how long rounding changed no reward:"
    return f"{said}\n\n{table(head, rows)}"


# ---------------------------------------------------------------------------------------------------------------- page


def grouped(results: Path) -> dict[str, list[Source]]:
    """Group name -> its records in order of seed."""
    groups: dict[str, list[Source]] = {}
    for record in records.load_all(results):
        groups.setdefault(record.group, []).append(Source(record, results / record.id))
    return groups


def generated(results: Path) -> str:
    """The text between the markers."""
    groups, plan = grouped(results), read_plan(results)
    parts = [REPEAT]
    parts += [READING] if groups else []
    for device, title in DEVICES.items():
        here = {name: group for name, group in groups.items() if group[0].record.machine.device == device}
        parts += [device_section(title, here)] if here or device != "npu" else []
    ready = [p for p in plan.comparisons if {p.base, *p.others} <= groups.keys()]
    if ready:
        parts.append("## Comparisons")
    for planned in ready:
        sides = {name: groups[name] for name in (planned.base, *planned.others)}
        parts.append(comparison_section(planned, comparisons.compare(sides, planned.kind)))
        if text := step_by_step(sides[planned.base], {name: sides[name] for name in planned.others}):
            parts.append(text)
    parts.append(benchmark_section(results))
    parts.append(not_run(plan, groups))
    return "\n\n".join(parts)


def not_run(plan: Plan, groups: dict[str, list[Source]]) -> str:
    """The rows and comparisons that are planned and have no record yet, with their command and empty cells."""
    wanted = [row for row in plan.rows if row.group not in groups]
    rows = [[row.what, f"`{row.command}`" if row.command else "", row.plan, "", "", "", ""] for row in wanted]
    for planned in plan.comparisons:
        if missing := [name for name in (planned.base, *planned.others) if name not in groups]:
            command = f"`python sweep.py {planned.sweep}`" if planned.sweep else ""
            rows.append([planned.title, command, f"missing: {', '.join(missing)}", "", "", "", ""])
    head = ["what", "command", "plan", "before", "after (95 %)", "seeds", "s a step"]
    return f"## Not run yet\n\n{table(head, rows) if rows else 'Nothing that is planned.'}"


def page(results: Path, path: Path) -> str:
    """The whole file at ``path`` with its generated part made anew."""
    text = read_text(path)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InputError(f"{path}: needed: the lines {BEGIN!r} and {END!r}, once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{generated(results)}\n\n{END}{rest.split(END)[1]}"


def wanted_figures(results: Path) -> dict[str, dict[str, list[Source]]]:
    """Figure -> the variants it shows: one a group, and one a comparison."""
    groups, plan = grouped(results), read_plan(results)
    wanted = {name: {name: group} for name, group in groups.items()}
    for planned in plan.comparisons:
        names = (planned.base, *planned.others)
        if set(names) <= groups.keys():
            wanted[figures.slug(planned.title)] = {name: groups[name] for name in names}
    return wanted


def build(results: Path, path: Path) -> None:
    """Write the page and its figures. Refuses records that were tampered with: nothing may rest on them."""
    if faults := records.check(results) + benchmark_records.check(results):
        raise InputError("; ".join(faults))
    fresh = page(results, path)
    figures.draw_all(wanted_figures(results), results / "figures")
    write_atomically(path, fresh)


def check(results: Path, path: Path) -> list[str]:
    """What is wrong with the records, the page and the figures, a sentence each; nothing when all is well."""
    if faults := records.check(results) + benchmark_records.check(results):
        return faults
    fresh, written = page(results, path), read_text(path)
    if fresh != written:
        changed = [line for line in difflib.ndiff(written.splitlines(), fresh.splitlines()) if line[0] in "+-"]
        first = changed[0][:100]
        faults.append(f"{path}: stale: {len(changed)} lines differ, the first: {first}; python report.py build")
    return faults + figures.check(wanted_figures(results), results / "figures")
