"""Checkpoints of a run: LoRA factors, optimizer moments and the step. Any layout loads what any layout saved.

run_dir/checkpoints/step-000020/          "20 steps are done"
    adapter.safetensors  optimizer.safetensors     one file per kind of tensor; nothing is ever pickled
    adapter-behind-1.safetensors                   with rollout.staleness: the factors of a step before, and so on
    state.json  checksums.json                     {step, config, config_hash, state}; sha256 of every other file
A checkpoint appears whole or not at all, even if the process is killed, and is used only if its checksums are right.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from config import changes_at_resume, config_hash, flatten, to_dict
from inputs.files import (
    InputError,
    check_folder,
    fsync_path,
    one_line,
    read_object,
    read_tensors,
    shown,
    write_atomically,
)
from knobs import Config
from run_record import lock_run, sha256_file

# A checkpoint has the second name if the process was killed while a newer one of the same step replaced it.
NAME = re.compile(r"(step-|\.replaced-step-)([0-9]{6,18})")

LEFTOVER = re.compile(r"\.tmp-(discarded-)?(\.replaced-)?step-[0-9]{6,}")  # left by a process that was killed
SAFETENSORS_TYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.int64: "I64"}


class Pending(NamedTuple):
    """A tensor that is made when it is written, and dropped afterwards."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]  # may be collective


@dataclass(frozen=True)
class Checkpoint:
    step: int  # steps done
    tensors: dict[str, dict[str, Tensor]]  # kind -> name -> full-size tensor on the CPU, mapped: its use reads it
    state: dict[str, Any]  # as it was passed to save()
    config: dict[str, Any]  # of the run that wrote it
    checksums: dict[str, str]  # sha256 of each file
    path: Path

    @property
    def run_dir(self) -> Path:
        return self.path.parent.parent


