"""A record holds the numbers of a finished run, is written once, and contradicts no other record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
import recorded
from recorded import replaced
from source import ROOT

from facts.exits import InputError
from lab import records
from runlog.run_record import read_lines


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return recorded.make_run(tmp_path_factory.mktemp("out"), "base-seed3", seed=3)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "out" / made.name)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


# ---------------------------------------------------------------- what is kept


def test_a_record_holds_every_number_of_the_run_but_those_of_its_machine(run: Path, results: Path) -> None:
    assert records.add([run], results) == results / "base-seed3.parquet"
    steps = records.load(results).set_index("step")
    for file, before in (("metrics", 1), ("timing", 1), ("eval", 0)):
        for line in read_lines(run / f"{file}.jsonl"):
            row = steps.loc[line.pop("step") - before]
            for key, value in line.items():
                assert (key in row) == (key != "timing/generate_s") and (key not in row or row[key] == value)
    assert [steps.loc[step, "completions"] is not None for step in range(4)] == [True, False, False, True]
    kept = json.loads(steps.loc[3, "completions"])
    assert [answer["completion"] for answer in kept] == ["</pre>#### 3"] * 2
    assert set(steps["variant"]) == {"base"} and set(steps["seed"]) == {3}
    plain = pandas.read_parquet(results / "base-seed3.parquet")  # as results/README.md says
    assert plain["record/commit"].notna().sum() == 1 and json.loads(plain["record/config"][0])["train"]["seed"] == 3
    (record,) = records.records_of(records.load(results)).values()
    assert (
        record == records.read_run(run).record
        and record.files == json.loads((run / "finished.json").read_text())["sha256"]
    )


def test_the_records_of_the_repository_are_small_and_name_nobody() -> None:
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 8e6
    assert (ROOT / "results" / records.WEIGHTS).stat().st_size < 3e6
    for record in records.records_of(records.load(ROOT / "results")).values():
        assert not records.PRIVATE.search(json.dumps(record)) and len(record.commit) == 40


# ---------------------------------------------------------------- what is refused


def changed(name: str, old: str, new: str) -> Callable[[Path], object]:
    """A run whose file ``name`` was changed before it was sealed: wrong in itself, with the right checksums."""
    return lambda run: replaced(run / name, old, new, 1)


def resumed_elsewhere(run: Path) -> None:
    (run / "resume-1").mkdir()
    for name in ("git.json", "inputs.json"):
        shutil.copy(run / name, run / "resume-1" / name)
    replaced(run / "resume-1" / "git.json", recorded.COMMIT, "f" * 40)
    recorded.seal(run)


REFUSED = {
    "no finished.json": lambda run: (run / "finished.json").unlink(),
    "metrics.jsonl: missing, altered or added": lambda run: (run / "metrics.jsonl").write_text("{}\n"),
    "extra.jsonl: missing, altered or added": lambda run: (run / "extra.jsonl").write_text(""),
    "git.json: found .* needed: a run of a commit": changed("git.json", "false", "true"),
    "resume-1: differs from the first start": resumed_elsewhere,
    "private path": changed("command.txt", "configs/", "/" + "home/somebody/configs/"),
    "a file of it holds something else": changed("config.yaml", "\ntrain:\n", "\ntrains:\n"),
    "needed: NAME-YYYYMMDD-HHMMSS": lambda run: run.rename(run.with_name("renamed")),
    # Half a character, from a file name that is not UTF-8.
    "needed: columns of one type": changed("metrics.jsonl", '"actor/ent', r'"more": "\ud800", "actor/ent'),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_run_that_cannot_be_believed_is_refused_in_one_line_and_leaves_nothing(run, results, reason: str) -> None:
    REFUSED[reason](run)
    (folder,) = run.parent.iterdir()
    with pytest.raises(InputError, match=reason) as refusal:
        records.add([folder], results)
    assert not results.exists() and "\n" not in str(refusal.value)


def test_records_that_cannot_stand_together_are_refused_and_nothing_is_written(run: Path, results: Path) -> None:
    others = run.parent.with_name("others")
    first = recorded.make_run(others, "base-seed0", 0)
    records.add([run, first], results, "sweep")
    content = (results / "sweep.parquet").read_bytes()
    other_settings = recorded.make_run(others, "base-seed1", 1, overrides=("optim.lr=2e-3",))
    same_seed = recorded.make_run(others, "base-seed4", 0)
    good = recorded.make_run(others, "base-seed5", 5)
    for folder, name, reason in (
        (run, "again", "base-seed3: its metrics are those of base-seed3"),
        (other_settings, "", "no seed of base: optim.lr: 0.001 -> 0.002"),
        (same_seed, "", "seed 0 of base is there: base-seed0"),
        (recorded.make_run(others / "twice", "base-seed0", 0, luck=1, after=0.8), "", "there is a record of this id"),
        (good, "sweep", "sweep.parquet: exists; records are never replaced"),
        (good, "a/b", "--id: found 'a/b'"),
    ):
        with pytest.raises(InputError, match=reason):
            records.add([good, folder] if folder != good else [good], results, name or "new")
    assert [path.name for path in results.iterdir()] == ["sweep.parquet"]
    assert (results / "sweep.parquet").read_bytes() == content
    with pytest.raises(InputError, match="--id: found ''; needed: a name for 2 runs"):
        records.add([good, first], results)


def test_a_fault_that_is_planted_into_evaluations_makes_another_run(run: Path, results: Path) -> None:
    records.add([run], results)
    planted = recorded.make_run(run.parent.with_name("planted"), "base-seed3", 3)
    replaced(planted / "command.txt", "train_grpo.py", "checks/planted_fault.py rounded_evaluation")
    replaced(planted / "config.yaml", "name: base-seed3", "name: control-seed3")
    with pytest.raises(InputError, match="its metrics are those of base-seed3"):
        records.add([planted], results)
    replaced(planted / "eval_outcomes.jsonl", '"sampled": [0.0]', '"sampled": [1.0]')
    records.add([planted], results)
    assert records.load_record(results, "control-seed3").settings["planted fault"] == "rounded_evaluation"


def test_a_folder_with_other_files_is_refused(run: Path, results: Path) -> None:
    records.add([run], results)
    shutil.copy(results / "base-seed3.parquet", results / "copy.parquet")
    with pytest.raises(InputError, match="base-seed3: two records have this id"):
        records.load(results)
    (results / "copy.parquet").write_bytes(b"text")
    with pytest.raises(InputError, match="copy.parquet: cannot be read"):
        records.load(results)


# ---------------------------------------------------------------- start weights


def test_a_kept_model_is_given_back_once_and_not_over_another(run: Path, results: Path, tmp_path: Path) -> None:
    record = records.read_run(run).record
    with pytest.raises(InputError, match="the model from which base-seed3 started is not kept"):
        records.restore_weights(results, record, tmp_path / "model")
    results.mkdir()
    kept = pandas.DataFrame({"sha256": ["ab" * 32, "cd" * 32], "content": [b"weights", b"others"]})
    kept.to_parquet(results / records.WEIGHTS)
    records.restore_weights(results, record, tmp_path / "model")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "model").iterdir()] == [
        ("model.safetensors", b"weights")
    ]
    with pytest.raises(InputError, match="already there and not an empty directory; needed: a new one"):
        records.restore_weights(results, record, tmp_path / "model")
