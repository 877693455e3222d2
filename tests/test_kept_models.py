"""The tiny model from which a run started belongs to its record: kept once, restored byte for byte, and checked."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import killed
import pytest
import recorded

import report
from lab import store

FILES = {"model.safetensors": b"\0weights" * 9, "tokenizer.json": b'{"tokens": 1}\n', "tiny_model.json": b"{}\n"}


def made(checkout: Path, name: str, seed: int, files: dict[str, bytes] = FILES, **inputs: str) -> Path:
    """A finished run in ``checkout``/out, which started from ``checkout``/models/tiny_qwen3_moe with these files."""
    model = checkout / "models" / "tiny_qwen3_moe"
    model.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (model / file).write_bytes(content)
    sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()} | inputs
    run = recorded.make_run(checkout / "out", name, seed)
    (run / "inputs.json").write_text(json.dumps({"model": sums, "data": {}}, indent=1) + "\n")
    recorded.seal(run)
    return run


def call(results: Path, *arguments: str) -> int:
    return report.main(["--results", str(results), *arguments])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """One record whose model was kept."""
    folder = tmp_path / "results"
    assert call(folder, "add", str(made(tmp_path / "checkout", "base-seed0", 0))) == 0
    return folder


def test_a_model_is_restored_byte_for_byte(results: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "checkout")
    assert call(results, "weights", "base-seed0", str(tmp_path / "again" / "model")) == 0
    restored = {path.name: path.read_bytes() for path in (tmp_path / "again" / "model").iterdir()}
    assert restored == FILES
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["model"]


def test_runs_that_share_a_model_share_its_files(results: Path, tmp_path: Path) -> None:
    other = FILES | {"model.safetensors": b"other"}
    assert call(results, "add", str(made(tmp_path / "checkout", "base-seed1", 1, other))) == 0
    assert call(results, "add", str(made(tmp_path / "checkout", "more-seed0", 0, other))) == 0
    names = {path.name for path in (results / "weights").iterdir()}
    assert len(names) == 4  # two models: two files of weights, one tokenizer, one recipe
    for path in (results / "weights").iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
    assert {f"weights/{name}" for name in names} <= json.loads((results / "index.json").read_text()).keys()


@pytest.mark.parametrize(
    ("files", "inputs", "why"),
    [
        (FILES, {"model.safetensors": "ab" * 32}, "does not hold the files from which the run started"),
        (FILES, {"more.safetensors": "ab" * 32}, "does not hold the files from which the run started"),
        (FILES | {"model.safetensors": bytes(5 * 2**20)}, {}, "not kept: 5.0 MiB; at most 4"),
    ],
)
def test_a_model_that_is_another_or_large_is_not_kept(
    tmp_path: Path, files: dict, inputs: dict, why: str, capsys: pytest.CaptureFixture
) -> None:
    run = made(tmp_path / "checkout", "base-seed0", 0, files, **inputs)
    assert call(tmp_path / "results", "add", str(run)) == 0 and why in capsys.readouterr().out
    assert not (tmp_path / "results" / "weights").exists()
    assert call(tmp_path / "results", "weights", "base-seed0", str(tmp_path / "again")) == 2
    assert "not there; needed: model.safetensors" in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_a_kept_model_that_was_edited_lost_or_renamed_is_found(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "RESULTS.md").write_text(f"{report.pages.BEGIN}\n{report.pages.END}\n")
    checked = ["--page", str(tmp_path / "RESULTS.md"), "--check"]
    (kept,) = (results / "weights").glob("*.safetensors")
    content, index = kept.read_bytes(), (results / "index.json").read_text()
    kept.write_bytes(b"other")
    assert call(results, *checked) == 1 and f"{kept}: edited" in capsys.readouterr().err
    assert call(results, "weights", "base-seed0", str(tmp_path / "again")) == 2
    assert f"{kept}: edited; needed: model.safetensors" in capsys.readouterr().err
    (results / "index.json").write_text(index.replace(f'"{kept.stem}"', f'"{hashlib.sha256(b"other").hexdigest()}"'))
    assert call(results, *checked) == 1 and "its name is not the sha256 of its content" in capsys.readouterr().err
    (results / "index.json").write_text(index)
    kept.unlink()
    assert call(results, *checked) == 1 and f"{kept}: was deleted" in capsys.readouterr().err
    kept.write_bytes(content)
    assert call(results, *checked[:2], "build") == 0
    assert call(results, *checked) == 0


def test_nothing_is_written_outside_the_folder_or_over_another(
    tmp_path: Path, results: Path, capsys: pytest.CaptureFixture
) -> None:
    """Another person may have written the record."""
    (tmp_path / "here").mkdir()
    assert call(results, "weights", "base-seed0", str(tmp_path / "here")) == 2
    assert "exists; needed: a new folder" in capsys.readouterr().err
    path = results / "base-seed0" / "record.json"
    path.write_text(path.read_text().replace('"tokenizer.json"', '"../../tokenizer.json"'))
    assert call(results, "weights", "base-seed0", str(tmp_path / "a" / "again")) == 2
    assert "found '../../tokenizer.json'; needed: the name of a file" in capsys.readouterr().err
    assert not list(tmp_path.glob("**/tokenizer.json"))[1:]


def test_a_repeat_starts_from_the_kept_model(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The command that rerun prints is executed as it is printed."""
    capsys.readouterr()
    assert call(results, "rerun", "base-seed0") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " weights base-seed0 " in line]
    line = line.replace("../rerun-base-seed0", str(tmp_path / "rerun"))
    subprocess.run(["bash", "-c", line], cwd=recorded.ROOT, check=True)
    model = tmp_path / "rerun" / "models" / "tiny_qwen3_moe"
    assert {path.name: path.read_bytes() for path in model.iterdir()} == FILES
    shutil.rmtree(results / "weights")
    assert call(results, "rerun", "base-seed0") == 0
    assert "# the model was not kept: its warm start is repeated" in capsys.readouterr().out


