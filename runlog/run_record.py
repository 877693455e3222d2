"""Writes and reads the records of a run: the metrics of its steps, and how it was started.

The metrics of a step are a row of a .jsonl file, which has one JSON object per line. Reading a row gives bit-identical
floats. `write_records` stores the resolved configuration, the environment, the git state of the source, the checksums
of model and data, and the command. `checksums` returns the checksums of all records of a finished run.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from facts.exits import InputError
from facts.root import ROOT
from inputs import functions, teacher
from inputs.config import to_yaml
from inputs.files import opened, read_bytes, read_object, usable_cores, variable, write_atomically
from knobs import Config, DataConfig, EvalConfig, listed

VARIABLES = re.compile(r"(OMP|MKL|CUDA|ASCEND|HCCL|NCCL|GLOO|VLLM|PYTORCH|TORCH)_")
SECRETS = re.compile(r"(API_KEY|_TOKEN$|SECRET|PASSW)")
RECORDED = ("*.json", "*.jsonl", "config.yaml", "command.txt", "git.patch", "resume-*/*")
THREADS = 8  # number of threads that read files for their checksums


# ---------------------------------------------------------------- files


def lock_file(path: Path) -> BinaryIO:
    """Open a file and lock it for this process, until the file is closed or the process ends.

    Raises BlockingIOError if another process has the lock, and another OSError if the file system has no locks.
    """
    handle = open(path, "ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise
    return handle


def lock_run(run_dir: Path) -> BinaryIO:
    """Lock the file run.lock of a run, as lock_file does."""
    return lock_file(run_dir / "run.lock")


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums(run_dir: Path) -> dict[str, str]:
    """Return the sha256 of the records of a run and of its resumed starts (resume-N/), by path in the run's folder.

    The log, the figure, the lock and the checkpoints are not included, nor is finished.json, which contains these
    checksums.
    """
    found = {path for pattern in RECORDED for path in run_dir.glob(pattern) if path.name != "finished.json"}
    return {path.relative_to(run_dir).as_posix(): sha256_file(path) for path in sorted(found)}


def json_line(row: dict[str, Any]) -> str:
    """Return one line of strict JSON with the keys of ``row`` in their order.

    A number that is NaN or infinite becomes null, and its key is added to the list "nonfinite".
    """
    written = json.dumps(row, default=lambda value: value.tolist())  # for scalars and arrays of numpy and torch
    plain = json.loads(written, parse_constant=lambda name: None)
    if lost := [key for key, value in row.items() if value is not None and plain[str(key)] is None]:
        plain["nonfinite"] = lost
    return json.dumps(plain, allow_nan=False) + "\n"


def whole_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines of a .jsonl file before the first incomplete line, each as its bytes and its decoded row.

    A complete line ends in a newline and is a JSON object with an integer "step". Return [] if there is no file.
    """
    lines = []
    for line in read_bytes(path).splitlines(keepends=True) if path.exists() else []:
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < 2**53:
            break
        lines.append((line, row))
    return lines


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file of the run, oldest first, or [] if there is no file."""
    return [row for _, row in whole_lines(path)]


# ---------------------------------------------------------------- how the run was started


def _without_homes(text: str) -> str:
    """Replace the user's home directory in ``text`` with $HOME, and other user names in paths with USER."""
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "$HOME", text)
    return re.sub(r"/(home|Users)/[^/:\s]+", r"/\1/USER", text)


def _private(text: str) -> str:
    """Replace home folders, the names of the user and the machine, and IP addresses in ``text``.

    They must not be in records, because records are published.
    """
    text = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "ADDRESS", _without_homes(text))
    host, home = socket.gethostname(), Path(os.path.expanduser("~"))
    names = {os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), home.name, host, host.split(".")[0]}
    for name in sorted(names - {"localhost"}, key=len, reverse=True):  # longest first: a name may contain another
        if len(name) > 2:  # a shorter name may be part of ordinary words
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "PRIVATE", text)
    return text


def cpu_name() -> str:
    """Return the name of the CPU and its vector instructions from /proc/cpuinfo.

    Without this file, return the processor or machine name of Python's module platform. The vector instructions are
    included because they can differ between virtual machines with the same CPU name, and because they change the
    rounding.
    """
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    models = re.findall(r"^model name\s*:\s*(.+)$", text, re.M)
    instructions = sorted({*re.findall(r"\b(?:avx2|avx512f|avx512_bf16|amx_bf16)\b", text)})
    return " ".join([*models[:1], *instructions]) or platform.processor() or platform.machine()


