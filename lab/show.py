"""The completions of a step of a run as text: its first question, the gold answer, rewards and what the model wrote.

    python report.py show out/RUN [--step N]      the last step that has completions, or step N

They are those of completions.jsonl in the run's folder; train.completions_logged says how many a step has.
"""

from pathlib import Path

from facts.exits import InputError
from inputs.files import printable
from runlog.run_record import read_lines


def show(run: Path, step: int | None = None) -> str:
    """The completions of ``step``, by default of the last step that has any. InputError if there are none."""
    path = run / "completions.jsonl"
    rows = read_lines(path)
    if not rows:
        raise InputError(f"{path}: found no completions; needed: a run with train.completions_logged of 1 or more")
    steps = {row["step"] for row in rows}
    if step is None:
        step = max(steps)
    if step not in steps:
        raise InputError(f"--step: found {step}; needed: a step with completions, {min(steps)} to {max(steps)}")
    shown = [row for row in rows if row["step"] == step]
    lines = [f"{run.name}, step {step}", "", f"question: {shown[0]['question']}", f"gold answer: {shown[0]['gold']}"]
    for row in shown:
        lines += ["", f"--- reward {row['reward']}, {row['tokens']} tokens", row["completion"]]
    return printable("\n".join(lines), kept="\n\t")  # a model may write anything
