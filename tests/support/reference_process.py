"""Make the models of tests/machines/on_device, and the results that every layout must compute from them.

A separate process makes them for two reasons: ranks are forked from a process in which autograd has not run, and under
MindSpeed's patches transformers computes other gradients.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import lora_reference
import update_reference
from source import ROOT
from torch import Tensor

from model.batches import Rollout

SCRIPT = "import sys, reference_process; reference_process.write(sys.argv[1])"


class Problem(NamedTuple):
    paths: dict[str, Path]  # for each of lora_reference.KINDS the folder of a model
    tokens: Tensor  # (8, 16)
    references: dict[str, lora_reference.Reference]
    batch: Rollout  # a rollout of the first of KINDS with the factors of its reference
    updates: dict[str, update_reference.Updated]  # for each of update_reference.CASES


def make(folder: Path) -> None:
    """Write the problem to ``folder``. RuntimeError with the last line of the output, then its end, if that fails."""
    paths = str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH")  # which may hold the packages
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RuntimeError(f"the reference was not computed: {last}\n{done.stderr[-3000:]}")


def write(folder: str) -> None:
    """What that process does."""
    paths, tokens, references = lora_reference.save_and_compute(Path(folder))
    kind = lora_reference.KINDS[0]
    path, factors = paths[kind], references[kind].factors
    batch = update_reference.rollout_of(path, factors)
    updates = {}
    for case in update_reference.CASES:
        cfg = update_reference.config(path, case)
        updates[case] = update_reference.compute(path, factors, batch, cfg)
    problem = Problem(paths, tokens, references, batch, updates)
    Path(folder, "problem").write_bytes(pickle.dumps(problem))


def read(folder: Path) -> Problem:
    return pickle.loads((folder / "problem").read_bytes())
