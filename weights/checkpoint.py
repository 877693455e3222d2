"""Checkpoints of a run: LoRA factors, optimizer moments and the step. Any layout loads what any layout saved.

run_dir/checkpoints/step-000020/          "20 steps are done"
    adapter.safetensors  optimizer.safetensors     one file per kind of tensor; nothing is ever pickled
    adapter-behind-1.safetensors                   with rollout.staleness: the factors of a step before, and so on
    state.json  checksums.json                     {step, config, config_hash, state}; sha256 of every other file
A checkpoint appears whole or not at all, even if the process is killed, and is used only if its checksums are right.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from facts.exits import InputError
from inputs.config import changes_at_resume, flatten, hash_of
from inputs.files import fsync_path, one_line, read_object, read_tensors, shown, write_atomically
from runlog.run_record import lock_run, sha256_file
from weights.huggingface import save_file

# A checkpoint has the second name if the process was killed while a newer one of the same step replaced it.
NAME = re.compile(r"(step-|\.replaced-step-)([0-9]{6,18})")

LEFTOVER = re.compile(r"\.tmp-(discarded-)?(\.replaced-)?step-[0-9]{6,}")  # left by a process that was killed


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


def _folders(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the folders that may be checkpoints, the best candidate first."""
    matches = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    ordered = sorted((int(match[2]), match[1] == "step-", path) for match, path in matches if match)
    return [(step, path) for step, _, path in reversed(ordered)]


def _discard(path: Path) -> None:
    """Remove a folder. It is renamed first, so after a kill half-way the next save recognises and removes the rest."""
    doomed = path.with_name(f".tmp-discarded-{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def save(
    run_dir: Path,
    step: int,
    tensors: Mapping[str, dict[str, Tensor]],
    state: dict[str, Any],
    config: dict[str, Any],
    keep_last: int,
    check: Callable[[Checkpoint], None] = lambda written: None,
) -> Path:
    """Write the checkpoint of ``step`` finished steps, keep the newest ``keep_last``, and return its folder.

    ``config``: inputs.config.to_dict of the run. One process calls it, with all tensors on the host, each contiguous
    and in memory of its own. The run's .jsonl files are forced to the disk before, because a resume needs their lines
    up to this step. Checkpoints of later steps are removed: they were made before the run was rewound. An earlier
    checkpoint of the same step is replaced. Raises InputError when the disk is full or cannot be written; the earlier
    checkpoints then stay as they were. They also stay if ``check`` raises: it gets what the files hold, before their
    folder has its name.
    """
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
        for kind, named in tensors.items():
            save_file(named, aside / f"{kind}.safetensors")
        about = {"step": step, "config": config, "config_hash": hash_of(config), "state": state}
        write_atomically(aside / "state.json", json.dumps(about, indent=1) + "\n")
        checksums = {path.name: sha256_file(path) for path in sorted(aside.iterdir())}
        write_atomically(aside / "checksums.json", json.dumps(checksums, indent=1) + "\n")
        for path in aside.iterdir():
            fsync_path(path)
        fsync_path(aside)
        check(load(aside, verified=True))  # mapped: only what is compared is read, and it is not allocated
        if target.exists():
            if replaced.exists():
                _discard(replaced)
            os.rename(target, replaced)  # still found by latest() if the process is killed here
        os.rename(aside, target)
        fsync_path(folder)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{target}: checkpoint not written: {one_line(error)}; earlier checkpoints are intact, the run can be "
            "resumed"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # after a failure; otherwise it has its name
    _remove_old(folder, step, keep_last)
    return target


def _remove_old(folder: Path, step: int, keep_last: int) -> None:
    """Remove the checkpoints but the newest ``keep_last`` up to ``step``, and what a kill left of replaced ones."""
    kept = [path for number, path in _folders(folder) if number <= step and path.name == f"step-{number:06d}"]
    for _, path in _folders(folder):
        if path not in kept[:keep_last]:
            try:
                _discard(path)
            except OSError as error:
                print(f"warning: {path}: an old checkpoint that cannot be removed: {error.strerror}", flush=True)


