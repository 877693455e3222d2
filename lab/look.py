"""Views of a run for `report.py show`, during and after training: its metrics, completions, and changed answers."""

import math
import textwrap
from collections import Counter
from pathlib import Path
from statistics import fmean

from facts.exits import InputError
from inputs.files import read_text
from lab.curves import read_curves
from runlog import completions
from runlog.completions import OUTCOMES, Row, outcome

METRICS = (  # the overview shows them after the accuracies and the parts of the reward
    "reward/mean",
    "reward/unparsable_frac",
    "response_length/mean",
    "response_length/truncated_frac",
    "actor/entropy",
    "rollout/logp_gap_mean",
    "actor/teacher_kl",
    "environment/turns_mean",
)
FACTS = ("step", "sample", "reward", "answer", "tokens", "turns", "advantage", "logp", "teacher_kl")  # shown if present
BARS, WIDTH = "▁▂▃▄▅▆▇█", 40  # the eight heights of a bar, and the largest number of bars per metric
SHORT = 300  # characters of the longest text in the overview
LAST = -1  # means the last step


def overview(run: Path) -> list[str]:
    """Return an overview of a run: the end of its log, metrics, a completion for each outcome, and changed answers."""
    log = read_text(run / "log.txt").splitlines()
    lines = [run.name, *log[-3:], "", f"{'':<34}{'first':>10}{'last':>10}"]
    for key, curve in read_curves(run, METRICS).items():
        values = [value for value in curve.values() if math.isfinite(value)]
        if values:
            lines.append(f"{key:<34}{values[0]:>10.4g}{values[-1]:>10.4g}  {bars(values)}")
    steps, evals = completions.files(run, "step"), completions.files(run, "eval")
    if steps:
        rows = completions.read(steps[max(steps)])
        lines += counts(f"step {max(steps)}", rows) + blocks(completions.telling(rows), SHORT)
    if len(evals) > 1:
        lines += diff(evals[min(evals)], evals[max(evals)], 1, SHORT)
    return lines


def bars(values: list[float]) -> str:
    """Return a string of at most WIDTH bars, which show the means of equally long parts of ``values``, in order.

    The last part may be shorter. The highest mean has the highest bar.
    """
    size = math.ceil(len(values) / WIDTH)
    means = [fmean(values[i : i + size]) for i in range(0, len(values), size)]
    low, span = min(means), max(means) - min(means) or 1
    return "".join(BARS[round((mean - low) / span * 7)] for mean in means)


def listing(path: Path, only: str, question: str, limit: int) -> list[str]:
    """Return the text of at most ``limit`` completions of a file.

    They have the outcome ``only`` and answer the question with the id ``question``. For both arguments, "" means all.
    """
    rows = completions.read(path)
    if question:
        rows = [row for row in rows if row["id"] == question]
    shown = [row for row in rows if only in ("", outcome(row))]
    lines = counts(path.name[:11], rows) if rows else []
    lines += blocks(shown[:limit])
    if len(shown) > limit:
        lines += ["", f"{len(shown) - limit} more (--limit {len(shown)} shows all)"]
    return lines


def file_of(run: Path, kind: str, step: int) -> Path:
    """Return the file of a step or an evaluation; LAST means the last one. Raises InputError if it does not exist."""
    found = completions.files(run, kind)
    if not found:
        raise InputError(f"{run}/completions: there is no {kind} file; choose a run without train.completions_logged=0")
    if step == LAST:
        step = max(found)
    if step not in found:
        raise InputError(f"{run}/completions: there is no {kind} {step}; choose from: {', '.join(map(str, found))}")
    return found[step]


def diff(before: Path, after: Path, limit: int, longest: int | None = None) -> list[str]:
    """Return text that lists the questions with fewer, and those with more, right answers in the second evaluation.

    For the ``limit`` questions that changed most in each direction, the text shows one changed answer, before and
    after. It shows at most ``longest`` characters of each question and answer. Raises InputError if the evaluations
    have different questions or samples.
    """
    old, new = completions.read(before), completions.read(after)
    if [row["question"] for row in old] != [row["question"] for row in new]:
        raise InputError(f"{before}, {after}: the questions or samples differ; give evaluations of the same ones")
    pairs = list(zip(old, new, strict=True))
    change = Counter[str]()
    for was, now in pairs:
        change[was["id"]] += now["correct"] - was["correct"]
    names = [f"{path.parents[1].name} {path.name[:11]}" for path in (before, after)]
    lines = ["", f"{' and '.join(names)}, {len(old)} answers each"]
    for direction, kind in ((-1, "fewer"), (1, "more")):
        changed = [name for name, n in change.most_common() if n * direction > 0][::direction]
        lines.append(f"  {len(changed)} questions have {kind} right answers: {' '.join(changed[:10])}")
        for name in changed[:limit]:
            answers = [pair for pair in pairs if pair[0]["id"] == name]
            lines += blocks(next([a, b] for a, b in answers if b["correct"] - a["correct"] == direction), longest)
    return lines


# ---------------------------------------------------------------------------------------------------- parts of a view


def counts(what: str, rows: list[Row]) -> list[str]:
    """Return text with the number of completions, and with the number, mean reward and mean length for each outcome.

    The text begins with ``what``, which names the step or file of the completions.
    """
    questions = {row["id"] for row in rows}
    lines = ["", f"{what}: {len(rows)} completions of {len(questions)} questions"]
    for kind in OUTCOMES:
        found = [row for row in rows if outcome(row) == kind]
        if found:
            reward = fmean(row["reward"] for row in found)
            tokens = fmean(row["tokens"] for row in found)
            lines.append(f"  {len(found):>6} {kind:<10}  mean reward {reward:.3g}, mean length {tokens:.4g} tokens")
    return lines


def blocks(rows: list[Row], longest: int | None = None) -> list[str]:
    """Return text that shows each completion below the facts about it. A question precedes its first completion.

    ``longest`` is the number of characters to show of each question or completion. None shows all.
    """
    lines = []
    before = None
    for row in rows:
        if row["id"] != before:
            before = row["id"]
            lines += ["", f"{before}, gold answer {row['gold']}", row["question"][:longest]]
        facts = [f"  {outcome(row)}{', dropped' * row['dropped']}"]
        for name, value in [*((key, row.get(key)) for key in FACTS), *row["parts"].items()]:
            if value is not None:
                facts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        lines += [", ".join(facts).replace("\n", " "), textwrap.indent(row["completion"][:longest], "    ")]
    return lines