def test_a_model_that_was_made_again_is_kept_for_an_older_record(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The records of a time before results/weights/."""
    shutil.rmtree(results / "weights")
    index = json.loads((results / "index.json").read_text())
    index = {name: checksum for name, checksum in index.items() if not name.startswith("weights/")}
    (results / "index.json").write_text(json.dumps(index))
    model = tmp_path / "checkout" / "models" / "tiny_qwen3_moe"
    assert call(results, "weights", "base-seed0", str(model), "--keep") == 0
    assert "kept" in capsys.readouterr().out and len(list((results / "weights").iterdir())) == 3
    shutil.rmtree(results / "weights")
    (model / "model.safetensors").write_bytes(b"of another processor")
    assert call(results, "weights", "base-seed0", str(model), "--keep") == 2
    assert "does not hold the files from which the run started" in capsys.readouterr().err
    assert not (results / "weights").exists()


@pytest.mark.parametrize("what", ["run", "benchmark", "model"])
def test_a_command_that_was_killed_at_any_file_operation_works_again(what: str, tmp_path: Path) -> None:
    """`add` of a run with its tiny model, `add` of a benchmark, and `weights`: the same files, and nothing is left."""
    folder, checkout = tmp_path / "project", tmp_path / "checkout"
    folder.mkdir()
    results, bench = folder / "results", tmp_path / "bench_step.json"
    assert call(results, "add", str(made(checkout, "base-seed0", 0))) == 0
    bench.write_text(json.dumps({
        "about": "x", "command": "python benchmarks/bench_step.py", "commit": "ab" * 20, "dirty": False,
        "machine": {}, "table": [{"case": "small", "ratio": 0.5}], "measured": {},
    }))  # fmt: skip
    command = {
        "run": ["add", str(made(checkout, "base-seed1", 1, FILES | {"model.safetensors": b"other"}))],
        "benchmark": ["add", str(bench)],
        "model": ["weights", "base-seed0", str(folder / "again")],
    }[what]
    moments, wrong = killed.after_each_kill(lambda: call(results, *command), folder)
    assert wrong == [] and moments > 10
    assert store.check(results) == []
    assert not [path for path in folder.rglob(".*")]
