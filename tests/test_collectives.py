"""All ranks of a group make the same collectives in the same order, in the layouts of the shipped scripts.

A start, two steps of two updates, three evaluations and two checkpoints, on gloo. The engine is a stand-in that takes
pushes into memory of vLLM's shape. Not covered: what vLLM's own ranks exchange, and rows that routing sends elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import collectives
import pytest
import run_scripts
import training
import world
from tiers import ci, nightly

EXPERTS = {"configs/qwen15_moe.yaml": 12}  # 60 in the real model: 3 and 6 ranks divide them
FIRST, FEW = "run_6npu.sh tp2_ep3", ["run_8gpu.sh tp4_ep8", "run_2npu.sh tp2_ep2"]
OTHER_SIZES = ("run_1gpu.sh", "run_2node.sh")  # one rank, and 32
OTHERS = [name for name in run_scripts.NAMES if name not in (FIRST, *FEW) and name.split()[0] not in OTHER_SIZES]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a tiny model of a configuration's architecture, whose sizes all layouts divide."""
    made: dict[str, Path] = {}

    def get(config: str) -> Path:
        if config not in made:
            kind = "qwen2_moe" if "qwen15" in config else "qwen3_moe"
            sizes = {"num_experts": EXPERTS.get(config, 16), "num_kv_heads": 4, "expert_width": 32, "vocab_size": 320}
            made[config] = training.make_model(tmp_path_factory.mktemp("models") / kind, kind, **sizes)
        return made[config]

    return get


def run(job: run_scripts.Training, model: Path, folder: Path, plant: Callable = lambda patch: None) -> list[int]:
    """The exit codes of all ranks."""
    cfg = collectives.small(job, model, folder / "out")
    training.import_before_the_fork()
    world._import_megatron()
    return world.as_torchrun(job.ranks, collectives.command, cfg, folder, plant, log=folder / "log")


@pytest.mark.slow
@pytest.mark.parametrize("name", [FIRST, *map(ci, FEW), *map(nightly, OTHERS)])
def test_ranks_of_a_group_make_the_same_collectives(name: str, model_of: Callable, tmp_path: Path) -> None:
    job = run_scripts.job(name)
    codes = run(job, model_of(job.config), tmp_path)
    assert not (found := collectives.differences(tmp_path, job.ranks)), found
    assert codes == [0] * job.ranks, (tmp_path / "log").read_text()[-3000:]
    of_all = collectives.read(tmp_path, job.ranks)[tuple(range(job.ranks))]
    assert len(of_all) == job.ranks and len(of_all[0]) > 50


def test_a_collective_of_some_ranks_alone_is_named(tmp_path: Path) -> None:
    """Rank 1 of the group 0, 1 sums twice, and rank 2 of the world never meets the others."""
    for rank, lines in enumerate((["0,1 all_reduce", "0,1 barrier"], ["0,1 all_reduce", "0,1 all_reduce"], [])):
        calls = ["0,1,2 barrier", *lines] if rank < 2 else []
        (tmp_path / f"rank-{rank}").write_text("".join(f"{line}\n" for line in calls))
    assert collectives.differences(tmp_path, 3) == [
        "group (0, 1, 2), call 0: {0: 'barrier', 1: 'barrier', 2: 'nothing'}",
        "group (0, 1), call 1: {0: 'barrier', 1: 'all_reduce'}",
    ]
