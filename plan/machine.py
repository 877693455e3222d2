"""The machine that the doctor examines, the run that is planned on it, and the form of the doctor's findings.

Every question to the machine is a field, so that a test can plant a fault: an environment, a file-system root,
versions, libraries, ports, commands. Nothing here imports torch; a separate process asks the accelerator.
"""

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knobs import Config

# Prints the free and total bytes of every visible device. argv[1]: npu or cuda.
ACCELERATOR = """
import importlib, json, sys, torch
kind = sys.argv[1]
if kind == "npu":
    importlib.import_module("torch_npu")
module = getattr(torch, kind)
memory = [module.mem_get_info(i) for i in range(module.device_count())]
nccl = ".".join(map(str, module.nccl.version())) if kind == "cuda" and memory else ""
print(json.dumps({"memory": memory, "nccl": nccl}))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: ``level`` (ok, warn or fail), the thing examined, what was found, and what to do."""

    level: str
    what: str
    found: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{self.level:4}  {self.what}: {self.found}" + (f"; {self.todo}" if self.todo else "")


Row = tuple[object, str, str, str]  # a condition; the finding if it holds: level, what was found, what to do


def every(what: str, good: str, *rows: Row) -> list[Finding]:
    """A finding for each row whose condition holds. If there is none, one that is ok and says ``good``."""
    found = [Finding(level, what, found, todo) for condition, level, found, todo in rows if condition]
    return found or [Finding("ok", what, good)]


def first(what: str, good: str, *rows: Row) -> list[Finding]:
    """The finding of the first row whose condition holds. If there is none, it is ok and says ``good``."""
    return every(what, good, *rows)[:1]


def number_ranges(ids: list[int]) -> str:
    """[0, 1, 2, 5] -> 0-2, 5"""
    starts = [i for i in ids if i - 1 not in ids]
    ends = [i for i in ids if i + 1 not in ids]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)) or "none"


def memory_findings(memory: list[list[int]], todo: str) -> list[Finding]:
    """A device with more than 4 GiB in use before the run starts is used by somebody else. ``memory``: (free, total)"""
    used = {device: (total - free) / 2**30 for device, (free, total) in enumerate(memory)}
    taken = ", ".join(f"{device}: {gib:.0f} GiB" for device, gib in used.items() if gib > 4)
    least = min((free for free, _ in memory), default=0) / 2**30
    return first(
        "device memory",
        f"{len(memory)} devices, {least:.1f} GiB or more free on each",
        (taken, "fail", f"taken before the run starts: {taken}", todo),
    )


# ------------------------------------------------------------------------------------------ questions to this machine


@functools.cache
def installed_version(name: str) -> str | None:
    """The version of an installed package, or of Python. "?": a source folder without a version; None: not installed.

    For torch it is the version in torch/version.py, which shows a build for CUDA by "+cu128"; the wheel's may not.
    """
    if name == "Python":
        return platform.python_version()
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "?" if importlib.util.find_spec(name.replace("-", "_")) else None
    said = re.search(r"__version__ = '([^']+)'", package_file(name, "version.py") or "") if name == "torch" else None
    return said[1] if said else version


def package_file(package: str, name: str) -> str | None:
    """The content of a file of an installed package, read without importing the package; None if there is none."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder, name)).is_file():
            return path.read_text(errors="replace")
    return None


def run_command(command: Sequence[str], seconds: float = 120) -> tuple[int, str]:
    """Exit code and output of ``command``. 127: there is no such program; 124: it takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, errors="replace")
    except FileNotFoundError as error:
        return 127, str(error)
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {seconds:.0f} s"
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def library_error(name: str) -> str:
    """Why the shared library ``name`` cannot be loaded; "" if it can."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return ""


def port_is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` now."""
    with socket.socket() as server, contextlib.suppress(OSError):
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT after a run counts as free
        server.bind(("", port))
        server.listen(1)
        return True
    return False


def is_own_address(address: str) -> bool:
    """Whether this machine has the IP address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as end, contextlib.suppress(OSError):
        end.bind((address, 0))
        return True
    return False


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that holds ``folder``, or will hold it."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


def last_line(output: str) -> str:
    """The last line of a program's output; in a traceback this line names the error."""
    return ([line.strip() for line in output.splitlines() if line.strip()] or ["no output"])[-1][:200]


@dataclass
class Machine:
    """This machine, or one that a test describes. ``run``: the configuration; ``ranks``: its processes here."""

    run: Config | None = None
    ranks: int | None = None
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")  # of /dev, /proc, /usr/local
    version: Callable[[str], str | None] = installed_version
    package_file: Callable[[str, str], str | None] = package_file
    command: Callable[[Sequence[str]], tuple[int, str]] = run_command
    library_error: Callable[[str], str] = library_error
    port_is_free: Callable[[int], bool] = port_is_free
    is_own_address: Callable[[str], bool] = is_own_address
    free_bytes: Callable[[Path], int] = free_bytes
    open_files: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    @property
    def kind(self) -> str:
        """npu, cuda or cpu: the device of the configuration, else the one whose files or software are present."""
        if self.run is not None and self.run.device != "auto":
            return self.run.device
        if self.device_nodes("davinci") or "ASCEND_HOME_PATH" in self.env:
            return "npu"
        return "cuda" if self.device_nodes("nvidia") else "cpu"

    @property
    def samples_with_vllm(self) -> bool:
        return self.run is not None and "vllm" in self.run.rollout.kind.packages

    @property
    def captures_graphs(self) -> bool:
        return self.samples_with_vllm and not self.run.rollout.enforce_eager

    def device_nodes(self, name: str) -> list[int]:
        """Numbers of the files /dev/<name>0, 1, ..."""
        numbers = (path.name.removeprefix(name) for path in (self.root / "dev").glob(f"{name}[0-9]*"))
        return sorted(int(number) for number in numbers if number.isdigit())

    def text(self, path: str) -> str:
        """The content of a system file such as "proc/meminfo"; "" if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""

    def number(self, variable: str, default: int) -> int | None:
        """A whole number from the environment; None if the variable holds anything else."""
        text = self.env.get(variable, str(default)).strip()
        return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None

    def python(self, code: str, *arguments: str) -> tuple[int, str]:
        """Exit code and output of ``code`` in a separate Python process."""
        return self.command([sys.executable, "-c", code, *arguments])

    @functools.cached_property
    def accelerator(self) -> dict[str, Any]:
        """{"memory": [[free, total] bytes of each device], "nccl": version}, or {"error": the reason}."""
        code, output = self.python(ACCELERATOR, self.kind)
        # Libraries may print lines of their own before the last one.
        return json.loads(output.strip().splitlines()[-1]) if code == 0 else {"error": last_line(output)}


Check = Callable[[Machine], list[Finding]]