def environment(world_size: int) -> dict[str, Any]:
    """Return a description of the versions, the machine, and the environment variables that change results or speed."""
    # Python imports the first version in the order of sys.path. Here it comes last, and so replaces the others.
    installed: dict[str, str | None] = {}
    for distribution in reversed(list(metadata.distributions())):
        # distribution.metadata would parse the whole file as an e-mail, which takes six times as long.
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        described = dict(line.partition(": ")[::2] for line in text.partition("\n\n")[0].splitlines())
        name = described.get("Name", "unnamed").lower().replace("_", "-")
        installed[name] = described.get("Version")
    return {
        "python": platform.python_version(),
        "packages": dict(sorted(installed.items())),
        "platform": _private(platform.platform()),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "cores_usable": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "world_size": world_size,
        "variables": {
            key: "(set)" if SECRETS.search(key) else _private(value)
            for key, value in sorted(os.environ.items())
            if VARIABLES.match(key)
        },
    }


def variant_name(name: str) -> str:
    """Return the name of a run or record without its seed."""
    return re.sub(r"-seed\d+$", "", name)


def git(*arguments: str) -> bytes:
    """Run a git command in the folder of the source code, and return its output.

    If the command fails or git is not installed, return b"".
    """
    # In a container, a mounted repository often has another owner, and git would refuse it.
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def git_state() -> tuple[dict[str, Any], bytes]:
    """Return a dictionary with the keys "commit" and "dirty", and the patch of the uncommitted changes.

    "dirty" says whether the source code has uncommitted changes. Without a repository or a commit, both values are
    None, and the patch is empty.
    """
    commit = git("rev-parse", "HEAD").decode().strip()
    if not commit:
        return {"commit": None, "dirty": None}, b""
    plain = "-c color.ui=false -c diff.noprefix=false -c diff.mnemonicPrefix=false".split()
    patch = git(*plain, "diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD", "--", ".")
    untracked = git("ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines()
    # `git apply` skips the lines before the first "diff".
    whole = b"".join(b"# untracked: %s\n" % name for name in untracked) + patch
    return {"commit": commit, "dirty": bool(whole)}, whole


# ---------------------------------------------------------------- model and data of the run


def inputs(files: dict[str, dict[str, Path]], beat: Callable[[], None] = lambda: None) -> dict[str, dict[str, str]]:
    """Return the sha256 of each of ``files``, which is the result of input_files for a run.

    The first reading of 60 GB takes a minute, or half an hour from a slow disk. ``beat`` is called after each file.
    """
    found = sha256_of_inputs([path for named in files.values() for path in named.values()], beat)
    return {kind: {name: found[path] for name, path in named.items()} for kind, named in files.items()}


def data_files(data: DataConfig, evaluation: EvalConfig) -> dict[str, str]:
    """Return every data file that a run reads, by its key in the configuration.

    For a list of files, [0], [1] and so on follow the key.
    """
    sets = {f"eval.sets.{name}": paths for name, paths in evaluation.sets.items()}
    read = {} if data.source == "arithmetic" else {"data.train_path": data.train_path, "data.test_path": data.test_path}
    return {
        f"{key}[{index}]" if isinstance(paths, tuple) else key: path
        for key, paths in (read | {"data.few_shot_path": data.few_shot_path} | sets).items()
        for index, path in enumerate(listed(paths))
        if path
    }


def input_files(cfg: Config) -> dict[str, dict[str, Path]]:
    """Return the model's files by name, the data files by use, and the files of the user's functions and teacher.

    A record contains the checksums of these files, so it shows which weights were used, not only their name.
    """
    folder = Path(cfg.model.path)
    model = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    # In inputs.json, data.train_path is called train.
    read = data_files(cfg.data, cfg.eval)
    used = {re.sub(r"^data\.(\w+)_path", r"\1", key): Path(path) for key, path in read.items()}
    own = {f"{key} {name}": path for key, name, path in functions.files(cfg.reward, cfg.loss, cfg.rollout)}
    return {
        "model": {path.name: path for path in model},
        "data": {use: path for use, path in used.items() if path.is_file()},
        **({"functions": own} if own else {}),
        **({"teacher": teacher.files(cfg.loss.teacher)} if cfg.loss.teacher else {}),
    }


def sha256_of_inputs(paths: list[Path], beat: Callable[[], None] = lambda: None) -> dict[Path, str]:
    """Return the sha256 of each file. Several threads read the files, and ``beat`` is called after each file."""
    found = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for path, checksum in zip(paths, pool.map(sha256_file, paths), strict=True):
            found[path] = checksum
            beat()
    return found


def of_last_start(run_dir: Path, name: str) -> Path:
    """Return the path of the file ``name`` that the last start of the run wrote.

    The file is in the last resume-N/ that has a file of this name, and otherwise in the folder of the run.
    """
    resumed = [path for path in run_dir.glob(f"resume-*/{name}") if path.parent.name[7:].isdecimal()]
    return max(resumed, key=lambda path: int(path.parent.name[7:]), default=run_dir / name)


def changed_inputs(
    run_dir: Path, files: dict[str, dict[str, Path]], model: Path, beat: Callable[[], None] = lambda: None
) -> list[str]:
    """Return a line for each of ``files`` (input_files) whose checksum has changed since the run's last start.

    Hidden files in the model's folder are ignored, because nothing reads them. Files of the data or the teacher that
    are absent now are also ignored. If inputs.json cannot be read, the only line says so. ``model`` is the model's
    folder, which gives the path of a file that no longer exists.
    """
    record = of_last_start(run_dir, "inputs.json")
    try:
        recorded = {kind: dict(files) for kind, files in read_object(record, ("model", "data")).items()}
    except (ValueError, TypeError) as error:
        return [f"{record}: not a record of the run's inputs ({error!r})"]
    present = inputs(files, beat)
    lines = []
    for kind in present | recorded:
        now, was = present.get(kind, {}), recorded.get(kind, {})
        if kind in ("data", "teacher"):  # an absent file is not read; if it is needed, the start has raised InputError
            was = {name: was[name] for name in was if name in now}
        for name in sorted(now.keys() | was.keys()):
            if now.get(name) != was.get(name) and not name.startswith("."):
                path = files.get(kind, {}).get(name, model / name if kind == "model" else name)
                before, after = _state(was.get(name)), _state(now.get(name))
                lines.append(f"{path}: has changed since {record.parent} was started: {before} -> {after}")
    return lines


def _state(checksum: str | None) -> str:
    return f"sha256 {checksum}" if checksum else "absent"


def refuse_changed_inputs(changed: list[str], *, accept: bool, how: str) -> list[str]:
    """Return ``changed``, the lines of changed_inputs, if it is empty or ``accept`` is true.

    Otherwise raises InputError. The message ends with ``how``, which says how the user can accept the changes.
    """
    if changed and not accept:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise InputError(f"{changed[0]}{more}; restore the old content, or {how}")
    return changed


# ---------------------------------------------------------------- all records of a start


def write_records(
    folder: Path, cfg: Config, world_size: int, read: Mapping[str, Mapping[str, str]] | None = None
) -> None:
    """Write config.yaml, environment.json, inputs.json, git.json, git.patch and command.txt for a start of the run.

    ``read`` has the checksums that `inputs` returns for the run's input_files. Without ``read``, this function computes
    them. If the commit is not known, there is no git.patch.
    """
    source, patch = git_state()
    if source["commit"] is None:
        print("note: the git commit of the source is not known, so `report.py add` will refuse this run", flush=True)
    launcher = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        processes = variable("LOCAL_WORLD_SIZE", world_size, 1, world_size)
        launcher = ["torchrun", f"--nnodes={world_size // processes}", f"--nproc_per_node={processes}"]
    script = Path(sys.argv[0]).resolve()
    script = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    command = shlex.join([*launcher, str(script), *sys.argv[1:]])
    records: dict[str, str | bytes] = {
        "config.yaml": to_yaml(cfg),
        "inputs.json": json.dumps(read or inputs(input_files(cfg)), indent=1) + "\n",
        "environment.json": json.dumps(environment(world_size), indent=1) + "\n",
        "git.json": json.dumps(source) + "\n",
        # Only home folders are replaced. If a name in `name=tiny` were replaced as well, the command would be another.
        "command.txt": _without_homes(command) + "\n",
        **({"git.patch": patch} if source["commit"] else {}),
    }
    for name, content in records.items():
        write_atomically(folder / name, content)
