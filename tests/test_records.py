"""What becomes a record is finished, unaltered, of a commit and whole; and it is never edited afterwards."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
import recorded

from input_files import InputError
from lab import audit, records, store, tables


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recorded.make_run(tmp_path / "out", "base-seed3", seed=3, checks={"entropy": "step 2: low"})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


def rewrite(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    """A run whose file ``name`` was changed before it was sealed: wrong in itself, with the right checksums."""

    def apply(run: Path) -> None:
        (run / name).write_text(change((run / name).read_text()))
        recorded.seal(run)

    return apply


def resumed_elsewhere(run: Path) -> None:
    (run / "resume-1").mkdir()
    for name in ("git.json", "inputs.json"):
        shutil.copy(run / name, run / "resume-1" / name)
    (run / "resume-1" / "git.json").write_text(json.dumps({"commit": "f" * 40, "dirty": False}))
    recorded.seal(run)


def resumed_with_more_steps(run: Path) -> None:
    (run / "resume-1").mkdir()
    for name in ("git.json", "inputs.json"):
        shutil.copy(run / name, run / "resume-1" / name)
    rewrite("run.json", lambda text: json.dumps(json.loads(text) | {"config_hash": "f" * 64}))(run)


def altered(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("0.", "0.1", 1))


REFUSED = {
    "no finished.json": lambda run: (run / "finished.json").unlink(),
    "metrics.jsonl: altered": altered,
    "config.yaml: missing": lambda run: (run / "config.yaml").unlink(),
    "extra.jsonl: not a file of the run": lambda run: (run / "extra.jsonl").write_text(""),
    "changes that are in no commit": rewrite("git.json", lambda text: text.replace("false", "true")),
    "no git repository": rewrite("git.json", lambda _: '{"commit": null, "dirty": null}'),
    "run.json: a resume has changed the configuration": resumed_with_more_steps,
    "resume-1/git.json: differs from the first start": resumed_elsewhere,
    "metrics.jsonl: found steps twice": rewrite("metrics.jsonl", lambda text: text + text.splitlines(keepends=True)[3]),
    "eval.jsonl: found steps twice": rewrite("eval.jsonl", lambda text: text + text.splitlines(keepends=True)[1]),
    "found the score 0.5": rewrite("eval_outcomes.jsonl", lambda text: text.replace('"greedy": 1.0', '"greedy": 0.5')),
    "0 evaluations after step 0": rewrite("eval.jsonl", lambda text: text.splitlines(keepends=True)[1]),
    "0 evaluations after step 4": rewrite("eval.jsonl", lambda text: text.splitlines(keepends=True)[0]),
    "but the outcomes give": rewrite("eval.jsonl", lambda text: text.replace('_accuracy": 0.', '_accuracy": 0.0', 1)),
    "of 199": rewrite("eval_outcomes.jsonl", lambda text: "".join(text.splitlines(keepends=True)[:-1])),
    "metrics.jsonl: 3 steps; needed: 4": rewrite("metrics.jsonl", lambda text: text[: text.rindex('{"step": 3')]),
    "model: Dictionary should have at least 1 item": rewrite("inputs.json", lambda _: '{"model": {}, "data": {}}'),
    "device: String should match": rewrite("config.yaml", lambda text: text.replace("device: cpu", "device: auto")),
    "private path": rewrite("config.yaml", lambda text: text.replace("models/", "/" + "home/somebody/models/")),
    "no checksum of inputs.json": lambda run: (
        (run / "inputs.json").unlink(),
        recorded.seal(run),
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_run_that_cannot_be_believed_is_refused_and_leaves_nothing(run: Path, results: Path, reason: str) -> None:
    REFUSED[reason](run)
    with pytest.raises(InputError, match=reason):
        store.add_run(run, results)
    assert not results.exists()


def test_a_record_says_what_the_run_was(run: Path, results: Path) -> None:
    assert store.add_run(run, results) == results / "base-seed3.parquet"
    added = store.load_run(results, "base-seed3").record
    assert records.from_run(run, "base-seed3").record == added and store.check(results) == []
    assert (added.group, added.seed, added.steps, added.commit) == ("base", 3, 4, recorded.COMMIT)
    assert (added.layout["ranks"], added.layout["expert"], added.device) == (2, 2, "cpu")
    assert added.date == "2030-01-02"  # in the name of the folder
    assert added.seconds_per_step == pytest.approx(0.65) and added.tokens_per_second == 2001.5  # medians of four
    assert added.peak_memory_gib == 0.5 and added.checks_fired == {"entropy": "step 2: low"}
    rows = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    assert added.last.sampled.accuracy == pytest.approx(rows[1]["eval/sampled_accuracy"])
    assert added.last.num_questions == 200 and added.first.step == 0 and added.last.step == 4
    assert added.environment.versions == recorded.ENVIRONMENT["packages"]
    assert added.files == json.loads((run / "finished.json").read_text())["sha256"]
    assert "log.txt" not in added.files and "curves.png" not in added.files


def test_a_record_is_one_file_that_holds_every_number_of_the_run(run: Path, results: Path) -> None:
    path = store.add_run(run, results)
    assert [path] == list(results.iterdir())
    rows = store.load_run(results, "base-seed3").rows
    for name, text in store.unmerged(rows).items():
        assert text == (run / name).read_text(), name
    assert [len(row.get("completions", ())) for row in rows] == [2, 0, 0, 2, 0]  # a sample: first and last step
    again = store.add_run(run, results.with_name("again"))
    assert again.read_bytes() == path.read_bytes()  # no time and no name in the file


def test_one_line_of_pandas_reads_the_steps_and_the_record(run: Path, results: Path) -> None:
    steps = pandas.read_parquet(store.add_run(run, results))
    assert list(steps["step"]) == [0, 1, 2, 3, 4] and steps["reward/mean"].notna().sum() == 4
    assert steps["eval/sampled_accuracy"].notna().tolist() == [True, False, False, False, True]
    right = [json.loads(line)["greedy"] for line in (run / "eval_outcomes.jsonl").read_text().splitlines()[:200]]
    assert [float(mark == "+") for mark in steps["eval/greedy_right"][0]] == right
    records = steps[steps["record/commit"].notna()]
    assert records["id"].tolist() == ["base-seed3"] and records["record/date"].tolist() == ["2030-01-02"]
    assert json.loads(records["record/config"][0])["lora"]["rank"] == 16


def test_a_text_that_no_file_can_hold_is_refused(run: Path, results: Path) -> None:
    """Half a character: from a file name that is not UTF-8."""
    broken = r'"more": "\ud800", "actor/entropy": '
    rewrite("metrics.jsonl", lambda text: text.replace('"actor/entropy": ', broken, 1))(run)
    with pytest.raises(InputError) as refusal:
        store.add_run(run, results)
    assert "\n" not in str(refusal.value) and not results.exists()


def test_numbers_that_a_table_would_change_are_refused(run: Path, results: Path) -> None:
    """A column has one type: 1 in a column of fractions would come back as 1.0."""
    rewrite("metrics.jsonl", lambda text: text.replace('"actor/entropy": ', '"actor/entropy": 1, "more": ', 1))(run)
    with pytest.raises(InputError, match="actor/entropy.*needed: in all steps whole numbers, or in all fractions"):
        store.add_run(run, results)
    assert not results.exists()


def test_the_records_of_the_repository_are_small_and_hold_every_number_of_their_runs() -> None:
    results = recorded.ROOT / "results"
    listed = [path for path in results.rglob("*") if path.is_file() and path.name != "report.html"]
    assert len(listed) <= 40 and sum(path.stat().st_size for path in listed) < 9e6
    runs = store.load_runs(results)
    assert len(runs) >= 614
    assert not [run.record.id for run in runs.values() if store.PRIVATE.search(run.record.model_dump_json())]
    for run in [*runs.values()][::10]:
        for name, text in store.unmerged(run.rows).items():
            assert hashlib.sha256(text.encode()).hexdigest() == run.record.files[name]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_reading_starts_no_thread(run: Path, results: Path) -> None:
    """A thread of pyarrow that lives until the end of the process may abort it there: one command in three did."""
    store.add_run(run, results)
    code = (
        "import os, sys; from pathlib import Path; from lab import store; from pyarrow import parquet\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "assert len(store.load_runs(Path(sys.argv[1]))) == 1\n"
        "assert len(os.listdir('/proc/self/task')) == before"
    )
    subprocess.run([sys.executable, "-c", code, str(results)], cwd=recorded.ROOT, check=True)


@pytest.mark.parametrize("killed_at", [None, 0, 1])
def test_files_are_merged_and_hold_what_they_held(run: Path, results: Path, killed_at: int | None, monkeypatch) -> None:
    """Also if the command is killed after it has written the new file, and is given again."""
    for seed in (3, 4, 5):
        made = run if seed == 3 else recorded.make_run(run.parent, f"base-seed{seed}", seed)
        store.add_run(made, results)
    before = {name: tables.sealed(each) for name, each in store.load_runs(results).items()}
    removed, unlink = [], Path.unlink

    def killing(path: Path, **options) -> None:
        if path.suffix == ".parquet" and len(removed) == killed_at:
            raise KeyboardInterrupt
        removed.append(path)
        unlink(path, **options)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Path, "unlink", killing)
        store.compact(results, "base", [])
    assert store.compact(results, "base", []) == results / "base.parquet"
    assert [path.name for path in results.iterdir()] == ["base.parquet"]
    assert {name: tables.sealed(each) for name, each in store.load_runs(results).items()} == before
    store.add_run(recorded.make_run(run.parent, "base-seed6", 6), results)
    store.compact(results, "base", [])
    assert [*store.load_runs(results)] == [f"base-seed{seed}" for seed in (3, 4, 5, 6)]
    with pytest.raises(InputError, match="found 0 runs, 0 benchmarks and 0 files .* needed: only one of these kinds"):
        store.compact(results, "other", [])


def test_an_id_is_used_once(run: Path, results: Path) -> None:
    store.add_run(run, results)
    before = {path: path.read_bytes() for path in results.rglob("*") if path.is_file()}
    store.add_run(run, results)  # the same run again: nothing changes
    assert {path: path.read_bytes() for path in results.rglob("*") if path.is_file()} == before
    with pytest.raises(InputError, match="never replaced"):
        store.add_run(recorded.make_run(run.parent, "other-seed3", seed=3), results, "base-seed3")
    with pytest.raises(InputError, match="id: found 4; needed: 3"):
        store.add_run(run, results, "base-seed4")
    with pytest.raises(InputError, match="seed 3 of base is there"):
        store.add_run(recorded.make_run(run.parent, "base-seed03", seed=3), results)
    with pytest.raises(InputError, match="again: the metrics are those of base-seed3"):
        store.add_run(run, results, "again")


def test_a_fault_that_is_planted_into_evaluations_makes_another_run(run: Path, results: Path) -> None:
    sound = records.from_run(run, "base-seed3").record
    command = sound.command.replace("train_grpo.py", "benchmarks/planted_fault.py altered_evaluation")
    faulty = sound.model_copy(update={"command": command})
    other_answers = {"files": sound.files | {"eval_outcomes.jsonl": "ab" * 32}}
    assert faulty.fault == "altered_evaluation" and sound.fault == ""
    assert store.same_run(sound, faulty) and not store.same_run(sound, faulty.model_copy(update=other_answers))
    assert store.same_run(sound, sound.model_copy(update=other_answers))  # no fault explains other answers
    assert store.differing(sound, faulty) == ["planted fault: nothing -> 'altered_evaluation'"]


@pytest.mark.parametrize("name", ["..", "a/b", "x" * 300, "\u0130", "base"])
def test_an_id_is_the_name_of_a_file_that_is_not_there(run: Path, results: Path, name: str) -> None:
    results.mkdir()
    (results / "base.parquet").write_bytes(tables.table_of([]))  # a merged file
    with pytest.raises(InputError):
        store.add_run(run, results, name)
    assert [path.name for path in results.iterdir()] == ["base.parquet"]


def odd(path: Path) -> None:
    """A run's file with other content, sealed as if the run had written it."""
    path.write_text('{"packages": 5, "step": 0}\n')
    recorded.seal(path.parent)


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "inputs.json", "git.json", "run.json"])
@pytest.mark.parametrize("change", [odd, lambda path: (path.unlink(), os.mkfifo(path))], ids=["sealed", "pipe"])
def test_whatever_a_file_of_a_run_holds_is_refused_in_one_line(run: Path, results: Path, name: str, change) -> None:
    change(run / name)
    with pytest.raises(InputError) as refusal:
        store.add_run(run, results)
    assert "\n" not in str(refusal.value) and not results.exists()


