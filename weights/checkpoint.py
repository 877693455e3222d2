"""Checkpoints of a run: LoRA factors, optimizer moments and the step. A run in any layout can load them.

run_dir/checkpoints/step-000020/          "20 steps are done"
    adapter.safetensors  optimizer.safetensors     one file per kind of tensor; nothing is ever pickled
    adapter-behind-1.safetensors                   with rollout.staleness: the factors of one step earlier, and so on
    state.json  checksums.json                     {step, config, state}; sha256 of every other file

A checkpoint appears whole or not at all, even if the process is killed. It is used only if its checksums are correct.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from facts.exits import InputError
from inputs.config import changed_keys, changes_at_resume, flatten
from inputs.files import (
    aside,
    disk_errors,
    fsync_path,
    one_line,
    read_file,
    read_object,
    read_tensors,
    shown,
    whole_folder,
)
from runlog.run_record import lock_run, of_last_start, sha256_file
from weights.huggingface import save_file

NAME = re.compile(r"step-[0-9]{6,18}")


@dataclass(frozen=True)
class Checkpoint:
    step: int  # steps done
    tensors: dict[str, dict[str, Tensor]]  # kind -> name -> whole tensor on the CPU, memory-mapped: read when used
    state: dict[str, Any]  # as it was passed to save()
    config: dict[str, Any]  # of the run that wrote it
    checksums: dict[str, str]  # sha256 of each file
    path: Path

    @property
    def run_dir(self) -> Path:
        return self.path.parent.parent


def _folders(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of the folders that may be checkpoints, the newest first."""
    named = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(((int(path.name[5:]), path) for path in named), reverse=True)


def _discard(path: Path) -> None:
    """Remove a folder.

    The folder is renamed first. If the process is killed, the next save recognises the rest by its name and removes it.
    """
    path = path.rename(aside(path))
    shutil.rmtree(path)


def save(
    run_dir: Path,
    step: int,
    tensors: Mapping[str, dict[str, Tensor]],
    state: dict[str, Any],
    config: dict[str, Any],
    keep_last: int,
    check: Callable[[Checkpoint], None] = lambda written: None,
) -> Path:
    """Write the checkpoint after ``step`` finished steps and return its folder. Only the newest ``keep_last`` are kept.

    ``config`` is the run's configuration, as inputs.config.to_dict returns it. Only one process calls this. All tensors
    are on the host, each contiguous and in separate memory. The run's .jsonl files are first flushed to the disk,
    because a resume needs their lines up to this step.
    Existing checkpoints of this step and of later steps are removed: they were saved before the run was rewound to an
    earlier checkpoint. ``check`` gets the new checkpoint, as read from its files, before the folder gets its final
    name. Raises InputError if the disk is full or cannot be written. If this happens, or ``check`` raises an exception,
    the checkpoints of earlier steps stay as they were.
    """
    folder = Path(run_dir) / "checkpoints"
    target = folder / f"step-{step:06d}"
    with disk_errors(target):
        for path in folder.glob(aside(folder / "*").name):  # left by a process that was killed
            shutil.rmtree(path)
        for path in Path(run_dir).glob("*.jsonl"):
            fsync_path(path)
        if target.exists():
            _discard(target)
    with whole_folder(target, SafetensorError) as filling:
        for kind, named in tensors.items():
            save_file(named, filling / f"{kind}.safetensors")
        about = {"step": step, "config": config, "state": state}
        (filling / "state.json").write_text(json.dumps(about, indent=1) + "\n")
        checksums = {path.name: sha256_file(path) for path in sorted(filling.iterdir())}
        (filling / "checksums.json").write_text(json.dumps(checksums, indent=1) + "\n")
        check(load(filling, verified=True))  # memory-mapped: only compared values are read, and no memory is allocated
    _remove_old(folder, step, keep_last)
    return target


def _remove_old(folder: Path, step: int, keep_last: int) -> None:
    """Keep the newest ``keep_last`` checkpoints of steps up to ``step``. Remove all others, including later ones."""
    kept = [path for number, path in _folders(folder) if number <= step]
    for _, path in _folders(folder):
        if path not in kept[:keep_last]:
            try:
                _discard(path)
            except OSError as error:
                print(f"warning: {path}: this old checkpoint cannot be removed: {error.strerror}", flush=True)


def verify(path: Path, only: str | None = None) -> None:
    """Raise InputError if a file is missing, is not in checksums.json, or has changed since the save.

    The message names the first such file. If ``only`` names a kind of tensor, the files of other kinds are not read.
    """
    if not path.is_dir():
        raise InputError(f"{path}: no such checkpoint; give the folder of one")
    checksums = read_object(path / "checksums.json")
    present = {file.name for file in path.iterdir()} - {"checksums.json"}
    for name in sorted(present | checksums.keys() | {"state.json"}):
        if name not in checksums:
            raise InputError(f"{path / name}: not listed in checksums.json")
        if name not in present:
            raise InputError(f"{path / name}: missing")
        if only and name.endswith(".safetensors") and name != f"{only}.safetensors":
            continue
        if sha256_file(path / name) != checksums[name]:
            raise InputError(f"{path / name}: corrupted: its sha256 differs from the saved one")


