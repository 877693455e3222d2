"""Checkpoints: what is loaded is what was saved, damage is named, and only suitable runs are resumed."""

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from breaking import flip_a_bit
from pytest import MonkeyPatch
from safetensors import SafetensorError
from saved import config_in, is_whole, names, opened, resumable, save, saved

from facts.exits import InputError
from inputs import files
from inputs.config import changes_at_resume, to_dict, to_yaml
from knobs import AqnConfig, Config, EvalConfig, ModelConfig, OptimConfig
from runlog import log as runlog
from weights import checkpoint


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return config_in(tmp_path)


# ---------------------------------------------------------------- save and load


def test_what_is_loaded_is_what_was_saved(tmp_path: Path, cfg: Config) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "adapter": {"row": whole[1], "half": torch.tensor([1e-3]).bfloat16()},
        "optimizer": {"step": torch.tensor(7, dtype=torch.int64), "none": torch.empty(0, 4)},
    }
    state = {"rng": [1, 2, 3], "lr": 0.1 + 0.2}
    path = save(tmp_path, 20, tensors, state, cfg)
    assert path == tmp_path / "checkpoints" / "step-000020"
    found = checkpoint.latest(tmp_path)
    assert (found.step, found.state, found.path) == (20, state, path)
    for kind, named in tensors.items():
        assert found.tensors[kind].keys() == named.keys()
        for name, tensor in named.items():
            assert found.tensors[kind][name].dtype == tensor.dtype and torch.equal(found.tensors[kind][name], tensor)


def test_after_a_rewind_damaged_later_checkpoints_do_not_replace_a_good_one(tmp_path: Path) -> None:
    cfg = config_in(tmp_path, keep_last=1)
    for path in saved(tmp_path, config_in(tmp_path, keep_last=3), 1, 2, 3)[1:]:
        (path / "state.json").write_text("{")
    saved(tmp_path, cfg, 2)  # resumed from 1; steps 2 and 3 still exist and are damaged
    assert checkpoint.latest(tmp_path).step == 2 and names(tmp_path) == ["step-000002"]


def test_every_file_is_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, cfg: Config, monkeypatch: MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    events: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append(f"-> {new}"), rename(old, new)))
    saved(tmp_path, cfg, 1)
    named = events.index(f"-> {tmp_path / 'checkpoints' / 'step-000001'}")
    aside = str(tmp_path / "checkpoints" / ".unfinished-step-000001")
    files = ("adapter.safetensors", "optimizer.safetensors", "state.json", "checksums.json")
    assert {aside, str(tmp_path / "metrics.jsonl"), *(f"{aside}/{name}" for name in files)} <= set(events[:named])
    assert str(tmp_path / "checkpoints") in events[named:]


# ---------------------------------------------------------------- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


FILES = ("adapter.safetensors", "optimizer.safetensors", "state.json", "checksums.json")


