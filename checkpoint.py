"""Checkpoints of a run: LoRA factors, optimizer moments and where the run stands; any layout loads any other's.

run_dir/checkpoints/step-000020/          "20 steps are done"
    adapter.safetensors  optimizer.safetensors     one file per kind of tensor; nothing is ever pickled
    state.json  checksums.json                     {step, config, config_hash, state}; sha256 of every other file
One appears whole or not at all, whenever the process is killed, and is used only if its checksums hold.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from config import changed_keys, config_hash, to_dict
from input_files import InputError, check_folder, one_line, read_object, shown
from knobs import Config
from run_record import fsync_path, sha256_file, write_atomically
from runlog import lock_run

# The second name is a checkpoint that a newer one of the same step was about to replace when the process was killed.
NAME = re.compile(r"(step-|\.replaced-step-)([0-9]{6,18})")

LEFTOVER = re.compile(r"\.tmp-(discarded-)?(\.replaced-)?step-[0-9]{6,}")  # of a process that was killed

SAFETENSORS_TYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.int64: "I64"}


class Pending(NamedTuple):
    """A tensor that exists only while it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]  # may be collective


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file by name, each read when it is asked for.  InputError if the file is damaged."""

    def __init__(self, path: Path) -> None:
        try:
            self.file = safe_open(path, framework="pt")
            self.names = dict.fromkeys(self.file.keys())
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: not a safetensors file ({error})") from None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self.file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Checkpoint:
    step: int  # steps done
    tensors: dict[str, Mapping[str, Tensor]]  # kind -> name -> full-size tensor on the CPU
    state: dict[str, Any]  # what save() was given
    config: dict[str, Any]  # of the run that wrote it
    checksums: dict[str, str]  # sha256 of each file
    path: Path


def _found(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of what may be a checkpoint, the best candidate first."""
    matches = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    ordered = sorted((int(match[2]), match[1] == "step-", path) for match, path in matches if match)
    return [(step, path) for step, _, path in reversed(ordered)]


