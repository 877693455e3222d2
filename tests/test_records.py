"""What becomes a record is finished, unaltered, of a commit and whole; and it is never edited afterwards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import recorded

from input_files import InputError
from lab import records


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
    "resume-1/git.json: not what the run began with": resumed_elsewhere,
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
        records.add(run, results)
    assert not results.exists()


def test_a_record_says_what_the_run_was(run: Path, results: Path) -> None:
    added = records.add(run, results)
    assert records.load(results, "base-seed3") == added and records.check(results) == []
    assert (added.group, added.seed, added.steps, added.commit) == ("base", 3, 4, recorded.COMMIT)
    assert (added.layout.ranks, added.layout.expert, added.machine.device) == (2, 2, "cpu")
    assert added.seconds_per_step == pytest.approx(0.65) and added.tokens_per_second == 2001.5  # medians of four
    assert added.peak_memory_gib == 0.5 and added.checks_fired == {"entropy": "step 2: low"}
    rows = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    assert added.last.sampled.accuracy == pytest.approx(rows[1]["eval/sampled_accuracy"])
    assert added.last.num_questions == 200 and added.first.step == 0 and added.last.step == 4
    assert {path.name for path in (results / "base-seed3").iterdir()} == {*added.files, "record.json"}
    assert "log.txt" not in added.files and "curves.png" not in added.files


def test_an_id_is_used_once(run: Path, results: Path) -> None:
    records.add(run, results)
    with pytest.raises(InputError, match="never replaced"):
        records.add(run, results)
    with pytest.raises(InputError, match="seed 3 of base is there"):
        records.add(run, results, "base-seed4")
    records.add(run, results, "again")


@pytest.mark.parametrize("name", ["figures", "benchmarks", "index.json", "plan.yaml", "..", "a/b", "x" * 300, "\u0130"])
def test_an_id_is_no_name_of_something_else_in_the_folder(run: Path, results: Path, name: str) -> None:
    with pytest.raises(InputError):
        records.add(run, results, name)
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
        records.add(run, results)
    assert "\n" not in str(refusal.value) and not results.exists()


def test_seeds_of_one_variant_have_the_same_settings(run: Path, results: Path, tmp_path: Path) -> None:
    records.add(run, results)
    own_model = ("model.path=models/seed1", "tiny_model.seed=1", "train.keep_last=1")
    records.add(recorded.make_run(tmp_path / "out", "base-seed1", seed=1, overrides=own_model), results)
    other = recorded.make_run(tmp_path / "out", "base-seed2", seed=2, overrides=("optim.lr=2e-3",))
    with pytest.raises(InputError, match="no seed of base: optim.lr: 0.001 -> 0.002"):
        records.add(other, results)


def edited_number(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps(record | {"seconds_per_step": 0.05}))


def edited_with_its_seals(folder: Path) -> None:
    """The careful forger: an outcome changed, finished.json and record.json made anew."""
    path = folder / "eval_outcomes.jsonl"
    path.write_text(path.read_text().replace('"gold": "7"', '"gold": "8"'))
    (folder / "record.json").unlink()
    recorded.seal(folder)
    (folder / "record.json").write_text(records.to_text(records.derive(folder, folder.name)))


TAMPERED = {
    "deleted": shutil.rmtree,
    "record.json: edited": edited_number,
    "record.json: edited: its": edited_with_its_seals,
    "command.txt: altered": lambda folder: (folder / "command.txt").write_text("another\n"),
    "git.patch: missing": lambda folder: (folder / "git.patch").unlink(),
    "notes.jsonl: not a file": lambda folder: (folder / "notes.jsonl").write_text(""),
    "no such record": lambda folder: (folder / "record.json").unlink(),
    "not in index.json": lambda folder: shutil.copytree(folder, folder.with_name("copy")),
}


@pytest.mark.parametrize("fault", TAMPERED)
def test_a_record_that_was_edited_or_lost_is_found(run: Path, results: Path, fault: str) -> None:
    records.add(run, results)
    assert records.check(results) == []
    TAMPERED[fault](results / "base-seed3")
    (found,) = records.check(results)
    assert fault in found


def test_the_schema_refuses_what_it_does_not_know(run: Path, results: Path) -> None:
    records.add(run, results)
    path = results / "base-seed3" / "record.json"
    whole = json.loads(path.read_text())
    for change in ({"surprise": 1}, {"steps": "4"}, {"commit": "main"}, {"schema_version": 2}):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(InputError, match=next(iter(change))):
            records.load(results, "base-seed3")
