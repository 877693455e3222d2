"""The tiny model from which a run started belongs to its record: kept once, restored byte for byte, and checked."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import killed
import pytest
import recorded
from tiers import ci

import report
from lab import audit, store

pytestmark = pytest.mark.nightly
FILES = {"model.safetensors": b"\0weights" * 9, "tokenizer.json": b'{"tokens": 1}\n', "tiny_model.json": b"{}\n"}


def made(checkout: Path, name: str, seed: int, files: dict[str, bytes] = FILES, **inputs: str) -> Path:
    """A finished run in ``checkout``/out, which started from ``checkout``/models/tiny_qwen3_moe with these files."""
    model = checkout / "models" / "tiny_qwen3_moe"
    model.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (model / file).write_bytes(content)
    sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()} | inputs
    run = recorded.make_run(checkout / "out", name, seed, questions=9)
    (run / "inputs.json").write_text(json.dumps({"model": sums, "data": {}}, indent=1) + "\n")
    recorded.seal(run)
    return run


def call(results: Path, *arguments: str) -> int:
    return report.main(["--results", str(results), *arguments])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """One record whose model was kept."""
    folder, checkout = tmp_path / "results", tmp_path / "checkout"
    assert call(folder, "add", str(made(checkout, "base-seed0", 0))) == 0
    assert call(folder, "weights", "base-seed0", str(checkout / "models" / "tiny_qwen3_moe"), "--keep") == 0
    return folder


def test_adding_a_run_says_how_its_model_is_kept(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    checkout = tmp_path / "checkout"
    assert call(results, "add", str(made(checkout, "base-seed1", 1))) == 0  # from the same model
    assert "its start weights are kept" in capsys.readouterr().out
    other = FILES | {"model.safetensors": b"other"}
    assert call(results, "add", str(made(checkout, "base-seed2", 2, other))) == 0
    command = re.search(r"to keep them: python report.py (.*)", capsys.readouterr().out)[1]
    assert call(results, *command.replace("models/", f"{checkout}/models/").split()) == 0
    assert call(results, "compact", "weights") == 0
    assert len(store.load_weights(results)) == 4  # two models: two files of weights, one tokenizer, one recipe
    assert len(list(results.glob("weights*"))) == 1 and audit.check(results) == []


@pytest.mark.parametrize(
    ("files", "inputs", "why"),
    [
        (FILES, {"model.safetensors": "ab" * 32}, "does not hold the files from which base-seed0 started"),
        (FILES | {"model.safetensors": bytes(5 * 2**20)}, {}, "5.0 MiB; needed: a model of at most 4"),
    ],
)
def test_a_model_that_is_another_or_large_is_not_kept(
    tmp_path: Path, files: dict, inputs: dict, why: str, capsys
) -> None:
    results, model = tmp_path / "results", tmp_path / "checkout" / "models" / "tiny_qwen3_moe"
    assert call(results, "add", str(made(tmp_path / "checkout", "base-seed0", 0, files, **inputs))) == 0
    assert call(results, "weights", "base-seed0", str(model), "--keep") == 2 and why in capsys.readouterr().err
    assert call(results, "weights", "base-seed0", str(tmp_path / "again")) == 2
    assert "not kept; needed: the model from which the run started" in capsys.readouterr().err
    assert not (tmp_path / "again").exists() and len(list(results.iterdir())) == 1


def test_a_kept_model_that_was_edited_is_found(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (path,) = results.glob("weights-*")
    found = store.load_weights(results)
    path.write_bytes(store.encoded(store.Content(weights={name: content + b"x" for name, content in found.items()})))
    assert len(audit.check(results)) == 3 and "a kept file of a model was edited" in audit.check(results)[0]
    assert call(results, "weights", "base-seed0", str(tmp_path / "again")) == 2
    assert "model.safetensors of base-seed0: edited" in capsys.readouterr().err


def test_nothing_is_written_outside_the_folder_or_over_another(
    tmp_path: Path, results: Path, capsys: pytest.CaptureFixture
) -> None:
    """Another person may have written the record."""
    (tmp_path / "here").mkdir()
    assert call(results, "weights", "base-seed0", str(tmp_path / "here")) == 2
    assert "exists; needed: a new folder" in capsys.readouterr().err
    outside = {"../../tokenizer.json": hashlib.sha256(FILES["tokenizer.json"]).hexdigest()}
    recorded.rewrite(results / "base-seed0.parquet", lambda record: record["inputs"].update(model=outside))
    assert call(results, "weights", "base-seed0", str(tmp_path / "a" / "again")) == 2
    assert "found '../../tokenizer.json'; needed: the name of a file" in capsys.readouterr().err
    assert not list(tmp_path.glob("**/tokenizer.json"))[1:]


def test_a_repeat_starts_from_the_kept_model(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The command that rerun prints is executed as it is printed, and restores the model byte for byte."""
    shutil.rmtree(tmp_path / "checkout")
    capsys.readouterr()
    assert call(results, "rerun", "base-seed0") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " weights base-seed0 " in line]
    line = line.replace("../rerun-base-seed0", str(tmp_path / "rerun"))
    subprocess.run(["bash", "-c", line], cwd=recorded.ROOT, check=True)
    model = tmp_path / "rerun" / "models" / "tiny_qwen3_moe"
    assert {path.name: path.read_bytes() for path in model.iterdir()} == FILES
    assert [path.name for path in model.parent.iterdir()] == [model.name]
    next(results.glob("weights-*")).unlink()
    assert call(results, "rerun", "base-seed0") == 0
    assert "# the model was not kept: its warm start is repeated" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["model", "merge", *map(ci, ["run", "benchmark", "keep"])])
def test_a_command_that_was_killed_at_any_file_operation_works_again(what: str, tmp_path: Path) -> None:
    """The command may have no effect or its whole effect, and nothing is left of it."""
    folder, checkout = tmp_path / "project", tmp_path / "checkout"
    folder.mkdir()
    results, bench = folder / "results", tmp_path / "bench_step.json"
    assert call(results, "add", str(made(checkout, "base-seed0", 0))) == 0
    bench.write_text(json.dumps(recorded.BENCHMARK))
    command = {
        "run": ["add", str(made(checkout, "base-seed1", 1))],
        "benchmark": ["add", str(bench)],
        "model": ["weights", "base-seed0", str(folder / "again")],
        "keep": ["weights", "base-seed0", str(checkout / "models" / "tiny_qwen3_moe"), "--keep"],
        "merge": ["compact", "base"],
    }[what]
    if what == "model":
        assert call(results, "weights", "base-seed0", str(checkout / "models" / "tiny_qwen3_moe"), "--keep") == 0
    moments, wrong = killed.after_each_kill(lambda: call(results, *command), folder)
    assert wrong == [] and moments > 2
    assert audit.check(results) == []
    assert not [path for path in folder.rglob(".*")]
