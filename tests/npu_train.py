"""Trainings on tests/fake_npu.py: train_grpo.run on every rank, interrupted in step 3, and once more to resume it.

    python tests/npu_train.py FOLDER [MINDSPEED_DIR]

Every FOLDER/LAYOUT/config.yaml is a training. Its ranks are forked, so that torch is imported once, and where no real
MindSpeed is asked for, Megatron as well; with it, every rank imports both in the order of a run. Rank r writes to
FOLDER/LAYOUT/answer-r what the device was asked to do. Exit code 1 if a rank failed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import warnings
from pathlib import Path

import fake_npu

ROOT = Path(__file__).parents[1]


class Interrupted(Exception):
    """The end of the run's first life."""


def patched() -> list[str]:
    """The names that MindSpeed's adaptor has put something in the place of, if it is imported."""
    if "mindspeed" not in sys.modules:
        return []
    from mindspeed.patch_utils import MindSpeedPatchesManager

    return sorted(MindSpeedPatchesManager.patches_info)


def interrupt(*args) -> None:
    raise Interrupted


def train(folder: Path, variables: dict[str, str], interrupted: bool) -> None:
    """One rank's process, started as torchrun would start it."""
    import training

    import config
    import train_grpo
    from learner import Learner

    os.environ |= variables
    training.lighten()
    if interrupted:
        real_update = Learner.update
        Learner.update = lambda self, *args: (interrupt if args[3] == 3 else real_update)(self, *args)
    try:
        train_grpo.run(config.load_config(folder / "config.yaml"))
    except Interrupted:
        os._exit(0)  # as train_grpo.py ends: no tear-down
    groups = [
        {"desc": group.group_desc, "ranks": group.members, "buffer": group.buffer_mib}
        for group in fake_npu.GROUPS
        if group.used
    ]
    version = sys.modules["megatron.core"].__version__
    answers = {"groups": groups, "kernels": fake_npu.KERNELS, "patched": patched(), "megatron": version}
    (folder / f"answer-{variables['RANK']}").write_text(json.dumps(answers))


def main(folder: str, mindspeed: str = "") -> int:
    fake_npu.install(stubs=bool(mindspeed))
    sys.path[:0] = [str(ROOT), *([mindspeed] if mindspeed else [])]
    import training
    import world

    import device as devices

    if not mindspeed:
        training.import_before_the_fork()
        npu = devices.resolve("npu")
        devices.adapt(npu)
        devices.import_megatron(npu)
    context, failed = multiprocessing.get_context("fork"), 0
    for path in sorted(Path(folder).glob("*/config.yaml")):
        ranks = world.LAYOUTS[path.parent.name][0]
        for interrupted in (True, False):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
            processes = []
            for rank in range(ranks):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                variables = meet | {name: str(value) for name, value in place.items()}
                processes.append(context.Process(target=train, args=(path.parent, variables, interrupted)))
                processes[-1].start()
            for process in processes:
                process.join()
                failed += process.exitcode != 0
    return min(failed, 1)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.exit(main(*sys.argv[1:]))
