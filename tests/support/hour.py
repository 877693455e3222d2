"""The first hour with forked ranks in all stages, so that torch and Megatron are imported only once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO

import training
import world

import preflight
import train_grpo


def forked(command: list[str], log: Path, seconds: float, lock: BinaryIO) -> int:
    """first_hour.execute with forked processes instead of torchrun."""
    mains = {"preflight.py": preflight.main, "train_grpo.py": train_grpo.main}
    place = next(i for i, word in enumerate(command) if word.endswith(".py"))
    ranks = re.search(r"--nproc_per_node=(\d+)", " ".join(command[:place]))

    def light(*arguments: object) -> int:
        training.lighten(lenient=False)
        return mains[Path(command[place]).name](*arguments)

    log.unlink(missing_ok=True)
    codes = world.as_torchrun(int(ranks[1]) if ranks else 1, light, command[place + 1 :], log=log)
    return int(any(codes))