def test_seeds_of_one_variant_have_the_same_settings(run: Path, results: Path, tmp_path: Path) -> None:
    store.add_run(run, results)
    own_model = ("model.path=models/seed1", "tiny_model.seed=1", "train.keep_last=1")
    store.add_run(recorded.make_run(tmp_path / "out", "base-seed1", seed=1, overrides=own_model), results)
    other = recorded.make_run(tmp_path / "out", "base-seed2", seed=2, overrides=("optim.lr=2e-3",))
    with pytest.raises(InputError, match="no seed of base: optim.lr: 0.001 -> 0.002"):
        store.add_run(other, results)


def edited(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda path: recorded.rewrite(path, change)


def other_marks(record: dict) -> None:
    """The marks of the answers of one evaluation are changed."""
    record["rows"][0]["eval/greedy_right"] = record["rows"][0]["eval/greedy_right"].replace("-+", "++", 1)


TAMPERED = {
    "base-seed3: not what its steps say": edited(lambda record: record.update(seconds_per_step=0.05)),
    "but the outcomes give": edited(other_marks),
    "metrics.jsonl: the record does not give": edited(lambda record: record["rows"][1].update({"actor/loss": 0.5})),
    "Extra inputs are not permitted": edited(lambda record: record.update(surprise=1)),
    "Input should be a valid integer": edited(lambda record: record.update(steps="4")),
    "commit: String should match": edited(lambda record: record.update(commit="main")),
    "schema_version: Input should be greater": edited(lambda record: record.update(schema_version=2)),
    "its rows have other ids": lambda path: (
        recorded.rewrite(path, lambda record: record.update(id="other")) or swap(path)
    ),
    "cannot be read": lambda path: path.write_bytes(b"x"),
    "cannot be read: ": lambda path: path.write_bytes(path.read_bytes()[:-100]),
}


def swap(path: Path) -> None:
    """The record says another id than the rows."""
    columns = tables.decoded(path.read_bytes(), path)
    columns["id"] = ["base-seed3"] * len(columns["id"])
    path.write_bytes(tables.encoded(columns))


@pytest.mark.parametrize("fault", TAMPERED)
def test_a_record_that_was_edited_is_found(run: Path, results: Path, fault: str) -> None:
    path = store.add_run(run, results)
    assert store.check(results) == []
    TAMPERED[fault](path)
    try:
        found = store.check(results)
    except InputError as error:
        found = [str(error)]
    assert len(found) == 1 and fault in found[0] and "\n" not in found[0]


def test_a_copied_record_is_found_and_two_files_may_hold_the_same_run(run: Path, results: Path) -> None:
    path = store.add_run(run, results)
    shutil.copy(path, copy := path.with_name("copy.parquet"))  # as after a killed `compact`
    assert store.check(results) == [] and [*store.load_runs(results)] == ["base-seed3"]
    recorded.rewrite(copy, lambda record: record.update(result="better"))
    with pytest.raises(InputError, match="base-seed3: another file of this folder holds another run of this id"):
        store.check(results)


# ---------------------------------------------------------------- against the history


def git(folder: Path, *arguments: str) -> str:
    """Output of a git command, run as a person who does not exist."""
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(run: Path, results: Path) -> Path:
    """Records of three seeds, one commit each."""
    results.mkdir()
    git(results, "init", "-q", "-b", "main")
    for seed in (3, 4, 5):
        made = run if seed == 3 else recorded.make_run(run.parent, f"base-seed{seed}", seed)
        store.add_run(made, results)
        commit(results, f"Add seed {seed}")
    return results


def commit(results: Path, subject: str) -> None:
    git(results, "add", "-A")
    git(results, "commit", "-q", "-m", subject)


def edit(results: Path) -> None:
    recorded.rewrite(results / "base-seed3.parquet", lambda record: record.update(result="a better result"))


def test_added_and_merged_records_agree_with_the_history(repository: Path) -> None:
    assert audit.history(repository) == ([], "commits compared: 3")
    assert audit.history(repository.parent)[1] == "no git history to compare with"
    store.compact(repository, "base", [])
    assert audit.history(repository) == ([], "commits compared: 3")
    commit(repository, "Merge the files")
    assert audit.history(repository) == ([], "commits compared: 4")


CHANGES = {
    "changed": edit,
    "not here": lambda results: (results / "base-seed3.parquet").unlink(),
    "changed;": lambda results: (edit(results), store.compact(results, "base", [])),
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_record_that_was_changed_after_it_was_added_is_found(repository: Path, said: str) -> None:
    CHANGES[said](repository)
    (found,), _ = audit.history(repository)
    assert f"run base-seed3: {said}" in found
    commit(repository, "Nothing to see here")
    (found,), _ = audit.history(repository)
    assert f"run base-seed3: {said}" in found


def test_a_merge_may_bring_records_and_may_not_change_them(repository: Path) -> None:
    """A merge shows its changes only against its parents: `git log -c` hides what differs from all but one."""
    git(repository, "checkout", "-q", "-b", "other", "main~1")
    store.add_run(recorded.make_run(repository.parent / "out", "base-seed8", 8), repository)
    commit(repository, "Add seed 8")
    git(repository, "checkout", "-q", "main")
    git(repository, "merge", "-q", "--no-ff", "-m", "Merge", "other")
    assert audit.history(repository)[0] == []
    git(repository, "checkout", "-q", "other")
    (repository / "notes").write_text("not a record")
    commit(repository, "Another branch again")
    git(repository, "checkout", "-q", "main")
    git(repository, "merge", "-q", "--no-ff", "--no-commit", "other")
    edit(repository)
    commit(repository, "A merge that changes a record")
    (found,), _ = audit.history(repository)
    assert "run base-seed3: changed; it is in the history until commit" in found


def test_a_shallow_clone_is_compared_as_far_as_it_reaches(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "2", repository.as_uri(), "clone")
    faults, compared = audit.history(tmp_path / "clone")
    assert faults == [] and compared == "commits compared: 2, a shallow clone has no older ones"


def test_records_of_before_version_0_2_are_compared_with_those_of_today(repository: Path) -> None:
    """At that time, a record was a folder with two files, without a date, and a benchmark was a JSON file."""
    benchmark = {"about": "x", "command": "python benchmarks/bench_step.py", "commit": "ab" * 20, "dirty": False,
                 "machine": {}, "table": [{"case": "small", "ratio": 0.5}], "measured": {"a": [1, 0.5]}}  # fmt: skip
    old = {"benchmarks/bench_step.json": json.dumps(benchmark).encode()}
    for name, run in store.load_runs(repository).items():
        record = run.record.model_dump(mode="json") | {"schema_version": 2}
        del record["date"]
        old[f"{name}/record.json"] = json.dumps(record).encode()
        old[f"{name}/steps.jsonl.gz"] = gzip.compress("".join(json.dumps(row) + "\n" for row in run.rows).encode())
    git(repository, "checkout", "-q", "--orphan", "before")
    git(repository, "rm", "-rfq", ".")
    for name, content in old.items():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_bytes(content)
    commit(repository, "Before")
    git(repository, "checkout", "-q", "main")
    (path := repository.parent / "bench_step.json").write_text(json.dumps(benchmark))
    assert audit.against(repository, "before")[0].endswith(
        f"benchmark bench_step: not here; it is in {git(repository, 'rev-parse', 'before')[:7]} (before)"
    )
    store.add_benchmark(path, repository)
    assert audit.against(repository, "before") == []
    edit(repository)
    (found,) = audit.against(repository, "before")
    assert "run base-seed3: changed; it is in" in found