@pytest.mark.parametrize("damage", [flip_a_bit, cut, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, cfg: Config, name: str, damage: Callable[[Path], None]
) -> None:
    newest = saved(tmp_path, cfg, 1, 2)[-1]
    damage(newest / name)
    with pytest.raises(InputError, match="step-000002/"):
        checkpoint.load(newest)
    said: list[str] = []
    found = checkpoint.latest(tmp_path, said.append)
    assert found.step == 1 and is_whole(found)
    assert len(said) == 1 and "step-000002/" in said[0]
    if name != "checksums.json":  # a flipped byte in checksums.json makes any other file look wrong
        assert name in said[0]


def test_a_file_too_many_another_name_and_a_missing_folder_are_refused(tmp_path: Path, cfg: Config) -> None:
    (path,) = saved(tmp_path, cfg, 1)
    (path / "more.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"more.safetensors: not listed in checksums.json"):
        checkpoint.load(path)
    (path / "more.safetensors").unlink()
    renamed = path.rename(path.with_name("step-000009"))
    with pytest.raises(InputError, match="step 1 in a folder of step 9"):
        checkpoint.load(renamed)
    with pytest.raises(InputError, match="no such checkpoint"):
        checkpoint.load(path)
    assert checkpoint.latest(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("module", "name", "full"),
    [
        (checkpoint, "save_file", SafetensorError("I/O error: disk full")),
        (files, "fsync_path", OSError(28, "disk full")),
    ],
)
def test_a_disk_that_is_full_half_way_is_a_clear_error_and_leaves_the_earlier_ones(
    module: ModuleType, name: str, full: Exception, tmp_path: Path, cfg: Config, monkeypatch: MonkeyPatch
) -> None:
    """safetensors raises errors of its own. Some file systems notice a full disk when bytes are forced to it."""
    saved(tmp_path, cfg, 1, 2)
    before, real = names(tmp_path), getattr(module, name)

    def fill_the_disk(*arguments: object) -> None:
        if "optimizer.safetensors" in str(arguments):
            raise full
        real(*arguments)

    monkeypatch.setattr(module, name, fill_the_disk)
    with pytest.raises(
        InputError, match=r"step-000003: cannot be written: .*disk full; choose a writable folder with enough space"
    ):
        saved(tmp_path, cfg, 3)
    assert names(tmp_path) == before and is_whole(checkpoint.latest(tmp_path))


# ---------------------------------------------------------------- what may be resumed


@pytest.fixture(autouse=True)
def no_records(monkeypatch: MonkeyPatch) -> None:
    """The records of a start take long to collect, and no test here reads others than the configuration."""

    def write_configuration(folder: Path, cfg: Config, *_: object) -> None:
        (folder / "config.yaml").write_text(to_yaml(cfg))

    monkeypatch.setattr(runlog, "write_records", write_configuration)


def start_a_run(cfg: Config, *steps: int) -> runlog.RunLog:
    log = opened(cfg)
    saved(log.run_dir, cfg, *steps)
    return log


def test_the_newest_unfinished_run_with_a_good_checkpoint_is_resumed(cfg: Config) -> None:
    assert resumable(cfg) is None
    runs = [start_a_run(cfg, 1) for _ in range(2)]
    empty, damaged, finished = start_a_run(cfg), start_a_run(cfg, 1), start_a_run(cfg, 1)
    (damaged.run_dir / "checkpoints" / "step-000001" / "state.json").write_text("{}")
    (finished.run_dir / "finished.json").write_text("{}")
    other = start_a_run(cfg.model_copy(update={"name": "tiny-20300101-000000"}), 1)
    for log in (*runs, empty, damaged, finished, other):
        log.close()
    said: list[str] = []
    assert resumable(cfg, said.append).path.parent.parent == runs[-1].run_dir
    assert len(said) == 1 and "state.json: corrupted" in said[0]


def test_more_than_ten_runs_of_one_second_are_ordered_by_number(tmp_path: Path, cfg: Config) -> None:
    for suffix in ("", *(f"-{n}" for n in range(2, 12))):
        log = start_a_run(cfg, 1)
        log.close()
        log.run_dir.rename(tmp_path / "out" / f"tiny-20300102-030405{suffix}")
    assert resumable(cfg).path.parent.parent.name == "tiny-20300102-030405-11"


def test_a_run_with_another_configuration_is_named_instead_of_starting_anew(cfg: Config) -> None:
    """The newest run decides that is not finished and that no live process writes."""
    other = cfg.model_copy(update={"optim": OptimConfig(lr=0.5)})
    log = start_a_run(cfg, 1)
    said: list[str] = []
    assert resumable(other, said.append) is None  # it still lives
    assert said == [f"{log.run_dir}: not resumed: a live process is writing it"]
    with pytest.raises(InputError, match="a live process is writing this run .*train.resume=never"):
        resumable(cfg)  # not a second run beside it
    log.close()
    with pytest.raises(
        InputError, match="step-000001: saved with other values: optim.lr: 1e-05 -> 0.5; .*resume=never"
    ) as raised:
        resumable(other)
    assert f"train.resume={log.run_dir}" in str(raised.value)
    finished = start_a_run(cfg, 1)
    finished.close()
    (finished.run_dir / "finished.json").write_text("{}")
    said.clear()
    assert resumable(other, said.append) is None  # a new run has been wished since
    assert said == [f"note: {log.run_dir}: not finished, and not continued because of changes: optim.lr: 1e-05 -> 0.5"]
    assert resumable(cfg).run_dir == log.run_dir


def test_what_a_resume_may_change_is_taken_over_and_more_steps_only_without_a_schedule(cfg: Config) -> None:
    def steps(number: int, **changes: object) -> tuple[list[str], list[str]]:
        train = cfg.train.model_copy(update={"steps": number})
        return changes_at_resume(to_dict(cfg), to_dict(cfg.model_copy(update={"train": train, **changes})))

    assert steps(202) == ([], ["train.steps: 200 -> 202"])
    assert steps(198) == (["train.steps: 200 -> 198 (a resume can only add steps)"], [])
    decaying = OptimConfig(decay="cosine")
    assert "train.steps: 200 -> 202 (optim.decay depends on it)" in steps(202, optim=decaying)[0]
    assert "train.steps: 200 -> 202 (aqn.schedule depends on it)" in steps(202, aqn=AqnConfig(schedule="qerl"))[0]
    assert steps(200, eval=EvalConfig(every=7), model=ModelConfig(path="moved")) == (
        [],
        ["model.path: 'none' -> 'moved'", "eval.every: 0 -> 7"],
    )
    packed = {"optim": cfg.optim.model_copy(update={"tokens_per_micro_batch": 999})}
    assert changes_at_resume(to_dict(cfg), to_dict(cfg.model_copy(update=packed))) == ([], [])
    older = to_dict(cfg)
    older["checks"]["rounding"] = "warn"
    assert changes_at_resume(older, to_dict(cfg)) == ([], [])
    older["lora"]["dropout"] = 0.2
    assert changes_at_resume(older, to_dict(cfg)) == (["lora.dropout: 0.2 -> nothing"], [])


def test_a_resume_verifies_each_file_once(tmp_path: Path, cfg: Config, monkeypatch: MonkeyPatch):
    """A checkpoint of 14 GiB takes 15 s to verify."""
    start_a_run(cfg, 1, 2).close()
    summed: list[str] = []
    real = checkpoint.sha256_file
    monkeypatch.setattr(checkpoint, "sha256_file", lambda path: summed.append(path.name) or real(path))
    found = resumable(cfg)
    again = checkpoint.load(found.path, verified=True)
    assert sorted(summed) == ["adapter.safetensors", "optimizer.safetensors", "state.json"]
    assert is_whole(found) and is_whole(again) and found.step == again.step == 2
