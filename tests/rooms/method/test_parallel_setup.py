"""Reductions, and collectives in the same order on all ranks."""

import math
from collections.abc import Callable
from pathlib import Path

import collectives
import pytest
import run_scripts
import torch
import training
import world
from planted import nothing
from planting import Plant, instead
from tiers import asked, ci, nightly

from parallel_setup import Parallel

# ------------------------------------------------------------------------------------------------------- parallel setup

LAYOUTS = world.TESTED


def measure(parallel: Parallel) -> dict:
    """The place of this rank, and every reduction of numbers that identify their ranks."""
    values = torch.tensor([2 ** (2 * parallel.data_rank), 10])
    summed = parallel.sum_over_data(values)
    return {
        "data_rank": parallel.data_rank,
        "summed": summed.tolist(),
        "values after": values.tolist(),
        "rows": parallel.gather_rows(torch.full((2, 3), parallel.rank)),
        "no rows": tuple(parallel.gather_rows(torch.zeros(0, 3)).shape),
        "max": parallel.max_over_ranks(float(-parallel.rank)),
        "objects": parallel.gather_objects({"reward": 0.1 + parallel.rank, "count": 7}),
        "max with nan": parallel.max_over_ranks(float("nan") if parallel.rank == 1 else 1.0),
    }


@pytest.fixture(scope="module")
def everywhere() -> dict[str, list]:
    return world.in_layouts(asked(LAYOUTS), measure)


@pytest.fixture(params=LAYOUTS)
def layout(request) -> str:
    return request.param


def test_sum_over_data_adds_each_data_rank_once_and_leaves_its_input(layout, everywhere):
    ranks, tensor, _ = world.LAYOUTS[layout]
    data = ranks // tensor
    for rank in everywhere[layout]:
        assert rank["summed"] == [sum(4**i for i in range(data)), 10 * data]
        assert rank["values after"] == [4 ** rank["data_rank"], 10]


def test_rows_and_objects_are_gathered_in_rank_order_and_the_largest_number_is_found(layout, everywhere):
    """Objects keep their last bit, and a NaN is not hidden."""
    answers = everywhere[layout]
    size = len(answers)
    for rank in answers:
        assert torch.equal(rank["rows"], torch.arange(size).view(-1, 1, 1).expand(size, 2, 3))
        assert rank["no rows"] == (size, 0, 3)
        assert rank["objects"] == [{"reward": 0.1 + rank, "count": 7} for rank in range(size)]
        assert rank["max"] == 0.0
        assert size == 1 or math.isnan(rank["max with nan"])


# --------------------------------------------------------------------------------------- equal collectives on all ranks
# All ranks of a group make the same collectives in the same order, in the layouts of the shipped scripts.
#
# A start, two steps of two updates, three evaluations and two checkpoints, on gloo. The engine is a stand-in that takes
# pushes into memory of vLLM's shape. Not covered: what vLLM's own ranks exchange, and rows that routing sends
# elsewhere.

EXPERTS = {"configs/qwen15_moe.yaml": 12}  # 60 in the real model: 3 and 6 ranks divide them
FEWEST, MIXED = "run_2npu.sh tp2_ep2", "run_6npu.sh tp2_ep3"  # the second has groups of two sizes that overlap
OTHER_SIZES = ("run_1gpu.sh", "run_2node.sh")  # one rank, and 32
OTHERS = [name for name in run_scripts.NAMES if name not in (FEWEST, MIXED) and name.split()[0] not in OTHER_SIZES]


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


def run(job: run_scripts.Training, model: Path, folder: Path, plant: Plant = nothing) -> tuple[list[int], str]:
    """The exit codes of all ranks, and their output."""
    cfg = collectives.small(job, model, folder / "out")
    training.import_before_the_fork()
    world._import_megatron()
    codes = world.as_torchrun(job.ranks, collectives.command, cfg, plant, log=folder / "log")
    return codes, (folder / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", [FEWEST, ci(MIXED), *map(nightly, OTHERS)])
def test_ranks_of_a_group_make_the_same_collectives(name: str, model_of: Callable, tmp_path: Path) -> None:
    job = run_scripts.job(name)
    codes, said = run(job, model_of(job.config), tmp_path)
    assert codes == [0] * job.ranks, said[-3000:]


@pytest.mark.ci
def test_a_collective_that_one_rank_makes_otherwise_ends_the_run(model_of: Callable, tmp_path: Path) -> None:
    job = run_scripts.job(FEWEST)
    longer = instead(Parallel, "sum_over_ranks", lambda real, self, x: real(self, torch.cat([x, x]))[: len(x)], rank=1)
    codes, said = run(job, model_of(job.config), tmp_path, longer)
    assert 0 not in codes and "Detected mismatch between collectives on ranks" in said, said[-3000:]
