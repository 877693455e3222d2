"""Trainings on fake_npu.py: train_grpo.start on every rank, interrupted in step 3 and then resumed.

    python tests/support/npu_train.py FOLDER [MINDSPEED_DIR]

Every FOLDER/LAYOUT/config.yaml is a training. Its ranks are forked, so that torch and Megatron are imported only once.
With a real MindSpeed, every rank imports MindSpeed and Megatron itself, in the order of a run. Rank r writes the groups
and the kernels that it used to FOLDER/LAYOUT/answer-r. The exit code is 1 if a rank failed.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import fake_npu

ROOT = Path(__file__).parents[2]


class Interrupted(Exception):
    """The planned interruption of the run."""


def patched() -> list[str]:
    """The names that MindSpeed's adaptor has replaced, if it is imported."""
    if "mindspeed" not in sys.modules:
        return []
    from mindspeed.patch_utils import MindSpeedPatchesManager

    return sorted(MindSpeedPatchesManager.patches_info)


def interrupt(*args) -> None:
    raise Interrupted


def train(folder: Path, interrupted: bool) -> int:
    """One rank, with the variables that torchrun sets."""
    import training

    import config
    import train_grpo
    from learner import Learner

    training.lighten()
    if interrupted:
        real_update = Learner.update
        Learner.update = lambda self, *args: (interrupt if args[3] == 3 else real_update)(self, *args)
    try:
        train_grpo.start(config.load_config(folder / "config.yaml"))
    except Interrupted:
        return 0
    groups = [
        {"desc": group.group_desc, "ranks": group.members, "buffer": group.buffer_mib}
        for group in fake_npu.GROUPS
        if group.used
    ]
    version = sys.modules["megatron.core"].__version__
    answers = {"groups": groups, "kernels": fake_npu.KERNELS, "patched": patched(), "megatron": version}
    (folder / f"answer-{os.environ['RANK']}").write_text(json.dumps(answers))
    return 0


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
    codes = []
    for path in sorted(Path(folder).glob("*/config.yaml")):
        for interrupted in (True, False):
            codes += world.as_torchrun(world.LAYOUTS[path.parent.name][0], train, path.parent, interrupted)
    return int(any(codes))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.exit(main(*sys.argv[1:]))