def verify(path: Path, only: str | None = None) -> None:
    """Raises InputError that names the first file that is missing or has another checksum than at the save.

    With ``only``, the files of other kinds of tensors are not read.
    """
    if not path.is_dir():
        raise InputError(f"{path}: no such checkpoint")
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
    for _, path in _folders(Path(run_dir) / "checkpoints"):
        try:
            verify(path, only)
        except (InputError, OSError) as error:
            say(f"checkpoint skipped: {one_line(error)}")
        else:
            return load(path, verified=True, only=only)
    return None


def check_resume(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Raises InputError that lists the keys of ``config`` that differ from the checkpoint's, but must not."""
    if refused := changes_at_resume(checkpoint.config, config)[0]:
        raise InputError(
            f"{checkpoint.path}: changed since: {'; '.join(refused[:10])}; needed: the old values to "
            f"continue it (train.resume={checkpoint.run_dir}), or train.resume=never or another name to begin anew"
        )


class Candidate(NamedTuple):
    """A run that train.resume=auto may resume."""

    run_dir: Path
    is_finished: bool
    newest: Checkpoint | None  # with right checksums; None also for a finished run


def runs_of(name: str, out_dir: Path) -> list[Path]:
    """The folders in ``out_dir`` of the runs of this name, the newest first."""
    pattern = re.compile(re.escape(name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    runs = []
    for path in out_dir.iterdir() if out_dir.is_dir() else []:
        match = pattern.fullmatch(path.name)
        # A process that was killed while it made its folder has left no run.json, and nothing to resume.
        if match and (path / "run.json").exists():
            runs.append((match[1], int(match[2] or 1), path))
    return [path for *_, path in sorted(runs, reverse=True)]


def candidates(runs: Iterable[Path], config: dict[str, Any], say: Callable[[str], None]) -> Iterator[Candidate]:
    """Those of ``runs`` that no live process writes.

    InputError if a live process writes a run with this very ``config``. A checkpoint is verified, which may take
    seconds, when its run's turn comes.
    """
    for run_dir in runs:
        if (run_dir / "finished.json").exists():
            yield Candidate(run_dir, True, None)
            continue
        try:
            with lock_run(run_dir):
                newest = latest(run_dir, say)
        except BlockingIOError:
            if read_object(run_dir / "run.json").get("config_hash") == hash_of(config):
                raise InputError(
                    f"{run_dir}: a live process writes this run (ranks can outlive a torchrun that was killed); "
                    "needed: end it, wait for it, or train.resume=never to begin another run beside it"
                ) from None
            say(f"{run_dir}: not resumed: a live process writes it")
        except OSError as error:
            say(f"{run_dir}: not resumed: {error.strerror}; if no process writes it: train.resume={run_dir}")
        else:
            yield Candidate(run_dir, False, newest)


def find_resumable(
    runs: Iterable[Path], config: dict[str, Any], say: Callable[[str], None] = print
) -> Checkpoint | None:
    """The checkpoint that train.resume=auto resumes from: the newest one of the newest suitable run; None without one.

    ``runs``: all runs of this name, the newest first. ``config``: to_dict of the new start. A suitable run has a
    configuration with which a resume may go on, is not finished, has a checkpoint with right checksums, and is not
    being written by a live process. Without one, the newest other run that has a checkpoint and is not finished
    decides: InputError names what has changed since. If a newer run is finished, ``say`` is told instead, and a new run
    begins; so it is told if the newest run has no checkpoint.
    """
    others: list[Candidate] = []
    for run in candidates(runs, config, say):
        if run.newest and not changes_at_resume(run.newest.config, config)[0]:
            return run.newest
        others.append(run)
    if others and not others[0].is_finished and not others[0].newest:
        say(f"note: {others[0].run_dir}: not finished, and without a usable checkpoint; that folder is left")
    changed = next((run for run in others if run.newest), None)
    if changed is None:
        return None
    if not any(run.is_finished for run in others[: others.index(changed)]):
        check_resume(changed.newest, config)  # raises InputError
    changes = changes_at_resume(changed.newest.config, config)[0]
    say(f"note: {changed.run_dir}: not finished, and left: {'; '.join(changes[:10])}")
    return None
