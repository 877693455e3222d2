"""The first hour on fake_npu.py, with forked ranks in all stages, so that torch and Megatron are imported only once.

    python tests/support/hour.py FOLDER CONFIG ...      the arguments after FOLDER are those of plan/first_hour.py

The doctor examines the server of healthy.py. Everything else is the code of the real processes.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).parents[2]


def forked(command: list[str], log: Path, seconds: float, lock: BinaryIO) -> int:
    """first_hour.execute with forked processes instead of torchrun."""
    import training
    import world

    import preflight
    import train_grpo

    mains = {"preflight.py": preflight.main, "train_grpo.py": train_grpo.main}
    place = next(i for i, word in enumerate(command) if word.endswith(".py"))
    ranks = re.search(r"--nproc_per_node=(\d+)", " ".join(command[:place]))

    def light(*arguments: object) -> int:
        training.lighten(lenient=False)
        return mains[Path(command[place]).name](*arguments)

    log.unlink(missing_ok=True)
    codes = world.as_torchrun(int(ranks[1]) if ranks else 1, light, command[place + 1 :], log=log)
    return int(any(codes))


def main(folder: str, *arguments: str) -> int:
    import fake_npu

    fake_npu.install()
    sys.path.insert(0, str(ROOT))
    import healthy
    import training

    import device as devices
    from plan import doctor, first_hour

    training.import_before_the_fork()
    npu = devices.resolve("npu")
    devices.adapt(npu)
    devices.import_megatron(npu)
    server = healthy.npu(Path(folder))
    on_it: Callable = lambda run, ranks: dataclasses.replace(server, run=run, ranks=ranks)  # noqa: E731
    doctor.Machine = first_hour.Machine = on_it
    first_hour.execute = forked
    return first_hour.main(arguments)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.exit(main(*sys.argv[1:]))
