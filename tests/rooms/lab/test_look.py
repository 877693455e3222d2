"""`report.py show`: what it says of a run agrees with the run's records and completions."""

import gzip
import re
import shutil
from pathlib import Path

import pytest
import recorded

import report
from lab import look
from runlog import completions
from runlog.run_record import read_lines


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = recorded.make_run(tmp_path_factory.mktemp("out"), "base-seed3", seed=3)
    (folder / "log.txt").write_text("12:00:00 step 3/4\n12:00:01 step 4/4\n")
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "out" / made.name)


def shown(capsys, *arguments: object) -> str:
    assert report.main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments: object) -> str:
    assert report.main(["show", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def answer(name: str, correct: bool, **more: object) -> dict:
    """A row of a completion: a wrong one, unless it is ``correct`` or ``more`` says otherwise."""
    judged = recorded.JUDGED | {"reward": float(correct), "correct": correct, "completion": f"#### {correct}"}
    return {"step": 1, "id": name, "sample": 0, "question": f"{name}?", "gold": "2", **judged, **more}


# -------------------------------------------------------------------------------------------------------- the overview


def test_what_is_no_folder_of_a_run_is_refused_in_every_view(run: Path, tmp_path: Path, capsys) -> None:
    """A record has a name, but no folder."""
    record = tmp_path / "base-seed0"
    for arguments in ([record], [record, "--eval"], [record, "--question", "test:20"], [run, "--diff", run, record]):
        said = f"error: {record}: not the folder of a run; give out/RUN (for a record, see results/README.md)"
        assert refused(capsys, *arguments) == said


def test_the_overview_has_the_first_and_last_value_of_each_metric_and_the_counts_of_the_last_step(
    run: Path, capsys
) -> None:
    text = shown(capsys, run)
    metrics, evaluations = read_lines(run / "metrics.jsonl"), read_lines(run / "eval.jsonl")
    for key, rows in {"reward/mean": metrics, "actor/entropy": metrics, "eval/greedy_accuracy": evaluations}.items():
        found = re.search(rf"^{key} +(\S+) +(\S+)  [▁▂▃▄▅▆▇█]{{{len(rows)}}}$", text, re.M)
        assert [float(found[1]), float(found[2])] == pytest.approx([rows[0][key], rows[-1][key]], rel=1e-3)
    assert "step 4: 2 completions of 1 questions\n" in text
    assert re.search(r"^ +1 right +mean reward 1, mean length 5 tokens\n +1 wrong +mean reward 1, .* 5 ", text, re.M)
    assert text.count("\ntrain:7, gold answer 2\n1 + 1 <b>?</b>\n") == 1, "one question for both outcomes"
    assert (run / "log.txt").read_text().splitlines()[-1] in text


def test_the_overview_names_the_questions_whose_answers_changed(run: Path, capsys) -> None:
    """Against eval_outcomes.jsonl: each question has a greedy and a sampled answer."""
    right: dict[int, dict[str, float]] = {0: {}, 4: {}}
    for row in read_lines(run / "eval_outcomes.jsonl"):
        right[row["step"]][f"test:{row['question']}"] = row["greedy"] + sum(row["sampled"])
    change = {name: right[4][name] - right[0][name] for name in right[0]}
    fewer, more = ({name for name, n in change.items() if n * sign > 0} for sign in (-1, 1))
    assert fewer and more
    text = shown(capsys, run)
    assert f"  {len(fewer)} questions have fewer right answers: " in text
    assert f"  {len(more)} questions have more right answers: " in text
    everything = shown(capsys, run, "--diff", 0, 4, "--limit", 999)
    ids = re.findall(r"^(test:\d+), gold", everything, re.M)
    assert len(ids) == len(set(ids)) and set(ids) == fewer | more
    turns = [[("right", "0"), ("wrong", "4")] if name in fewer else [("wrong", "0"), ("right", "4")] for name in ids]
    assert re.findall(r"^  (\w+), step (\d+), ", everything, re.M) == sum(turns, [])
    sizes = [abs(change[name]) for name in ids]
    assert sizes == sorted(sizes[: len(fewer)], reverse=True) + sorted(sizes[len(fewer) :], reverse=True)


def test_bars_go_from_the_lowest_to_the_highest_mean_and_are_at_most_forty() -> None:
    assert look.bars([0.0, 7.0, 3.5]) == "▁█▅"
    assert look.bars([2.0, 2.0]) == "▁▁"
    assert look.bars([*range(80)]) == look.bars([2 * n + 0.5 for n in range(40)])
    assert len(look.bars([*range(1000)])) == 40


def test_a_run_that_has_only_begun_is_shown(run: Path, capsys) -> None:
    for name in ("metrics.jsonl", "timing.jsonl", "eval.jsonl"):
        (run / name).unlink()
    shutil.rmtree(run / "completions")
    assert shown(capsys, run).startswith(f"{run.name}\n")
    (run / "log.txt").unlink()
    assert "log.txt" in refused(capsys, run)


# ------------------------------------------------------------------------------------------------------------ listings


def test_completions_are_chosen_by_step_evaluation_outcome_and_question(run: Path, capsys) -> None:
    first = shown(capsys, run, "--step", 1)
    assert first.startswith("step-000001: 2 completions of 1 questions\n") and "#### 0" in first
    assert "  right, " not in first and first.count("  wrong, step 1, ") == 2
    last = shown(capsys, run, "--only", "right")
    assert "  right, step 4, sample 0, reward 1, tokens 5\n    </pre>#### 3\n" in last and "    no\n" not in last
    assert shown(capsys, run, "--eval") == shown(capsys, run, "--eval", 4)
    assert shown(capsys, run, "--eval", 0).startswith("eval-000000: ")
    history = shown(capsys, run, "--question", "test:5")
    assert re.findall(r"^\S+: 2 completions of 1 questions$", history, re.M) == [
        "eval-000000: 2 completions of 1 questions",
        "eval-000004: 2 completions of 1 questions",
    ]
    assert shown(capsys, run, "--question", "test:99999") == "no completion matches\n"
    assert "limit 2" in shown(capsys, run, "--step", 1, "--limit", 1)


def test_a_completion_stands_with_its_numbers_and_the_parts_of_its_reward(run: Path, capsys) -> None:
    numbers = {"advantage": -0.25, "logp": -1.5, "answer": "2", "dropped": True, "parts": {"form": 0.1, "read": "7"}}
    completions.write(run, "step", 4, [answer("train:1", True, **numbers)])
    first = "right, dropped, step 1, sample 0, reward 1, answer 2, tokens 5, advantage -0.25, logp -1.5"
    assert f"  {first}, form 0.1, read 7\n    #### True" in shown(capsys, run, "--step", 4)


def test_no_text_of_a_model_controls_the_terminal(run: Path, capsys) -> None:
    texts = {"completion": "\x1b[2Jtwo\nlines\ud800", "question": "a\x07", "gold": "\x1b]0;x", "parts": {"\x1b": "\r"}}
    completions.write(run, "step", 4, [answer("\x9b1", False, **texts)])
    for arguments in ((run,), (run, "--step", 4)):
        text = shown(capsys, *arguments)
        assert not re.search(r"[^\n\t -~▁-█]", text) and "\\x1b[2Jtwo\n    lines\\ud800" in text


def test_a_hacked_reward_shows_in_the_counts_of_a_step(run: Path, capsys) -> None:
    """A reward that pays for length: the wrong completions earn more and are longer."""
    rows = [answer("train:1", True, reward=0.5, tokens=10)]
    rows += [answer("train:1", False, sample=n, reward=2.0 + n, tokens=100) for n in (1, 2)]
    completions.write(run, "step", 4, rows)
    text = shown(capsys, run)
    assert re.search(r" 1 right +mean reward 0.5, mean length 10 tokens", text)
    assert re.search(r" 2 wrong +mean reward 3.5, mean length 100 tokens", text)


def test_two_runs_are_compared_by_their_last_evaluations(run: Path, tmp_path: Path, capsys) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    assert "0 questions have fewer" in shown(capsys, run, "--diff", run, other)
    rows = [answer(f"test:{n}", n == 1) for n in range(3)]
    completions.write(run, "eval", 4, rows)
    completions.write(other, "eval", 9, [row | {"correct": row["id"] == "test:2"} for row in rows])
    text = shown(capsys, run, "--diff", run, other)
    assert "fewer right answers: test:1\n" in text and "more right answers: test:2\n" in text
    assert f"{run.name} eval-000004 and other eval-000009, 3 answers each\n" in text
    completions.write(other, "eval", 10, [row | {"question": "another"} for row in rows])
    assert "the questions or samples differ" in refused(capsys, run, "--diff", run, other)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_an_absent_step_or_evaluation_is_one_line_with_those_that_are_there(run: Path, capsys) -> None:
    assert "there is no step 9; choose from: 1, 2, 3, 4" in refused(capsys, run, "--step", 9)
    assert "there is no eval 3; choose from: 0, 4" in refused(capsys, run, "--diff", 3, 4)
    (run.parent / "nothing").mkdir()
    assert "nothing/completions: there is no eval file" in refused(capsys, run, "--diff", run, run.parent / "nothing")
    for option in ("--step", "--eval", "--limit"):
        with pytest.raises(SystemExit, match="2"):
            report.main(["show", str(run), option, "-1"])
        assert f"{option}: must be a number of 0 or more, not '-1'" in capsys.readouterr().err
    shutil.rmtree(run / "completions")
    assert "there is no step file; choose a run without train.completions_logged=0" in refused(
        capsys, run, "--only", "wrong"
    )
    assert "step 4:" not in shown(capsys, run)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:30] + bytes([data[30] ^ 64]) + data[31:],
        lambda data: b"not gzip",
        lambda data: gzip.compress(b"{\n"),
        lambda data: gzip.compress(b"[1]\n"),
        lambda data: gzip.compress(b'{"id": "train:1"}\n'),
    ],
)
def test_a_damaged_file_is_one_line_with_its_name(damage, run: Path, capsys) -> None:
    path = completions.files(run, "step")[4]
    path.write_bytes(damage(path.read_bytes()))
    assert f"{path}: is damaged: " in refused(capsys, run)
    path.unlink()
    assert "step 3: 2 completions" in shown(capsys, run)
