"""What becomes a record is finished, unaltered, of a commit and whole; and it is never edited afterwards."""

from __future__ import annotations

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
from recorded import commit, git, replaced

from inputs.files import InputError
from lab import audit, records, run_folders, store


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return recorded.make_run(tmp_path_factory.mktemp("out"), "base-seed3", seed=3)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "out" / made.name)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


def changed(name: str, old: str, new: str) -> Callable[[Path], None]:
    """A run whose file ``name`` was changed before it was sealed: wrong in itself, with the right checksums."""
    return lambda run: replaced(run / name, old, new, 1)


def resumed_elsewhere(run: Path) -> None:
    for name in ("git.json", "inputs.json"):
        (run / "resume-1").mkdir(exist_ok=True)
        shutil.copy(run / name, run / "resume-1" / name)
    replaced(run / "resume-1" / "git.json", recorded.COMMIT, "f" * 40)
    recorded.seal(run)


def lines_of(name: str, chosen: slice) -> Callable[[Path], None]:
    """A run whose file ``name`` has only some of its lines."""
    return lambda run: rewritten(run / name, "".join((run / name).read_text().splitlines(keepends=True)[chosen]))


def rewritten(path: Path, text: str) -> None:
    path.write_text(text)
    recorded.seal(path.parent)


REFUSED = {
    "no finished.json": lambda run: (run / "finished.json").unlink(),
    "metrics.jsonl: missing, altered or added": lambda run: (run / "metrics.jsonl").write_text("{}\n"),
    "extra.jsonl: missing, altered or added": lambda run: (run / "extra.jsonl").write_text(""),
    "git.json: found .* needed: a run of a commit": changed("git.json", "false", "true"),
    "git.patch: the record does not give the file": lambda run: rewritten(
        run / "git.patch", "diff --git a/grpo.py b/grpo.py\n"
    ),
    "config_hash: found f+; needed": lambda run: rewritten(
        run / "run.json", f'{{"name": "base-seed3", "config_hash": "{"f" * 64}"}}'
    ),
    "resume-1: differs from the first start": resumed_elsewhere,
    "metrics.jsonl: the record does not give": changed(
        "metrics.jsonl", '{"step": 2', '{"step": 1, "a": 1}\n{"step": 2'
    ),
    "greedy: Input should be a multiple of 1": changed("eval_outcomes.jsonl", '"greedy": 1.0', '"greedy": 0.5'),
    "0 evaluations after step 4": lines_of("eval.jsonl", slice(1)),
    "but the outcomes give": lines_of("eval_outcomes.jsonl", slice(-1)),
    "metrics.jsonl: 3 steps; needed: 4": lines_of("metrics.jsonl", slice(3)),
    "model: Dictionary should have at least 1 item": changed(
        "inputs.json", '"model.safetensors": "' + "ab" * 32 + '"', ""
    ),
    "private path": changed("command.txt", "configs/", "/" + "home/somebody/configs/"),
    "environment.json": lambda run: ((run / "environment.json").unlink(), os.mkfifo(run / "environment.json")),
    "a file of it holds something else": changed("config.yaml", "parallel:", "parallels:"),
    # Half a character, from a file name that is not UTF-8.
    "more: .*needed: values of one type": changed("metrics.jsonl", '"actor/ent', r'"more": "\ud800", "actor/ent'),
    # A column has one type: 1 in a column of fractions would come back as 1.0.
    "actor/loss.*needed: in all steps whole numbers": changed(
        "metrics.jsonl", '"actor/loss": ', '"actor/loss": 1, "x": '
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_run_that_cannot_be_believed_is_refused_in_one_line_and_leaves_nothing(run, results, reason: str) -> None:
    REFUSED[reason](run)
    with pytest.raises(InputError, match=reason) as refusal:
        store.add_run(run, results)
    assert not results.exists() and "\n" not in str(refusal.value)


@pytest.mark.parametrize("first_step", [0, 1])
def test_a_record_is_one_file_that_holds_every_number_of_the_run(tmp_path: Path, first_step: int) -> None:
    results = tmp_path / "results"
    run = recorded.make_run(tmp_path / "runs", "base-seed3", seed=3, first_step=first_step)
    path = store.add_run(run, results)
    assert [path] == list(results.iterdir()) and audit.check(results) == []
    added = store.load_run(results, "base-seed3")
    record, rows = added.record, added.rows
    assert run_folders.from_run(run, "base-seed3").record == record
    assert (record.group, record.seed, record.steps, record.commit) == ("base", 3, 4, recorded.COMMIT)
    assert (record.layout["ranks"], record.layout["expert"], record.device) == (2, 2, "cpu")
    assert record.date == "2030-01-02"  # in the name of the folder
    assert record.seconds_per_step == pytest.approx(0.65) and record.tokens_per_second == 2001.5  # medians of four
    assert record.checks_fired == {"entropy": "step 2: <low>"}
    assert record.environment.versions == recorded.ENVIRONMENT["packages"]
    assert record.files == json.loads((run / "finished.json").read_text())["sha256"]
    for name, text in records.unmerged(rows, record.first_step).items():
        assert text == (run / name).read_text(), name
    assert [len(row.get("completions", ())) for row in rows] == [2, 0, 0, 2, 0]  # a sample: first and last step
    again = store.add_run(run, results.with_name("again"))
    assert again.read_bytes() == path.read_bytes()  # no time and no name in the file
    steps = pandas.read_parquet(path)
    assert list(steps["step"]) == [0, 1, 2, 3, 4] and steps["reward/mean"].notna().sum() == 4
    assert steps["record/date"].tolist() == ["2030-01-02", *[None] * 4]


def test_a_record_holds_the_answers_to_further_sets_beside_those_of_the_main_one(tmp_path: Path) -> None:
    """As evaluate.py writes them: after those of the main set, with the name of their set."""
    run, results = recorded.make_run(tmp_path / "runs", "sets", questions=3), tmp_path / "results"
    main = run_folders.from_run(run, "sets").record
    for name, added in {
        "eval.jsonl": lambda row: {**row, "eval/math/num_questions": 2, "eval/math/sampled_accuracy": 0.25},
        "eval_outcomes.jsonl": None,
    }.items():
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        if added:
            lines = [added(line) for line in lines]
        else:
            more = {"greedy": 1.0, "sampled": [0.0, 1.0]}, {"greedy": 0.0, "sampled": [0.0, 0.0]}
            lines = [
                line
                for step in (0, 4)
                for line in (
                    *(line for line in lines if line["step"] == step),
                    *({"step": step, "set": "math", "question": n, "gold": f"\\frac{n}2", **more[n]} for n in (0, 1)),
                )
            ]
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    recorded.seal(run)
    store.add_run(run, results)
    (found,) = store.load_runs(results).values()
    assert audit.check(results) == [] and (found.record.first, found.record.last) == (main.first, main.last)
    for name in ("eval.jsonl", "eval_outcomes.jsonl"):
        assert records.unmerged(found.rows, 1)[name] == (run / name).read_text()
    assert (found.rows[4]["eval/math/greedy_right"], found.rows[4]["eval/math/sampled_right"]) == ("+-", "-+--")
    assert found.rows[0]["eval/math/gold"] == ["\\frac02", "\\frac12"] and len(records.scores(found, "sampled")) == 3


@pytest.mark.ci
def test_the_records_of_the_repository_are_small_and_name_nobody() -> None:
    results = recorded.ROOT / "results"
    listed = [path for path in results.rglob("*") if path.is_file()]
    assert len(listed) <= 60 and sum(path.stat().st_size for path in listed) < 20e6
    runs = store.load_runs(results)
    assert len(runs) >= 1584
    assert not [run.record.id for run in runs.values() if store.PRIVATE.search(run.record.model_dump_json())]


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


def test_an_id_is_used_once(run: Path, results: Path) -> None:
    path = store.add_run(run, results)
    before = path.stat().st_mtime_ns
    store.add_run(run, results)  # the same run again: nothing changes
    assert path.stat().st_mtime_ns == before
    other = recorded.make_run(run.parent, "other-seed3", seed=3)
    twin = recorded.make_run(run.parent, "base-seed03", seed=3)
    (results / "merged.parquet").write_bytes(store.encoded(store.Content()))
    for folder, name, said in (
        (other, "base-seed3", "never replaced"),
        (other, "merged", "never replaced"),
        (run, "base-seed4", "id: found 4; needed: 3"),
        (run, "again", "again: its metrics are those of base-seed3"),
        (twin, "", "seed 3 of base is there"),
        *((run, name, "id: String should match") for name in ("..", "a/b", "x" * 300, "\u0130")),
    ):
        with pytest.raises(InputError, match=said):
            store.add_run(folder, results, name)
    assert len([*results.iterdir()]) == 2


def test_a_fault_that_is_planted_into_evaluations_makes_another_run(run: Path) -> None:
    sound = run_folders.from_run(run, "base-seed3").record
    command = sound.command.replace("train_grpo.py", "benchmarks/planted_fault.py altered_evaluation")
    faulty = sound.model_copy(update={"command": command})
    other_answers = {"files": sound.files | {"eval_outcomes.jsonl": "ab" * 32}}
    assert faulty.fault == "altered_evaluation" and sound.fault == ""
    assert store.same_run(sound, faulty) and not store.same_run(sound, faulty.model_copy(update=other_answers))
    assert store.same_run(sound, sound.model_copy(update=other_answers))  # no fault explains other answers
    assert store.differing(sound, faulty) == ["planted fault: nothing -> 'altered_evaluation'"]


def test_seeds_of_one_variant_have_the_same_settings(run: Path, results: Path) -> None:
    store.add_run(run, results)
    own_model = ("model.path=models/seed1", "tiny_model.seed=1", "train.keep_last=1")
    store.add_run(recorded.make_run(run.parent, "base-seed1", seed=1, overrides=own_model), results)
    other = recorded.make_run(run.parent, "base-seed2", seed=2, overrides=("optim.lr=2e-3",))
    with pytest.raises(InputError, match="no seed of base: optim.lr: 0.001 -> 0.002"):
        store.add_run(other, results)


def other_marks(record: dict) -> None:
    """The marks of the answers of one evaluation are changed."""
    record["rows"][0]["eval/greedy_right"] = record["rows"][0]["eval/greedy_right"].replace("-+", "++", 1)


TAMPERED: dict[str, Callable[[dict], object]] = {
    "base-seed3: not what its steps say": lambda record: record.update(seconds_per_step=0.05),
    "but the outcomes give": other_marks,
    "metrics.jsonl: the record does not give": lambda record: record["rows"][1].update({"actor/loss": 0.5}),
    "Extra inputs are not permitted": lambda record: record.update(surprise=1),
    "Input should be a valid integer": lambda record: record.update(steps="4"),
    "other: its rows have other ids": lambda record: record.update(id="other"),
}


def test_a_record_that_was_edited_is_found(run: Path, results: Path) -> None:
    path = store.add_run(run, results)
    sound = path.read_bytes()

    def faults() -> list[str]:
        try:
            return audit.check(results)
        except InputError as error:
            return [str(error)]

    for said, change in TAMPERED.items():
        path.write_bytes(sound)
        assert audit.check(results) == []
        recorded.rewrite(path, change, name="base-seed3")
        (found,) = faults()
        assert said in found and "\n" not in found
    for content in (b"x", sound[:-100]):
        path.write_bytes(content)
        assert "cannot be read: " in faults()[0]


def test_files_are_merged_and_two_files_may_hold_the_same_run_but_no_other_of_its_name(run, results: Path) -> None:
    for seed in (3, 4):
        store.add_run(run if seed == 3 else recorded.make_run(run.parent, f"base-seed{seed}", seed), results)
    before = {name: store.sealed(each) for name, each in store.load_runs(results).items()}
    shutil.copy(results / "base-seed3.parquet", copy := results / "base-copy.parquet")  # as after a killed `compact`
    assert audit.check(results) == []
    sound = copy.read_bytes()
    recorded.rewrite(copy, lambda record: record.update(result="better"))
    with pytest.raises(InputError, match="base-seed3: another file of this folder holds another run of this id"):
        audit.check(results)
    copy.write_bytes(sound)
    assert store.compact(results, "base", []) == results / "base.parquet" and len([*results.iterdir()]) == 1
    assert {name: store.sealed(each) for name, each in store.load_runs(results).items()} == before
    with pytest.raises(InputError, match="found 0 runs, 0 benchmarks and 0 files .* needed: only one of these kinds"):
        store.compact(results, "other", [])


# ---------------------------------------------------------------- against the history


@pytest.fixture(scope="module")
def three_commits(made: Path, tmp_path_factory) -> Path:
    """Records of three seeds, one commit each."""
    results = tmp_path_factory.mktemp("history") / "results"
    results.mkdir()
    git(results, "init", "-q", "-b", "main")
    for seed in (3, 4, 5):
        store.add_run(made if seed == 3 else recorded.make_run(made.parent, f"base-seed{seed}", seed), results)
        commit(results)
    return results


@pytest.fixture
def repository(three_commits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(three_commits, tmp_path / "results")


def edit(results: Path) -> None:
    recorded.rewrite(results / "base-seed3.parquet", lambda record: record.update(result="a better result"))


def test_added_and_merged_records_agree_with_the_history(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "2", repository.as_uri(), "clone")
    shallow = audit.history(tmp_path / "clone")
    assert shallow == ([], "commits compared: 2, a shallow clone has no older ones")
    assert audit.history(repository) == ([], "commits compared: 3")
    store.compact(repository, "base", [])
    assert audit.history(repository) == ([], "commits compared: 3")
    commit(repository)
    assert audit.history(repository) == ([], "commits compared: 4")


CHANGES = {
    "changed": edit,
    "not here": lambda results: (results / "base-seed3.parquet").unlink(),
    "changed;": lambda results: (edit(results), store.compact(results, "base", [])),
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_record_that_was_changed_after_it_was_added_is_found(repository: Path, said: str) -> None:
    CHANGES[said](repository)
    for _ in ("in the working tree", "in a commit"):
        (found,), _ = audit.history(repository)
        assert f"run base-seed3: {said}" in found
        if git(repository, "status", "--short"):
            commit(repository)


def test_a_merge_may_bring_records_and_may_not_change_them(repository: Path) -> None:
    """A merge shows its changes only against its parents: `git log -c` hides what differs from all but one."""
    git(repository, "checkout", "-q", "-b", "other", "main~1")
    store.add_run(recorded.make_run(repository.parent / "out", "base-seed8", 8), repository)
    commit(repository)
    git(repository, "checkout", "-q", "main")
    git(repository, "merge", "-q", "--no-ff", "-m", "Merge", "other")
    assert audit.history(repository)[0] == []
    git(repository, "checkout", "-q", "other")
    (repository / "notes").write_text("not a record")
    commit(repository)
    git(repository, "checkout", "-q", "main")
    git(repository, "merge", "-q", "--no-ff", "--no-commit", "other")
    edit(repository)
    commit(repository)
    (found,), _ = audit.history(repository)
    assert "run base-seed3: changed; it is in the history until commit" in found


@pytest.mark.nightly
@pytest.mark.skipif(not (recorded.ROOT / ".git").exists(), reason="not a git checkout: there is no history")
def test_a_commit_of_before_version_0_2_is_refused_and_not_taken_for_one_without_records() -> None:
    """At that time, a record was a folder with two files."""
    results = recorded.ROOT / "results"
    commits = git(results, "log", "--format=%h", "--", "*/record.json").split()
    if len(commits) < 2:
        pytest.skip("a shallow clone")
    with pytest.raises(InputError, match="has its records in folders; needed: a commit of version 0.2 or later"):
        audit.against(results, commits[1])
    assert len(audit._records_at(results, commits[0])) > 600 and audit.against(results, commits[0]) == []
