"""What becomes a record is finished, unaltered, of a commit and whole; and it is never edited afterwards."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
import recorded

from input_files import InputError
from lab import consistency, records, store


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
    assert store.add_run(run, results) == results / "base-seed3"
    added = store.load_run(results, "base-seed3").record
    assert records.from_run(run, "base-seed3").record == added and store.check(results) == []
    assert (added.group, added.seed, added.steps, added.commit) == ("base", 3, 4, recorded.COMMIT)
    assert (added.layout["ranks"], added.layout["expert"], added.device) == (2, 2, "cpu")
    assert added.seconds_per_step == pytest.approx(0.65) and added.tokens_per_second == 2001.5  # medians of four
    assert added.peak_memory_gib == 0.5 and added.checks_fired == {"entropy": "step 2: low"}
    rows = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    assert added.last.sampled.accuracy == pytest.approx(rows[1]["eval/sampled_accuracy"])
    assert added.last.num_questions == 200 and added.first.step == 0 and added.last.step == 4
    assert added.environment.versions == recorded.ENVIRONMENT["packages"]
    assert added.files == json.loads((run / "finished.json").read_text())["sha256"]
    assert "log.txt" not in added.files and "curves.png" not in added.files


def test_a_record_is_two_small_files_that_hold_every_number_of_the_run(run: Path, results: Path) -> None:
    folder = store.add_run(run, results)
    assert {path.name for path in folder.iterdir()} == {"record.json", "steps.jsonl.gz"}
    rows = store.load_run(results, "base-seed3").rows
    for name, text in consistency.unmerged(rows).items():
        assert text == (run / name).read_text(), name
    assert [len(row.get("completions", ())) for row in rows] == [2, 0, 0, 2, 0]  # a sample: first and last step
    again = store.add_run(run, results.with_name("again")) / "steps.jsonl.gz"
    assert again.read_bytes() == (folder / "steps.jsonl.gz").read_bytes()  # no time and no name in the file


def test_one_line_of_pandas_reads_the_steps(run: Path, results: Path) -> None:
    steps = pandas.read_json(store.add_run(run, results) / "steps.jsonl.gz", lines=True)
    assert list(steps["step"]) == [0, 1, 2, 3, 4] and steps["reward/mean"].notna().sum() == 4
    assert steps["eval/sampled_accuracy"].notna().tolist() == [True, False, False, False, True]
    right = [json.loads(line)["greedy"] for line in (run / "eval_outcomes.jsonl").read_text().splitlines()[:200]]
    assert [float(mark == "+") for mark in steps["eval/greedy_right"][0]] == right


def test_the_records_of_the_repository_are_small_and_hold_every_number_of_their_runs() -> None:
    folders = sorted(path.parent for path in recorded.ROOT.glob("results/*/record.json"))
    assert len(folders) >= 93
    for place, folder in enumerate(folders):
        files = list(folder.iterdir())
        assert len(files) == 2 and sum(path.stat().st_size for path in files) < 60_000
        if place % 10 == 0:
            run = store.load_run(recorded.ROOT / "results", folder.name)
            for name, text in consistency.unmerged(run.rows).items():
                assert hashlib.sha256(text.encode()).hexdigest() == run.record.files[name]


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


@pytest.mark.parametrize(
    "name", ["figures", "benchmarks", "index.json", "plan.yaml", "README.md", "..", "a/b", "x" * 300, "\u0130"]
)
def test_an_id_is_no_name_of_something_else_in_the_folder(run: Path, results: Path, name: str) -> None:
    with pytest.raises(InputError):
        store.add_run(run, results, name)
    assert not results.exists()


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


def edited_number(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps(record | {"seconds_per_step": 0.05}))


def edited_steps(folder: Path) -> None:
    """The marks of the answers of one evaluation are changed."""
    steps = gzip.decompress((folder / "steps.jsonl.gz").read_bytes()).decode()
    (folder / "steps.jsonl.gz").write_bytes(gzip.compress(steps.replace("-+", "++", 1).encode()))


def with_its_checksum(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """A change by somebody who also corrects the index."""

    def apply(folder: Path) -> None:
        change(folder)
        index = {f"{folder.name}/{path.name}": store.sha256_file(path) for path in folder.iterdir()}
        (folder.parent / "index.json").write_text(json.dumps(index))

    return apply


TAMPERED = {
    "record.json: was deleted": lambda folder: (folder / "record.json").unlink(),
    "steps.jsonl.gz: was deleted": lambda folder: (folder / "steps.jsonl.gz").unlink(),
    "record.json: edited": edited_number,
    "steps.jsonl.gz: edited": edited_steps,
    "notes.txt: not in index.json": lambda folder: (folder / "notes.txt").write_text(""),
    "record.json: not what steps.jsonl.gz says": with_its_checksum(edited_number),
    "but the outcomes give": with_its_checksum(edited_steps),
    "cannot be read": with_its_checksum(lambda folder: (folder / "steps.jsonl.gz").write_bytes(b"x")),
}


@pytest.mark.parametrize("fault", TAMPERED)
def test_a_record_that_was_edited_or_lost_is_found(run: Path, results: Path, fault: str) -> None:
    store.add_run(run, results)
    assert store.check(results) == []
    TAMPERED[fault](results / "base-seed3")
    (found,) = store.check(results)
    assert fault in found


def test_a_deleted_and_a_copied_record_are_found(run: Path, results: Path) -> None:
    folder = store.add_run(run, results)
    shutil.move(folder, folder.with_name("copy"))
    found = store.check(results)
    assert len(found) == 4 and "base-seed3/record.json: was deleted" in found[0] and "not in index.json" in found[3]


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


def reseal(results: Path) -> None:
    """Change a record and its checksum, so that the files agree with each other."""
    with_its_checksum(lambda folder: (folder / "record.json").write_text((folder / "record.json").read_text() + " "))(
        results / "base-seed3"
    )


def test_added_records_agree_with_the_history(repository: Path) -> None:
    assert store.history(repository) == ([], "commits compared: 3")
    assert store.history(repository.parent)[1] == "no git history to compare with"


@pytest.mark.parametrize("change", [reseal, lambda results: shutil.rmtree(results / "base-seed3")])
def test_a_record_that_was_changed_after_it_was_added_is_found(repository: Path, change) -> None:
    change(repository)
    (found, *_), _ = store.history(repository)
    assert "base-seed3/record.json: changed or deleted by the working tree" in found
    commit(repository, "Nothing to see here")
    (found, *_), _ = store.history(repository)
    assert "base-seed3/record.json: changed or deleted by commit" in found


def test_the_one_announced_conversion_is_accepted_and_no_later_change(repository: Path) -> None:
    reseal(repository)
    commit(repository, "Convert the records to two files each")
    assert store.history(repository) == ([], "commits compared: 0")
    reseal(repository)
    commit(repository, "Convert the records once more")
    (found,), compared = store.history(repository)
    assert "base-seed3/record.json" in found and compared == "commits compared: 1"


def test_a_merge_may_bring_records_and_may_not_change_them(repository: Path) -> None:
    """A branch from before the conversion is merged, with a conflict that keeps this side, and then with a change."""
    git(repository, "branch", "old", "main~1")
    reseal(repository)
    commit(repository, "Convert the records to two files each")
    git(repository, "checkout", "-q", "old")
    (repository / "notes").write_text("not a record")
    commit(repository, "Another branch")
    git(repository, "checkout", "-q", "main")
    git(repository, "merge", "-q", "--no-ff", "-m", "Merge", "old")
    assert store.history(repository)[0] == []
    git(repository, "checkout", "-q", "old")
    (repository / "notes").write_text("still not a record")
    commit(repository, "Another branch again")
    git(repository, "checkout", "-q", "main")
    git(repository, "merge", "-q", "--no-ff", "--no-commit", "old")
    reseal(repository)
    commit(repository, "An evil merge")
    assert "base-seed3/record.json" in store.history(repository)[0][0]


def test_a_shallow_clone_is_compared_as_far_as_it_reaches(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "2", repository.as_uri(), "clone")
    faults, compared = store.history(tmp_path / "clone")
    assert faults == [] and compared == "commits compared: 2, a shallow clone has no older ones"


def test_the_schema_refuses_what_it_does_not_know(run: Path, results: Path) -> None:
    store.add_run(run, results)
    path = results / "base-seed3" / "record.json"
    whole = json.loads(path.read_text())
    for change in ({"surprise": 1}, {"steps": "4"}, {"commit": "main"}, {"schema_version": 1}):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(InputError, match=next(iter(change))):
            store.load_run(results, "base-seed3")
