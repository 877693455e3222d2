"""Writes and reads the completions of a run, which are in the folder completions/.

step-N.jsonl.gz has the completions of step N, and eval-N.jsonl.gz those of the evaluation after N steps. Each line of
these files is a JSON object. A file appears only when it is complete, so it can be read while the run writes. A resume
removes the files of later steps. No checksum depends on these files, so they may be deleted.
"""

import gzip
import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from facts.exits import InputError
from inputs.files import one_line, write_atomically
from runlog.run_record import json_line

Row = dict[str, Any]
OUTCOMES = ("right", "wrong", "unparsable", "truncated")
LEVEL = 3  # compression level of gzip; level 6 takes four times as long and saves a tenth
NEEDED = {  # the keys of a row
    "step",
    "id",
    "sample",
    "question",
    "gold",
    "reward",
    "correct",
    "parsable",
    "tokens",
    "finish",
    "dropped",
    "parts",
    "completion",
}


def write(run: Path, kind: str, step: int, rows: list[Row]) -> None:
    """Write the completions of a step (``kind`` is step) or of the evaluation after it (``kind`` is eval).

    The same rows always give a file with the same bytes.
    """
    path = run / "completions" / f"{kind}-{step:06d}.jsonl.gz"
    path.parent.mkdir(exist_ok=True)
    text = "".join(json_line({"step": step, **row}) for row in rows)
    write_atomically(path, gzip.compress(text.encode(), LEVEL, mtime=0))


def files(run: Path, kind: str) -> dict[int, Path]:
    """Return a dictionary from each step to its file of this ``kind`` (step or eval), in the order of the steps."""
    digits = "[0-9]" * 6
    return {int(path.name[5:11]): path for path in sorted(run.glob(f"completions/{kind}-{digits}.jsonl.gz"))}


def read(path: Path) -> list[Row]:
    """Return the rows of a file. Raises InputError if the file is damaged."""
    try:
        with gzip.open(path, "rb") as file:
            rows = [json.loads(line) for line in file]
        if not all(isinstance(row, dict) and NEEDED <= row.keys() for row in rows):
            raise ValueError(f"a row needs {', '.join(sorted(NEEDED))}")
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise InputError(f"{path}: is damaged: {one_line(error)}; delete it to see the others") from None
    return rows


def rewind(run: Path, step: int) -> None:
    """Remove the files of all steps and evaluations after ``step``."""
    for kind in ("step", "eval"):
        for later, path in files(run, kind).items():
            if later > step:
                path.unlink()


def outcome(row: Row) -> str:
    """Return the outcome of a completion, one of OUTCOMES. A completion that was cut off is "right" or "truncated"."""
    if row["correct"]:
        return "right"
    missed = "wrong" if row["parsable"] else "unparsable"
    return "truncated" if row["finish"] in ("length", "turns") else missed


def telling(rows: list[Row]) -> list[Row]:
    """Return one row for each outcome that occurs.

    For each outcome, the row is from the question with the most different outcomes, among the questions that have it.
    """
    kinds = Counter(name for name, _ in {(row["id"], outcome(row)) for row in rows})
    varied = sorted(rows, key=lambda row: kinds[row["id"]], reverse=True)
    first = {outcome(row): row for row in reversed(varied)}
    return [first[kind] for kind in OUTCOMES if kind in first]
