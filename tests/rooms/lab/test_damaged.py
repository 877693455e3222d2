"""Runs and records of others: if they are damaged, a command ends with one line, and no text of theirs is run."""

import gzip
import json
import shutil
from pathlib import Path

import pandas
import pytest
import recorded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw
from tiers import asked, nightly

import report
from facts.exits import InputError
from lab import records
from runlog import run_record


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, and their records."""
    folder = tmp_path_factory.mktemp("made")
    runs = [recorded.make_run(folder / "out", f"{name}-seed1", 1) for name in ("base", "other")]
    assert report.main(["--results", str(folder / "results"), "add", "--id", "base", *map(str, runs)]) == 0
    return folder


def resealed(run: Path) -> None:
    """The run with checksums of its files as they are now."""
    path = run / "finished.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sha256": run_record.checksums(run)}))


def ends_well(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    """What a command says that ends with a result, or with one line and code 2."""
    code = report.main(arguments)
    said = capsys.readouterr()
    assert code in (0, 1, 2), said
    if code == 2:
        assert said.err.startswith("error: ") and said.err.count("\n") == 1 and len(said.err) < 1200, said.err
    return said.out + said.err


steady = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=asked([60, nightly(300)])[-1],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
VALUES = draw.sampled_from(
    [None, True, -1, 10**30, 0.5, float("inf"), "x", "", [], [1, "x"], {}, {"a": None}, "\x1b[2J"]
)
ROWS = ("metrics.jsonl", "timing.jsonl", "eval.jsonl", "eval_outcomes.jsonl", "completions/step-000004.jsonl.gz")
OBJECTS = ("environment.json", "git.json", "inputs.json", "finished.json", "run.json")


@steady
@given(
    file=draw.sampled_from([*ROWS, *OBJECTS, "config.yaml", "command.txt"]),
    place=draw.integers(0, 60),
    value=VALUES,
    line=draw.integers(0, 5),
)
def test_a_run_of_any_content_ends_in_a_result_or_one_line(
    file: str, place: int, value: object, line: int, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "out" / "base-seed1-20300102-030405"
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    shutil.rmtree(tmp_path / "results", ignore_errors=True)
    shutil.copytree(next((made / "out").glob("base-seed1-*")), run)
    other = str(next((made / "out").glob("other-seed1-*")))
    path = run / file
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as source:
        text = source.read()
    lines = text.splitlines() if file in ROWS else [text]
    if file in (*ROWS, *OBJECTS):
        number = line % len(lines)
        content = json.loads(lines[number])
        key = sorted(content)[place % len(content)] if content else "step"
        content[key] = value
        lines[number] = json.dumps(content)
    elif file == "config.yaml":
        keys = lines[0].splitlines()
        name, _, _ = keys[place % len(keys)].partition(":")
        keys[place % len(keys)] = f"{name}: {json.dumps(value)}"
        lines = ["\n".join(keys)]
    else:
        lines = [str(value)]
    with opened(path, "wt") as changed:
        changed.writelines(f"{line}\n" for line in lines)
    if file != "finished.json":
        resealed(run)
    for arguments in (["show", str(run)], ["add", str(run)], ["compare", str(run), other], ["rerun", "base-seed1"]):
        ends_well(["--results", str(tmp_path / "results"), *arguments], capsys)


FIELDS = [f"record/{field}" for field in records.Record._fields if field != "id"]
COLUMNS = ["id", "step", *FIELDS, "eval/sampled_accuracy", "completions", "reward/mean"]


@steady
@given(column=draw.sampled_from(COLUMNS), value=VALUES, key=draw.integers(0, 30))
def test_a_record_of_any_content_ends_in_a_result_or_one_line(column, value, key, made: Path, tmp_path, capsys) -> None:
    results = tmp_path / "results"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    table = pandas.read_parquet(made / "results" / "base.parquet")
    old = table.loc[0, column]
    if isinstance(old, str) and old.startswith("{"):  # one member of the object
        content = json.loads(old)
        content[sorted(content)[key % len(content)]] = value
        value = json.dumps(content)
    values = table[column].astype(object)
    values[0] = json.dumps(value) if isinstance(value, list | dict) else value
    try:
        table.assign(**{column: values}).to_parquet(results / "base.parquet")
    except (TypeError, ValueError, OverflowError):  # no file can hold this
        table.assign(**{column: values.astype(str)}).to_parquet(results / "base.parquet")
    for arguments in (
        ["rerun", "base-seed1"],
        ["compare", "base-seed1", "other-seed1"],
        ["weights", "base-seed1", "w"],
    ):
        ends_well(["--results", str(results), *arguments], capsys)


@pytest.mark.parametrize(
    "commit", ["HEAD; touch RAN #", "HEAD", "", "0123456", "$(touch RAN)", "0123456789\ntouch RAN", "abc"]
)
def test_a_commit_is_a_hash_or_is_refused(commit: str, made: Path) -> None:
    record = records.load_record(made / "results", "base-seed1")._replace(commit=commit)
    if commit == "0123456":
        assert "git worktree add --detach ../rerun-base-seed1 0123456\n" in report.rerun_commands(record, made)
        return
    with pytest.raises(InputError, match="base-seed1.*commit: must match"):
        report.rerun_commands(record, made)


@pytest.mark.parametrize("name", ["a\ntouch RAN", "a; touch RAN", "../x", "$(touch RAN)"])
def test_a_record_of_a_name_that_is_none_is_refused(name: str, made: Path) -> None:
    with pytest.raises(InputError, match="id: must match"):
        report.rerun_commands(records.load_record(made / "results", "base-seed1")._replace(id=name), made)
