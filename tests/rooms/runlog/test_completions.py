"""The files of completions: whole, equal for equal rows, gone after a resume, and which completions are telling."""

import gzip
import json
from pathlib import Path

import pytest

from runlog import completions


def row(name: str, outcome: str, sample: int = 0) -> dict:
    """A completion with an outcome, by the definition of the words."""
    judged = {
        "right": {"correct": True, "parsable": True, "finish": "length"},  # right, although it was cut off
        "wrong": {"correct": False, "parsable": True, "finish": "stop"},
        "unparsable": {"correct": False, "parsable": False, "finish": "stop"},
        "truncated": {"correct": False, "parsable": True, "finish": "length"},
    }
    texts = {"question": "1 + 1?", "gold": "2", "completion": f"{outcome}\u2028\n"}
    rest = {"step": 1, "reward": 0.5, "tokens": 3, "dropped": False, "parts": {"form": 0.1}}
    return {"id": name, "sample": sample, **judged[outcome], **texts, **rest}


def test_equal_rows_give_equal_bytes_that_any_reader_of_gzip_and_json_understands(tmp_path: Path) -> None:
    rows = [row("train:1", "right"), row("train:2", "wrong")]
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        completions.write(tmp_path / folder, "step", 12, rows)
        paths.append(tmp_path / folder / "completions" / "step-000012.jsonl.gz")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert [json.loads(line) for line in gzip.open(paths[0])] == rows == completions.read(paths[0])
    assert [path.name for path in paths[0].parent.iterdir()] == [paths[0].name]


def test_files_are_in_the_order_of_their_steps_and_a_rewind_removes_the_later_ones(tmp_path: Path) -> None:
    for kind, steps in {"step": (2, 10, 9), "eval": (0, 10)}.items():
        for step in steps:
            completions.write(tmp_path, kind, step, [row("train:1", "wrong")])
    (tmp_path / "completions" / ".step-000011.jsonl.gz.tmp").write_bytes(b"half")
    (tmp_path / "completions" / "step-notes.jsonl.gz").write_bytes(b"of the user")
    assert [*completions.files(tmp_path, "step")] == [2, 9, 10]
    completions.rewind(tmp_path, 9)
    assert [[*completions.files(tmp_path, kind)] for kind in ("step", "eval")] == [[2, 9], [0]]
    completions.rewind(tmp_path / "none", 9)


@pytest.mark.parametrize("outcome", completions.OUTCOMES)
def test_an_outcome_is_one_of_four(outcome: str) -> None:
    assert completions.outcome(row("train:1", outcome)) == outcome


def test_telling_completions_are_one_of_each_outcome_from_the_question_with_the_most() -> None:
    rows = [row("train:1", "right"), row("train:1", "wrong", 1)]
    rows += [row("train:2", kind, n) for n, kind in enumerate(("wrong", "wrong", "right", "unparsable"))]
    rows += [row("train:3", kind, n) for n, kind in enumerate(("unparsable", "wrong", "right"))]
    assert completions.telling(rows) == [rows[4], rows[2], rows[5]]
    rows += [row("train:4", "truncated")]
    assert completions.telling(rows) == [rows[4], rows[2], rows[5], rows[-1]]
    assert completions.telling([]) == []