def _discard(path: Path) -> None:
    """Remove a folder; a kill half-way leaves a name that is no checkpoint's, for the next save to remove."""
    doomed = path.with_name(f".tmp-discarded-{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor | Pending]) -> str:
    """Write a safetensors file, holding one tensor at a time, and return its sha256.

    safetensors' own save_file takes all tensors at once. The format: the header's length in 8 bytes; the header, JSON
    padded with spaces to a multiple of 8; the tensors' bytes, in its order.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        about = {"dtype": SAFETENSORS_TYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = about | {"data_offsets": [start, end]}
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


def save(
    run_dir: Path,
    step: int,
    tensors: dict[str, Mapping[str, Tensor | Pending]],
    state: dict[str, Any],
    cfg: Config,
    writes: bool = True,
) -> Path | None:
    """Write the checkpoint of ``step`` finished steps and keep the newest cfg.train.keep_last; its folder.

    One process ``writes``; the others make the pending tensors with it, one at a time, and drop them.

    Also puts the run's .jsonl files on the disk first: a checkpoint vouches for the steps before it.  Checkpoints of
    later steps are removed: they are from before the run was rewound.  A step saved again replaces the old one.
    Raises InputError when the disk is full or cannot be written; earlier checkpoints are then as they were.
    """
    if not writes:
        for tensor in (tensor for named in tensors.values() for tensor in named.values()):
            if isinstance(tensor, Pending):
                tensor.make()
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
        if target.exists():
            if replaced.exists():
                _discard(replaced)
            os.rename(target, replaced)  # still found by latest() if the process is killed here
        os.rename(aside, target)
        fsync_path(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise InputError(_write_failure(target, tensors, error)) from error
    kept = [path for found, path in _found(folder) if found <= step and path.name == f"step-{found:06d}"]
    for _, path in _found(folder):
        if path not in kept[: cfg.train.keep_last]:
            try:
                _discard(path)
            except OSError as error:
                print(f"warning: {path}: an old checkpoint that cannot be removed: {error.strerror}", flush=True)
    return target


def _write_failure(target: Path, tensors: dict[str, Mapping[str, Tensor | Pending]], error: OSError) -> str:
    """One line for a checkpoint that could not be written."""
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        everything = [tensor for named in tensors.values() for tensor in named.values()]
        size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in everything)
        free = shutil.disk_usage(target.parent.parent).free
        reason = f"disk full: {size / 2**20:.1f} MiB needed, {free / 2**20:.1f} MiB free"
    return f"{target}: checkpoint not written: {reason}; earlier checkpoints are intact, the run can be resumed"


def verify(path: Path, only: str | None = None) -> None:
    """Raises InputError that names the file when one is missing, or does not have the checksum it was saved with.

    ``only``: the one kind of tensor whose file will be read; the files of the other kinds are not.
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
    """The checkpoint in the folder ``path``; raises InputError that names the file if it is torn or corrupted.

    ``verified``: its checksums have been held against its files already, which takes 15 s for 14 GiB. ``only``: the one
    kind of tensor that is wanted, for example adapter.
    """
    path = Path(path)
    if not verified:
        verify(path, only)
    about = read_object(path / "state.json", ("step", "config", "config_hash", "state"))
    kinds = {"step": int, "config": dict, "config_hash": str, "state": dict}
    if odd := [key for key, kind in kinds.items() if type(about[key]) is not kind]:
        raise InputError(f"{path / 'state.json'}: {odd[0]}: found {shown(about[odd[0]])}; needed: what a run saves")
    match = NAME.fullmatch(path.name)
    if match and int(match[2]) != about["step"]:
        raise InputError(f"{path / 'state.json'}: step {about['step']} in a folder of step {int(match[2])}")
    tensors = {file.stem: TensorFile(file) for file in sorted(path.glob(f"{only or '*'}.safetensors"))}
    checksums = read_object(path / "checksums.json")
    return Checkpoint(about["step"], tensors, about["state"], about["config"], checksums, path)


def latest(run_dir: Path, say: Callable[[str], None] = print, only: str | None = None) -> Checkpoint | None:
    """The newest checkpoint of the run whose checksums hold; ``say`` hears which were skipped and why."""
    for _, path in _found(Path(run_dir) / "checkpoints"):
        try:
            verify(path, only)
        except (InputError, OSError) as error:
            say(f"checkpoint skipped: {one_line(error)}")
        else:
            return load(path, verified=True, only=only)
    return None


def check_resume(checkpoint: Checkpoint, cfg: Config) -> None:
    """Raises InputError that lists the configuration keys which differ from the checkpoint's and may not."""
    changed = changed_keys(checkpoint.config, cfg)
    if changed:
        listed = "; ".join(changed)
        raise InputError(f"{checkpoint.path}: changed since: {listed}; needed: the old values, or train.resume=never")


def find_resumable(cfg: Config, say: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest checkpoint of the newest run that train.resume=auto goes on with, or None.

    The run has this name and configuration, is not finished, has a checkpoint whose checksums hold, and no live process
    writes it.
    """
    pattern = re.compile(re.escape(cfg.name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    out_dir = Path(cfg.train.out_dir)
    matches = [(pattern.fullmatch(path.name), path) for path in out_dir.iterdir()] if out_dir.is_dir() else []
    runs = sorted((match[1], int(match[2] or 1), path) for match, path in matches if match)
    for _, _, run_dir in reversed(runs):
        try:
            same = read_object(run_dir / "run.json", ("config_hash",))["config_hash"] == config_hash(cfg)
        except InputError:
            continue  # killed while the folder was made: nothing in it to go on with
        if not same or (run_dir / "finished.json").exists():
            continue
        try:
            with lock_run(run_dir):
                if found := latest(run_dir, say):
                    return found
        except BlockingIOError:
            say(f"{run_dir}: not resumed: a live process writes it")
        except OSError as error:
            say(f"{run_dir}: not resumed: {error.strerror}; if no process writes it: train.resume={run_dir}")
    return None
