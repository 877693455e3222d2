"""Reductions, and collectives in the same order on all ranks."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import training
import world
from planted import nothing
from planting import Plant, instead
from tiers import asked, ci, nightly

import train_grpo
from knobs import Config
from parallel_setup import Parallel

# ------------------------------------------------------------------------------------------------------- parallel setup

LAYOUTS = world.TESTED


def groups_of_megatron() -> list[tuple[int, ...]]:
    """The ranks of each of Megatron's groups that this rank is in."""
    from megatron.core import parallel_state

    values = vars(parallel_state).values()
    known = {group for group in values if isinstance(group, dist.ProcessGroup)}
    return [tuple(dist.get_process_group_ranks(group)) for group in known]


def measure(parallel: Parallel) -> dict:
    """The place of this rank, and every reduction of numbers that identify their ranks."""
    values = torch.tensor([2 ** (2 * parallel.data_rank), 10])
    summed = parallel.sum_over_data(values)
    return {
        "groups": groups_of_megatron(),
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


def test_a_cpu_has_one_group_for_each_set_of_ranks(layout, everywhere):
    """Each group has threads that poll. Megatron asks for several groups of some sets."""
    for rank in everywhere[layout]:
        assert len(rank["groups"]) == len(set(rank["groups"]))


# --------------------------------------------------------------------------------------- equal collectives on all ranks
# All ranks of a group make the same collectives in the same order.
#
# Under torch's debug level DETAIL the ranks of a group exchange the kind, number, shapes and types of each collective
# before it begins. If they differ, every rank ends with an error; a rank that is missing is named after a time-out.
# Not covered: what vLLM's own ranks exchange, and pushes into an engine whose ranks split the experts.

RUNS = {  # ranks, tensor, expert
    "TP2_EP2": (2, 2, 2),
    "EP3": (3, 1, 3),
    "TP2_EP3": (6, 2, 3),  # groups of two sizes that overlap
    "TP4_EP16": (16, 4, 16),
}
EXPERTS = 48  # 2, 3 and 16 ranks divide them
TWO_STEPS = {  # with noise, replayed routes, two updates in each step, evaluations and checkpoints
    "train__steps": 2,
    "train__checkpoint_every": 1,
    "eval__every": 1,
    "aqn__schedule": "constant",
    "replay__mode": "r3",
    "rollout__group_size": 2,
    "rollout__max_new_tokens": 8,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return training.make_model(tmp_path_factory.mktemp("models") / "tiny", num_experts=EXPERTS)


def train(cfg: Config, plant: Plant) -> int:
    """Train on this rank, while torch compares the collectives."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    training.lighten()
    plant(pytest.MonkeyPatch())
    train_grpo.launch(cfg)
    return 0


def run(name: str, model: Path, folder: Path, plant: Plant = nothing) -> tuple[list[int], str]:
    """The exit codes of all ranks of one of RUNS, and their output."""
    ranks, tensor, expert = RUNS[name]
    sizes = {"parallel__tensor": tensor, "parallel__expert": expert, "optim__prompts_per_update": ranks}
    sizes |= {"rollout__prompts_per_step": 2 * ranks, "data__num_train": 4 * ranks}
    cfg = training.config(model, folder / "out", **TWO_STEPS | sizes)
    training.import_before_the_fork()
    world._import_megatron()
    codes = world.as_torchrun(ranks, train, cfg, plant, log=folder / "log")
    return codes, (folder / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TP2_EP2", ci("EP3"), ci("TP2_EP3"), nightly("TP4_EP16")])
def test_ranks_of_a_group_make_the_same_collectives(name: str, model: Path, tmp_path: Path) -> None:
    codes, said = run(name, model, tmp_path)
    assert set(codes) == {0}, said[-3000:]


@pytest.mark.ci
def test_a_collective_that_one_rank_makes_otherwise_ends_the_run(model: Path, tmp_path: Path) -> None:
    longer = instead(Parallel, "sum_over_ranks", lambda real, self, x: real(self, torch.cat([x, x]))[: len(x)], rank=1)
    codes, said = run("TP2_EP2", model, tmp_path, longer)
    assert 0 not in codes and "Detected mismatch between collectives on ranks" in said, said[-3000:]
