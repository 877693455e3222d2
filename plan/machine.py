"""What the doctor looks at: one machine, and the run that is meant to go on it; and the form of what it finds.

Every question to the machine is a field, so that a test can plant a fault: an environment, a file-system root,
versions, libraries, ports, commands. Imports no torch; the accelerator is asked in a process of its own.
"""

from __future__ import annotations

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

# argv[1]: npu or cuda. Free and total bytes of every device that this environment shows.
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
    """One line: ``level`` ok, warn or fail; the thing looked at; what was found; what to do about it."""

    level: str
    what: str
    found: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{self.level:4}  {self.what}: {self.found}" + (f"; {self.todo}" if self.todo else "")


def ok(what: str, found: str) -> Finding:
    return Finding("ok", what, found)


def warn(what: str, found: str, todo: str) -> Finding:
    return Finding("warn", what, found, todo)


def fail(what: str, found: str, todo: str) -> Finding:
    return Finding("fail", what, found, todo)


def number_ranges(ids: list[int]) -> str:
    """[0, 1, 2, 5] -> 0-2, 5"""
    starts = [i for i in ids if i - 1 not in ids]
    ends = [i for i in ids if i + 1 not in ids]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)) or "none"


def memory_findings(memory: list[list[int]], todo: str) -> list[Finding]:
    """A device of which more than 4 GiB are taken before the run starts is somebody else's."""
    taken = {i: (total - free) / 2**30 for i, (free, total) in enumerate(memory) if total - free > 4 * 2**30}
    if taken:
        listed = ", ".join(f"{i}: {gib:.0f} GiB" for i, gib in taken.items())
        return [fail("device memory", f"taken before the run starts: {listed}", todo)]
    least = min((free for free, _ in memory), default=0) / 2**30
    return [ok("device memory", f"{len(memory)} devices, {least:.1f} GiB or more free on each")]


# --------------------------------------------------------------------------------------------- how a machine answers


@functools.cache
def installed_version(name: str) -> str | None:
    """The version of an installed package; "?" for a source folder without one; None: not there. Python is one, too.

    torch's own says more than its wheel's: "+cu128" is a build for CUDA.
    """
    if name == "Python":
        return platform.python_version()
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "?" if importlib.util.find_spec(name.replace("-", "_")) else None
    spec = importlib.util.find_spec(name) if name == "torch" else None
    if spec and spec.origin:
        said = re.search(r"__version__ = '([^']+)'", Path(spec.origin).with_name("version.py").read_text())
        version = said[1] if said else version
    return version


def package_file(package: str, name: str) -> str | None:
    """The content of a file of an installed package, which is not imported for it; None where there is none."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder, name)).is_file():
            return path.read_text(errors="replace")
    return None


def run_command(command: Sequence[str], seconds: float = 120) -> tuple[int, str]:
    """Exit code and output of ``command``; 127 when there is no such program, 124 when it takes too long."""
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
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that only lingers after a run is free
        try:
            server.bind(("", port))
            server.listen(1)
        except OSError:
            return False
    return True


def free_bytes(folder: Path) -> int:
    """Free on the disk that holds ``folder``, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


def last_line(output: str) -> str:
    """The line of a program's output that says what went wrong: of a traceback, the last."""
    return ([line.strip() for line in output.splitlines() if line.strip()] or ["no output"])[-1][:200]


@dataclass
class Machine:
    """This machine, unless a test says otherwise. ``run``: the configuration; ``ranks``: its processes here."""

    run: Config | None = None
    ranks: int | None = None
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")  # of /dev, /proc, /usr/local
    version: Callable[[str], str | None] = installed_version
    package_file: Callable[[str, str], str | None] = package_file
    command: Callable[[Sequence[str]], tuple[int, str]] = run_command
    library_error: Callable[[str], str] = library_error
    port_is_free: Callable[[int], bool] = port_is_free
    free_bytes: Callable[[Path], int] = free_bytes
    open_files: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    @property
    def kind(self) -> str:
        """npu, cuda or cpu: what the configuration names, else what is plugged in or installed for."""
        if self.run is not None and self.run.device != "auto":
            return self.run.device
        if self.device_nodes("davinci") or "ASCEND_HOME_PATH" in self.env:
            return "npu"
        return "cuda" if self.device_nodes("nvidia") else "cpu"

    @property
    def samples_with_vllm(self) -> bool:
        return self.run is not None and self.run.rollout.engine == "vllm"

    @property
    def captures_graphs(self) -> bool:
        return self.samples_with_vllm and not self.run.rollout.enforce_eager

    def device_nodes(self, name: str) -> list[int]:
        """Numbers of the files /dev/<name>0, 1, ..."""
        numbers = (path.name.removeprefix(name) for path in (self.root / "dev").glob(f"{name}[0-9]*"))
        return sorted(int(number) for number in numbers if number.isdigit())

    def text(self, path: str) -> str:
        """The content of a system file such as "proc/meminfo"; "" where there is none."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""

    def number(self, variable: str, default: int) -> int | None:
        """A whole number from the environment; None when it is set to anything else."""
        text = self.env.get(variable, str(default)).strip()
        return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None

    def python(self, code: str, *arguments: str) -> tuple[int, str]:
        """Exit code and output of ``code`` in a Python process of its own."""
        return self.command([sys.executable, "-c", code, *arguments])

    @functools.cached_property
    def accelerator(self) -> dict[str, Any]:
        """{"memory": [[free, total] bytes of each device], "nccl": version}, or {"error": the reason}."""
        # The last line: libraries print lines of their own.
        code, output = self.python(ACCELERATOR, self.kind)
        return json.loads(output.strip().splitlines()[-1]) if code == 0 else {"error": last_line(output)}