def _candidates(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the folders that may be checkpoints, the best candidate first."""
    matches = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    ordered = sorted((int(match[2]), match[1] == "step-", path) for match, path in matches if match)
    return [(step, path) for step, _, path in reversed(ordered)]


def _discard(path: Path) -> None:
    """Remove a folder. It is renamed first, so after a kill half-way the next save recognises and removes the rest."""
    doomed = path.with_name(f".tmp-discarded-{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor | Pending]) -> str:
    """Write a safetensors file with one tensor in memory at a time, and return its sha256.

    The save_file of safetensors needs all tensors at once. The format: the length of the header in 8 bytes; the header,
    JSON padded with spaces to a multiple of 8; the bytes of the tensors, in the order of the header.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + _num_bytes(tensor)
        dtype, shape = SAFETENSORS_TYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            value = tensor.make() if isinstance(tensor, Pending) else tensor
            assert value.shape == tensor.shape and value.dtype == tensor.dtype, name
            value = value.detach().cpu().contiguous()
            write(memoryview(value.reshape(-1).view(torch.uint8).numpy()))
            del value
    return digest.hexdigest()


def _num_bytes(tensor: Tensor | Pending) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def save(
    run_dir: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor | Pending]],
    state: dict[str, Any],
    cfg: Config,
    writes: bool = True,
    check: Callable[[Checkpoint | None], None] | None = None,
) -> Path | None:
    """Write the checkpoint of ``step`` finished steps, keep the newest cfg.train.keep_last, and return its folder.

    One process ``writes``. Every other process makes the pending tensors at the same time, because that is collective,
    and drops them. The run's .jsonl files are forced to the disk before, because a resume needs their lines up to this
    step. Checkpoints of later steps are removed: they were made before the run was rewound. An earlier checkpoint of
    the same step is replaced. Raises InputError when the disk is full or cannot be written; the earlier checkpoints
    then stay as they were. So they do if ``check`` raises: it gets what the files hold, before their folder has its
    name, and None on a process that does not write.
    """
    if not writes:
        for tensor in (
            tensor for named in tensors.values() for tensor in named.values() if isinstance(tensor, Pending)
        ):
            tensor.make()
        if check:
            check(None)
        return None
    folder = Path(run_dir) / "checkpoints"
    target = folder / f"step-{step:06d}"
    aside = folder / f".tmp-{target.name}"
    replaced = folder / f".replaced-{target.name}"
    try:
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
        for path in Path(run_dir).glob("*.jsonl"):
            fsync_path(path)
        aside.mkdir()
        files = {f"{kind}.safetensors": named for kind, named in tensors.items()}
        checksums = {name: _write_tensors(aside / name, named) for name, named in files.items()}
        about = {"step": step, "config": to_dict(cfg), "config_hash": config_hash(cfg), "state": state}
        write_atomically(aside / "state.json", json.dumps(about, indent=1) + "\n")
        checksums["state.json"] = sha256_file(aside / "state.json")
        write_atomically(aside / "checksums.json", json.dumps(checksums, indent=1) + "\n")
        for path in aside.iterdir():
            fsync_path(path)
        fsync_path(aside)
        if check:
            check(load(aside, verified=True))  # mapped: only what is compared is read, and it is not allocated
        if target.exists():
            if replaced.exists():
                _discard(replaced)
            os.rename(target, replaced)  # still found by latest() if the process is killed here
        os.rename(aside, target)
        fsync_path(folder)
    except OSError as error:
        raise InputError(_write_failure(target, tensors, error)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # after a failure; otherwise it has its name
    kept = [path for number, path in _candidates(folder) if number <= step and path.name == f"step-{number:06d}"]
    for _, path in _candidates(folder):
        if path not in kept[: cfg.train.keep_last]:
            try:
                _discard(path)
            except OSError as error:
                print(f"warning: {path}: an old checkpoint that cannot be removed: {error.strerror}", flush=True)
    return target


def _write_failure(target: Path, tensors: Mapping[str, Mapping[str, Tensor | Pending]], error: OSError) -> str:
    """The message, in one line, for a checkpoint that could not be written."""
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        size = sum(_num_bytes(tensor) for named in tensors.values() for tensor in named.values())
        free = shutil.disk_usage(target.parent.parent).free
        reason = f"disk full: {size / 2**20:.1f} MiB needed, {free / 2**20:.1f} MiB free"
    return f"{target}: checkpoint not written: {reason}; earlier checkpoints are intact, the run can be resumed"


def verify(path: Path, only: str | None = None) -> None:
    """Raises InputError that names the first file that is missing or has another checksum than at the save.

    With ``only``, the files of other kinds of tensors are not read.
    """
    if not path.is_dir():
        raise InputError(f"{path}: no such checkpoint")
    check_folder(path)
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
            raise InputError(f"{path / name}: corrupted: its sha256 is not the one it was saved with")


def load(path: Path, verified: bool = False, only: str | None = None) -> Checkpoint:
    """The checkpoint in the folder ``path``; raises InputError that names the file if it is incomplete or corrupted.

    ``verified``: verify() has been called already; it takes 15 s for 14 GiB. ``only``: the one kind of tensor that is
    wanted, for example adapter.
    """
    if not verified:
        verify(path, only)
    about = read_object(path / "state.json", ("step", "config", "config_hash", "state"))
    kinds = {"step": int, "config": dict, "config_hash": str, "state": dict}
    if odd := [key for key, kind in kinds.items() if type(about[key]) is not kind]:
        raise InputError(f"{path / 'state.json'}: {odd[0]}: found {shown(about[odd[0]])}; needed: what a run saves")
    if (match := NAME.fullmatch(path.name)) and int(match[2]) != about["step"]:
        raise InputError(f"{path / 'state.json'}: step {about['step']} in a folder of step {int(match[2])}")
    if wrong := misfit(about["step"], about["config"], about["state"]):
        raise InputError(f"{path / 'state.json'}: {wrong}")
    tensors = {file.stem: read_tensors(file) for file in sorted(path.glob(f"{only or '*'}.safetensors"))}
    return Checkpoint(
        about["step"], tensors, about["state"], about["config"], read_object(path / "checksums.json"), path
    )


def misfit(step: int, config: dict[str, Any], state: dict[str, Any]) -> str:
    """What is wrong with the steps and the optimizer steps of a checkpoint under its configuration; "" if they fit."""
    named = ("train.steps", "rollout.prompts_per_step", "optim.prompts_per_update")
    most, prompts, update = (size if type(size) is int else 0 for size in map(flatten(config).get, named))
    expected = step * (prompts // max(1, update))
    optimizer_steps = state.get("optimizer_steps", expected)
    if 0 <= step <= most and optimizer_steps == expected:
        return ""
    return (
        f"found step {step}, optimizer_steps {shown(optimizer_steps)}; needed: at most train.steps {most} steps of "
        f"{prompts} // {update} optimizer steps, {expected} in all"
    )


def latest(run_dir: Path, say: Callable[[str], None] = print, only: str | None = None) -> Checkpoint | None:
    """The newest checkpoint of the run with right checksums. ``say`` is told which ones were skipped, and why."""
    for _, path in _candidates(Path(run_dir) / "checkpoints"):
        try:
            verify(path, only)
        except (InputError, OSError) as error:
            say(f"checkpoint skipped: {one_line(error)}")
        else:
            return load(path, verified=True, only=only)
    return None


def check_resume(checkpoint: Checkpoint, cfg: Config) -> None:
    """Raises InputError that lists the configuration keys that differ from the checkpoint's, but must not."""
    if refused := changes_at_resume(checkpoint.config, cfg)[0]:
        raise InputError(
            f"{checkpoint.path}: changed since: {'; '.join(refused[:10])}; needed: the old values to "
            f"continue it (train.resume={checkpoint.run_dir}), or train.resume=never or another name to begin anew"
        )


def find_resumable(cfg: Config, say: Callable[[str], None] = print) -> Checkpoint | None:
    """The checkpoint that train.resume=auto resumes from: the newest one of the newest suitable run; None without one.

    A suitable run has this name and a configuration with which a resume may go on, is not finished, has a checkpoint
    with right checksums, and is not being written by a live process. Without one, the newest other run of this name
    that has a checkpoint and is not finished decides: InputError names what has changed since. If a newer run is
    finished, ``say`` is told instead, and a new run begins; so it is told if the newest run has no checkpoint.
    """
    pattern = re.compile(re.escape(cfg.name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    out_dir = Path(cfg.train.out_dir)
    matches = [(pattern.fullmatch(path.name), path) for path in out_dir.iterdir()] if out_dir.is_dir() else []
    # A process that was killed while it made its folder has left no run.json, and nothing to resume.
    started = [(match, path) for match, path in matches if match and (path / "run.json").exists()]
    runs = sorted((match[1], int(match[2] or 1), path) for match, path in started)
    others: list[tuple[Path, Checkpoint | None]] = []  # runs that do not go on, the newest first
    for _, _, run_dir in reversed(runs):
        newest = None
        try:
            if not (run_dir / "finished.json").exists():
                with lock_run(run_dir):
                    newest = latest(run_dir, say)
        except BlockingIOError:
            if read_object(run_dir / "run.json").get("config_hash") == config_hash(cfg):
                raise InputError(
                    f"{run_dir}: a live process writes this run (ranks can outlive a torchrun that was killed); "
                    "needed: end it, wait for it, or train.resume=never to begin another run beside it"
                ) from None
            say(f"{run_dir}: not resumed: a live process writes it")
        except OSError as error:
            say(f"{run_dir}: not resumed: {error.strerror}; if no process writes it: train.resume={run_dir}")
        else:
            if newest and not changes_at_resume(newest.config, cfg)[0]:
                return newest
            others.append((run_dir, newest))
    finished_since = False
    for place, (run_dir, newest) in enumerate(others):
        if newest and not finished_since:
            check_resume(newest, cfg)
        elif newest:
            say(f"note: {run_dir}: not finished, and left: {'; '.join(changes_at_resume(newest.config, cfg)[0][:10])}")
            break
        elif (run_dir / "finished.json").exists():
            finished_since = True
        elif place == 0:
            say(f"note: {run_dir}: not finished, and without a usable checkpoint; that folder is left")
    return None
