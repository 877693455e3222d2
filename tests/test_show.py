"""`report.py show` prints the completions of one step of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recorded

import report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recorded.make_run(tmp_path, "base-seed0", questions=20)


def test_a_step_is_shown_with_question_gold_answer_rewards_and_completions(run: Path, capsys) -> None:
    """By default the last step. What another step has is not shown, and a question is printed once."""
    assert report.main(["show", str(run)]) == 0
    assert capsys.readouterr().out == (
        f"{run.name}, step 4\n\nquestion: 1 + 1 <b>?</b>\ngold answer: 2\n"
        "\n--- reward 1, 8 tokens\n</pre>#### 3\n\n--- reward 1, 9 tokens\n</pre>#### 3\n"
    )
    assert report.main(["show", str(run), "--step", "1"]) == 0
    first = capsys.readouterr().out
    assert "step 1\n" in first and first.count("--- reward 0, ") == 2 and "#### 3" not in first


def test_several_questions_are_told_apart_and_no_completion_controls_the_terminal(run: Path, capsys) -> None:
    rows = [
        {"step": 7, "question": "a?", "completion": "\x1b[2Jtwo\nlines\ud800", "reward": 0.5, "tokens": 3},
        {"step": 7, "question": "b?", "gold": "9", "completion": "9", "reward": 1.0, "tokens": 1},
    ]
    (run / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report.main(["show", str(run)]) == 0
    assert capsys.readouterr().out == (
        f"{run.name}, step 7\n\nquestion: a?\n\n--- reward 0.5, 3 tokens\n\\x1b[2Jtwo\nlines\\ud800\n"
        "\nquestion: b?\ngold answer: 9\n\n--- reward 1.0, 1 tokens\n9\n"
    )


def test_what_cannot_be_shown_is_one_line_and_exit_code_2(run: Path, capsys) -> None:
    def refused(*arguments: str) -> str:
        assert report.main(["show", *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        return said.err

    assert "absent: there is no such folder; needed: the folder of a run" in refused(str(run / "absent"))
    assert "--step: found 9; needed: a step with completions, 1 to 4" in refused(str(run), "--step", "9")
    (run / "completions.jsonl").unlink()
    assert "found no completions; needed: a run with train.completions_logged" in refused(str(run))
