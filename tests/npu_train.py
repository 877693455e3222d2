"""A training on tests/fake_npu.py, started by torchrun: interrupted after step 3, resumed in the same processes.

    torchrun --nproc_per_node=N tests/npu_train.py CONFIG ANSWER [MINDSPEED_DIR]

Rank r writes to ANSWER-r what the device was asked to do.
"""

from __future__ import annotations

import json
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


def main(config_path: str, answer: str, mindspeed: str = "") -> None:
    fake_npu.install(stubs=bool(mindspeed))
    sys.path[:0] = [str(ROOT), *([mindspeed] if mindspeed else [])]
    import training

    import config
    import parallel_setup
    import train_grpo
    from heartbeat import Heartbeat
    from learner import Learner

    training.lighten()
    cfg = config.load_config(config_path)
    real_update = Learner.update

    def update(self, batch, own, advantages, step, clock):
        if step == 3:
            raise Interrupted
        return real_update(self, batch, own, advantages, step, clock)

    with parallel_setup.open_world(cfg) as device:
        layout = cfg.parallel
        sizes = {"tensor": layout.tensor, "expert": layout.expert, "expert_tensor": layout.expert_tensor}
        parallel = parallel_setup.init_model_parallel(device, **sizes)
        Learner.update = update
        try:
            train_grpo.train(cfg, parallel, Heartbeat(0, 0))
        except Interrupted:
            Learner.update = real_update
        train_grpo.train(cfg, parallel, Heartbeat(0, 0))
        groups = [
            {"desc": group.group_desc, "ranks": group.members, "buffer": group.buffer_mib}
            for group in fake_npu.GROUPS
            if group.used
        ]
        answers = {
            "device": str(parallel.device),
            "argv": sys.argv,
            "groups": groups,
            "kernels": fake_npu.KERNELS,
            "patched": patched(),
        }
        Path(f"{answer}-{parallel.rank}").write_text(json.dumps(answers))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(*sys.argv[1:])
