"""What a run records of its start can be published, and what it writes survives a power cut."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pytest import MonkeyPatch
from recorded import commit, git
from saved import config_in

from facts.exits import InputError
from inputs.files import write_atomically
from knobs import Config
from runlog import run_record


def test_command_of_a_torchrun_start_can_be_typed_again(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("HOME", "/data/people/train")
    arguments = ["configs/a b.yaml", "train.steps=3", "model.path=/data/people/train/model"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/train_grpo.py", *arguments])
    run_record.write_records(tmp_path, config_in(tmp_path), world_size=16)
    typed = "train_grpo.py 'configs/a b.yaml' train.steps=3 model.path=$HOME/model"
    expected = f"torchrun --nnodes=2 --nproc_per_node=8 {typed}\n"
    assert (tmp_path / "command.txt").read_text() == expected


def test_environment_names_no_host_user_or_home(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17.cluster")
    for key, value in {
        "HOME": "/data/people/somebody",
        "USER": "somebody",
        "TORCH_HOME": "/data/people/somebody/.cache",
        "ASCEND_HOME_PATH": "/" + "home/another/Ascend:/opt/node-17/x",
        "HCCL_IF_IP": "192.0.2.17",
        "VLLM_API_KEY": "sk-123",
        "NCCL_DEBUG": "INFO",
        "NOT_OURS": "kept out",
    }.items():
        monkeypatch.setenv(key, value)
    text = json.dumps(run_record.environment(world_size=1))
    for private in ("somebody", "another", "node-17", "cluster", "192.0.2.17", "sk-123", "NOT_OURS"):
        assert private not in text
    variables = json.loads(text)["variables"]
    assert variables["TORCH_HOME"] == "$HOME/.cache" and variables["NCCL_DEBUG"] == "INFO"
    assert variables["VLLM_API_KEY"] == "(set)"


def test_git_patch_holds_the_changes_and_untracked_sources(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    source, record = tmp_path / "source", tmp_path / "record"
    source.mkdir()
    record.mkdir()
    monkeypatch.setattr(run_record, "ROOT", source)
    (source / "old.py").write_text("a = 1\n")
    git(source, "init", "-q")
    head = commit(source)
    # In a container, a mounted repository often has another owner. git's own tests pretend it so.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True).returncode != 0
    run_record.write_records(record, config_in(tmp_path), 1)
    assert json.loads((record / "git.json").read_text()) == {"commit": head, "dirty": False}
    monkeypatch.delenv("GIT_TEST_ASSUME_DIFFERENT_OWNER")
    (source / "old.py").write_text("a = 2\n")
    (source / "new.py").write_text("b = 3\n")
    run_record.write_records(record, config_in(tmp_path), 1)
    assert json.loads((record / "git.json").read_text())["dirty"] is True
    patch = (record / "git.patch").read_text()
    assert patch.startswith("# untracked: new.py\n") and "+a = 2" in patch
    git(source, "checkout", "old.py")
    git(source, "apply", str(record / "git.patch"))  # the patch with its heading still applies
    assert (source / "old.py").read_text() == "a = 2\n"


def test_a_start_without_a_commit_says_so(tmp_path: Path, monkeypatch: MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(run_record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    run_record.write_records(tmp_path, config_in(tmp_path), 1)
    assert json.loads((tmp_path / "git.json").read_text()) == {"commit": None, "dirty": None}
    assert capsys.readouterr().out == (
        "note: no git commit of the source is known, so `report.py add` will not take this run\n"
    )


def test_an_atomic_write_is_on_the_disk_before_it_has_the_name(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    events: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("replace"), replace(old, new)))
    write_atomically(tmp_path / "a.json", "{}")
    assert events == [str(tmp_path / ".a.json.tmp"), "replace", str(tmp_path)]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_of_two_versions_the_one_that_is_imported_is_recorded(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    for version in ("0.12.1", "0.16.1"):
        folder = tmp_path / version / f"some_package-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some_package\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "0.12.1"), str(tmp_path / "0.16.1")])
    assert run_record.environment(world_size=1)["packages"] == {"some-package": "0.12.1"}


def test_inputs_are_the_checksums_of_model_and_data(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "train.jsonl"
    (model / "subfolder").mkdir(parents=True)
    (model / "config.json").write_text("abc")
    data.write_text("")
    source = {"source": "gsm8k", "train_path": [str(data), str(model / "config.json")], "test_path": str(data)}
    cfg = config_in(tmp_path).model_dump() | {"model": {"path": str(model)}, "data": source}
    cfg["eval"] = {"sets": {"math": str(data), "gone": str(tmp_path / "gone.jsonl")}}
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert run_record.inputs(run_record.input_files(Config.model_validate(cfg))) == {
        "model": {"config.json": abc},
        "data": {"train[0]": empty, "train[1]": abc, "test": empty, "eval.sets.math": empty},
    }
    assert run_record.inputs(run_record.input_files(config_in(tmp_path))) == {"model": {}, "data": {}}


def test_checksums_cover_every_record_and_those_of_resumed_starts(tmp_path: Path) -> None:
    sealed = ["config.yaml", "git.patch", "inputs.json", "metrics.jsonl", "resume-1/git.json"]
    for name in [*sealed, "finished.json", "log.txt", "run.lock", "curves.png", "checkpoints/x.json", ".a.json.tmp"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(run_record.checksums(tmp_path)) == sealed


def test_damaged_records_of_inputs_are_one_line_and_may_be_accepted(tmp_path: Path) -> None:
    cfg = config_in(tmp_path)
    for name in ("resume-old", "resume-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "inputs.json").write_text("{")
    changed = run_record.changed_inputs(tmp_path, run_record.input_files(cfg), Path(cfg.model.path))
    with pytest.raises(InputError, match="resume-1/inputs.json: not the record of the run's inputs .* or how"):
        run_record.refuse_changed_inputs(changed, accept=False, how="how")
    assert len(run_record.refuse_changed_inputs(changed, accept=True, how="how")) == 1


def test_large_inputs_are_read_once_until_they_change(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    large, small = tmp_path / "large", tmp_path / "small"
    for path, size in ((large, run_record.LARGE_BYTES), (small, 1000)):
        path.write_bytes(b"x" * size)
        os.utime(path, ns=(1, 1))
    real, read = run_record.sha256_file, []
    monkeypatch.setattr(run_record, "sha256_file", lambda path, *done: read.append(path.name) or real(path, *done))

    def names_read() -> list[str]:
        """The files that were read for the checksums, which are right."""
        read.clear()
        sums = run_record.sha256_of_inputs([large, small])
        assert sums == {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in (large, small)}
        return sorted(read)

    assert names_read() == names_read() == ["large", "small"]  # too new: nothing is kept
    later = time.time() + 60
    monkeypatch.setattr(run_record.time, "time", lambda: later)
    assert names_read() == ["large", "small"] and names_read() == ["small"]
    with open(large, "r+b") as file:  # the same size and, by hand, the same time of change: the inode's time tells
        file.write(b"y")
    os.utime(large, ns=(1, 1))
    names_read()
    (tmp_path / "cache/megatron-grpo/sha256.json").write_text("{")
    assert names_read() == ["large", "small"]


def test_a_checksum_is_kept_as_soon_as_it_is_known_and_files_beat(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A start that ends while it reads 60 GB goes on where it was. The heartbeat must see that the files are read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    later = time.time() + 60
    monkeypatch.setattr(run_record.time, "time", lambda: later)
    paths = [tmp_path / name for name in ("first", "second")]
    for path in paths:
        path.write_bytes(path.name.encode() * run_record.LARGE_BYTES)
    real = run_record.sha256_file

    def second_ends_the_start(path: Path, after_piece: Callable[[], None]) -> str:
        if path.name == "first":
            return real(path, after_piece)
        while not (tmp_path / "cache/megatron-grpo/sha256.json").exists():
            time.sleep(0.01)
        raise InputError("second: cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(run_record, "sha256_file", second_ends_the_start)
        with pytest.raises(InputError, match="second: cannot be read"):
            run_record.sha256_of_inputs(paths)
    kept = json.loads((tmp_path / "cache/megatron-grpo/sha256.json").read_text())
    assert list(kept.values()) == [hashlib.sha256(b"first" * run_record.LARGE_BYTES).hexdigest()]

    def slow(path: Path, after_piece: Callable[[], None]) -> str:
        for _ in range(3):
            time.sleep(1.1)
            after_piece()
        return real(path, after_piece)

    beats: list[None] = []
    monkeypatch.setattr(run_record, "sha256_file", slow)
    run_record.sha256_of_inputs(paths, lambda: beats.append(None))
    assert len(beats) >= 3
