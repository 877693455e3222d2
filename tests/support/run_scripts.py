"""Get what the run scripts for NPUs and GPUs plan to start: the training command of a script and a layout."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ON_A_CPU = ("run_cpu.sh", "run_smol.sh", "run_tests.sh")
SCRIPTS = sorted(path.name for path in ROOT.glob("run_*.sh") if path.name not in ON_A_CPU)


class Training(NamedTuple):
    """A configuration file with its overrides, and the number of ranks."""

    config: str
    overrides: list[str]
    ranks: int


def start(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The script in the repository and a plain environment."""
    known = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "RENDEZVOUS": "first:29400"}
    command = ["bash", str(ROOT / script), *arguments]
    return subprocess.run(command, env=known | environment, cwd="/", capture_output=True, text=True, timeout=300)


def planned(script: str, *arguments: str, **environment: str) -> tuple[list[str], list[str]]:
    """What --plan-only prints: its lines before the plan, and the words of the last of them, the torchrun command."""
    done = start(script, "--plan-only", *arguments, **environment)
    only_the_plan_is_missing = done.stderr.startswith("error: PYTHON: ")
    assert done.returncode == 0 or only_the_plan_is_missing, done.stderr
    lines = done.stdout.splitlines()
    (last,) = [place for place, line in enumerate(lines) if " launch/first_code.py " in line]
    return lines[: last + 1], shlex.split(lines[last])


def training(command: list[str]) -> Training:
    """What a torchrun command trains."""
    number = {key: int(value) for key, value in (w[2:].split("=") for w in command if re.match("--n.*=[0-9]+$", w))}
    path, *overrides = command[command.index("train_grpo.py") + 1 :]
    return Training(path, overrides, number["nnodes"] * number["nproc_per_node"])


def layouts(script: str) -> list[str]:
    """The layouts that a script offers in its line LAYOUT=."""
    offered = re.search(r"^LAYOUT=.*$", (ROOT / script).read_text(), re.M)
    return sorted({*re.findall(r"tp\d+_ep\d+", offered[0])})


NAMES = [f"{script} {layout}" for script in SCRIPTS for layout in layouts(script)]


def job(name: str) -> Training:
    """What a script starts in the layout of one of NAMES."""
    script, layout = name.split()
    return training(planned(script, LAYOUT=layout)[1])


def shipped() -> dict[str, Training]:
    """Every layout of every script, by name, and the two configurations of a tiny model that no such script starts."""
    return {name: job(name) for name in NAMES} | {
        "tiny_cpu.yaml": Training("configs/tiny_cpu.yaml", [], 2),
        "tiny_16.yaml": Training("configs/tiny_16.yaml", [], 16),
    }