def load(path: Path, verified: bool = False, only: str | None = None) -> Checkpoint:
    """Return the checkpoint in the folder ``path``.

    Raises InputError, which names the file, if the checkpoint is incomplete or corrupted. Set ``verified`` if verify()
    has already been called, which takes 15 s for 14 GiB. If ``only`` names a kind of tensor, for example adapter, only
    this kind is loaded.
    """
    if not verified:
        verify(path, only)
    about = read_object(path / "state.json", ("step", "config", "state"))
    kinds = {"step": int, "config": dict, "state": dict}
    if odd := [key for key, kind in kinds.items() if type(about[key]) is not kind]:
        raise InputError(f"{path / 'state.json'}: {odd[0]} is {shown(about[odd[0]])}, which no run saves")
    if NAME.fullmatch(path.name) and int(path.name[5:]) != about["step"]:
        raise InputError(f"{path / 'state.json'}: says step {about['step']} in a folder of step {int(path.name[5:])}")
    if wrong := mismatch(about["step"], about["config"], about["state"]):
        raise InputError(f"{path / 'state.json'}: {wrong}")
    tensors = {file.stem: read_tensors(file) for file in sorted(path.glob(f"{only or '*'}.safetensors"))}
    return Checkpoint(
        about["step"], tensors, about["state"], about["config"], read_object(path / "checksums.json"), path
    )


def mismatch(step: int, config: dict[str, Any], state: dict[str, Any]) -> str:
    """Return a message if a checkpoint's steps and optimizer steps do not fit its configuration, and otherwise ""."""
    named = ("train.steps", "rollout.prompts_per_step", "optim.prompts_per_update")
    most, prompts, update = (size if type(size) is int else 0 for size in map(flatten(config).get, named))
    expected = step * (prompts // max(1, update))
    optimizer_steps = state.get("optimizer_steps", expected)
    if 0 <= step <= most and optimizer_steps == expected:
        return ""
    return (
        f"step {step} and optimizer_steps {shown(optimizer_steps)} do not fit: a run has at most train.steps {most} "
        f"steps of {prompts} // {update} optimizer steps, here {expected} in all"
    )


def latest(run_dir: Path, say: Callable[[str], None] = print, only: str | None = None) -> Checkpoint | None:
    """Return the run's newest checkpoint with correct checksums, or None if there is none.

    ``say`` gets a line for each checkpoint that is skipped.
    """
    for _, path in _folders(Path(run_dir) / "checkpoints"):
        try:
            verify(path, only)
        except (InputError, OSError) as error:
            say(f"checkpoint skipped: {one_line(error)}")
        else:
            return load(path, verified=True, only=only)
    return None


def check_resume(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Raise InputError if ``config`` differs from the checkpoint's configuration in keys that must stay the same.

    The message names these keys.
    """
    if refused := changes_at_resume(checkpoint.config, config)[0]:
        raise InputError(
            f"{checkpoint.path}: saved with other values: {'; '.join(refused[:10])}; restore them to continue this run "
            f"(train.resume={checkpoint.run_dir}), or start a new one with train.resume=never or another name"
        )


def runs_of(name: str, out_dir: Path) -> list[Path]:
    """Return the folders of all runs called ``name`` in ``out_dir``, the newest first."""
    pattern = re.compile(re.escape(name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    runs = []
    for path in out_dir.iterdir() if out_dir.is_dir() else []:
        match = pattern.fullmatch(path.name)
        # A process that was killed while it made its folder leaves no run.json, and nothing to resume.
        if match and (path / "run.json").exists():
            runs.append((match[1], int(match[2] or 1), path))
    return [path for *_, path in sorted(runs, reverse=True)]


def find_resumable(
    runs: Iterable[Path], config: dict[str, Any], say: Callable[[str], None] = print
) -> Checkpoint | None:
    """Return the newest checkpoint of the newest suitable run, from which train.resume=auto resumes, or None.

    ``runs`` are all runs of this name, the newest first. ``config`` is the configuration of the new start, as
    inputs.config.to_dict returns it. A suitable run is not finished, has a checkpoint with correct checksums, and may
    be resumed with ``config``. Also, no live process is writing it. If no run is suitable, but an unfinished run with a
    checkpoint has another configuration, InputError is raised. It names the keys that differ in the newest such run. If
    a newer run is finished, ``say`` gets these keys instead, and the result is None. InputError is also raised if a
    live process is writing a run with exactly this ``config``.
    """
    changed = None  # the checkpoint of the newest run that has one but another configuration
    newer_is_finished = False
    for run_dir in runs:
        if (run_dir / "finished.json").exists():
            newer_is_finished = newer_is_finished or changed is None
            continue
        found = _newest(run_dir, config, say)
        if found and not changes_at_resume(found.config, config)[0]:
            return found
        changed = changed or found
    if changed is None:
        return None
    if not newer_is_finished:
        check_resume(changed, config)  # raises InputError
    changes = changes_at_resume(changed.config, config)[0]
    say(f"note: {changed.run_dir}: not finished, and not continued because of changes: {'; '.join(changes[:10])}")
    return None


def _newest(run_dir: Path, config: dict[str, Any], say: Callable[[str], None]) -> Checkpoint | None:
    """Return the `latest` checkpoint of a run, or None if a live process is writing the run, or the run is unreadable.

    Raises InputError if the live process has exactly this ``config``.
    """
    try:
        with lock_run(run_dir):
            return latest(run_dir, say)
    except BlockingIOError:
        if not changed_keys(read_file(of_last_start(run_dir, "config.yaml")), config):
            raise InputError(
                f"{run_dir}: a live process is writing this run (ranks can outlive a torchrun that was killed); "
                "end it, wait for it, or start another run with train.resume=never"
            ) from None
        say(f"{run_dir}: not resumed: a live process is writing it")
    except OSError as error:
        say(f"{run_dir}: not resumed: {error.strerror}; if no process is writing it, set train.resume={run_dir}")
    return None
